"""Read folders of config.json and safetensors: what they describe, and the tensors they hold."""

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.files import parse_json
from eagle_jax.models.families import Family
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.pickled import pickled_names, read_pickled
from eagle_jax.weights.safetensors import read_safetensors, safetensors_names

log = logging.getLogger('eagle_jax')


def read_config(folder: Path) -> dict[str, Any]:
  """Read the config.json of a folder; raise a ValueError if it is absent or not a JSON object."""
  path = folder / 'config.json'
  if (adapter := folder / 'adapter_config.json').is_file():
    base = read_json(adapter).get('base_model_name_or_path')
    raise ValueError(
      f'{folder} holds an adapter (adapter_config.json), which changes the weights of {base!r}: merge them, as with '
      "peft's merge_and_unload, save the whole model, and give that folder."
    )
  if not path.is_file():
    raise ValueError(f'{folder} holds no config.json: give a folder with config.json and *.safetensors files.')
  return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
  try:
    content = parse_json(path.read_bytes(), str(path))
  except ValueError as error:
    raise ValueError(f'{error} Fetch or save it again.') from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} must hold a JSON object, got a {type(content).__name__}.')
  return content


@contextlib.contextmanager
def naming_config(folder: Path) -> Iterator[None]:
  """Turn an error that values of a config.json cause inside the block into a ValueError that names the file."""
  try:
    yield
  except (TypeError, AttributeError, ArithmeticError, ValueError) as error:
    if isinstance(error, ValueError) and str(folder) in str(error):
      raise
    raise ValueError(f'{folder}/config.json has an invalid value: {error}') from error


class _File(NamedTuple):
  """A file of weights, and which of its tensors to read."""

  path: Path
  names: frozenset[str] | None = None  # None: all


WHOLE, PICKLED = 'model.safetensors', 'pytorch_model.bin'
MEDUSA = 'medusa_lm_head.safetensors', 'medusa_lm_head.pt'
_PICKLES = '.bin', '.pt'
_INDEX = '.index.json'
_WEIGHTS = WHOLE, WHOLE + _INDEX, PICKLED, PICKLED + _INDEX, *MEDUSA


def read_tensors(folder: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
  """Yield (name, array) from the first of model.safetensors, its shards, pytorch_model.bin, its shards, Medusa's heads.

  Of shards, each gives the tensors that their index says are in it, and no others.

  Args:
    folder: with the files.
    names: those that are asked for; None for all.
  """
  if not (files := _weight_files(folder)):
    raise ValueError(f'{folder} holds none of {", ".join(_WEIGHTS)}: fetch one of them.')
  for path, meant in files:
    asked = meant if names is None else frozenset(names) if meant is None else meant & frozenset(names)
    yield from (read_pickled if path.suffix in _PICKLES else read_safetensors)(path, asked)


def read_names(folder: Path) -> frozenset[str]:
  """Return the names of the tensors that `read_tensors` yields, without reading one; none where there is no file."""
  names: set[str] = set()
  for path, meant in _weight_files(folder):
    there = pickled_names(path) if path.suffix in _PICKLES else safetensors_names(path)
    names |= {*there} if meant is None else meant.intersection(there)
  return frozenset(names)


def _weight_files(folder: Path) -> list[_File]:
  """List the files that hold the folder's tensors, in the order in which transformers looks for them."""
  there = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
  if not there:
    return []
  first = there[0]
  if (stale := first.with_name(first.name + _INDEX)) in there:
    log.warning('%s: %s is read; %s, which names other files, is not: was it left behind?', folder, first.name, stale)
  return _shards(folder, first) if first.name.endswith(_INDEX) else [_File(first)]


def _shards(folder: Path, index: Path) -> list[_File]:
  files = _named_shards(folder, index)
  if missing := [file.path.name for file in files if not file.path.is_file()]:
    raise ValueError(f'{folder} lacks {missing}, of {len(files)} files that {index.name} names: fetch them.')
  return files


def named_shards(folder: Path) -> list[Path]:
  """Return the files of safetensors that the folder's index names, there or not; none without an index."""
  index = folder / (WHOLE + _INDEX)
  return [file.path for file in _named_shards(folder, index)] if index.is_file() else []


def _named_shards(folder: Path, index: Path) -> list[_File]:
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(_is_file_name(shard) for shard in weight_map.values()):
    raise ValueError(f'{index} has no "weight_map" object of names of files beside it: fetch it again.')
  shards = sorted(set(weight_map.values()))
  return [_File(folder / shard, frozenset(k for k, place in weight_map.items() if place == shard)) for shard in shards]


def _is_file_name(name: Any) -> bool:
  return isinstance(name, str) and name not in ('', '.', '..') and not {'/', '\\', '\0'} & {*name}


def llama_fields(folder: Path, content: Keys, family: Family, *also_needed: str) -> dict[str, Any]:
  """Read the fields that have the same keys in all families. An absent key means what it means to transformers."""
  needed = (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_attention_heads',
    'rms_norm_eps',
    *family.needed,
    *also_needed,
  )
  if missing := [name for name in needed if content.get(name) is None]:
    raise ValueError(f'{folder}/config.json lacks {missing}: fetch the whole file again.')
  num_heads = int(content['num_attention_heads'])
  head_dim = int(content.get('head_dim') or content['hidden_size'] // num_heads)
  return {
    'vocab_size': int(content['vocab_size']),
    'width': int(content['hidden_size']),
    'ffn_width': int(content['intermediate_size']),
    'num_heads': num_heads,
    'num_kv_heads': int(content.get('num_key_value_heads') or num_heads),
    'head_dim': head_dim,
    'norm_eps': float(content['rms_norm_eps']),
  }
