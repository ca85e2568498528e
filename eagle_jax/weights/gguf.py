"""Reads GGUF files: metadata, tensors as float32, and the `TargetConfig` the metadata describes.

GGUF writes shapes fastest axis first; the arrays handed out here are ordinary NumPy [out, in].
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.models.families import FAMILIES, Family
from eagle_jax.weights.rope import chosen_context

_DEFAULT_ROPE_THETA = 10_000.0  # what GGUF means by an absent rope.freq_base


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """An opened GGUF file: metadata as plain Python values, tensors dequantised one at a time."""

  path: Path
  metadata: Mapping[str, Any]
  _tensors: Mapping[str, Any]  # name -> gguf.ReaderTensor, a view of the memory-mapped file

  @property
  def tensor_names(self) -> frozenset[str]:
    return frozenset(self._tensors)

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, f32 array); only one dequantised tensor need be alive at a time."""
    for name in self._tensors:
      yield name, self.tensor(name)

  def tensor(self, name: str) -> np.ndarray:
    """One tensor, dequantised to float32."""
    gguf, tensor = _import_gguf(), self._tensors[name]
    try:
      array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
        f'{self.path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf package cannot dequantise. '
        'Use a file with types such as F16, BF16, Q8_0, Q4_1 or Q4_K.'
      ) from error
    return array.astype(np.float32, copy=False).reshape(tensor.shape[::-1])


def _import_gguf():
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      'Reading a GGUF file needs the gguf package. Install it with: pip install "eagle_jax[demo]"'
    ) from error
  return gguf


def _open(path: Path):
  """The package's reader, which cuts a vocabulary into 150,000 slices: of an array, three times as fast as of a map."""
  gguf: Any = _import_gguf()

  class Reader(gguf.GGUFReader):
    @property
    def data(self):
      return self._array

    @data.setter
    def data(self, mapped: np.memmap):
      self._array = np.asarray(mapped)  # the same memory

  return Reader(path)


def read_gguf(path: str | Path) -> GGUFFile:
  """Open a GGUF file and read its metadata; tensor data stays on disk until asked for.

  Of a split file, the name of any part will do: all parts must lie beside it.

  Raises:
    ValueError: no such file, not GGUF, truncated, or corrupt; a part is missing.
  """
  first, *others = (_read_part(part) for part in _parts(Path(path)))
  if (count := int(first.metadata.get('split.count', 1))) > 1 + len(others):
    raise ValueError(
      f'{path} is one of {count} parts of a model, which its name does not say: give it the name that it was '
      f'published under, ending in -00001-of-{count:05}.gguf, and so the others.'
    )
  tensors = dict(first._tensors)
  for part in others:
    if twice := tensors.keys() & part._tensors.keys():
      raise ValueError(f'{part.path}: {sorted(twice)[:3]} are in another part, too: fetch all parts of one model.')
    tensors |= part._tensors
  return GGUFFile(first.path, first.metadata, tensors)


_PART = re.compile(r'-\d{5}-of-(\d{5})$')


def _parts(path: Path) -> list[Path]:
  """The parts of a split file, the one with the metadata first; the file itself if its name is not that of a part."""
  if not path.is_file() or (found := _PART.search(path.stem)) is None:
    return [path]
  count = int(found[1])
  parts = [path.with_name(f'{path.stem[: found.start()]}-{i:05}-of-{count:05}.gguf') for i in range(1, count + 1)]
  if missing := [part.name for part in parts if not part.is_file()]:
    raise ValueError(f'{path.parent} lacks {missing}, of {count} parts of one model: fetch them.')
  return parts


