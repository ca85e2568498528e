"""Sums of products of two arrays, added up and returned in float32."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.device import precision
from eagle_jax.kernels.dispatch import dispatch


def reference(a: jax.Array, b: jax.Array, *, subscripts: str) -> jax.Array:
  """Return `einsum` of two arrays of one dtype, in float32."""
  return jnp.einsum(subscripts, a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)


def multiply_cast(a: jax.Array, b: jax.Array, *, subscripts: str) -> jax.Array:
  """Cast both to float32 first: XLA:CPU has no product of bfloat16 that gives float32, in some shapes."""
  return reference(a.astype(jnp.float32), b.astype(jnp.float32), subscripts=subscripts)


def einsum_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Return `einsum` of two arrays of one dtype, added up and returned in float32."""
  plain, cast = (functools.partial(form, subscripts=subscripts) for form in (reference, multiply_cast))
  return dispatch(a, b, default=plain, cpu=cast)
