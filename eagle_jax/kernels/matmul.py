"""Products of weights, [out, in], and columns of activations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.device import precision
from eagle_jax.kernels import cpu, einsum
from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.layout import row_major

NUM_PARTS = 4  # of a small matrix, for the cores of a CPU
SMALL = range(2**16, 2**19)  # numbers in a matrix that is faster in parts


def reference(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """Return W x, [..., R]; the weight's output dimensions may be several."""
  return jnp.tensordot(weight_OI, x_IR, axes=1, precision=precision(x_IR.dtype), preferred_element_type=dtype)


def multiply_parts(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """Multiply `NUM_PARTS` parts of the matrix, as a batch.

  XLA:CPU multiplies a small matrix by one column on one core, and the parts on several. By more columns, the whole
  matrix is faster.
  """
  part_POI = weight_OI.reshape(NUM_PARTS, -1, weight_OI.shape[-1])
  x_PIR = jnp.broadcast_to(x_IR, (NUM_PARTS, *x_IR.shape))
  y_PIR = jnp.matmul(part_POI, x_PIR, precision=precision(x_IR.dtype), preferred_element_type=dtype)
  return y_PIR.reshape(*weight_OI.shape[:-1], -1)


def multiply_from_left(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """Multiply as (x^T W^T)^T: each column of the result is contiguous in memory, and so should those of x be.

  XLA:GPU lays out the result of a product as the product is written, and norms and attention need contiguous columns.
  Written the other way round, it would take four transpositions a layer.
  """

  def in_place(x: jax.Array) -> jax.Array:
    is_whole = jax.sharding.get_abstract_mesh().size <= 1
    return row_major(x) if is_whole else x  # an array that a mesh splits would be gathered

  dimensions = ((1,), (weight_OI.ndim - 1,)), ((), ())
  how: dict[str, Any] = {'precision': precision(x_IR.dtype), 'preferred_element_type': dtype}
  y_RO = jax.lax.dot_general(in_place(x_IR.T), weight_OI, dimensions, **how)
  return jnp.moveaxis(in_place(y_RO), 0, -1)


def multiply_compiled(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """Multiply numbers of float32 by the kernels of `cpu.cc`."""
  return cpu.multiply(weight_OI, x_IR).astype(dtype or x_IR.dtype)


def matmul(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any = None) -> jax.Array:
  """Return W x, [..., R].

  Args:
    weight_OI: [..., I].
    x_IR: of the same dtype.
    dtype: of the result; default theirs.
  """
  is_column, num_outputs = x_IR.shape[1] == 1, weight_OI.size // weight_OI.shape[-1]
  is_small = weight_OI.size in SMALL and num_outputs % NUM_PARTS == 0
  whole, parts, left, compiled = (
    functools.partial(form, dtype=dtype) for form in (reference, multiply_parts, multiply_from_left, multiply_compiled)
  )
  xla = parts if is_column and is_small else None
  on_cpu = compiled if cpu.is_supported(weight_OI, x_IR) else xla
  return dispatch(weight_OI, x_IR, default=whole, cpu=on_cpu, gpu=None if is_column else left)


def matmul_float32(weight_OI: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return W x, [O, R] f32, for a matrix with so many outputs that they stay in front on every platform.

  Args:
    weight_OI: [O, I].
    x_IR: of the same dtype.
  """
  if not cpu.is_supported(weight_OI, x_IR):
    return einsum.einsum_float32('oi,ir->or', weight_OI, x_IR)
  return dispatch(weight_OI, x_IR, default=functools.partial(reference, dtype=jnp.float32), cpu=multiply_compiled)
