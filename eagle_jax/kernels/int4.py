"""Matrices in 4 bits. Each 32 inputs of an output share a scale and an offset, as in the Q4_1 blocks of GGUF files."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle_jax.kernels import cpu
from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.matmul import matmul

GROUP = 32  # inputs
LARGEST = 15  # of 4 bits


def reference(pair_Oi: jax.Array, scale_OG: jax.Array, offset_OG: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return [..., R] f32, the product of the matrix's floats."""
  return matmul(unpack(pair_Oi, scale_OG, offset_OG).astype(x_IR.dtype), x_IR, jnp.float32)


def unpack(pair_Oi: jax.Array, scale_OG: jax.Array, offset_OG: jax.Array) -> jax.Array:
  """Return the matrix as floats, [..., I] f32; see `Grouped`."""
  pair_OGp = pair_Oi.reshape(*scale_OG.shape, GROUP // 2)
  code_OGg = jnp.concatenate([pair_OGp & LARGEST, pair_OGp >> 4], axis=-1).astype(jnp.float32)
  return (code_OGg * scale_OG[..., None] + offset_OG[..., None]).reshape(*pair_Oi.shape[:-1], -1)


def multiply(pair_Oi: jax.Array, scale_OG: jax.Array, offset_OG: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return [..., R] f32, the product of a matrix in 4 bits and columns of floats; see `Grouped`."""
  compiled = cpu.multiply_groups if cpu.is_supported(pair_Oi, x_IR) else None
  return dispatch(pair_Oi, scale_OG, offset_OG, x_IR, default=reference, cpu=compiled)


@functools.partial(jax.tree_util.register_dataclass, data_fields=['pair', 'scale', 'offset'], meta_fields=['dtype'])
@dataclasses.dataclass(frozen=True)
class Grouped:
  """A matrix whose number i of a group is `scale * code[i] + offset`; outputs may have several dimensions."""

  pair: jax.Array  # [..., I / 2] u8: of a group's 16, byte i holds code i in its lower bits, and code 16 + i above
  scale: jax.Array  # [..., I / 32] f32
  offset: jax.Array  # [..., I / 32] f32
  dtype: Any  # of the matrix that it stands for, and of what it is multiplied with

  @property
  def shape(self) -> tuple[int, ...]:
    return *self.pair.shape[:-1], 2 * self.pair.shape[-1]

  def times(self, x_IR: jax.Array) -> jax.Array:
    """Return [..., R] f32, the product with columns of `dtype`."""
    return multiply(self.pair, self.scale, self.offset, x_IR)


def reads_groups(mesh: Mesh | None) -> bool:
  """Return whether a product of 4 bits and floats is faster than one of floats, on a mesh's devices or the default one.

  The kernels of `cpu.cc` are, and are for one device.
  """
  return cpu.in_use(mesh) == 'compiled'
