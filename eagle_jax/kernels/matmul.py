"""Products of weights, [out, in], and columns of activations, in the form that each platform is fastest in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.device import precision
from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.layout import row_major

NUM_PARTS = 4  # of a small matrix, for the cores of a CPU
SMALL = range(2**16, 2**19)  # numbers in a matrix that is faster in parts


def float32_product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`einsum` of two arrays of one dtype, added up and returned in float32."""

  def product(a, b):
    return jnp.einsum(subscripts, a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)

  def product_on_cpu(a, b):  # XLA:CPU has no product of bfloat16 that gives float32, in some shapes
    return product(a.astype(jnp.float32), b.astype(jnp.float32))

  return dispatch(a, b, default=product, cpu=product_on_cpu)


def applied(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """W x, [..., R]; the weight's output dimensions may be several.

  XLA:CPU gives a small matrix times one column to one core, and the same as a batch of parts to several: of
  SmolLM2-135M, an output projection takes 46 us so on two cores, and whole 78. Times more columns it is faster whole.

  XLA:GPU lays out what a product leaves as it is written, and norms and attention want each column in one place: so
  there it is written as rows (`in_rows`). A target pass of Llama-3.1-8B's shape over 60 nodes takes 5.8 ms so on an
  H200, and else 6.3, with four transpositions a layer.

  Args:
    weight_OI: [..., I].
    x_IR: of the same dtype.
    dtype: of the result; default theirs.
  """
  how: dict[str, Any] = {'precision': precision(x_IR.dtype), 'preferred_element_type': dtype}

  def whole(weight_OI, x_IR):
    return jnp.tensordot(weight_OI, x_IR, axes=1, **how)

  def in_parts(weight_OI, x_IR):
    part_POI = weight_OI.reshape(NUM_PARTS, -1, weight_OI.shape[-1])
    x_PIR = jnp.broadcast_to(x_IR, (NUM_PARTS, *x_IR.shape))
    return jnp.matmul(part_POI, x_PIR, **how).reshape(*weight_OI.shape[:-1], -1)

  is_column, num_outputs = x_IR.shape[1] == 1, weight_OI.size // weight_OI.shape[-1]
  is_small = weight_OI.size in SMALL and num_outputs % NUM_PARTS == 0
  return dispatch(
    weight_OI, x_IR,
    default=whole,
    cpu=in_parts if is_column and is_small else None,
    gpu=None if is_column else functools.partial(in_rows, **how),
  )  # fmt: skip


def in_rows(weight_OI: jax.Array, x_IR: jax.Array, **how: Any) -> jax.Array:
  """W x, made of rows of x: in memory each column of the result lies in one place, and so should those of x."""

  def in_place(x: jax.Array) -> jax.Array:
    is_whole = jax.sharding.get_abstract_mesh().size <= 1
    return row_major(x) if is_whole else x  # what a mesh splits, it would gather

  y_RO = jax.lax.dot_general(in_place(x_IR.T), weight_OI, (((1,), (weight_OI.ndim - 1,)), ((), ())), **how)
  return jnp.moveaxis(in_place(y_RO), 0, -1)
