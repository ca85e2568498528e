"""PyTorch's pickled checkpoints (`pytorch_model.bin`), read without executing anything in them.

A pickle is a program for a small machine whose only dangerous instruction is to look up a global name and call it. Here
four kinds of names are known, none of which does more than describe a tensor; any other ends the reading.
"""

import collections
import contextlib
import pickle
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES = {
  'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16, 'BFloat16Storage': jnp.bfloat16,
  'LongStorage': np.int64, 'IntStorage': np.int32, 'ShortStorage': np.int16, 'CharStorage': np.int8,
  'ByteStorage': np.uint8, 'BoolStorage': np.bool_,
}  # fmt: skip


# Exceptions that a damaged or hostile file may cause in the two modules.
_FAULTS = (
  zipfile.BadZipFile, pickle.UnpicklingError, EOFError, OSError, ValueError, TypeError, LookupError, AttributeError,
  OverflowError, MemoryError, NotImplementedError,
)  # fmt: skip


class _Storage(NamedTuple):
  """A flat run of numbers, one file of the archive."""

  dtype: np.dtype
  key: str
  size: int


class _Tensor(NamedTuple):
  """A view of a storage, in elements."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _rebuild_tensor(storage, offset, shape, strides, *_) -> _Tensor:
  tensor = _Tensor(_Storage(*storage), int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
  if len(tensor.shape) != len(tensor.strides) or min((tensor.offset, *tensor.shape, *tensor.strides)) < 0:
    raise ValueError(f'a tensor of shape {shape} with strides {strides} at {offset}')
  last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
  if 0 not in tensor.shape and last >= tensor.storage.size:
    raise ValueError(f'a tensor of shape {shape} reaches beyond its {tensor.storage.size} numbers')
  return tensor


def _rebuild_parameter(tensor, *_) -> _Tensor:
  return tensor


_KNOWN: dict[tuple[str, str], Any] = {
  ('collections', 'OrderedDict'): collections.OrderedDict,
  ('torch._utils', '_rebuild_tensor_v2'): _rebuild_tensor,
  ('torch._utils', '_rebuild_parameter'): _rebuild_parameter,
  **{('torch', name): np.dtype(dtype) for name, dtype in _DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
  """An unpickler that resolves the names in `_KNOWN` and no others."""

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) not in _KNOWN:
      raise ValueError(f'it asks for {module}.{name}, which no list of tensors needs. Nothing of it was executed')
    return _KNOWN[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    _, dtype, key, _, size = pid
    if not isinstance(dtype, np.dtype):
      raise ValueError(f'a storage of {dtype!r}')
    return _Storage(dtype, str(key), int(size))


def read_pickled(path: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
  """Yield (name, array) of every tensor, in the order of the file, one at a time.

  Args:
    path: of the file.
    names: those that are meant; None for all.

  Raises:
    ValueError: no such file, not of the zip form that PyTorch has written since 1.6, damaged, or holding anything else
      than a flat dictionary of tensors.
  """
  with _opened(path) as (archive, root, tensors):
    for name, tensor in tensors.items():
      if names is None or name in names:
        yield name, _read(archive, root, tensor)


def pickled_names(path: Path) -> list[str]:
  """Return the names of the tensors; errors are those of `read_pickled`."""
  with _opened(path) as (_, _, tensors):
    return [*tensors]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, str, dict[str, _Tensor]]]:
  """The archive, the folder inside it, and what it describes."""
  try:
    with zipfile.ZipFile(path) as archive:
      root, tensors = _contents(archive)
      for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
          raise ValueError(f'{name!r} is a {type(tensor).__name__}')
      yield archive, root, tensors
  except FileNotFoundError as error:
    raise ValueError(f'No checkpoint at {path}: give the path of an existing pytorch_model.bin.') from error
  except _FAULTS as error:
    raise ValueError(
      f'{path} cannot be read as a dictionary of tensors: {error}. Fetch it again, or use a safetensors file.'
    ) from error


def _contents(archive: zipfile.ZipFile) -> tuple[str, dict]:
  """The folder inside the archive, and what its pickle describes."""
  pickles = [name for name in archive.namelist() if name.endswith('data.pkl')]
  if len(pickles) != 1:
    raise ValueError(f'{len(pickles)} pickles in the archive')
  root = pickles[0].removesuffix('data.pkl')
  if f'{root}byteorder' in archive.namelist() and archive.read(f'{root}byteorder') != b'little':
    raise ValueError('its bytes are in big-endian order')
  with archive.open(pickles[0]) as file:
    content = _Unpickler(file).load()
  if not isinstance(content, dict):
    raise ValueError(f'a {type(content).__name__}')
  return root, content


def _read(archive: zipfile.ZipFile, root: str, tensor: _Tensor) -> np.ndarray:
  storage = tensor.storage
  info = archive.getinfo(f'{root}data/{storage.key}')
  if info.compress_type != zipfile.ZIP_STORED:
    raise ValueError(f'{info.filename} is compressed')
  if info.file_size != storage.size * storage.dtype.itemsize:
    raise ValueError(f'{info.filename} has {info.file_size} bytes, not {storage.size} x {storage.dtype.itemsize}')
  flat = np.frombuffer(archive.read(info), storage.dtype)[tensor.offset :]
  strides = [stride * flat.itemsize for stride in tensor.strides]
  return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False))
