"""Named tensors of a file <-> our nested dict of parameters, by a table from `naming`."""

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax import device
from eagle_jax.models import rounded
from eagle_jax.progress import progress_bar
from eagle_jax.sharding import place_param
from eagle_jax.weights.naming import Entry, Table


def parameter_dtype(dtype: Any, *more: str) -> np.dtype:
  """Convert to a dtype; raise a ValueError unless it is float32, bfloat16 or float16, or one of `more`."""
  known = 'float32', 'bfloat16', 'float16', *more
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found not in map(jnp.dtype, known):
    *others, last = map(repr, known)
    raise ValueError(f'`dtype` must be {", ".join(others)} or {last}, got {dtype!r}.')
  return found


def require_memory(table: Table, dtype: Any, *, rounded_to: str | None, source: str) -> None:
  """Raise a ValueError if the parameters do not fit the memory that is free: better now than killed halfway.

  Args:
    table: of the tensors that are loaded.
    dtype: of the resulting arrays.
    rounded_to: one of `models.rounded.NAMES`, or None.
    source: what to call the file in the error.
  """

  def bytes_of(entry: Entry) -> float:
    of_rounded = rounded.bytes_per_number(entry.path, rounded_to) if rounded_to else None
    return math.prod(entry.shape) * (of_rounded or jnp.dtype(dtype).itemsize)

  needed = sum(bytes_of(entry) for name, entry in table.entries.items() if name not in table.optional)
  free = device.free_memory_bytes()  # of this process
  if free is not None and needed > free * jax.process_count():
    raise ValueError(
      f"{source} needs {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free: load it with dtype='bfloat16', "
      "'int8' or 'int4', or end other programs."
    )


def assemble(
  tensors: Iterable[tuple[str, np.ndarray]],
  table: Table,
  dtype: Any,
  *,
  mesh: Mesh | None = None,
  source: str = 'weights',
  place: Callable[[tuple[str, ...], np.ndarray], Any] | None = None,
  keeps: Callable[[tuple[str, ...]], bool] | None = None,
) -> dict[str, Any]:
  """Build the parameter tree from named tensors, taking them one at a time.

  Beside the parameters, memory holds at most one copy of a tensor in their dtype at a time.

  Args:
    tensors: (name, array) pairs, such as `dict.items()`; float64, float32, float16 or bfloat16.
    table: what the file must hold, and where it goes.
    dtype: of the resulting arrays, where the table does not say another: float32, bfloat16 or float16.
    mesh: over which each array is sharded, see `sharding.param_sharding`; None means the default device.
    source: what to call the file in an error.
    place: (path, array) -> what is held of a parameter; None: the array, placed by `sharding.place_param`.
    keeps: path -> whether `place` gets a parameter that is one tensor as the file holds it, not in `dtype`.

  Returns:
    Nested dict with `jax.Array` leaves of `dtype`.

  Raises:
    ValueError: another dtype; or once, listing all missing, unexpected, repeated, misshaped, mistyped and non-finite
      tensors.
  """
  dtype = parameter_dtype(dtype)
  params: dict[str, Any] = {}
  faults: list[str] = []
  seen: set[str] = set()
  parts_left = collections.Counter(entry.path for entry in table.entries.values())
  begun: dict[tuple[str, ...], np.ndarray] = {}
  for name, array in progress_bar(tensors, desc=f'loading {source}', total=len(table.entries), unit='tensor'):
    if name in table.ignored:
      continue
    fault = _fault(name, array, table, seen)
    seen.add(name)
    if fault is not None:
      faults.append(fault)
      continue
    entry = table.entries[name]
    value = entry.to_ours(array)
    del array  # the file's copy
    if entry.joint_shape or not (place and keeps and keeps(entry.path)):
      with np.errstate(over='ignore'):  # an overflow shows as inf, which is looked for next
        value = value.astype(entry.dtype or dtype, copy=False)
    if not np.isfinite(value).all():
      faults.append(f'{name}: holds NaN or infinite values as {dtype.name}')
      continue
    value = _with_other_parts(value, entry, begun)
    parts_left[entry.path] -= 1
    if not parts_left[entry.path]:
      leaf = place(entry.path, value) if place else place_param(value, entry.path, mesh)
      _insert(params, entry.path, jax.block_until_ready(leaf))  # else a busy machine holds several copies at a time
      begun.pop(entry.path, None)
  _require_no_faults(faults, seen, table, source)
  return params


