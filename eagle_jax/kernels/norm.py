"""Norms of columns: RMSNorm, arXiv:1910.07467."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.kernels import cpu
from eagle_jax.kernels.dispatch import dispatch

MAX_COMPILED_COLUMNS = 64  # of a pass over a tree; a prefill has more


def reference(x_DR: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
  """Return x / rms(x) * scale, [..., D, R] of the dtype of the scale; the mean square is in float32."""
  x32_DR = x_DR.astype(jnp.float32)
  rms_R = jnp.sqrt(jnp.square(x32_DR).mean(axis=-2, keepdims=True) + eps)
  scale_DR = jax.lax.broadcast_in_dim(scale_D, x_DR.shape, (x_DR.ndim - 2,))
  return (x32_DR / rms_R).astype(scale_D.dtype) * scale_DR


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def normalise_compiled(x_DR: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """Normalise by the kernel of `cpu.cc`; of float32 alone."""
  return cpu.call('norm', x_DR.shape, x_DR, scale_D, jnp.float32(eps))


@normalise_compiled.defjvp
def _differentiate(eps: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  form = functools.partial(reference, eps=eps)
  return normalise_compiled(*primals, eps), jax.jvp(form, primals, tangents)[1]


def normalise(x_DR: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
  """Return x / rms(x) * scale, [..., D, R] of the dtype of the scale.

  Args:
    x_DR: [..., D, R], columns of any float dtype.
    scale_D: of the same dtype, or float32.
    eps: added to the mean square.
  """
  is_few = x_DR.shape[-1] <= MAX_COMPILED_COLUMNS and x_DR.dtype == scale_D.dtype == jnp.float32
  compiled = functools.partial(normalise_compiled, eps=eps) if is_few and cpu.is_usable() else None
  return dispatch(x_DR, scale_D, default=functools.partial(reference, eps=eps), cpu=compiled)
