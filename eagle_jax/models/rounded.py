"""Targets whose matrices are rounded to 8 bits, an output channel at a time; activations stay floats, or 16 bits.

That is another model than the one it was rounded from, and decoding it is just as exact: speculative text is its own
plain text. The head is rounded too, the embedding is not: where the two are one matrix, it is held twice.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.device import is_cpu
from eagle_jax.kernels.int8 import LARGEST, Quantised, reads_bytes
from eagle_jax.models.transformer import Target
from eagle_jax.sharding import mesh_of, place_param, to_host

NAME = 'int8'
BLOCK = 2**22  # numbers rounded at a time: bounds the memory of intermediate results

log = logging.getLogger('eagle_jax')


def default_compute_dtype() -> str:
  """Name the dtype of activations of rounded targets on this device."""
  return 'float32' if is_cpu() else 'bfloat16'


def is_rounded(path: Sequence[str]) -> bool:
  """Return whether the parameter at this path is a matrix that is rounded: not norms, biases, embedding, routers."""
  return path[-1] == 'weight' and path[0] != 'embed' and 'router' not in path


def round_matrix(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Round a matrix [..., I] of floats, a few output channels at a time.

  Returns:
    [..., I] i8 and [...] f32: the largest number of each output becomes 127, and the second is what 1 stands for.
  """
  flat_OI = matrix.reshape(-1, matrix.shape[-1])
  value_OI, scale_O = np.empty(flat_OI.shape, np.int8), np.empty(len(flat_OI), np.float32)
  size = max(1, BLOCK // flat_OI.shape[1])
  for start in range(0, len(flat_OI), size):
    part_OI = flat_OI[start : start + size].astype(np.float32)
    scale = np.abs(part_OI).max(axis=1) / np.float32(LARGEST)
    scale_O[start : start + size] = scale
    value_OI[start : start + size] = np.round(part_OI / np.where(scale > 0, scale, 1)[:, None])
  return value_OI.reshape(matrix.shape), scale_O.reshape(matrix.shape[:-1])


def hold(path: Sequence[str], array: np.ndarray, dtype: Any, mesh: Mesh | None) -> Any:
  """Place one parameter as a rounded target holds it.

  Args:
    path: its keys in the nested dict.
    array: of floats, in the host's memory.
    dtype: of activations, and of what is not rounded.
    mesh: as in `sharding.place_param`.

  Returns:
    A `Quantised` matrix where the device multiplies bytes and floats; else an array of `dtype`, the rounded numbers.
  """
  if not is_rounded(path):
    return place_param(array.astype(dtype, copy=False), path, mesh)
  value, scale = round_matrix(array)
  if reads_bytes(mesh):
    return Quantised(place_param(value, path, mesh), place_param(scale, path, mesh), jnp.dtype(dtype), num_parts=None)
  return place_param((value * scale[..., None]).astype(dtype), path, mesh)


def rounded_target(target: Target) -> Target:
  """Round the matrices of a loaded target; see `hold`."""
  mesh, dtype = mesh_of(target.params), target.dtype

  def held(path: Any, x: jax.Array) -> Any:
    return hold([key.key for key in path], to_host(x), dtype, mesh)

  params = jax.tree_util.tree_map_with_path(held, target.params)
  return with_own_head(dataclasses.replace(target, params=params))


def with_own_head(target: Target) -> Target:
  """Finish a rounded target: give it a head of its own where it shared the embedding's matrix, and say what it is."""
  params, config = target.params, target.config
  if config.tied_head:
    embed = to_host(params['embed']['weight'])
    head = hold(('head', 'weight'), embed, target.dtype, mesh_of(params))
    params, config = {**params, 'head': {'weight': head}}, dataclasses.replace(config, tied_head=False)
  if not reads_bytes(mesh_of(params)):
    log.info('%s: this device multiplies floats only, so the matrices, rounded to 8 bits, are held as floats', NAME)
  return dataclasses.replace(target, config=config, params=params, weights_dtype=NAME)