def _read_part(path: Path) -> GGUFFile:
  if not path.is_file():
    raise ValueError(f'No GGUF file at {path}: give the path of an existing .gguf file.')
  try:
    reader = _open(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
    raise ValueError(
      f'{path} ({path.stat().st_size} bytes) is not a whole GGUF file: {type(error).__name__}: {error}. '
      'It may be truncated or corrupt: fetch it again.'
    ) from error
  return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_family(file: GGUFFile) -> Family:
  """Find the file's architecture in `FAMILIES`; ValueError if GGUF files of it cannot be read."""
  name, known = file.metadata.get('general.architecture'), {x.gguf: x for x in FAMILIES.values() if x.gguf}
  if name not in known:
    raise ValueError(f'{file.path}: GGUF architecture {name!r} is not supported; one of {sorted(known)} is.')
  return known[name]


def target_config(file: GGUFFile, *, max_context: int | None = None) -> TargetConfig:
  """The network a GGUF file describes, for texts of so many tokens, see `hub.load_target`.

  Raises:
    ValueError: unsupported architecture or variant, missing fields (all listed at once), or another context.
  """
  family = read_family(file)
  arch = file.metadata['general.architecture']
  fields = {key.removeprefix(f'{arch}.'): value for key, value in file.metadata.items() if key.startswith(f'{arch}.')}
  _require_fields(file, arch, fields)
  _refuse_variants(file, fields)
  width, num_heads = int(fields['embedding_length']), int(fields['attention.head_count'])
  head_dim = int(fields.get('attention.key_length', width // num_heads))
  for name in ('attention.value_length', 'rope.dimension_count'):
    if fields.get(name, head_dim) != head_dim:
      raise ValueError(f'{file.path}: {arch}.{name} is {fields[name]}, but only the head size {head_dim} is supported.')
  return TargetConfig(
    vocab_size=_vocab_size(file, fields),
    width=width,
    num_layers=int(fields['block_count']),
    num_heads=num_heads,
    num_kv_heads=int(fields.get('attention.head_count_kv', num_heads)),  # GGUF: absent means multi-head
    head_dim=head_dim,
    ffn_width=int(fields['feed_forward_length']),
    max_context=chosen_context(file.path, int(fields['context_length']), int(fields['context_length']), max_context),
    norm_eps=float(fields['attention.layer_norm_rms_epsilon']),
    rope_theta=float(fields.get('rope.freq_base', _DEFAULT_ROPE_THETA)),
    rope_slowdown=_rope_slowdown(file),
    tied_head='output.weight' not in file.tensor_names,
    qkv_bias=family.qkv_bias,
    qk_norm=family.qk_norm,
    eos_ids=_eos_ids(file.metadata),
    name=str(file.metadata.get('general.name', file.path.stem)),
  )


def _rope_slowdown(file: GGUFFile) -> tuple[float, ...]:
  """Llama 3.1 and later: converters store what comes of the scaling's numbers, as a tensor [K/2]."""
  name = 'rope_freqs.weight'
  return tuple(file.tensor(name).tolist()) if name in file.tensor_names else ()


def _require_fields(file: GGUFFile, arch: str, fields: Mapping[str, Any]) -> None:
  needed = (
    'embedding_length',
    'block_count',
    'attention.head_count',
    'feed_forward_length',
    'context_length',
    'attention.layer_norm_rms_epsilon',
  )
  missing = [f'{arch}.{name}' for name in needed if name not in fields]
  if missing:
    raise ValueError(f'{file.path}: the GGUF metadata lacks {missing}. Convert the model again with a current tool.')


def _refuse_variants(file: GGUFFile, fields: Mapping[str, Any]) -> None:
  """Variants whose extra fields, if ignored, would give wrong logits without an error."""
  factor = fields.get('rope.scaling.factor', fields.get('rope.scale_linear', 1.0))  # old files say no type
  scaling = fields.get('rope.scaling.type', 'none' if factor in (0, 1) else 'linear')
  if scaling != 'none':
    raise ValueError(f'{file.path}: RoPE scaling {scaling!r} is not supported, only none.')
  if fields.get('expert_count', 0):
    raise ValueError(f'{file.path}: mixture of {fields["expert_count"]} experts is not supported, only dense layers.')
  if fields.get('attention.sliding_window', 0):
    raise ValueError(f'{file.path}: a sliding window is not supported in GGUF files, only in Hugging Face folders.')


def _vocab_size(file: GGUFFile, fields: Mapping[str, Any]) -> int:
  if 'vocab_size' in fields:
    return int(fields['vocab_size'])
  if 'tokenizer.ggml.tokens' not in file.metadata:
    raise ValueError(f'{file.path}: the GGUF metadata has neither vocab_size nor tokenizer.ggml.tokens; one is needed.')
  return len(file.metadata['tokenizer.ggml.tokens'])


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
  names = ('tokenizer.ggml.eos_token_id', 'tokenizer.ggml.eot_token_id')
  return tuple(dict.fromkeys(int(metadata[name]) for name in names if name in metadata))
