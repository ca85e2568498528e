"""Write weight files of networks so small that writing and reading one takes milliseconds."""

import json

import gguf
import jax
import numpy as np
import pytest

from eagle_jax import hub
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft import export
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import name_of_kind
from eagle_jax.models.transformer import Target
from eagle_jax.weights import naming
from eagle_jax.weights.safetensors import write_safetensors

TINY = TargetConfig(
  vocab_size=11, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64, max_context=128,
  norm_eps=1e-5, rope_theta=5000.0, tied_head=False, eos_ids=(3, 4), name='tiny',
)  # fmt: skip
TINY_DRAFTER = DrafterConfig(
  vocab_size=11, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64, qkv_bias=True
)  # fmt: skip

HF_CONFIG = {
  'model_type': 'llama',
  'vocab_size': 11,
  'hidden_size': 32,
  'intermediate_size': 64,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'num_hidden_layers': 2,
  'max_position_embeddings': 128,
  'rms_norm_eps': 1e-5,
  'rope_theta': 5000.0,
  'eos_token_id': [3, 4],
}


def random_tensors(table: naming.Table, seed: int = 0) -> dict[str, np.ndarray]:
  """Make a random f32 array for each tensor that must be in the file, by name."""
  rng = np.random.default_rng(seed)
  names = [name for name in table.entries if name not in table.optional]
  return {name: rng.standard_normal(table.entries[name].shape, dtype=np.float32) for name in names}


def hf_folder(path, content, *, num_shards=1):
  """Write a Hugging Face folder without a tokenizer."""
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(content))
  tensors = list(random_tensors(naming.hf_table(TINY)).items())
  if num_shards == 1:
    write_safetensors(path / 'model.safetensors', dict(tensors))
    return path
  files = {f'model-{i}.safetensors': dict(tensors[i::num_shards]) for i in range(num_shards)}
  for name, some in files.items():
    write_safetensors(path / name, some)
  weight_map = {tensor: name for name, some in files.items() for tensor in some}
  (path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  return path


def byte_letters() -> list[str]:
  """Return the letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
  return [letter[byte] for byte in range(256)]


def byte_metadata(**changes) -> dict:
  """Make the GGUF metadata of a tokenizer whose ids 0..255 are bytes, 256 an ordinary word, 257 and 258 special."""
  prefix = 'tokenizer.ggml.'
  fields = {
    'model': 'gpt2',
    'pre': 'smollm',
    'tokens': [*byte_letters(), 'ab', '<|bos|>', '<|end|>'],
    'token_type': [1] * 257 + [3, 3],
    'merges': ['a b'],
    'bos_token_id': 257,
    'eos_token_id': 258,
  }
  return {prefix + name: value for name, value in (fields | changes).items() if value is not None}


def write_gguf(path, tensors, *, config=TINY, arch='llama', leave_out=(), extra=None, quantised=()):
  """Write a GGUF file as converters do; `quantised` tensors become Q8_0, the rest stay float32."""
  writer = gguf.GGUFWriter(path, arch)
  fields = {
    'context_length': config.max_context,
    'embedding_length': config.width,
    'block_count': config.num_layers,
    'feed_forward_length': config.ffn_width,
    'attention.head_count': config.num_heads,
    'attention.head_count_kv': config.num_kv_heads,
    'vocab_size': config.vocab_size,
  }
  for name, value in fields.items():
    if name not in leave_out:
      writer.add_uint32(f'{arch}.{name}', value)
  writer.add_float32(f'{arch}.attention.layer_norm_rms_epsilon', config.norm_eps)
  if 'rope.freq_base' not in leave_out:
    writer.add_float32(f'{arch}.rope.freq_base', config.rope_theta)
  writer.add_name(config.name)
  writer.add_eos_token_id(config.eos_ids[0])
  writer.add_eot_token_id(config.eos_ids[1])
  for name, value in (extra or {}).items():
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add = adders[type(value)]
    add(name, value)
  for name, array in tensors.items():
    if name in quantised:
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def assert_only_own_layout(target: Target, drafter: Drafter, folder) -> None:
  """Check that a drafter comes back as it was saved, with a draft vocabulary too, and that no other layout takes it."""
  for one in (drafter, drafter.with_ids([5, 3, 90, 11])):
    hub.save_drafter(one, folder / 'own')
    again = hub.load_drafter(folder / 'own', target)
    assert again.config == one.config
    jax.tree.map(np.testing.assert_array_equal, again.params, one.params)
  for layout in export.LAYOUTS:
    with pytest.raises(ValueError, match=f'{layout!r} .*{name_of_kind(drafter.config)!r}'):
      hub.export_drafter(drafter, folder / layout, target, layout=layout)
