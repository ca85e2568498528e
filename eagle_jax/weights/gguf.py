"""Read GGUF files: metadata, tensors as float32, and the `TargetConfig` the metadata describes.

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
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.rope import Rope, Settings, chosen_context
from eagle_jax.weights.targets import SWITCHES, layer_changes

_LONG_ROW = 4_096  # bytes
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
    """Yield (name, f32 array); only one dequantised tensor need be alive at a time."""
    for name in self._tensors:
      yield name, self.tensor(name)

  def tensor(self, name: str) -> np.ndarray:
    """Return one tensor, dequantised to float32."""
    gguf, tensor = _import_gguf(), self._tensors[name]
    try:
      array = gguf.dequantize(_by_longer_rows(tensor.data), tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
        f'{self.path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf package cannot dequantise. '
        'Use a file with types such as F16, BF16, Q8_0, Q4_1 or Q4_K.'
      ) from error
    return array.astype(np.float32, copy=False).reshape(tensor.shape[::-1])


def _by_longer_rows(data: np.ndarray) -> np.ndarray:
  """Join rows of blocks: the package takes 16 at a time, and if they are short, that takes twice as long."""
  if data.dtype != np.uint8:
    return data
  rows = data.reshape(-1, data.shape[-1])
  count = next((n for n in (8, 4, 2) if len(rows) % n == 0 and n * rows.shape[1] <= _LONG_ROW), 1)
  return rows.reshape(len(rows) // count, -1)


def _import_gguf():
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      'Reading a GGUF file needs the gguf package. Install it with: pip install "eagle_jax[demo]"'
    ) from error
  return gguf


def _open(path: Path):
  """Open the package's reader over an array, from which lists are read at once.

  It would take three times as long to slice a vocabulary out of a memmap, and longer still to do so entry by entry.
  """
  gguf: Any = _import_gguf()
  types = gguf.GGUFValueType

  class Reader(gguf.GGUFReader):
    @property
    def data(self):
      return self._array

    @data.setter
    def data(self, mapped: np.memmap):
      self._array = np.asarray(mapped)  # the same memory

    def _get_field_parts(self, start: int, raw_type: int):
      kind = types(self._get(start, np.uint32)[0]) if raw_type == types.ARRAY and self.byte_order == 'I' else None
      if kind != types.STRING and kind not in self.gguf_scalar_to_np:
        return super()._get_field_parts(start, raw_type)
      count, start_of_list = int(self._get(start + 4, np.uint64)[0]), start + 12
      if kind == types.STRING:
        parts, end = _strings(memoryview(self.data), start_of_list, count)
      else:
        parts = [self._get(start_of_list, self.gguf_scalar_to_np[kind], count)]
        end = start_of_list + count * parts[0].itemsize
      if end > len(self.data):
        raise ValueError(f'a list of {count} entries is longer than the file')
      return end - start, parts, range(len(parts)), [types.ARRAY, kind]

  return Reader(path)


def _strings(data: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
  """Slice out strings, each after its length in 8 bytes, until the data end.

  Returns:
    The strings' bytes, and where they end: beyond the data if they are cut short.
  """
  strings: list[memoryview] = []
  end = start
  while len(strings) < count and end <= len(data):
    begin = end + 8
    end = begin + int.from_bytes(data[begin - 8 : begin], 'little')
    strings.append(data[begin:end])
  return strings, end


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
      f'published under, ending in -00001-of-{count:05}.gguf, and likewise the others.'
    )
  tensors = dict(first._tensors)
  for part in others:
    if twice := tensors.keys() & part._tensors.keys():
      raise ValueError(f'{part.path}: {sorted(twice)[:3]} are in another part, too: fetch all parts of one model.')
    tensors |= part._tensors
  return GGUFFile(first.path, first.metadata, tensors)


_PART = re.compile(r'-\d{5}-of-(\d{5})$')


def _parts(path: Path) -> list[Path]:
  """List the parts of a split file, the one with the metadata first; the file itself if it is not named as a part."""
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
  """Read the network that a GGUF file describes; `max_context` as in `hub.load_target`.

  Raises:
    ValueError: unsupported architecture or variant, missing fields (all listed at once), or another context.
  """
  family = read_family(file)
  arch = file.metadata['general.architecture']
  fields = Keys(
    {key.removeprefix(f'{arch}.'): value for key, value in file.metadata.items() if key.startswith(f'{arch}.')}
  )
  _require_fields(file, arch, fields)
  width, num_heads = int(fields['embedding_length']), int(fields['attention.head_count'])
  head_dim = int(fields.get('attention.key_length', width // num_heads))
  for name in ('attention.value_length', 'attention.key_length_swa', 'attention.value_length_swa'):
    if fields.get(name, head_dim) != head_dim:
      raise ValueError(f'{file.path}: {arch}.{name} is {fields[name]}, but only the head size {head_dim} is supported.')
  ropes, rotary_dim, max_context = _ropes(file, family, fields, head_dim, max_context)
  layers = _layers(file, family, fields, ropes)
  num_experts = int(fields.get('expert_count', 0))
  config = TargetConfig(
    **layers[0],
    vocab_size=_vocab_size(file, fields),
    width=width,
    num_layers=len(layers),
    num_heads=num_heads,
    num_kv_heads=int(fields.get('attention.head_count_kv', num_heads)),  # GGUF: absent means multi-head
    head_dim=head_dim,
    ffn_width=_ffn_width(fields, num_experts),
    max_context=max_context,
    norm_eps=float(fields['attention.layer_norm_rms_epsilon']),
    rotary_dim=rotary_dim if rotary_dim != head_dim else None,
    tied_head='output.weight' not in file.tensor_names,
    qkv_bias=family.qkv_bias or 'blk.0.attn_q.bias' in file.tensor_names,
    o_bias='blk.0.attn_output.bias' in file.tensor_names,
    mlp_bias='blk.0.ffn_up.bias' in file.tensor_names,
    **{name: getattr(family, name) for name in SWITCHES},
    **_numbers(family, fields, width, head_dim, num_heads, len(layers)),
    num_experts=num_experts,
    experts_per_token=int(fields.get('expert_used_count', 0)),
    expert_bias='blk.0.ffn_gate_inp.bias' in file.tensor_names,
    layer_changes=layer_changes(layers),
    eos_ids=_eos_ids(file.metadata),
    name=str(file.metadata.get('general.name', file.path.stem)),
  )
  _require_known(file, arch, fields)
  return config


def _ffn_width(fields: Keys, num_experts: int) -> int:
  dense = int(fields['feed_forward_length'])
  return int(fields.get('expert_feed_forward_length', dense)) if num_experts else dense


def _numbers(
  family: Family, fields: Keys, width: int, head_dim: int, num_heads: int, num_layers: int
) -> dict[str, Any]:
  """Read the factors and limits that only some families have."""
  numbers = {}
  if 'embedding_multiplier' in family.holds:
    names = {
      'embedding_scale': 'embedding_scale', 'attention_scale': 'attention.scale', 'residual_scale': 'residual_scale',
      'logit_divisor': 'logit_scale',
    }  # fmt: skip
    numbers = {ours: float(fields.get(name, 1.0)) for ours, name in names.items()}
  if family.scales_embedding:
    numbers['embedding_scale'] = width**0.5
    is_27b = num_layers == 62  # this size alone divides by width / num_heads, which no key says
    numbers['attention_scale'] = (width // num_heads if is_27b else head_dim) ** -0.5
    if (cap := fields.get('final_logit_softcapping')) is not None:
      numbers['logit_cap'] = float(cap)
  if 'swiglu_limit' in family.holds:
    numbers |= {'gate_limit': family.absent['swiglu_limit'], 'gate_slope': family.absent['swiglu_alpha']}
  return numbers


def _layers(file: GGUFFile, family: Family, fields: Keys, ropes: tuple[Rope, Rope]) -> list[dict[str, Any]]:
  """Read the fields in which layers may differ, by layer. Without a key, a family's layers are as in its models."""
  num_layers = int(fields['block_count'])
  if num_layers < 1:
    raise ValueError(f'{file.path}: block_count must be positive, got {num_layers}.')
  window = int(fields.get('attention.sliding_window', 0)) if 'sliding_window' in family.holds else 0
  pattern = fields.get('attention.sliding_window_pattern') if window else None
  if pattern is None:
    pattern = family.absent.get('sliding_window_pattern')
  if isinstance(pattern, list):  # one for each layer, whether it is windowed
    is_windowed = [bool(is_on) for is_on in pattern]
  else:
    is_windowed = [pattern is None or (index + 1) % pattern != 0 for index in range(num_layers)]
  if len(is_windowed) != num_layers:
    raise ValueError(f'{file.path}: attention.sliding_window_pattern {pattern} does not fit {num_layers} layers.')
  interval = family.absent.get('no_rope_layer_interval')
  layers = []
  for index in range(num_layers):
    has_window = bool(window) and is_windowed[index]
    rope = ropes[has_window]
    layers.append(
      {
        'window': window if has_window else None,
        'has_rope': interval is None or (index + 1) % interval != 0,
        'rope_theta': rope.theta,
        'rope_slowdown': rope.slowdown,
        'rope_factor': rope.factor,
      }
    )
  return layers


