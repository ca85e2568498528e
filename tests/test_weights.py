"""Bytes -> parameters: GGUF and safetensors files written here, read back, and damaged."""

import dataclasses
import math
import resource

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eagle_jax.draft.kinds import tensor_table
from eagle_jax.models.families import FAMILIES
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.weights import gguf as gguf_file
from eagle_jax.weights import naming, targets
from eagle_jax.weights.load import assemble, flatten
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors
from tiny_files import TINY, TINY_DRAFTER, random_tensors, write_gguf


@pytest.fixture
def table():
  return naming.gguf_table(TINY)


def test_gguf_config(tmp_path, table):
  file = gguf_file.read_gguf(write_gguf(tmp_path / 'tiny.gguf', random_tensors(table)))
  config = gguf_file.target_config(file)
  assert config.norm_eps == pytest.approx(TINY.norm_eps)
  assert dataclasses.replace(config, norm_eps=TINY.norm_eps) == TINY


def test_gguf_absent_fields_mean_what_the_format_says(tmp_path, table):
  tensors = random_tensors(table)
  del tensors['output.weight']
  path = write_gguf(tmp_path / 'tiny.gguf', tensors, leave_out=('rope.freq_base', 'attention.head_count_kv'))
  config = gguf_file.target_config(gguf_file.read_gguf(path))
  assert (config.rope_theta, config.num_kv_heads, config.tied_head) == (10_000.0, 4, True)


def test_gguf_vocabulary_size_may_come_from_the_tokens(tmp_path, table):
  path = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table), leave_out=('vocab_size',))
  file = gguf_file.read_gguf(path)
  with pytest.raises(ValueError, match='neither vocab_size nor'):
    gguf_file.target_config(file)
  tokens = {'tokenizer.ggml.tokens': list('abcdefghijk')}
  assert gguf_file.target_config(dataclasses.replace(file, metadata=file.metadata | tokens)).vocab_size == 11


def test_gguf_needed_fields_have_no_default(tmp_path, table):
  path = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table), leave_out=('block_count', 'context_length'))
  with pytest.raises(ValueError, match=r"lacks \['llama.block_count', 'llama.context_length'\]"):
    gguf_file.target_config(gguf_file.read_gguf(path))


@pytest.mark.parametrize(
  ('extra', 'message'),
  [
    ({'llama.rope.scaling.type': 'yarn'}, "RoPE scaling 'yarn'"),
    ({'llama.rope.scaling.type': 'ntk'}, "RoPE scaling 'ntk'"),
    ({'llama.expert_count': 8}, '`experts_per_token`'),
    ({'llama.rope.dimension_count': 4}, 'rope.dimension_count is 4'),
    ({'llama.attention.value_length': 4}, 'attention.value_length is 4'),
    ({'llama.attention.sliding_window': 4096}, "{'llama.attention.sliding_window': 4096}"),
    ({'llama.attn_logit_softcapping': 30.0}, "{'llama.attn_logit_softcapping': 30.0}"),
    ({'llama.pooling_type': 3}, "{'llama.pooling_type': 3}"),
  ],
)
def test_gguf_variants_are_refused(tmp_path, table, extra, message):
  path = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table), extra=extra)
  with pytest.raises(ValueError, match=message):
    gguf_file.target_config(gguf_file.read_gguf(path))


@pytest.mark.parametrize(
  'extra',
  [{'llama.rope.scaling.factor': 4.0}, {'llama.rope.scale_linear': 4.0}, {'llama.attention.sliding_window': 0}],
)
def test_gguf_scales_rope_and_may_say_what_means_nothing(tmp_path, table, extra):
  path = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table), extra=extra)
  config = gguf_file.target_config(gguf_file.read_gguf(path))
  is_scaled = 'llama.attention.sliding_window' not in extra
  assert (config.rope_slowdown, config.max_context) == (((4.0,) * 4, 512) if is_scaled else ((), 128))