def _fault(name: str, array: np.ndarray, table: Table, seen: set[str]) -> str | None:
  if name not in table.entries:
    return f'{name}: not expected, shape {list(array.shape)}'
  if name in seen:
    return f'{name}: found twice'
  entry = table.entries[name]
  if tuple(array.shape) != entry.shape:
    return f'{name}: shape {list(array.shape)}, {list(entry.shape)} needed'
  if entry.dtype is None and not (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize >= 2):
    return f'{name}: dtype {array.dtype}, one of float32, float16 and bfloat16 needed; quantised weights cannot be read'
  if entry.dtype is not None and not jnp.issubdtype(array.dtype, jnp.integer):
    return f'{name}: dtype {array.dtype}, integers needed'
  return None


def _require_no_faults(faults: list[str], seen: set[str], table: Table, source: str) -> None:
  """Raise a ValueError that lists all faults, and the tensors that were not seen and must be there."""
  missing = [name for name in table.entries if name not in seen | table.optional]
  faults = faults + [f'{name}: missing, {list(table.entries[name].shape)} needed' for name in missing]
  if faults:
    raise ValueError(
      f'{source}: {len(faults)} of {len(table.entries)} needed tensors do not fit the config. Check that config and '
      'weights belong together.\n  ' + '\n  '.join(faults)
    )


def _with_other_parts(value: np.ndarray, entry: Entry, begun: dict[tuple[str, ...], np.ndarray]) -> np.ndarray:
  """Put `value` into the array that joins several tensors, which `begun` keeps; return it as far as it is complete."""
  if not entry.joint_shape:
    return value
  if entry.path not in begun:
    begun[entry.path] = np.zeros(entry.joint_shape, value.dtype)
  part = begun[entry.path][entry.part]
  part[...] = value.reshape(part.shape)
  return begun[entry.path]


def _insert(params: dict[str, Any], path: tuple[str, ...], leaf: jax.Array) -> None:
  for key in path[:-1]:
    params = params.setdefault(key, {})
  params[path[-1]] = leaf


def flatten(params: dict[str, Any], table: Table) -> dict[str, np.ndarray]:
  """Reverse `assemble`: return NumPy arrays by their names in the file, of the same dtype (bfloat16 too).

  Raises:
    ValueError: `params` lacks a leaf of the table, has one more, or one of another shape; all listed at once.
  """
  leaves = {_path_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  shapes = {entry.path: entry.joint_shape or entry.shape for entry in table.entries.values()}
  entries = {name: entry for name, entry in table.entries.items() if name not in table.optional or entry.path in leaves}
  needed = dict.fromkeys(entry.path for entry in entries.values())
  faults = [f'{"/".join(path)}: missing' for path in needed if path not in leaves]
  for path, leaf in leaves.items():
    if path not in shapes:
      faults.append(f'{"/".join(path)}: not expected')
    elif tuple(leaf.shape) != shapes[path]:
      faults.append(f'{"/".join(path)}: shape {list(leaf.shape)}, {list(shapes[path])} needed')
  if faults:
    raise ValueError('Parameters do not fit the config they are saved with:\n  ' + '\n  '.join(faults))
  return {
    name: entry.to_file(np.asarray(leaves[entry.path])[entry.part].reshape(entry.shape))
    for name, entry in entries.items()
  }


def _path_keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(key.key for key in path)