def _ropes(
  file: GGUFFile, family: Family, fields: Keys, head_dim: int, max_context: int | None
) -> tuple[tuple[Rope, Rope], int, int]:
  """Read RoPE of layers without and with a window, the numbers of a head that it rotates, and the context length."""
  rotary_dim = int(fields.get('rope.dimension_count', head_dim))
  if rotary_dim != head_dim and 'partial_rotary_factor' not in family.holds:
    raise ValueError(
      f'{file.path}: rope.dimension_count is {rotary_dim}, but only the head size {head_dim} is supported.'
    )
  context, theta = int(fields['context_length']), float(fields.get('rope.freq_base', _DEFAULT_ROPE_THETA))
  scaling = _scaling(file, family, fields)
  content = Keys({'rope_scaling': scaling, 'rope_theta': theta, 'max_position_embeddings': context})
  kinds = 'default', 'linear', 'yarn', 'longrope'
  settings = Settings.read(file.path, content, rotary_dim, theta=theta, kinds=kinds)
  is_local = 'rope_local_base_freq' in family.holds
  contexts = (context, context) if is_local else settings.contexts()
  max_context = chosen_context(file.path, *contexts, max_context)
  rope = settings.rope(max_context)
  if slowdown := _rope_slowdown(file):
    rope = Rope(theta, slowdown)
  local = Rope(float(fields.get('rope.freq_base_swa', family.absent['rope_local_base_freq']))) if is_local else rope
  return (rope, local), rotary_dim, max_context


