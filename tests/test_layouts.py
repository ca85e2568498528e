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
from eagle_jax.weights.safetensors import read_safetensors

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
  drafter = HEADS.get(name) or eagle3(own_embedding=True)  # for which other layouts have no words
  if layout == 'safeailab' and not isinstance(drafter.config, type(tiny.DRAFTER)):
    drafter = Drafter(dataclasses.replace(drafter.config, taps=None), drafter.params)
  hub.export_drafter(drafter, tmp_path / name, target, layout=layout)
  again = hub.load_drafter(tmp_path / name, target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  assert json.loads((tmp_path / name / 'config.json').read_text())['architectures']


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
    ({'fc_norm': True}, 'sglang', r"no words for \['fc_norm'\]"),
    ({'norm_before_residual': True}, 'safeailab', r"\['norm_before_residual', 'taps'\]"),
    ({'own_embedding': True}, 'sglang', r"no words for \['own_embedding'\]"),
    ({'own_embedding': True, 'taps': None}, 'safeailab', r"no words for \['own_embedding'\]"),
    ({'taps': (0, 1, 2)}, 'sglang', 'input of the first layer'),
    ({}, 'vllm', "Unknown layout 'vllm'"),
  ],
)
def test_what_a_layout_cannot_say_is_an_error(target, tmp_path, changes, layout, message):
  with pytest.raises(ValueError, match=message):
    hub.export_drafter(eagle3(**changes), tmp_path / 'out', target, layout=layout)
  assert not (tmp_path / 'out').exists()


def test_ids_of_a_head_of_its_own_cannot_be_chosen():
  with pytest.raises(ValueError, match='head of its own'):
    HEADS['eagle3'].with_ids([1, 2])
  for ids in ([1, 1], [0, -1], [10_000]):
    with pytest.raises(ValueError, match='distinct ones are needed, 0 ..'):
      HEADS['eagle'].with_ids(ids)


SPECULATORS = {'architectures': ['EagleSpeculator'], 'speculators_model_type': 'eagle'}


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ({**SPECULATORS, 'speculators_model_type': 'mtp'}, "speculators_model_type 'mtp'.* is not supported"),
    ({**SPECULATORS, 'layernorms': True}, 'layernorms True'),
    ({**SPECULATORS, 'transformer_layer_config': {'mlp_bias': True}}, 'transformer_layer_config.mlp_bias True'),
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


def test_a_layout_without_a_kind_says_so():
  name = 'a kind of another day'
  with pytest.raises(ValueError, match=name):
    export.written(name, kinds.Table({}), EAGLE3, {}, TARGET, None, 'sglang')
