"""Targets whose matrices are rounded to 8 or 4 bits; activations stay floats, or 16 bits.

That is another model than the one it was rounded from, and decoding it is just as exact: speculative text is its own
plain text. In 8 bits the numbers of an output share a scale; in 4 bits each 32 of them share a scale and an offset. The
head is rounded to 8 bits either way, the embedding is not: where the two are one matrix, it is held twice.
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
from eagle_jax.kernels import int4
from eagle_jax.kernels.int4 import Grouped, reads_groups
from eagle_jax.kernels.int8 import LARGEST, Quantised, reads_bytes
from eagle_jax.models.transformer import Target
from eagle_jax.sharding import mesh_of, place_param, to_host

NAMES = 'int8', 'int4'
BLOCK = 2**22  # numbers rounded at a time: bounds the memory of intermediate results

log = logging.getLogger('eagle_jax')


def default_compute_dtype() -> str:
  """Name the dtype of activations of rounded targets on this device."""
  return 'float32' if is_cpu() else 'bfloat16'


def is_rounded(path: Sequence[str]) -> bool:
  """Return whether the parameter at this path is a matrix that is rounded: not norms, biases, embedding, routers."""
  return path[-1] == 'weight' and path[0] != 'embed' and 'router' not in path


def is_grouped(path: Sequence[str], name: str) -> bool:
  """Return whether a target of this name, one of `NAMES`, holds the parameter at this path in 4 bits."""
  return name == 'int4' and is_rounded(path) and path[0] != 'head'


def bytes_per_number(path: Sequence[str], name: str) -> float | None:
  """Return how many bytes a number of the parameter at this path takes; None if it is not rounded."""
  if not is_rounded(path):
    return None
  return 0.5 + 2 * 4 / int4.GROUP if is_grouped(path, name) else 1


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


def round_groups(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Round a matrix [..., I] of floats to 4 bits: the least number of each group becomes 0 and the largest 15.

  Of a matrix that comes from blocks like these, such as GGUF's Q4_1, nearly all numbers stay what they are.

  Returns:
    The arrays of `Grouped`.
  """
  *outputs, width = matrix.shape
  flat_NG32 = matrix.reshape(-1, width // int4.GROUP, int4.GROUP)
  pair_NGp = np.empty((*flat_NG32.shape[:2], int4.GROUP // 2), np.uint8)
  scale_NG, offset_NG = (np.empty(flat_NG32.shape[:2], np.float32) for _ in range(2))
  size = max(1, BLOCK // width)
  for start in range(0, len(flat_NG32), size):
    part = slice(start, start + size)
    numbers = flat_NG32[part].astype(np.float32)
    offset, largest = numbers.min(axis=-1), numbers.max(axis=-1)
    scale = (largest - offset) / np.float32(int4.LARGEST)
    steps = (numbers - offset[..., None]) / np.where(scale > 0, scale, 1)[..., None]
    low, high = np.split(np.clip(np.round(steps), 0, int4.LARGEST).astype(np.uint8), 2, axis=-1)
    pair_NGp[part], scale_NG[part], offset_NG[part] = low | high << 4, scale, offset
  of_groups = *outputs, width // int4.GROUP
  return pair_NGp.reshape(*outputs, width // 2), scale_NG.reshape(of_groups), offset_NG.reshape(of_groups)


def hold(path: Sequence[str], array: np.ndarray, dtype: Any, mesh: Mesh | None, *, name: str) -> Any:
  """Place one parameter as a rounded target holds it.

  Args:
    path: its keys in the nested dict.
    array: of floats, in the host's memory.
    dtype: of activations, and of what is not rounded.
    mesh: as in `sharding.place_param`.
    name: one of `NAMES`.

  Returns:
    A `Quantised` or `Grouped` matrix where the device multiplies those; else an array of `dtype`, the rounded numbers.

  Raises:
    ValueError: a matrix does not have whole groups of inputs.
  """
  if not is_rounded(path):
    return place_param(array.astype(dtype, copy=False), path, mesh)
  if is_grouped(path, name):
    if width := array.shape[-1] % int4.GROUP:
      raise ValueError(
        f"dtype='int4' rounds groups of {int4.GROUP} inputs, and {'/'.join(path)} has {array.shape[-1]}, {width} more "
        "than whole groups: use dtype='int8'."
      )
    if reads_groups(mesh):
      pair, scale_G, offset_G = (place_param(part, path, mesh) for part in round_groups(array))
      return Grouped(pair, scale_G, offset_G, jnp.dtype(dtype))
    numbers = int4.unpack(*map(jnp.asarray, round_groups(array)))
    return place_param(to_host(numbers).astype(dtype), path, mesh)
  value, scale = round_matrix(array)
  if reads_bytes(mesh):
    return Quantised(place_param(value, path, mesh), place_param(scale, path, mesh), jnp.dtype(dtype), num_parts=None)
  return place_param((value * scale[..., None]).astype(dtype), path, mesh)


def rounded_target(target: Target, name: str = 'int8') -> Target:
  """Round the matrices of a loaded target; see `hold`."""
  mesh, dtype = mesh_of(target.params), target.dtype

  def held(path: Any, x: jax.Array) -> Any:
    return hold([key.key for key in path], to_host(x), dtype, mesh, name=name)

  params = jax.tree_util.tree_map_with_path(held, target.params)
  return with_own_head(dataclasses.replace(target, params=params), name)


def with_own_head(target: Target, name: str) -> Target:
  """Finish a rounded target: give it a head of its own where it shared the embedding's matrix, and say what it is."""
  params, config = target.params, target.config
  if config.tied_head:
    embed = to_host(params['embed']['weight'])
    head = hold(('head', 'weight'), embed, target.dtype, mesh_of(params), name=name)
    params, config = {**params, 'head': {'weight': head}}, dataclasses.replace(config, tied_head=False)
  if not (reads_groups if name == 'int4' else reads_bytes)(mesh_of(params)):
    log.info('%s: this device multiplies floats faster, so the rounded matrices are held as floats', name)
  return dataclasses.replace(target, config=config, params=params, weights_dtype=name)