def test_gguf_of_qwen2(tmp_path):
  """Rows of q and k as they are, and biases."""
  biased = dataclasses.replace(TINY, qkv_bias=True)
  table = naming.gguf_table(biased, FAMILIES['qwen2'])
  tensors = random_tensors(table)
  file = gguf_file.read_gguf(write_gguf(tmp_path / 'tiny.gguf', tensors, arch='qwen2'))
  config = gguf_file.target_config(file)
  assert dataclasses.replace(config, norm_eps=TINY.norm_eps) == biased
  assert gguf_file.read_family(file) is FAMILIES['qwen2']
  attention = assemble(file.tensors(), table, jnp.float32)['layer_1']['attn']
  q_GJKD, k_bias_GK = attention['qkv']['weight'][:, :-2], attention['qkv']['bias'][:, -2]
  np.testing.assert_array_equal(q_GJKD.reshape(32, 32), tensors['blk.1.attn_q.weight'])
  np.testing.assert_array_equal(k_bias_GK.reshape(16), tensors['blk.1.attn_k.bias'])


def test_gguf_rope_factors_come_as_a_tensor(tmp_path, table):
  tensors = random_tensors(table) | {'rope_freqs.weight': np.array([1, 1, 2.5, 8], np.float32)}
  file = gguf_file.read_gguf(write_gguf(tmp_path / 'tiny.gguf', tensors))
  assert gguf_file.target_config(file).rope_slowdown == (1, 1, 2.5, 8)
  assert assemble(file.tensors(), table, jnp.float32).keys() == {'embed', 'layer_0', 'layer_1', 'norm', 'head'}


def test_gguf_other_architecture(tmp_path, table):
  path = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table), arch='mamba')
  with pytest.raises(ValueError, match="architecture 'mamba' is not supported"):
    gguf_file.target_config(gguf_file.read_gguf(path))


