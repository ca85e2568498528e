"""Matrices in 8 bits, since the time of a pass is that of the bytes it reads.

A drafter's products may round the columns to 8 bits as well, since the text is the target's whatever is drafted. A
target's never do: rounding would turn the 1e-7 by which passes of different shapes differ into 1e-2, and trees would
diverge from plain decoding. The kernels of `cpu.cc` round them to 16 bits, in steps of 3e-5 of a column's largest
number, where passes of few columns do not differ at all (`kernels/README.md`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle_jax.device import is_cpu
from eagle_jax.kernels import cpu
from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.matmul import matmul

LARGEST = 127  # of int8, to both sides


def reference(value_OI: jax.Array, scale_O: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return [..., R] f32, the scaled product. An accelerator converts the bytes as it reads them."""
  return matmul(value_OI.astype(x_IR.dtype), x_IR, jnp.float32) * scale_O[..., None]


def multiply_bytes(value_OI: jax.Array, scale_O: jax.Array, x_IR: jax.Array, *, num_parts: int) -> jax.Array:
  """Round the columns too, because XLA:CPU multiplies bytes only with bytes, and only with two columns or more.

  Each part of a column is rounded with its own scale, so it becomes a column of its own, 0 elsewhere. With one scale,
  set by the largest numbers, an embedding beside a feature would be rounded away.

  The columns are on the left, transposed, which is faster. (For floats it is the other way round.)
  """
  x_PRI = x_IR.astype(jnp.float32).T.reshape(x_IR.shape[1], num_parts, -1).swapaxes(0, 1)
  scale_PR = jnp.abs(x_PRI).max(axis=2) / LARGEST
  x_CI = jax.scipy.linalg.block_diag(*round_to_scale(x_PRI, scale_PR[..., None]))
  num_columns = x_CI.shape[0]
  x_CI = jnp.pad(x_CI, ((0, max(0, 2 - num_columns)), (0, 0)))
  value_NI = value_OI.reshape(-1, value_OI.shape[-1])
  product_CN = jnp.einsum('ci,ni->cn', x_CI, value_NI, preferred_element_type=jnp.int32)[:num_columns]
  product_PRN = product_CN.reshape(*scale_PR.shape, -1).astype(jnp.float32)
  product_OR = (product_PRN * scale_PR[..., None]).sum(axis=0).T.reshape(*value_OI.shape[:-1], -1)
  return product_OR * scale_O[..., None]


def round_to_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Return x over its scale, rounded to int8; 0 where the scale is 0."""
  return jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)


def multiply(value_OI: jax.Array, scale_O: jax.Array, x_IR: jax.Array, *, num_parts: int | None = None) -> jax.Array:
  """Return [..., R] f32, the product of a matrix in bytes and columns of floats.

  Args:
    value_OI: [..., I] i8.
    scale_O: [...] f32, what 1 stands for in each output.
    x_IR: of any float dtype.
    num_parts: the parts of a column that are rounded apart, where columns are rounded; None: they are not.
  """
  in_bytes = functools.partial(multiply_bytes, num_parts=num_parts) if num_parts else None
  on_cpu = cpu.multiply_bytes if cpu.is_supported(value_OI, x_IR) else in_bytes
  return dispatch(value_OI, scale_O, x_IR, default=reference, cpu=on_cpu)


@functools.partial(jax.tree_util.register_dataclass, data_fields=['value', 'scale'], meta_fields=['dtype', 'num_parts'])
@dataclasses.dataclass(frozen=True)
class Quantised:
  """A matrix whose output o is `scale[o] * value[o]`; outputs may have several dimensions."""

  value: jax.Array  # [..., I] i8
  scale: jax.Array  # [...] f32
  dtype: Any  # of the matrix that it stands for, and of what it is multiplied with
  # Where it is faster, products round the columns to 8 bits too: so many equal parts of I, each with its own scale,
  # since a column may join an embedding and a feature. None: they never do.
  num_parts: int | None = 1

  @property
  def shape(self) -> tuple[int, ...]:
    return self.value.shape

  def times(self, x_IR: jax.Array) -> jax.Array:
    """Return [..., R] f32, the product with columns of `dtype`."""
    return multiply(self.value, self.scale, x_IR, num_parts=self.num_parts)

  def take(self, index_R: jax.Array) -> jax.Array:
    """Return the matrix's outputs at these indices, [R, I] of `dtype`, where outputs stand in one dimension."""
    value_RI, scale_R = (jnp.take(x, index_R, axis=0, mode='clip') for x in (self.value, self.scale))
    return (value_RI.astype(jnp.float32) * scale_R[:, None]).astype(self.dtype)


def reads_bytes(mesh: Mesh | None) -> bool:
  """Return whether a product of bytes and floats is faster than one of floats, on a mesh's devices or the default one.

  XLA:CPU runs a naive loop; the kernels of `cpu.cc` read bytes, and are for one device.
  """
  return not is_cpu() or cpu.in_use(mesh) == 'compiled'


@functools.partial(jax.jit, static_argnames='num_parts')
def round_to_int8(matrix_OI: jax.Array, *, num_parts: int = 1) -> Quantised:
  """Round a matrix [..., I] of floats: the largest number of each output becomes 127."""
  matrix32_OI = matrix_OI.astype(jnp.float32)
  scale_O = jnp.abs(matrix32_OI).max(axis=-1) / LARGEST
  return Quantised(round_to_scale(matrix32_OI, scale_O[..., None]), scale_O, matrix_OI.dtype, num_parts)
