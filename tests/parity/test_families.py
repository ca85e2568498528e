"""Every family of targets against transformers in PyTorch, float32: tiny random models, saved as people find them."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import gguf
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tiny
from eagle_jax import hub
from eagle_jax.cache import append
from eagle_jax.config import DrafterConfig
from eagle_jax.models.families import FAMILIES
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.tree import NO_PARENT, ancestor_mask, depth
from eagle_jax.weights import naming, targets
from eagle_jax.weights.load import flatten
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors
from tiny_files import write_gguf
from tiny_programs import decode_alike

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4  # of the largest |logit|
NUM_PROMPT, NUM_NEW = 50, 24
SIZES = {
  'vocab_size': 97, 'hidden_size': 48, 'intermediate_size': 80, 'num_hidden_layers': 2, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'max_position_embeddings': 256, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': False,
  'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None,
}  # fmt: skip
LLAMA3_ROPE = {  # a head of 12 has pairs that stay, one between, and pairs that turn eight times slower
  'rope_type': 'llama3', 'rope_theta': 10_000.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}  # fmt: skip
LONG_ROPE = {'short_factor': [1.0, 1.1, 1.3], 'long_factor': [1.2, 2.0, 7.0]}
CASES = {
  'llama 2, vicuna': {'model_type': 'llama', 'num_key_value_heads': 4},
  'llama 3.1': {'model_type': 'llama', 'rope_parameters': LLAMA3_ROPE},
  'llama, linear scaling': {
    'model_type': 'llama',
    'rope_parameters': {'rope_type': 'linear', 'rope_theta': 5000.0, 'factor': 4.0},
  },
  'llama, YaRN, biases': {
    'model_type': 'llama', 'attention_bias': True,
    'rope_parameters': {
      'rope_type': 'yarn', 'rope_theta': 5000.0, 'factor': 4.0, 'original_max_position_embeddings': 32,
    },
  },
  'mistral': {'model_type': 'mistral', 'sliding_window': 20},
  'mixtral': {'model_type': 'mixtral', 'num_local_experts': 4, 'num_experts_per_tok': 2},
  'qwen3_moe, shares not normalised, a dense layer': {
    'model_type': 'qwen3_moe', 'head_dim': 16, 'num_experts': 16, 'num_experts_per_tok': 3,
    'moe_intermediate_size': 24, 'norm_topk_prob': False, 'mlp_only_layers': [0],
  },
  'qwen2': {'model_type': 'qwen2', 'tie_word_embeddings': True},
  'qwen3': {'model_type': 'qwen3', 'head_dim': 16},
  'qwen3, YaRN without truncation, biases': {
    'model_type': 'qwen3', 'head_dim': 16, 'attention_bias': True,
    'rope_parameters': {
      'rope_type': 'yarn', 'rope_theta': 5000.0, 'factor': 8.0, 'original_max_position_embeddings': 32,
      'beta_fast': 4.0, 'beta_slow': 0.5, 'truncate': False, 'mscale': 2.0, 'mscale_all_dim': 0.5,
    },
  },
  'gemma3_text': {
    'model_type': 'gemma3_text', 'head_dim': 16, 'query_pre_attn_scalar': 9,
    'sliding_window': 20, 'layer_types': ['sliding_attention', 'full_attention'], 'final_logit_softcapping': 30.0,
    'tie_word_embeddings': True,
    'rope_parameters': {
      'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 5000.0},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
    },
  },
  'gpt_oss': {
    'model_type': 'gpt_oss', 'head_dim': 16, 'num_local_experts': 6, 'num_experts_per_tok': 2,
    'sliding_window': 20, 'swiglu_limit': 0.5,
    'rope_parameters': {
      'rope_type': 'yarn', 'rope_theta': 5000.0, 'factor': 8.0, 'original_max_position_embeddings': 32,
      'beta_fast': 4.0, 'beta_slow': 0.5, 'truncate': False,
    },
  },
  'smollm3': {
    'model_type': 'smollm3', 'no_rope_layers': [1, 0], 'use_sliding_window': True,
    'sliding_window': 20, 'tie_word_embeddings': True,
  },
  'olmo2': {'model_type': 'olmo2', 'attention_bias': True},
  'granite': {
    'model_type': 'granite', 'embedding_multiplier': 3.0, 'attention_multiplier': 0.2,
    'residual_multiplier': 0.5, 'logits_scaling': 4.0, 'mlp_bias': True, 'attention_bias': True,
  },
  'phi3, beyond the original context': {
    'model_type': 'phi3', 'original_max_position_embeddings': 32,
    'rope_parameters': {'rope_type': 'longrope', 'rope_theta': 5000.0, 'partial_rotary_factor': 0.5} | LONG_ROPE,
  },
}  # fmt: skip
MAX_CONTEXT = {'phi3, beyond the original context': 256}
TREE_PARENTS = [NO_PARENT, 0, 0, 0, 1, 1, 2, 4, 7]


@dataclasses.dataclass(frozen=True)
class Pair:
  """A model of transformers, and the target that was loaded from where it saved itself."""

  model: transformers.PreTrainedModel
  target: Target


def saved(path, case: dict) -> transformers.PreTrainedModel:
  """A model with every weight random, norm scales and biases too, saved in two shards."""
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(**SIZES | case)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
  num_bytes = sum(parameter.nbytes for parameter in model.parameters())
  model.save_pretrained(path, max_shard_size=int(0.6 * num_bytes))
  assert len(list(path.glob('model-*.safetensors'))) == 2
  return model


@pytest.fixture(scope='module', params=CASES)
def pair(request, tmp_path_factory) -> Pair:
  path = tmp_path_factory.mktemp('family')
  model = saved(path, CASES[request.param])
  return Pair(model, hub.load_target(path, max_context=MAX_CONTEXT.get(request.param)))


def prompt() -> np.ndarray:
  """[1, L] i32."""
  return np.random.default_rng(0).integers(0, SIZES['vocab_size'], (1, NUM_PROMPT), dtype=np.int32)


@functools.partial(jax.jit, static_argnames='network')
def our_passes(params, prompt_1L, token_1T, *, network: TransformerTarget) -> tuple[jax.Array, jax.Array]:
  """Logits of the prompt, [L, V], and of the tree behind it, [T, V]."""
  position_1L = jnp.arange(NUM_PROMPT)[None]
  causal_1LL = jnp.tri(NUM_PROMPT, dtype=bool)[None]
  prompt_taps, rows = network.forward(params, prompt_1L, position_1L, causal_1LL, network.init_cache(1, 0))
  cache = append(network.init_cache(1, 64), rows, jnp.array([NUM_PROMPT]))
  mask_TT = ancestor_mask(jnp.array(TREE_PARENTS), max_depth=len(TREE_PARENTS))
  position_1T = NUM_PROMPT + depth(mask_TT)[None]
  tree_taps, _ = network.forward(params, token_1T, position_1T, mask_TT[None], cache)
  return network.logits(params, prompt_taps)[:, 0].T, network.logits(params, tree_taps)[:, 0].T


def their_passes(model, token_1T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The same; the tree in one pass with the prompt, under masks that are made here."""
  num_rows = NUM_PROMPT + len(TREE_PARENTS)
  visible, position = np.zeros((num_rows, num_rows), bool), np.arange(num_rows)
  for row in range(num_rows):
    parent = row - 1 if row <= NUM_PROMPT else NUM_PROMPT + TREE_PARENTS[row - NUM_PROMPT]
    if row:
      visible[row], position[row] = visible[parent], position[parent] + 1
    visible[row, row] = True

  def mask_of(visible: np.ndarray) -> torch.Tensor:
    return torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[None, None]

  mask, window = mask_of(visible), getattr(model.config, 'sliding_window', None)
  if window is not None:
    of_window = mask_of(visible & (position[:, None] - position[None] < window))
    is_mixed = hasattr(model.config, 'layer_types')
    mask = {'full_attention': mask, 'sliding_attention': of_window} if is_mixed else of_window
  ids = torch.from_numpy(np.concatenate([prompt(), token_1T], axis=1)).long()
  with torch.no_grad():
    causal = model(ids[:, :NUM_PROMPT]).logits[0].numpy()  # transformers' own mask
    masked = model(ids, attention_mask=mask, position_ids=torch.from_numpy(position)[None]).logits[0].numpy()
  return causal, masked[NUM_PROMPT:]


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
  assert ours.shape == theirs.shape
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def errors(pair: Pair) -> tuple[float, float]:
  """Of the prompt's logits, and of the tree's."""
  token_1T = np.random.default_rng(1).integers(0, SIZES['vocab_size'], (1, len(TREE_PARENTS)), dtype=np.int32)
  config = dataclasses.replace(pair.target.config, eos_ids=(), name='')  # so that files of one network share a program
  passes = our_passes(pair.target.params, prompt(), token_1T, network=TransformerTarget(config))
  ours = [np.asarray(logits) for logits in passes]
  theirs = their_passes(pair.model, token_1T)
  return relative_error(ours[0], theirs[0]), relative_error(ours[1], theirs[1])