def test_gguf_round_trip_turns_q_and_k_back(tmp_path, table):
  """Row j of a head in the file is pair j // 2, member j % 2; ours keeps all first members first."""
  tensors = random_tensors(table)
  row_ids = np.arange(32, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
  tensors['blk.1.attn_q.weight'] = row_ids
  file = gguf_file.read_gguf(write_gguf(tmp_path / 'tiny.gguf', tensors))
  params = assemble(file.tensors(), table, jnp.float32)
  qkv_GQKD = params['layer_1']['attn']['qkv']['weight']
  q_rows = qkv_GQKD[:, :-2].reshape(32, 32)[:, 0]
  np.testing.assert_array_equal(q_rows[:16], [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15])
  np.testing.assert_array_equal(qkv_GQKD[:, -1].reshape(16, 32), tensors['blk.1.attn_v.weight'])
  back = flatten(params, table)
  assert back.keys() == tensors.keys()
  for name, array in tensors.items():
    np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_k_rows_turn_by_kv_heads(table):
  """Two kv heads of eight rows: a head's rows stay in its half of the weight."""
  rows = np.arange(16, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
  ours = table.entries['blk.0.attn_k.weight'].to_ours(rows)[:, 0]
  np.testing.assert_array_equal(ours, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15])
  plain = naming.gguf_table(TINY, FAMILIES['qwen2']).entries['blk.0.attn_k.weight']
  np.testing.assert_array_equal(plain.to_ours(rows), rows)


def test_gguf_dequantises(tmp_path, table):
  tensors = random_tensors(table)
  quantised = ('blk.0.ffn_down.weight',)
  file = gguf_file.read_gguf(write_gguf(tmp_path / 'tiny.gguf', tensors, quantised=quantised))
  read = dict(file.tensors())
  assert all(array.dtype == np.float32 for array in read.values())
  step = np.abs(tensors[quantised[0]]).max() / 127  # Q8_0: 255 steps over a block's range
  error = np.abs(read[quantised[0]] - tensors[quantised[0]]).max()
  assert 0 < error <= step


@pytest.mark.parametrize('kind', gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_gguf_dequantises_blocks_of_every_kind(tmp_path, kind):
  """Random ones, four rows of two blocks of 256 numbers."""
  num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
  raw = np.random.default_rng(0).integers(0, 256, (4, 512 // num_numbers * num_bytes), dtype=np.uint8)
  writer = gguf.GGUFWriter(tmp_path / 'one.gguf', 'llama')
  writer.add_tensor('x', raw, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with np.errstate(all='ignore'):
    found = gguf_file.read_gguf(tmp_path / 'one.gguf').tensor('x')
    assert (found.shape, found.dtype) == ((4, 512), np.float32)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))


def test_gguf_lists_are_read_as_the_package_reads_them(tmp_path):
  lists = {
    'strings': ['', 'é', 'two words'],
    'numbers': [3, -1, 2],
    'floats': [0.5, 1e30],
    'switches': [True, False, True],
    'one': ['x'],
    'text': 'no list',
    'last': [7],
  }
  path = tmp_path / 'lists.gguf'
  writer = gguf.GGUFWriter(path, 'llama')
  for name, values in lists.items():
    writer.add_array(name, values) if isinstance(values, list) else writer.add_string(name, values)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  expected = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
  assert [name for name in expected if name in lists] == [*lists]
  assert dict(gguf_file.read_gguf(path).metadata) == expected


def test_gguf_damage_gives_one_clear_error(tmp_path, table):
  whole = write_gguf(tmp_path / 'tiny.gguf', random_tensors(table)).read_bytes()
  damaged = tmp_path / 'damaged.gguf'
  cuts = [0, 3, 4, 20, 100, 300, 900, len(whole) // 2, len(whole) - 32]
  for content in [whole[:cut] for cut in cuts] + [b'not a model' * 100, whole[:24] + b'\xff' * 200]:
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r'damaged.gguf .* is not a whole GGUF file'):
      gguf_file.read_gguf(damaged)
  with pytest.raises(ValueError, match='No GGUF file'):
    gguf_file.read_gguf(tmp_path / 'absent.gguf')


def test_assemble_lists_all_faults_at_once(table):
  tensors = random_tensors(table)
  del tensors['blk.0.attn_q.weight'], tensors['output_norm.weight']
  tensors['blk.7.attn_q.weight'] = np.zeros((2, 2), np.float32)
  tensors['blk.1.ffn_up.weight'] = tensors['blk.1.ffn_up.weight'].T
  tensors['blk.1.attn_norm.weight'][3] = np.nan
  tensors['token_embd.weight'][0, 0] = np.inf
  tensors['blk.0.ffn_up.weight'] = np.ones((64, 32), np.int8)
  with pytest.raises(ValueError, match='7 of 21 needed tensors') as caught:
    assemble(tensors.items(), table, jnp.float32, source='tiny.gguf')
  for line in (
    'blk.0.attn_q.weight: missing, [32, 32] needed',
    'output_norm.weight: missing, [32] needed',
    'blk.7.attn_q.weight: not expected, shape [2, 2]',
    'blk.1.ffn_up.weight: shape [32, 64], [64, 32] needed',
    'blk.1.attn_norm.weight: holds NaN or infinite values',
    'token_embd.weight: holds NaN or infinite values',
    'blk.0.ffn_up.weight: dtype int8, one of float32, float16 and bfloat16 needed',
  ):
    assert line in str(caught.value)


def test_assemble_finds_overflow_of_the_wanted_dtype(table):
  tensors = random_tensors(table)
  tensors['output.weight'][0, 0] = 1e6
  assemble(tensors.items(), table, jnp.bfloat16)
  with pytest.raises(ValueError, match='output.weight: holds NaN or infinite values as float16'):
    assemble(tensors.items(), table, jnp.float16)


def test_assemble_refuses_a_tensor_that_comes_twice(table):
  tensors = list(random_tensors(table).items())
  with pytest.raises(ValueError, match='token_embd.weight: found twice'):
    assemble([*tensors, tensors[0]], table, jnp.float32)


def test_ignored_names_are_ignored_by_name_only():
  table = tensor_table(TINY_DRAFTER)
  tensors = {**random_tensors(table), 'verifier_norm.weight': np.full(32, np.nan, np.float32)}
  params = assemble(tensors.items(), table, jnp.float32)
  assert params.keys() == {'fc', 'layer'}
  tensors['lm_head.weight'] = np.zeros((11, 32), np.float32)
  with pytest.raises(ValueError, match='lm_head.weight: not expected'):
    assemble(tensors.items(), table, jnp.float32)


@pytest.mark.parametrize('fc_bias', [True, False])
@pytest.mark.parametrize('qkv_bias', [True, False])
def test_drafter_tree(fc_bias, qkv_bias):
  config = dataclasses.replace(TINY_DRAFTER, fc_bias=fc_bias, qkv_bias=qkv_bias)
  table = tensor_table(config)
  shapes = jax.tree.map(jnp.shape, assemble(random_tensors(table).items(), table, jnp.float32))
  assert shapes == {
    'fc': {'weight': (32, 64), **({'bias': (32,)} if fc_bias else {})},
    'layer': {
      'attn': {
        'qkv': {'weight': (2, 4, 8, 32), **({'bias': (2, 4, 8)} if qkv_bias else {})},
        'o': {'weight': (32, 32)},
      },
      'mlp_norm': {'scale': (32,)},
      'mlp': {'gate_up': {'weight': (2, 64, 32)}, 'down': {'weight': (32, 64)}},
    },
  }


@pytest.mark.parametrize(
  'switches',
  [
    {},
    {'tied_head': True},
    {'qkv_bias': True},
    {'qk_norm': True},
    {'num_experts': 4, 'experts_per_token': 2},
  ],
)
def test_target_tree_is_the_networks_own(switches):
  config = dataclasses.replace(TINY, **switches)
  init = TransformerTarget(config).init_params
  needed = jax.tree.map(jnp.shape, jax.eval_shape(init, jax.random.key(0)))
  tables = [naming.hf_table(config)]
  if not config.num_experts:
    tables.append(naming.gguf_table(config))
  for table in tables:
    params = assemble(random_tensors(table).items(), table, jnp.float32)
    assert jax.tree.map(jnp.shape, params) == needed


LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
PUBLISHED = {
  'Llama-2-7b, Vicuna-7b': (
    6_738_415_616, {'model_type': 'llama', 'vocab_size': 32000, 'hidden_size': 4096, 'intermediate_size': 11008},
  ),
  'Llama-3.1-8B': (
    8_030_261_248,
    {
      'model_type': 'llama', 'vocab_size': 128256, 'hidden_size': 4096, 'intermediate_size': 14336,
      'num_key_value_heads': 8, 'rope_theta': 500000.0,
      'rope_scaling': LLAMA3 | {'original_max_position_embeddings': 8192},
    },
  ),
  'Mistral-7B-v0.1': (
    7_241_732_096,
    {
      'model_type': 'mistral', 'vocab_size': 32000, 'hidden_size': 4096, 'intermediate_size': 14336,
      'num_key_value_heads': 8, 'sliding_window': 4096, 'rope_theta': 10000.0,
    },
  ),
  'Mixtral-8x7B-v0.1': (
    46_702_792_704,
    {
      'model_type': 'mixtral', 'vocab_size': 32000, 'hidden_size': 4096, 'intermediate_size': 14336,
      'num_key_value_heads': 8, 'sliding_window': None, 'rope_theta': 1000000.0, 'num_local_experts': 8,
      'num_experts_per_tok': 2,
    },
  ),
  'Qwen2.5-7B': (
    7_615_616_512,
    {
      'model_type': 'qwen2', 'vocab_size': 152064, 'hidden_size': 3584, 'intermediate_size': 18944,
      'num_hidden_layers': 28, 'num_attention_heads': 28, 'num_key_value_heads': 4, 'rope_theta': 1000000.0,
      'sliding_window': 131072, 'use_sliding_window': False,
    },
  ),
  'Qwen3-8B': (
    8_190_735_360,
    {
      'model_type': 'qwen3', 'vocab_size': 151936, 'hidden_size': 4096, 'intermediate_size': 12288,
      'num_hidden_layers': 36, 'num_key_value_heads': 8, 'head_dim': 128, 'rope_theta': 1000000,
      'attention_bias': False, 'sliding_window': None, 'use_sliding_window': False,
    },
  ),
}  # fmt: skip


@pytest.mark.parametrize(('num_params', 'content'), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_the_tables_hold_as_many_parameters_as_were_published(num_params, content, tmp_path):
  common = {'num_hidden_layers': 32, 'num_attention_heads': 32, 'max_position_embeddings': 4096, 'rms_norm_eps': 1e-5}
  config = targets.target_config(tmp_path, common | content)
  table = naming.hf_table(config, FAMILIES[content['model_type']])
  assert sum(math.prod(table.entries[name].shape) for name in table.entries.keys() - table.optional) == num_params


USUAL = {
  'attention_dropout': 0.0, 'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 0, 'initializer_range': 0.02,
  'torch_dtype': 'bfloat16', 'transformers_version': '4.51.0', 'use_cache': True,
}  # fmt: skip
YARN = {'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False}
COMPLETE = {  # files of the hub with all of their keys, and what comes of them
  'Qwen3-30B-A3B': (
    30_532_122_624,
    {
      'architectures': ['Qwen3MoeForCausalLM'], 'attention_bias': False, 'decoder_sparse_step': 1, 'head_dim': 128,
      'hidden_act': 'silu', 'hidden_size': 2048, 'intermediate_size': 6144, 'max_position_embeddings': 40960,
      'max_window_layers': 48, 'mlp_only_layers': [], 'model_type': 'qwen3_moe', 'moe_intermediate_size': 768,
      'norm_topk_prob': True, 'num_attention_heads': 32, 'num_experts': 128, 'num_experts_per_tok': 8,
      'num_hidden_layers': 48, 'num_key_value_heads': 4, 'output_router_logits': False, 'rms_norm_eps': 1e-6,
      'rope_scaling': None, 'rope_theta': 1e6, 'router_aux_loss_coef': 0.001, 'sliding_window': None,
      'tie_word_embeddings': False, 'use_sliding_window': False, 'vocab_size': 151936,
    },
    {'num_experts': 128, 'experts_per_token': 8, 'ffn_width': 768, 'shares_sum_to_1': True, 'layer_changes': ()},
  ),
  'gemma-3-1b-it': (
    999_885_952,
    {
      'architectures': ['Gemma3ForCausalLM'], 'attention_bias': False, 'attn_logit_softcapping': None,
      'cache_implementation': 'hybrid', 'final_logit_softcapping': None, 'head_dim': 256,
      'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 1152, 'intermediate_size': 6912,
      'max_position_embeddings': 32768, 'model_type': 'gemma3_text', 'num_attention_heads': 4, 'num_hidden_layers': 26,
      'num_key_value_heads': 1, 'query_pre_attn_scalar': 256, 'rms_norm_eps': 1e-6, 'rope_local_base_freq': 10000,
      'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': 512, 'sliding_window_pattern': 6,
      'vocab_size': 262144,
    },
    {
      'tied_head': True, 'window': 512, 'rope_theta': 1e4, 'attention_scale': 1 / 16, 'embedding_scale': 1152**0.5,
      'layer_changes': tuple((layer, (('rope_theta', 1e6), ('window', None))) for layer in (5, 11, 17, 23)),
    },
  ),
  'gpt-oss-20b': (
    20_914_757_184,
    {
      'architectures': ['GptOssForCausalLM'], 'attention_bias': True, 'experts_per_token': 4, 'head_dim': 64,
      'hidden_act': 'silu', 'hidden_size': 2880, 'initial_context_length': 4096, 'intermediate_size': 2880,
      'layer_types': ['sliding_attention', 'full_attention'] * 12, 'max_position_embeddings': 131072,
      'model_type': 'gpt_oss', 'num_attention_heads': 64, 'num_experts_per_tok': 4, 'num_hidden_layers': 24,
      'num_key_value_heads': 8, 'num_local_experts': 32, 'output_router_logits': False,
      'quantization_config': {'modules_to_not_convert': ['lm_head'], 'quant_method': 'mxfp4'}, 'rms_norm_eps': 1e-5,
      'rope_scaling': YARN | {'original_max_position_embeddings': 4096}, 'rope_theta': 150000,
      'router_aux_loss_coef': 0.9, 'sliding_window': 128, 'swiglu_limit': 7.0, 'tie_word_embeddings': False,
      'vocab_size': 201088,
    },
    {'window': 128, 'has_sinks': True, 'expert_bias': True, 'gate_limit': 7.0, 'rope_factor': 0.1 * math.log(32) + 1},
  ),
  'OLMo-2-1124-7B': (
    7_298_617_344,
    {
      'architectures': ['Olmo2ForCausalLM'], 'attention_bias': False, 'hidden_act': 'silu', 'hidden_size': 4096,
      'intermediate_size': 11008, 'max_position_embeddings': 4096, 'model_type': 'olmo2', 'num_attention_heads': 32,
      'num_hidden_layers': 32, 'num_key_value_heads': 32, 'rms_norm_eps': 1e-6, 'rope_scaling': None,
      'rope_theta': 500000, 'tie_word_embeddings': False, 'vocab_size': 100352,
    },
    {'joint_qk_norm': True, 'has_input_norms': False, 'has_output_norms': True, 'norm_eps': 1e-6},
  ),
  'granite-3.2-8b-instruct': (
    8_170_848_256,
    {
      'architectures': ['GraniteForCausalLM'], 'attention_bias': False, 'attention_multiplier': 0.0078125,
      'embedding_multiplier': 12.0, 'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 12800,
      'logits_scaling': 16.0, 'max_position_embeddings': 131072, 'mlp_bias': False, 'model_type': 'granite',
      'num_attention_heads': 32, 'num_hidden_layers': 40, 'num_key_value_heads': 8, 'residual_multiplier': 0.22,
      'rms_norm_eps': 1e-5, 'rope_scaling': None, 'rope_theta': 1e7, 'tie_word_embeddings': True, 'vocab_size': 49155,
    },
    {'embedding_scale': 12.0, 'attention_scale': 0.0078125, 'residual_scale': 0.22, 'logit_divisor': 16.0},
  ),
  'Phi-4-mini-instruct': (
    3_836_021_760,
    {
      'architectures': ['Phi3ForCausalLM'], 'attention_bias': False, 'auto_map': {}, 'embd_pdrop': 0.0,
      'full_attn_mod': 1, 'hidden_act': 'silu', 'hidden_size': 3072, 'intermediate_size': 8192,
      'interpolate_factor': 1, 'lm_head_bias': False, 'max_position_embeddings': 131072, 'mlp_bias': False,
      'model_type': 'phi3', 'num_attention_heads': 24, 'num_hidden_layers': 32, 'num_key_value_heads': 8,
      'original_max_position_embeddings': 4096, 'partial_rotary_factor': 0.75, 'resid_pdrop': 0.0,
      'rms_norm_eps': 1e-5, 'rope_scaling': {'long_factor': [2.0] * 48, 'short_factor': [1.0] * 48, 'type': 'longrope'},
      'rope_theta': 10000.0, 'sliding_window': 262144, 'tie_word_embeddings': True, 'vocab_size': 200064,
    },
    {
      'rotary_dim': 96, 'rope_factor': (1 + math.log(32) / math.log(4096)) ** 0.5, 'max_context': 4096,
      'rope_slowdown': (1.0,) * 48, 'window': 262144,
    },
  ),
  'SmolLM3-3B': (
    3_075_098_624,
    {
      'architectures': ['SmolLM3ForCausalLM'], 'attention_bias': False, 'hidden_act': 'silu', 'hidden_size': 2048,
      'intermediate_size': 11008, 'layer_types': ['full_attention'] * 36, 'max_position_embeddings': 65536,
      'max_window_layers': 28, 'mlp_bias': False, 'model_type': 'smollm3', 'no_rope_layer_interval': 4,
      'no_rope_layers': [1, 1, 1, 0] * 9, 'num_attention_heads': 16, 'num_hidden_layers': 36,
      'num_key_value_heads': 4, 'pretraining_tp': 2, 'rms_norm_eps': 1e-6, 'rope_scaling': None,
      'rope_theta': 5000000.0, 'sliding_window': None, 'use_sliding_window': False, 'vocab_size': 128256,
    },
    {'tied_head': True, 'layer_changes': tuple((layer, (('has_rope', False),)) for layer in range(3, 36, 4))},
  ),
}  # fmt: skip


@pytest.mark.parametrize(('num_params', 'content', 'fields'), COMPLETE.values(), ids=COMPLETE.keys())
def test_published_files_are_read_with_all_of_their_keys(num_params, content, fields, tmp_path):
  test_the_tables_hold_as_many_parameters_as_were_published(num_params, USUAL | content, tmp_path)
  config = targets.target_config(tmp_path, USUAL | content)
  assert {name: getattr(config, name) for name in fields} == fields


def test_flatten_lists_all_faults_at_once(table):
  params = assemble(random_tensors(table).items(), table, jnp.float32)
  del params['norm']
  params['extra'] = {'weight': jnp.zeros(3)}
  params['head']['weight'] = params['head']['weight'].T
  with pytest.raises(ValueError, match='do not fit') as caught:
    flatten(params, table)
  for line in ('norm/scale: missing', 'extra/weight: not expected', 'head/weight: shape [32, 11], [11, 32] needed'):
    assert line in str(caught.value)


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors_round_trip(tmp_path, dtype):
  tensors = {'a': np.arange(6).reshape(2, 3).astype(dtype), 'b': np.ones(4, dtype)}
  write_safetensors(tmp_path / 'new' / 'model.safetensors', tensors)
  read = dict(read_safetensors(tmp_path / 'new' / 'model.safetensors'))
  assert read.keys() == tensors.keys()
  for name, array in tensors.items():
    assert read[name].dtype == dtype
    np.testing.assert_array_equal(read[name], array)
  assert [path.name for path in (tmp_path / 'new').iterdir()] == ['model.safetensors']


def test_safetensors_stores_a_view_in_its_own_order(tmp_path):
  path = tmp_path / 'model.safetensors'
  view = np.arange(6, dtype=np.float32).reshape(2, 3).T
  write_safetensors(path, {'a': view})
  np.testing.assert_array_equal(dict(read_safetensors(path))['a'], view)


def test_a_reader_of_the_old_file_keeps_it(tmp_path):
  path = tmp_path / 'model.safetensors'
  write_safetensors(path, {'a': np.zeros(2, np.float32)})
  before = path.read_bytes()
  with path.open('rb') as reader:
    write_safetensors(path, {'a': np.ones(2, np.float32)})
    assert reader.read() == before != path.read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / 'model.safetensors'
  write_safetensors(path, {'a': np.ones(2, np.float32)})
  before = path.read_bytes()
  with pytest.raises(OSError, match='model.safetensors .*str128'):
    write_safetensors(path, {'a': np.array(['text'])})
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_safetensors_damage_gives_one_clear_error(tmp_path):
  path = tmp_path / 'model.safetensors'
  write_safetensors(path, {'a': np.ones((4, 4), np.float32)})
  whole = path.read_bytes()
  for content in [whole[:cut] for cut in (0, 4, 20, len(whole) - 1)] + [b'\xff' * 64]:
    path.write_bytes(content)
    with pytest.raises(ValueError, match='is not a whole safetensors file'):
      dict(read_safetensors(path))
  with pytest.raises(ValueError, match='No safetensors file'):
    dict(read_safetensors(tmp_path / 'absent.safetensors'))


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
  path, limits = tmp_path / 'big.safetensors', resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
  try:
    with pytest.raises(OSError, match=str(path)):
      write_safetensors(path, {'x': np.zeros(4096, np.float32)})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert [*tmp_path.iterdir()] == []
