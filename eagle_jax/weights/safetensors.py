"""Reads and writes safetensors files as NumPy arrays, bfloat16 included."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle_jax.weights.files import replacing


def read_safetensors(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, array) for each tensor of the file, in the dtype it is stored in.

  Raises:
    ValueError: no such file, truncated, or corrupt.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f'No safetensors file at {path}: give the path of an existing .safetensors file.')
  try:
    with safe_open(path, framework='np') as file:
      for name in file.keys():  # noqa: SIM118  (a handle, not a dict)
        yield name, file.get_tensor(name)
  except SafetensorError as error:
    raise ValueError(
      f'{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}. '
      'It may be truncated or corrupt: fetch or save it again.'
    ) from error


def write_safetensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes the file under a temporary name, then renames: a reader finds the old file or the whole new one.

  Args:
    path: where the file goes; missing folders are made.
    tensors: name -> array, of any float dtype, bfloat16 included.
  """
  # The library stores raw memory: a transposed view would be written in the wrong order, without an error.
  ordered = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
  with replacing(Path(path)) as temporary:
    save_file(ordered, temporary)
