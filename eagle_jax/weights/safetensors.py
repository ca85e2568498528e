"""Read and write safetensors files as NumPy arrays, bfloat16 included."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle_jax.files import replacing


def read_safetensors(path: str | Path, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
  """Yield (name, array) for each tensor of the file, in the dtype it is stored in.

  Args:
    path: of the file.
    names: of the tensors to read; None for all.

  Raises:
    ValueError: no such file, truncated, corrupt, or a type that NumPy does not have.
  """
  path = Path(path)
  with _opened(path) as whole:
    asked = [name for name in whole.keys() if names is None or name in names]  # noqa: SIM118  (a handle, not a dict)
  # Not through the handle, which maps the file: its pages would stay in memory beside the arrays.
  with path.open('rb') as file:
    size = int.from_bytes(file.read(8), 'little')
    entries = json.loads(file.read(size))
    for name in asked:
      yield name, _tensor(file, 8 + size, entries[name], f'{path}: {name}')


def safetensors_names(path: str | Path) -> list[str]:
  """Return the names of the file's tensors; errors are those of `read_safetensors`."""
  with _opened(Path(path)) as file:
    return [*file.keys()]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
  if not path.is_file():
    raise ValueError(f'No safetensors file at {path}: give the path of an existing .safetensors file.')
  try:
    with safe_open(path, framework='np') as file:
      yield file
  except SafetensorError as error:
    raise ValueError(
      f'{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}. '
      'It may be truncated or corrupt: fetch or save it again.'
    ) from error


_DTYPES = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'BOOL': np.bool_,
  'I64': np.int64, 'I32': np.int32, 'I16': np.int16, 'I8': np.int8,
  'U64': np.uint64, 'U32': np.uint32, 'U16': np.uint16, 'U8': np.uint8,
  'F8_E4M3': ml_dtypes.float8_e4m3fn, 'F8_E5M2': ml_dtypes.float8_e5m2, 'F8_E8M0': ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def _tensor(file: BinaryIO, start: int, entry: Mapping[str, Any], source: str) -> np.ndarray:
  """Read a tensor; `entry` of the header says where it lies behind `start`."""
  if entry['dtype'] not in _DTYPES:
    raise ValueError(
      f'{source} is stored as {entry["dtype"]}, one of F32, F16, BF16, F8_E4M3 and I8 is needed: use the unquantised '
      'checkpoint.'
    )
  begin, end = entry['data_offsets']
  file.seek(start + begin)
  raw = np.fromfile(file, np.uint8, count=end - begin)
  if len(raw) < end - begin:
    raise ValueError(f'{source} ends too early: the file was changed while it was read.')
  return raw.view(_DTYPES[entry['dtype']]).reshape(entry['shape'])


def write_safetensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Write the file under a temporary name, then rename it: a reader finds the old file or the whole new one.

  Args:
    path: where the file goes; missing folders are made.
    tensors: name -> array, of any float dtype, bfloat16 included.

  Raises:
    OSError: the file cannot be written, as on a full disk.
  """
  # The library stores raw memory: a transposed view would be written in the wrong order, without an error.
  ordered = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
  try:
    with replacing(Path(path)) as temporary:
      save_file(ordered, temporary)
  except SafetensorError as error:  # its own type, for what the system refuses too
    raise OSError(f'{path} could not be written: {error}. Free some space, or write elsewhere.') from error