def _scaling(file: GGUFFile, family: Family, fields: Keys) -> dict[str, Any]:
  """Read the scaling of RoPE, in the terms of config.json."""
  factor = fields.get('rope.scaling.factor', fields.get('rope.scale_linear'))  # old files say no type
  kind = fields.get('rope.scaling.type', 'none' if factor in (None, 0, 1) else 'linear')
  original = fields.get('rope.scaling.original_context_length')
  if 'rope_factors_long.weight' in file.tensor_names:
    lists = {f'{name}_factor': file.tensor(f'rope_factors_{name}.weight').tolist() for name in ('short', 'long')}
    attention = fields.get('rope.scaling.attn_factor')
    return {
      'rope_type': 'longrope',
      'original_max_position_embeddings': original,
      'attention_factor': attention,
    } | lists
  if kind == 'none':
    return {'rope_type': 'default'}
  scaling = {'rope_type': kind, 'factor': factor}
  if kind == 'yarn':
    betas = {name: fields.get(f'rope.scaling.yarn_{name}') for name in ('beta_fast', 'beta_slow')}
    scaling |= {'original_max_position_embeddings': original, 'truncate': family.gguf != 'gpt-oss', **betas}
  return scaling


def _rope_slowdown(file: GGUFFile) -> tuple[float, ...]:
  """Read the slowdowns of Llama 3.1 and later, which converters store as a tensor [K/2]; () if there are none."""
  name = 'rope_freqs.weight'
  return tuple(file.tensor(name).tolist()) if name in file.tensor_names else ()


def _require_fields(file: GGUFFile, arch: str, fields: Keys) -> None:
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
  for name in (*needed, 'attention.head_count_kv', 'expert_feed_forward_length'):
    if isinstance(fields.get(name), list):
      raise ValueError(f'{file.path}: {arch}.{name} differs between layers, which is not supported.')


# Fields that may be there with a value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'rope.scaling.finetuned': (True, False), 'rope.dimension_count_swa': (), 'attention.causal': (True,),
  'attention.sliding_window': (0,), 'expert_shared_count': (0,), 'expert_group_count': (0, 1),
  'expert_group_used_count': (0, 1), 'expert_weights_norm': (True,), 'expert_gating_func': (1,),
  'leading_dense_block_count': (0,), 'nextn_predict_layers': (0,), 'pooling_type': (0,),
}  # fmt: skip


def _require_known(file: GGUFFile, arch: str, fields: Keys) -> None:
  """Raise ValueError if a field that was not read may change the network; all are listed."""
  wrong = {f'{arch}.{name}': fields[name] for name in sorted(fields.unread())}
  if wrong := {name: x for name, x in wrong.items() if x not in _NEUTRAL.get(name.removeprefix(f'{arch}.'), ())}:
    raise ValueError(f'{file.path}: {wrong} are not supported: they may change the network.')


def _vocab_size(file: GGUFFile, fields: Keys) -> int:
  if 'vocab_size' in fields:
    return int(fields['vocab_size'])
  if 'tokenizer.ggml.tokens' not in file.metadata:
    raise ValueError(f'{file.path}: the GGUF metadata has neither vocab_size nor tokenizer.ggml.tokens; one is needed.')
  return len(file.metadata['tokenizer.ggml.tokens'])


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
  names = ('tokenizer.ggml.eos_token_id', 'tokenizer.ggml.eot_token_id')
  return tuple(dict.fromkeys(int(metadata[name]) for name in names if name in metadata))