def test_logits(pair):
  assert max(errors(pair)) <= TOLERANCE


@pytest.mark.parametrize(
  ('pair', 'off'),
  [
    ('mistral', {'window': None}),
    ('llama 3.1', {'rope_slowdown': ()}),
    ('llama, linear scaling', {'rope_slowdown': ()}),
    ('smollm3', {'layer_changes': ()}),
    ('gemma3_text', {'layer_changes': ()}),
    ('gpt_oss', {'gate_limit': 100.0}),
    ('phi3, beyond the original context', {'rope_factor': 1.0}),
  ],
  indirect=['pair'],
)
def test_what_no_tensor_gives_away_is_seen_here(pair, off):
  """Weights load without these switches just as well: the inputs must be such that they count."""
  target = dataclasses.replace(pair.target, config=dataclasses.replace(pair.target.config, **off))
  assert min(errors(dataclasses.replace(pair, target=target))) > 100 * TOLERANCE


@pytest.mark.parametrize('length', [20, 60, 100])
@pytest.mark.parametrize(
  ('family', 'scaling'),
  [
    ('llama', {'rope_type': 'default'}),
    ('llama', {'rope_type': 'linear', 'factor': 4.0}),
    ('llama', {'rope_type': 'dynamic', 'factor': 4.0}),
    ('qwen3', {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}),
    ('llama', LLAMA3_ROPE | {'original_max_position_embeddings': 16}),
    ('phi3', {'rope_type': 'longrope', 'partial_rotary_factor': 0.5} | LONG_ROPE),
    ('phi3', {'rope_type': 'longrope', 'partial_rotary_factor': 0.5, 'attention_factor': 1.5} | LONG_ROPE),
    ('llama', {'rope_type': 'longrope', 'factor': 2.0, 'original_max_position_embeddings': 32,
      'short_factor': [1.0] * 6, 'long_factor': [2.0] * 6}),
  ],
)  # fmt: skip
@pytest.mark.parametrize('key', ['rope_scaling', 'rope_parameters'])
def test_frequencies_are_those_of_texts_of_the_context(family, scaling, key, length, tmp_path):
  """Under both keys; past the original context too, which is 32 or, with dynamic scaling, 64."""
  content = SIZES | {'max_position_embeddings': 64 if scaling['rope_type'] == 'dynamic' else 128, 'head_dim': 12}
  scaling = {'rope_theta': 5000.0} | scaling
  content |= {'original_max_position_embeddings': 32} if family == 'phi3' else {}
  theirs = transformers.AutoConfig.for_model(family, **content, rope_parameters=dict(scaling))
  kind, d = scaling['rope_type'], int(12 * scaling.get('partial_rotary_factor', 1))
  frequency_P, factor = 5000.0 ** (-np.arange(d // 2) / (d // 2)), 1.0
  if kind != 'default':
    frequency_P, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, 'cpu', seq_len=length)
  config = targets.target_config(
    tmp_path,
    content | {'model_type': family, key: scaling},
    max_context=max(length, 64) if kind == 'dynamic' else length,
  )
  ours_P = config.rope_theta ** (-np.arange(d // 2) / (d // 2)) / np.asarray(config.rope_slowdown or 1.0)
  np.testing.assert_allclose(ours_P, frequency_P, rtol=2e-6)
  assert config.rope_factor == pytest.approx(factor, rel=1e-6)
  assert config.rotary_dim == (None if d == 12 else d)


def test_text(pair):
  """Plain text is transformers', and speculative text is plain text, greedy and sampled."""
  config = DrafterConfig(vocab_size=97, width=48, num_heads=4, num_kv_heads=2, head_dim=12, ffn_width=48)
  drafter, policy = tiny.drafter(config), DynamicTree(width=3, fanout=3, max_depth=3, num_nodes=8)
  for temperature in (0.0, 1.0):
    how = {'max_new_tokens': NUM_NEW, 'temperature': temperature, 'seed': 3}
    plain, (speculative,) = decode_alike(pair.target, drafter, [policy], prompt().tolist(), **how)
    assert speculative == plain
    if temperature == 0:
      ids = torch.from_numpy(prompt()).long()
      with torch.no_grad():
        theirs = pair.model.generate(ids, do_sample=False, max_new_tokens=NUM_NEW)
      assert plain == theirs[:, NUM_PROMPT:].tolist()


@pytest.mark.parametrize(
  ('pair', 'arch'),
  [('llama 3.1', 'llama'), ('llama 2, vicuna', 'llama'), ('qwen2', 'qwen2'), ('qwen3', 'qwen3')],
  indirect=['pair'],
)
def test_gguf(pair, arch, tmp_path):
  """A converter's file: transformers reads its weights back to its own, and the target from it gives their logits.

  transformers does not read the RoPE factors of such a file, so they stand against those of the model in memory.
  """
  config = dataclasses.replace(pair.target.config, eos_ids=(0, 1))
  table = naming.gguf_table(config, FAMILIES[arch])
  tensors = flatten(pair.target.params, table)
  if config.rope_slowdown:
    plain = 1 / config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    tensors['rope_freqs.weight'] = (plain / pair.model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
  heads = {f'{arch}.attention.{name}_length': config.head_dim for name in ('key', 'value')}
  path = write_gguf(tmp_path / 'tiny.gguf', tensors, config=config, arch=arch, extra=heads)
  read_back = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file=path.name, config=pair.model.config
  ).state_dict()
  for name, tensor in pair.model.state_dict().items():
    torch.testing.assert_close(read_back[name], tensor, rtol=0, atol=0)
  assert max(errors(dataclasses.replace(pair, target=hub.load_target(path)))) <= TOLERANCE


# Architecture in GGUF -> a case, what it changes in it, and fields that llama.cpp's converter writes for it.
GGUF_YARN = {
  'rope.scaling.type': 'yarn', 'rope.scaling.factor': 8.0, 'rope.scaling.original_context_length': 32,
  'rope.scaling.yarn_beta_fast': 4.0, 'rope.scaling.yarn_beta_slow': 0.5,
}  # fmt: skip
GGUF_CASES = {
  'llama': ('mixtral', {}, {'expert_count': 4, 'expert_used_count': 2, 'rope.dimension_count': 12}),
  'qwen3moe': (
    'qwen3_moe, shares not normalised, a dense layer', {'mlp_only_layers': [], 'norm_topk_prob': True},
    {'expert_count': 16, 'expert_used_count': 3, 'feed_forward_length': 80, 'expert_feed_forward_length': 24},
  ),
  'gemma3': (
    'gemma3_text', {'query_pre_attn_scalar': 16, 'num_hidden_layers': 6, 'layer_types': None},
    {
      'attention.sliding_window': 20, 'rope.freq_base_swa': 100.0, 'rope.freq_base': 5000.0,
      'final_logit_softcapping': 30.0, 'rope.scaling.type': 'linear', 'rope.scaling.factor': 8.0,
    },
  ),
  'gpt-oss': (
    'gpt_oss', {'swiglu_limit': 7.0},
    GGUF_YARN | {
      'expert_count': 6, 'expert_used_count': 2, 'expert_feed_forward_length': 80, 'attention.sliding_window': 20,
    },
  ),
  'phi3': (
    'phi3, beyond the original context', {},
    {
      'rope.dimension_count': 6, 'rope.scaling.original_context_length': 32,
      'rope.scaling.attn_factor': (1 + np.log(8) / np.log(32)) ** 0.5,
    },
  ),
  'olmo2': ('olmo2', {}, {}),
  'granite': (
    'granite', {},
    {'embedding_scale': 3.0, 'attention.scale': 0.2, 'residual_scale': 0.5, 'logit_scale': 4.0, 'vocab_size': 97},
  ),
  'smollm3': ('smollm3', {'num_hidden_layers': 4, 'no_rope_layers': None, 'use_sliding_window': False}, {}),
}  # fmt: skip
PERMUTED = 'llama', 'granite', 'smollm3'  # whose converter turns rows of q and k into interleaved order
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def converted(model, arch: str) -> dict[str, np.ndarray]:
  """A model's tensors as llama.cpp's converter writes them, by the package's own names."""
  config, experts = model.config, {}
  names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
  tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
  for name in [name for name in tensors if '.experts.' in name]:  # all of one kind in a tensor; gate and up apart
    experts[name] = tensors.pop(name)
  found = {}
  for name, x in tensors.items():
    if name == 'lm_head.weight' and config.tie_word_embeddings:
      continue
    if arch in PERMUTED and ('.q_proj' in name or '.k_proj' in name):
      heads = config.num_attention_heads if '.q_proj' in name else config.num_key_value_heads
      x = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if arch == 'gemma3' and name.endswith('norm.weight'):
      x = x + 1
    name = name.replace('.self_attn.sinks', '.self_attn.sinks.weight')
    found[names.get_name(name, try_suffixes=('.weight', '.bias'))] = x
  for name, x in experts.items():
    block, leaf = f'blk.{name.split(".")[2]}', 'bias' if name.endswith('_bias') else 'weight'
    axis = 1 if arch != 'gpt-oss' else x.ndim - 1
    if 'down_proj' in name:
      found[f'{block}.ffn_down_exps.{leaf}'] = x.swapaxes(1, 2) if arch == 'gpt-oss' and leaf == 'weight' else x
      continue
    halves = (x[..., ::2], x[..., 1::2]) if arch == 'gpt-oss' else np.split(x, 2, axis=axis)
    for kind, half in zip(('gate', 'up'), halves, strict=True):
      found[f'{block}.ffn_{kind}_exps.{leaf}'] = half.swapaxes(1, 2) if arch == 'gpt-oss' and leaf == 'weight' else half
  if arch == 'phi3':
    lists = model.config.rope_parameters
    found |= {f'rope_factors_{kind}.weight': np.float32(lists[f'{kind}_factor']) for kind in ('long', 'short')}
  return {name: np.ascontiguousarray(x) for name, x in found.items()}


@pytest.mark.parametrize('arch', GGUF_CASES)
def test_gguf_files_are_their_folders(arch, tmp_path):
  """A file that is written here by the converter's rules holds the network of the folder, which the tests above run."""
  name, changes, fields = GGUF_CASES[arch]
  (tmp_path / 'folder').mkdir()
  model = saved(tmp_path / 'folder', CASES[name] | changes)
  expected = hub.load_target(tmp_path / 'folder', max_context=MAX_CONTEXT.get(name))
  config = dataclasses.replace(
    expected.config, eos_ids=(0, 1), **{'ffn_width': 80} if 'feed_forward_length' in fields else {}
  )
  given = {f'attention.{part}_length': expected.config.head_dim for part in ('key', 'value')} | fields
  extra = {f'{arch}.{field}': float(x) if isinstance(x, np.floating) else x for field, x in given.items()}
  path = write_gguf(
    tmp_path / 'tiny.gguf', converted(model, arch), config=config, arch=arch, extra=extra, leave_out=[*fields]
  )
  found = hub.load_target(path, max_context=MAX_CONTEXT.get(name))
  ours, theirs = (dataclasses.asdict(x.config) | {'eos_ids': None, 'name': None} for x in (found, expected))
  for field, value in theirs.items():
    if field in ('rope_slowdown', 'layer_changes'):
      np.testing.assert_equal(rounded_numbers(ours[field]), rounded_numbers(value), err_msg=field)
    else:
      assert ours[field] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found.params, expected.params)


def rounded_numbers(x):
  if isinstance(x, float):
    return float(f'{x:.5g}')
  return [rounded_numbers(y) for y in x] if isinstance(x, tuple | list) else x


@pytest.mark.parametrize('is_newer', [False, True])
def test_the_text_model_of_gemma3_with_images(tmp_path, is_newer):
  """Numbers that its config leaves out are the usual ones; tensors of images are not read."""
  text = {name: x for name, x in (SIZES | CASES['gemma3_text']).items() if x is not None and 'model_type' not in name}
  vision = {
    'hidden_size': 16,
    'intermediate_size': 16,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'image_size': 8,
  }
  config = transformers.Gemma3Config(
    text_config=text, vision_config=vision | {'patch_size': 4}, mm_tokens_per_image=4, image_token_index=96,
    boi_token_index=95, eoi_token_index=94, eos_token_id=[1, 2],
  )  # fmt: skip
  transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
  tensors = dict(read_safetensors(tmp_path / 'model.safetensors'))
  assert any('vision_tower' in name for name in tensors)
  if is_newer:
    tensors = {
      f'model.{name}'.replace('model.language_model.model.', 'model.language_model.'): x for name, x in tensors.items()
    }
  write_safetensors(tmp_path / 'model.safetensors', tensors)
  content = json.loads((tmp_path / 'config.json').read_text())
  del content['text_config']['rms_norm_eps']
  (tmp_path / 'config.json').write_text(json.dumps(content))
  target = hub.load_target(tmp_path)
  assert (target.config.norm_eps, target.config.eos_ids, target.config.tied_head) == (1e-6, (1, 2), True)
  for name, found in flatten(target.params, naming.hf_table(target.config, FAMILIES['gemma3_text'])).items():
    theirs = [x for key, x in tensors.items() if key.endswith(name.removeprefix('model.')) and 'language_model' in key]
    np.testing.assert_array_equal(found, theirs[0])


def test_mxfp4_experts_are_transformers(pair_of_mxfp4):
  """Blocks as gpt-oss is published: loaded, they are the matrices that transformers makes of them."""
  path, matrices = pair_of_mxfp4
  target = hub.load_target(path)
  table = naming.hf_table(target.config, FAMILIES['gpt_oss'])
  found = flatten(target.params, table)
  for name, matrix in matrices.items():
    np.testing.assert_array_equal(found[name], matrix.float().numpy())


@pytest.fixture
def pair_of_mxfp4(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
  """A folder with experts in MXFP4, and its matrices by transformers."""
  sizes = {'hidden_size': 64, 'intermediate_size': 32, 'quantization_config': {'quant_method': 'mxfp4'}}
  saved(tmp_path, CASES['gpt_oss'] | {name: sizes[name] for name in ('hidden_size', 'intermediate_size')})
  index = tmp_path / 'model.safetensors.index.json'
  tensors = {name: x for file in tmp_path.glob('model-*.safetensors') for name, x in read_safetensors(file)}
  index.unlink()
  rng, matrices = np.random.default_rng(0), {}
  for name in [name for name in tensors if name.endswith(('gate_up_proj', 'down_proj'))]:
    E, num_inputs, num_outputs = tensors.pop(name).shape
    blocks = rng.integers(0, 256, (E, num_outputs, num_inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(118, 132, blocks.shape[:3], dtype=np.uint8)
    tensors |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
    matrices[name] = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
  write_safetensors(tmp_path / 'model.safetensors', tensors)
  content = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(content | sizes))
  assert len(matrices) == 4
  return tmp_path, matrices
