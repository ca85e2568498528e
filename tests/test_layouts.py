"""Heads in other layouts: written and read again; the configs and sizes of published ones."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import decode, hub
from eagle_jax.config import Eagle3Config
from eagle_jax.draft import export, heads, kinds
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.rope import read_rope
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors

TARGET = dataclasses.replace(tiny.TARGET, num_layers=6)
EAGLE3 = Eagle3Config(
  vocab_size=97, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=48, target_width=32, taps=(1, 3, 4)
)


def eagle3(**changes) -> Drafter:
  config = dataclasses.replace(EAGLE3, **changes)
  params = Eagle3(config).init_params(jax.random.key(2))
  keys = iter(jax.random.split(jax.random.key(3)))
  num_ids = config.num_ids
  params['head'] = {'weight': jax.random.normal(next(keys), (num_ids, config.width))}
  if config.own_embedding:
    params['embed'] = {'weight': jax.random.normal(next(keys), (config.vocab_size, config.width))}
  if config.draft_vocab_size:
    params['ids'] = jnp.arange(3, 3 + 2 * num_ids, 2, dtype=jnp.int32)
  return Drafter(config, params)


def eagle(ids=None, **changes) -> Drafter:
  drafter = tiny.drafter(dataclasses.replace(tiny.DRAFTER, **changes))
  return drafter if ids is None else drafter.with_ids(ids)


HEADS = {
  'eagle': eagle(),
  'eagle with biases': eagle(fc_bias=True, rope_theta=500_000.0),
  'eagle of few ids': eagle(ids=[5, 3, 90, 11]),
  'eagle3': eagle3(),
  'eagle3 of few ids': eagle3(draft_vocab_size=20),
  'eagle3 of another width': eagle3(width=16, own_embedding=True, draft_vocab_size=20),
}
USUAL_TAPS = (2, 3, 3)  # of six layers


@pytest.fixture(scope='module')
def target():
  return tiny.target(TARGET)


@pytest.mark.parametrize(
  ('name', 'layout'),
  [*itertools.product(sorted(HEADS), sorted(export.LAYOUTS)), ('eagle3 of an embedding', 'speculators')],
)
def test_a_head_comes_back_bit_for_bit(target, tmp_path, name, layout):
  drafter = HEADS.get(name) or eagle3(own_embedding=True)  # which other layouts cannot express
  if layout == 'safeailab' and not isinstance(drafter.config, type(tiny.DRAFTER)):
    drafter = Drafter(dataclasses.replace(drafter.config, taps=None), drafter.params)
  hub.export_drafter(drafter, tmp_path / name, target, layout=layout)
  again = hub.load_drafter(tmp_path / name, target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  assert json.loads((tmp_path / name / 'config.json').read_text())['architectures']


SCALINGS = {
  'linear': {'rope_type': 'linear', 'factor': 4.0},
  'llama3': {
    'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64,
  },
  'yarn': {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 64, 'beta_fast': 4},
  'yarn, mscale': {
    'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 64, 'mscale': 2.0, 'mscale_all_dim': 0.5,
  },
}  # fmt: skip


def scaled(name: str, path) -> dict:
  rope = read_rope(path, Keys({'rope_scaling': SCALINGS[name]}), EAGLE3.head_dim, EAGLE3.rope_theta)
  return {'rope_slowdown': rope.slowdown, 'rope_factor': rope.factor, 'rope_scaling': rope.words}


@pytest.mark.parametrize(
  ('layout', 'changes'),
  [
    ('sglang', {'norm_before_fc': True, 'norm_output': True, 'fc_bias': True, 'taps': (1, 2, 5)}),
    ('sglang', {'fc_norm': True, 'taps': (1, 2, 4, 5, 6)}),
    ('sglang', {'taps': ()}),
    ('speculators', {'norm_before_fc': True, 'norm_output': True, 'norm_before_residual': True, 'window': 3}),
    ('speculators', {'mlp_bias': True, 'taps': (2, 3, 4)}),
    ('speculators', {'qk_norm': True, 'qkv_bias': True, 'o_bias': True, 'fc_norm': True, 'taps': (0, 6)}),
    *itertools.product(['sglang', 'speculators'], SCALINGS),
    ('safeailab', 'linear'),
  ],
)
def test_every_switch_that_a_layout_has_words_for_comes_back(target, tmp_path, layout, changes):
  changes = scaled(changes, tmp_path) if isinstance(changes, str) else changes
  taps = None if layout == 'safeailab' else (1, 3, 4)
  hub.export_drafter(drafter := eagle3(**{'taps': taps} | changes), tmp_path / 'out', target, layout=layout)
  again = hub.load_drafter(tmp_path / 'out', target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


@pytest.mark.parametrize(
  ('layout', 'changes'),
  [
    ('safeailab', {'qkv_bias': True}),
    ('sglang', 'yarn'),
    ('speculators', {'qkv_bias': True, 'o_bias': True, 'mlp_bias': True}),
    ('speculators', 'llama3'),
    ('safeailab', {'own_embedding': True}),
  ],
)
def test_so_do_those_of_eagle_1_and_2(target, tmp_path, layout, changes):
  drafter = eagle(**scaled(changes, tmp_path) if isinstance(changes, str) else changes)
  if drafter.config.own_embedding:
    embed = {'weight': jnp.flip(target.params['embed']['weight'])}
    drafter = Drafter(drafter.config, drafter.params | {'embed': embed})
  hub.export_drafter(drafter, tmp_path / 'out', target, layout=layout)
  again = hub.load_drafter(tmp_path / 'out', target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  hub.save_drafter(drafter, tmp_path / 'ours')
  assert hub.load_drafter(tmp_path / 'ours', target).config == drafter.config


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'norm_before_residual': True, 'taps': ()},
    {'fc_norm': True, 'norm_output': True, 'fc_bias': True, 'taps': (0, 6)},
    {'norm_before_fc': True, 'norm_output': True, 'window': 3, 'qk_norm': True, 'qkv_bias': True, 'o_bias': True},
  ],
  ids=str,
)
def test_text_with_an_eagle3_head_is_plain(target, tmp_path, changes):
  drafter = eagle3(draft_vocab_size=20, **changes)
  how = {'max_new_tokens': 20, 'temperature': 1.0, 'seed': 2, 'eos_ids': ()}
  plain = decode.generate(target, None, [[1, 2, 3], [4]], **how)
  out = decode.generate(target, drafter, [[1, 2, 3], [4]], policy=DynamicTree(3, 3, 3, 8), **how)
  assert out.tokens == plain.tokens
  hub.save_drafter(drafter, tmp_path / 'drafter')  # in our own layout, which has words for everything
  again = hub.load_drafter(tmp_path / 'drafter', target)
  assert again.config == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


def test_files_are_what_the_engines_look_for(target, tmp_path):
  def names(drafter, layout):
    hub.export_drafter(drafter, tmp_path / layout, target, layout=layout)
    return {name for name, _ in read_safetensors(tmp_path / layout / 'model.safetensors')}

  biased = HEADS['eagle with biases']
  assert {'embed_tokens.weight', 'fc.bias', 'layers.0.self_attn.q_proj.weight'} <= names(biased, 'safeailab')
  assert 'embed_tokens.weight' not in names(biased, 'sglang')
  assert {'fusion_fc.weight', 'transformer.mlp.up_proj.weight'} <= names(biased, 'speculators')
  few = HEADS['eagle3 of few ids']
  assert {'midlayer.hidden_norm.weight', 'd2t', 't2d', 'lm_head.weight'} <= names(few, 'sglang')
  assert 'layers.0.hidden_norm.weight' in names(few, 'speculators')
  tensors = dict(read_safetensors(tmp_path / 'sglang' / 'model.safetensors'))
  assert tensors['d2t'].dtype == np.int64
  ids = np.asarray(few.params['ids'])
  np.testing.assert_array_equal(np.flatnonzero(tensors['t2d']), ids)
  np.testing.assert_array_equal(tensors['d2t'] + np.arange(20), ids)
  content = json.loads((tmp_path / 'sglang' / 'config.json').read_text())
  assert content['eagle_config']['eagle_aux_hidden_state_layer_ids'] == [0, 2, 3]
  assert content['max_position_embeddings'] == TARGET.max_context


@pytest.mark.parametrize(
  ('changes', 'layout', 'message'),
  [
    ({'fc_norm': True}, 'safeailab', r"cannot express \['fc_norm'\]"),
    ({'norm_before_residual': True, 'window': 3}, 'safeailab', r"\['window', 'norm_before_residual'\]"),
    ({'norm_before_residual': True}, 'sglang', r"\['norm_before_residual'\]"),
    ({'window': 3, 'qk_norm': True}, 'sglang', r"\['qk_norm', 'window'\]"),
    ({'qkv_bias': True}, 'speculators', 'qkv_bias True, but o_bias False'),
    ({'fc_bias': True}, 'speculators', r"\['fc_bias'\]"),
    ({'taps': ()}, 'speculators', 'the final feature alone'),
    ({}, 'safeailab', r"cannot express \['taps'\]"),
    ({'taps': (3, 4, 4)}, 'sglang', 'for other layers than those'),  # whose outputs' list means the usual inputs
    ({'rope_slowdown': (2.0,) * 4}, 'sglang', r"\['rope_slowdown'\]"),
    ({'own_embedding': True}, 'sglang', r"cannot express \['own_embedding'\]"),
    ({'own_embedding': True, 'taps': None}, 'safeailab', r"cannot express \['own_embedding'\]"),
    ({'taps': (0, 1, 2)}, 'sglang', 'input of the first layer'),
    ({}, 'vllm', "`layout`.* got 'vllm'"),
  ],
)
def test_what_a_layout_cannot_say_is_an_error(target, tmp_path, changes, layout, message):
  with pytest.raises(ValueError, match=message):
    hub.export_drafter(eagle3(**changes), tmp_path / 'out', target, layout=layout)
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  ('changes', 'layout'), [*itertools.product([{'griffin': True}, {'num_layers': 2}], sorted(export.LAYOUTS))]
)
def test_what_is_beyond_eagle_2_is_an_error_too(target, tmp_path, changes, layout):
  with pytest.raises(ValueError, match=rf'cannot express \[{[*changes][0]!r}\]'):
    hub.export_drafter(eagle(**changes), tmp_path / 'out', target, layout=layout)


def test_ids_of_a_head_of_its_own_cannot_be_chosen():
  with pytest.raises(ValueError, match='fixed draft vocabulary'):
    HEADS['eagle3'].with_ids([1, 2])
  for ids in ([1, 1], [0, -1], [10_000]):
    with pytest.raises(ValueError, match='`ids`') as raised:
      HEADS['eagle'].with_ids(ids)
    assert str(ids) in str(raised.value)


SPECULATORS = {'architectures': ['EagleSpeculator'], 'speculators_model_type': 'eagle'}


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ({**SPECULATORS, 'speculators_model_type': 'mtp'}, "speculators_model_type 'mtp'.* is not supported"),
    ({**SPECULATORS, 'layernorms': True}, 'layernorms True'),
    ({**SPECULATORS, 'transformer_layer_config': {'hidden_act': 'gelu'}}, 'transformer_layer_config.hidden_act'),
  ],
)
def test_speculators_that_are_refused(tmp_path, content, message):
  with pytest.raises(ValueError, match=message):
    kinds.read_drafter_config(tmp_path, content, TARGET)


def test_absent_keys_of_speculators_mean_what_they_mean_to_transformers(tmp_path):
  found = kinds.read_drafter_config(
    tmp_path, {**SPECULATORS, 'fusion_bias': True, 'transformer_layer_config': {}}, TARGET
  )
  assert (found.width, found.ffn_width, found.vocab_size, found.norm_eps) == (4096, 11_008, 32_000, 1e-6)
  assert found.fc_bias


def test_a_damaged_draft_vocabulary(target, tmp_path):
  hub.export_drafter(HEADS['eagle of few ids'], tmp_path, target, layout='sglang')
  (tmp_path / heads.VOCABULARY_FILE).write_text('{"ids": "5"}')
  with pytest.raises(ValueError, match='no list of "ids"'):
    hub.load_drafter(tmp_path, target)


def published(width, ffn, num_heads, kv_heads, vocab, **more):
  content = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': width, 'intermediate_size': ffn,
    'num_attention_heads': num_heads, 'num_hidden_layers': 1, 'vocab_size': vocab, 'rms_norm_eps': 1e-5,
    'max_position_embeddings': 2048,
  }  # fmt: skip
  return content | ({'num_key_value_heads': kv_heads} if kv_heads else {}) | more


# Name -> config.json, bytes a number, GB of the published file (as the Hugging Face hub lists them).
PUBLISHED = {
  'EAGLE-Vicuna-7B-v1.3': (published(4096, 11_008, 32, None, 32_000), 4, 1.47),
  'EAGLE-Vicuna-13B-v1.3': (published(5120, 13_824, 40, None, 32_000), 4, 2.13),
  'EAGLE-Vicuna-33B-v1.3': (published(6656, 17_920, 52, 13, 32_000), 4, 3.08),
  'EAGLE-mixtral-instruct-8x7B': (published(4096, 14_336, 32, 32, 32_000, bias=False), 4, 1.63),
  'EAGLE-LLaMA3-Instruct-8B': (published(4096, 14_336, 32, 8, 128_256, bias=False, rope_theta=5e5), 2, 1.55),
  'EAGLE-LLaMA3-Instruct-70B': (published(8192, 28_672, 64, 8, 128_256, bias=False, rope_theta=5e5), 2, 4.08),
  'EAGLE-Qwen2-7B-Instruct': (published(3584, 18_944, 28, 28, 152_064, qkv_bias=True), 2, 1.65),
  'EAGLE-Qwen2-72B-Instruct': (published(8192, 29_568, 64, 64, 152_064, qkv_bias=True), 2, 4.75),
  'EAGLE3-LLaMA3.1-Instruct-8B': (published(4096, 14_336, 32, 8, 128_256, draft_vocab_size=32_000), 2, 0.85),
  'EAGLE3-Vicuna1.3-13B': (
    published(5120, 13_824, 40, 40, 32_000, draft_vocab_size=32_000) | {'num_hidden_layers': 40}, 2, 1.28,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', sorted(PUBLISHED))
def test_tables_are_as_large_as_published_files(tmp_path, name):
  content, itemsize, gigabytes = PUBLISHED[name]
  config = kinds.read_drafter_config(tmp_path, content, TARGET)
  table = kinds.tensor_table(config)
  entries = [entry for name, entry in table.entries.items() if name not in table.optional]
  num_bytes = sum(math.prod(entry.shape) * (8 if entry.dtype else itemsize) for entry in entries)
  if isinstance(config, Eagle3Config):
    assert config.rope_theta == 10_000
    num_bytes += config.vocab_size if config.draft_vocab_size else 0  # t2d
  else:
    assert config.fc_bias == content.get('bias', True)
    num_bytes += config.vocab_size * config.width * itemsize  # the target's embedding
  assert abs(num_bytes / 1e9 - gigabytes) < 0.0051


def test_every_config_is_of_one_kind():
  forms = [kind.config for kind in kinds.KINDS.values()]
  assert len({*forms}) == len(forms)
  for name, drafter in HEADS.items():
    assert kinds.kind_of(drafter.config).title == ('EAGLE-3' if 'eagle3' in name else 'EAGLE-1/2')
    borrowed = {'embed', 'head', 'ids'} - drafter.params.keys()
    assert borrowed <= kinds.kind_of(drafter.config).borrows


def test_what_comes_back_otherwise_is_an_error():
  drafter = HEADS['eagle3']
  renamed = dataclasses.replace(drafter.config, name='again')
  hub.require_same(drafter, Drafter(renamed, drafter.params), tiny.target(TARGET))
  with pytest.raises(ValueError, match='window was None and is now 3'):
    hub.require_same(drafter, Drafter(dataclasses.replace(renamed, window=3), drafter.params), tiny.target(TARGET))
  with pytest.raises(ValueError, match='other numbers'):
    hub.require_same(drafter, Drafter(renamed, jax.tree.map(jnp.negative, drafter.params)), tiny.target(TARGET))


def test_a_layout_without_a_kind_says_so(target, monkeypatch):
  name = 'a kind of another day'
  monkeypatch.setattr(export, 'name_of_kind', lambda config: name)
  with pytest.raises(ValueError, match=name):
    export.written(HEADS['eagle3'], target, 'sglang')


def head(width, ffn, num_heads, kv_heads, head_dim, vocab, num_ids, **more):
  """Return the keys that SpecForge, AngelSlim and others write for every head."""
  return {
    'architectures': ['LlamaForCausalLMEagle3'], 'attention_bias': False, 'attention_dropout': 0.0, 'bos_token_id': 1,
    'eos_token_id': [2, 3], 'pad_token_id': 0, 'head_dim': head_dim, 'hidden_act': 'silu', 'hidden_size': width,
    'initializer_range': 0.02, 'intermediate_size': ffn, 'max_position_embeddings': 40_960, 'model_type': 'llama',
    'num_attention_heads': num_heads, 'num_hidden_layers': 1, 'num_key_value_heads': kv_heads, 'rms_norm_eps': 1e-6,
    'rope_scaling': None, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16', 'transformers_version': '4.53.2',
    'use_cache': True, 'vocab_size': vocab, 'draft_vocab_size': num_ids,
  } | more  # fmt: skip


def of_speculators(version, layer, num_ids, **more):
  kept = {key: layer[key] for key in layer if key not in ('architectures', 'draft_vocab_size', 'torch_dtype')}
  return {
    'architectures': ['Eagle3DraftModel'], 'auto_map': {'': 'config.Eagle3SpeculatorConfig'}, 'dtype': 'bfloat16',
    'base_model_ep_plan': None, 'has_no_defaults_at_init': False, 'draft_vocab_size': num_ids,
    'eagle_aux_hidden_state_layer_ids': None, 'embed_requires_grad': False, 'norm_before_residual': True,
    'speculators_config': {'algorithm': 'eagle3', 'default_proposal_method': 'greedy'},
    'speculators_model_type': 'eagle3', 'speculators_version': version, 'target_hidden_size': None,
    'transformer_layer_config': kept, 'transformers_version': '4.57.6',
  } | more  # fmt: skip


def ids(*layers, **more):
  return {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [*layers]} | more}


MO = {
  'use_aux_hidden_state': True, 'use_input_layernorm_in_first_layer': True, 'use_last_layernorm': True,
  'use_mtp_layernorm': False, 'next_layer_regular': True, 'parallel_draft_step': 1,
  'parallel_draft_heads_num_layers': None,
}  # fmt: skip
YARN_OF_GPT_OSS = {
  'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False,
  'original_max_position_embeddings': 4096,
}  # fmt: skip
MROPE = {'mrope_interleaved': True, 'mrope_section': [24, 20, 20]}
NO_WINDOW = {'max_window_layers': 48, 'sliding_window': None, 'use_sliding_window': False}
LLAMA3 = {
  'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}  # fmt: skip

# Whose head -> its config.json, how its layer is called, layers of the target, and what is read.
CONFIGS = {
  'danielhanchen/EAGLE-llama2-chat-7B': (
    {'model_type': 'eagle', 'model': published(4096, 11_008, 32, 32, 32_000), 'truncated_vocab_size': 32_000},
    'layers.0', 32, {'fc_bias': True, 'rope_theta': 10_000.0},
  ),
  'yuhuili/EAGLE-Vicuna-13B-v1.3': (
    published(5120, 13_824, 40, None, 32_000), 'layers.0', 40, {'num_kv_heads': 40, 'head_dim': 128},
  ),
  'nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted': (
    of_speculators('0.1.0.dev14', head(4096, 14_336, 32, 8, 128, 128_256, 32_000), 32_000, norm_before_residual=False),
    'layers.0', 32, {'norm_before_residual': False, 'taps': None},
  ),
  'inference-optimization/Mistral3_speculator_dummy': (
    of_speculators('0.5.0.dev5', head(7168, 14_336, 32, 8, 192, 131_072, 32_000), 32_000, norm_before_fc=False),
    'layers.0', 40, {'head_dim': 192, 'norm_before_residual': True, 'norm_before_fc': False},
  ),
  'RedHatAI/gpt-oss-20b-speculator.eagle3': (
    of_speculators('0.5.0', head(2880, 2880, 64, 8, 64, 201_088, 64_000), 64_000, norm_before_fc=True),
    'layers.0', 24, {'draft_vocab_size': 64_000, 'norm_before_fc': True, 'num_kv_heads': 8},
  ),
  'what speculators 0.9 writes': (
    of_speculators(
      '0.9.0', head(4096, 12_288, 32, 8, 128, 151_936, 32_000, model_type='qwen3', layer_types=['sliding_attention'],
                    sliding_window=2048, use_sliding_window=True, mlp_bias=False),
      32_000, norm_before_fc=True, fc_norm=False, norm_output=True,
    ),
    'layers.0', 36, {'qk_norm': True, 'window': 2048, 'norm_output': True, 'norm_before_fc': True},
  ),
  'nebius/EAGLE3-gpt-oss-20b': (
    head(2880, 11_520, 64, 8, 64, 201_088, 64_000, truncated_vocab_size=64_000, architectures=['LlamaForCausalLM'],
         rope_theta=150_000, rope_scaling=YARN_OF_GPT_OSS),
    'midlayer', 24, {'rope_theta': 150_000.0, 'rope_factor': pytest.approx(1.3466, abs=1e-4)},
  ),
  'nvidia/gpt-oss-120b-Eagle3-v3': (
    head(2880, 17_280, 64, 8, 64, 201_088, 201_088, mlp_bias=False, pretraining_tp=1, norm_before_fc=True)
    | ids(24, 30, 36, **MO), 'layers.0', 36, {'taps': (24, 30, 36), 'draft_vocab_size': None, 'norm_before_fc': True},
  ),
  'AQ-MedAI/Kimi-K2-Instruct-eagle3': (
    head(7168, 18_432, 64, 64, 128, 163_840, 32_000, model_type='kimi_k2', rope_theta=1e6, **NO_WINDOW)
    | ids(2, 30, 58, use_aux_hidden_state=True), 'midlayer', 61, {'taps': (2, 30, 58)},
  ),
  'zjxia/step-3.5-flash-eagle3-SpecForge-draft': (
    head(4096, 11_264, 64, 8, 64, 128_896, 32_000) | ids(4, 20, 40), 'midlayer', 45, {'taps': (5, 21, 41)},
  ),
  'AvitoTech/avibe-eagle': (
    head(4096, 12_288, 32, 8, 128, 116_394, 32_000, num_hidden_layers=36, rope_theta=1e6), 'midlayer', 36, {},
  ),
  'lukeysong/llama3-draft': (
    head(4096, 14_336, 32, 8, 128, 128_256, 128_256, rope_scaling=LLAMA3), 'midlayer', 32,
    {'draft_vocab_size': None, 'rope_theta': 10_000.0},
  ),
  'SpecForge gpt-oss-120B': (
    head(2880, 17_280, 64, 8, 64, 201_088, 32_000) | ids(1, 17, 33), 'midlayer', 36, {'taps': (2, 18, 34)},
  ),
  'SpecForge qwen3-30B-A3B, EAGLE-3.1': (
    head(2048, 12_288, 32, 4, 128, 151_936, 32_000, fc_norm=True, norm_output=True, rope_theta=1e6, **NO_WINDOW),
    'midlayer', 48, {'fc_norm': True, 'norm_output': True, 'taps': None},
  ),
  'SpecForge gemma3-27b': (
    head(5376, 21_504, 32, 16, 128, 262_208, 262_208, sliding_window=512, use_sliding_window=False, additional_fc=False,
         target_model_type='gemma3_text', reuse_target_lm_head=True, rope_theta=1_000_000) | ids(1, 29, 61),
    'midlayer', 62, {'draft_vocab_size': None, 'taps': (2, 30, 62), 'window': None},
  ),
  'SpecForge phi4-mini': (
    head(3072, 8192, 24, 8, None, 200_064, 32_000, model_type='phi3', tie_word_embeddings=True, rope_theta=10_000.0),
    'midlayer', 32, {'head_dim': 128},
  ),
  'SpecForge qwen3-vl-30b-a3b': (
    head(2048, 6144, 32, 4, 128, 151_936, 32_000, rope_scaling=MROPE, rope_theta=5_000_000, dtype='bfloat16',
         max_window_layers=None, target_model_type='qwen3_vl_moe', pretraining_tp=1),
    'midlayer', 48, {'rope_slowdown': (), 'rope_theta': 5e6},
  ),
  'deepseek-ai/eagle3_qwen3_8b_ttt7': (
    {key: value for key, value in head(4096, 12_288, 32, 8, 128, 151_936, None, rope_theta=1_000_000).items() if value}
    | {'architectures': ['Qwen3Eagle3Model'], 'model_type': 'qwen3', 'num_target_layers': 36, 'ttt_length': 7,
       'target_layer_ids': [1, 9, 17, 25, 33], 'step_loss_decay': 0.8, 'layer_types': ['full_attention']} | NO_WINDOW,
    'layers.0', 36, {'taps': (2, 10, 18, 26, 34), 'qk_norm': True, 'draft_vocab_size': None},
  ),
  'AngelSlim qwen3-vl-4b': (
    head(2560, 9728, 32, 8, 128, 151_936, 32_000, architectures=['Eagle3LlamaForCausalLM'], rope_theta=5_000_000,
         rope_scaling={'type': 'default', 'rope_type': 'default'} | MROPE, tie_word_embeddings=True, modal_type='VLM',
         image_token_id=151_655, video_token_id=151_656, vision_start_token_id=151_652, vision_end_token_id=151_653),
    'midlayer', 36, {'taps': None, 'rope_slowdown': ()},
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', CONFIGS)
def test_published_configs(tmp_path, name):
  content, layer, num_layers, expected = CONFIGS[name]
  write_safetensors(tmp_path / 'model.safetensors', {f'{layer}.post_attention_layernorm.weight': np.ones(1)})
  target = dataclasses.replace(TARGET, num_layers=num_layers)
  config = kinds.read_drafter_config(tmp_path, content, target)
  assert {key: getattr(config, key) for key in expected} == expected
  table = kinds.tensor_table(config)
  if isinstance(config, Eagle3Config):
    assert table.entries['fc.weight'].shape == (config.width, config.num_taps * config.width)
    assert table.entries['layers.0.self_attn.q_proj.weight'].shape == (
      config.num_heads * config.head_dim, 2 * config.width,
    )  # fmt: skip
    assert ('input_norm.weight' in table.entries) == config.norm_before_fc


@pytest.mark.parametrize(
  ('content', 'named'),
  [
    (head(2880, 17_280, 64, 8, 64, 201_088, 32_000, architectures=['GptOssForCausalLMEagle3']), 'GptOssForCausalLM'),
    (head(7168, 18_432, 64, 64, 128, 163_840, 32_000, architectures=['Eagle3DeepseekV2ForCausalLM']), 'DeepseekV2'),
    (
      published(5120, 17_408, 32, 8, 248_320, architectures=['DFlashDraftModel'], block_size=16),
      r"DFlash drafter lacks \['mask_token_id'\]",
    ),
    (
      {'speculators_model_type': 'dflash', 'architectures': ['DFlashDraftModel']},
      'DFlash drafter lacks .*aux_hidden_state_layer_ids',
    ),
    (
      published(4096, 12_288, 32, 8, 151_936, architectures=['Gemma4Eagle3Model'], target_layer_ids=[1, 9]),
      'Gemma4Eagle3',
    ),
  ],
)
def test_drafters_of_other_kinds_and_incomplete_ones_are_refused_by_name(tmp_path, content, named):
  with pytest.raises(ValueError, match=named):
    kinds.read_drafter_config(tmp_path, content, TARGET)
