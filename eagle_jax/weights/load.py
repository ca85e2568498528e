"""Named tensors of a file <-> our nested dict of parameters, by a table from `naming`."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.sharding import place_param
from eagle_jax.weights.naming import Entry, Table


def parameter_dtype(dtype: Any, *more: str) -> np.dtype:
  """That of a name or a type; ValueError unless it is float32, bfloat16 or float16, or one of `more`."""
  known = 'float32', 'bfloat16', 'float16', *more
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found not in map(jnp.dtype, known):
    *others, last = map(repr, known)
    raise ValueError(f'dtype is {dtype!r}; {", ".join(others)} or {last} is needed.')
  return found


def assemble(
  tensors: Iterable[tuple[str, np.ndarray]],
  table: Table,
  dtype: Any,
  *,
  mesh: Mesh | None = None,
  source: str = 'weights',
  place: Callable[[tuple[str, ...], np.ndarray], Any] | None = None,
) -> dict[str, Any]:
  """Builds the parameter tree from named tensors, taking them one at a time.

  Args:
    tensors: (name, array) pairs, such as `dict.items()`; float64, float32, float16 or bfloat16.
    table: what the file must hold, and where it goes.
    dtype: of the resulting arrays, where the table does not say another: float32, bfloat16 or float16.
    mesh: takes each array in its own shards, see `sharding.param_sharding`; None means the default device.
    source: what to call the file in an error.
    place: (path, array) -> what is held of a parameter; None: the array, placed by `sharding.place_param`.

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
  for name, array in tensors:
    if name in table.ignored:
      continue
    fault = _fault(name, array, table, seen)
    seen.add(name)
    if fault is None:
      entry = table.entries[name]
      with np.errstate(over='ignore'):  # an overflow shows as inf, which is looked for next
        value = entry.to_ours(array).astype(entry.dtype or dtype, copy=False)
      if np.isfinite(value).all():
        value = _with_other_parts(value, entry, begun)
        parts_left[entry.path] -= 1
        if not parts_left[entry.path]:
          _insert(params, entry.path, place(entry.path, value) if place else place_param(value, entry.path, mesh))
          begun.pop(entry.path, None)
      else:
        fault = f'{name}: holds NaN or infinite values as {dtype.name}'
    if fault is not None:
      faults.append(fault)
  missing = [name for name in table.entries if name not in seen | table.optional]
  faults += [f'{name}: missing, {list(table.entries[name].shape)} needed' for name in missing]
  if faults:
    raise ValueError(
      f'{source}: {len(faults)} of {len(table.entries)} needed tensors do not fit the config. Check that config and '
      'weights belong together.\n  ' + '\n  '.join(faults)
    )
  return params


def _fault(name: str, array: np.ndarray, table: Table, seen: set[str]) -> str | None:
  if name not in table.entries:
    return f'{name}: not expected, shape {list(array.shape)}'
  if name in seen:
    return f'{name}: came twice'
  entry = table.entries[name]
  if tuple(array.shape) != entry.shape:
    return f'{name}: shape {list(array.shape)}, {list(entry.shape)} needed'
  if entry.dtype is None and not (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize >= 2):
    return f'{name}: dtype {array.dtype}, one of float32, float16 and bfloat16 needed; quantised weights cannot be read'
  if entry.dtype is not None and not jnp.issubdtype(array.dtype, jnp.integer):
    return f'{name}: dtype {array.dtype}, integers needed'
  return None


def _with_other_parts(value: np.ndarray, entry: Entry, begun: dict[tuple[str, ...], np.ndarray]) -> np.ndarray:
  """Our array, as far as its parts have come; `begun` keeps those that join several, and `value` goes there."""
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
  """The reverse of `assemble`: name in the file -> NumPy array, dtype kept (bfloat16 too).

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
