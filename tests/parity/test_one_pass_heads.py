"""Published heads that draft all depths in one pass, against renderings of their equations in PyTorch, which run whole
sequences anew; and what a config.json of theirs must not say.
"""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import torch
from torch_heads import (
  CONFIG,
  HEADS,
  KV_HEADS,
  TOKENS,
  D,
  K,
  Switches,
  U,
  V,
  assert_close,
  attention,
  eagle3_outputs,
  eagle3_weights,
  fused,
  layer_shapes,
  mlp,
  rms,
  rope,
  told,
  weights,
)

import tiny
from eagle_jax import decode, hub
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import Chain
from eagle_jax.weights.safetensors import write_safetensors

pytestmark = pytest.mark.parity
N, DEPTHS = 6, 3
TARGET = dataclasses.replace(tiny.TARGET, num_layers=N)


@pytest.fixture(scope='module')
def target():
  return tiny.target(TARGET)


def load(folder, target, content: dict, w: dict, rename=lambda name: name):
  write_safetensors(folder / 'model.safetensors', {rename(name): x.numpy() for name, x in w.items()})
  (folder / 'config.json').write_text(json.dumps(content))
  return hub.load_drafter(folder, target)


def scored(target, drafter, residual):
  """Network, params, state and root behind the text, whose last three tokens come after a pass over the others; and
  the logits of all depths.
  """
  params, spec = decode.build(target, drafter, policy=Chain(DEPTHS))
  root_B, token_1L = jnp.asarray(TOKENS[-1:]), jnp.asarray(TOKENS)[None]
  shown = token_1L, Taps(jnp.zeros((D, 1, len(TOKENS))), tuple(map(jnp.asarray, residual)))

  @jax.jit
  def run(params):
    first = jax.tree.map(lambda x: x[..., :4], shown)
    rest = jax.tree.map(lambda x: jnp.pad(x[..., 4:], [(0, 0)] * (x.ndim - 1) + [(0, 1)]), shown)
    state = spec.drafter.start(params, *first, jnp.asarray([4]), 16, root_B)
    state = spec.drafter.update(params, state, *rest, jnp.asarray([3]))
    return state, root_B, spec.drafter.score(params, state, root_B, DEPTHS)

  return spec.drafter, params.drafter, *run(params.drafter)


def our_logits(target, drafter, residual) -> np.ndarray:
  """[d, U] of all depths."""
  return np.asarray(scored(target, drafter, residual)[-1])[..., 0].T


def layer_of(w: dict, index: int) -> dict:
  """The weights of one layer, as if it were the first."""
  return {name.replace(f'layers.{index}.', 'layers.0.'): x for name, x in w.items() if f'layers.{index}.' in name}


def plain_layer(w, x, s):
  x = x + attention(w, rms(x, w['layers.0.input_layernorm.weight']), s)
  return x + mlp(w, rms(x, w['layers.0.post_attention_layernorm.weight']))


def layer_weights(index: int, *, qk_norm: bool) -> dict:
  norms = {f'layers.0.self_attn.{name}_norm.weight': (K,) for name in ('qk' if qk_norm else '')}
  shapes = layer_shapes(D) | {'layers.0.input_layernorm.weight': (D,)} | norms
  return {name.replace('.0.', f'.{index}.'): x * (1 + 0.1 * index) for name, x in weights(shapes).items()}


def changed(content: dict, path: str, value) -> dict:
  """With another value under a path such as `transformer_layer_config.sliding_window`; None takes the key away."""
  content = copy.deepcopy(content)
  *above, name = path.split('.')
  place = content
  for key in above:
    place = place.setdefault(key, {})
  place[name] = value
  return content


# P-EAGLE.

MASK = 90


def p_eagle_logits(w, embed, residual, s, later_windows):
  """[d, U]: a text, and behind it mask tokens and the vector in place of taps."""
  taps = torch.tensor(residual[:, :, 0].transpose(0, 2, 1))
  slots = w['mask_hidden'].reshape(3, 1, D).expand(3, DEPTHS - 1, D)
  h = fused(w, torch.cat([taps, slots], 1), s)
  out = eagle3_outputs(w, embed[TOKENS + [MASK] * (DEPTHS - 1)], h, s)
  for index, window in enumerate(later_windows, 1):
    out = plain_layer(layer_of(w, index), out, dataclasses.replace(s, window=window))
  return rms(out[-DEPTHS:], w['norm.weight']) @ w['lm_head.weight'].T


def p_eagle_weights(*, qk_norm: bool = False, num_later: int = 0, more: dict | None = None) -> dict:
  head_norms = {f'layers.0.self_attn.{name}_norm.weight': (K,) for name in ('qk' if qk_norm else '')}
  w = eagle3_weights() | weights({'mask_hidden': (1, 1, 3 * D), **head_norms, **(more or {})})
  for index in range(1, 1 + num_later):
    w |= layer_weights(index, qk_norm=qk_norm)
  return w


SPECULATORS = {
  'architectures': ['PEagleSpeculator'], 'speculators_model_type': 'peagle', 'speculators_version': '0.7.0',
  'draft_vocab_size': U, 'mask_token_id': MASK, 'norm_before_residual': True, 'norm_before_fc': True,
  'norm_output': True, 'eagle_aux_hidden_state_layer_ids': [1, 3, 6], 'embed_requires_grad': True,
  'transformer_layer_config': CONFIG | {
    'model_type': 'qwen3', 'head_dim': K, 'num_hidden_layers': 2, 'sliding_window': 3,
    'layer_types': ['full_attention', 'sliding_attention'],
  },
}  # fmt: skip
VLLM = CONFIG | {
  'architectures': ['PeagleLlamaForCausalLM'], 'draft_vocab_size': U, 'pard_token': MASK, 'num_hidden_layers': 3,
}  # fmt: skip
AUTOMODEL = CONFIG | {
  'architectures': ['LlamaEagle3DraftModel'], 'parallel_drafting': True, 'mask_token_id': MASK, 'num_depths': 8,
  'draft_vocab_size': U, 'fc_norm': True, 'num_aux_hidden_states': 3, 'down_sample_ratio': 0.7,
}  # fmt: skip
AMAZON = CONFIG | {
  'architectures': ['LlamaForCausalLMEagle3'], 'ptd_token_id': MASK, 'num_hidden_layers': 3, 'draft_vocab_size': U,
  'attention_bias': True, 'sliding_window': 128,
}  # fmt: skip
SPECFORGE = CONFIG | {
  'architectures': ['PEagleDraftModel'], 'num_hidden_layers': 2, 'draft_vocab_size': U, 'mask_token_id': MASK,
  'norm_before_residual': True,
}  # fmt: skip
FORMS = {
  'speculators': (
    SPECULATORS,
    {'qk_norm': True, 'num_later': 1, 'more': {'input_norm.weight': (3 * D,), 'embed_tokens.weight': (V, D)}},
    Switches(norm_before_residual=True, norm_before_fc=True), (3,), (1, 3, 6),
  ),
  'vLLM': (VLLM, {'num_later': 2}, Switches(), (None, None), (2, 3, 3)),
  'Amazon': (AMAZON, {'num_later': 2}, Switches(), (None, None), (2, 3, 3)),
  'SpecForge': (SPECFORGE, {'num_later': 1}, Switches(norm_before_residual=True), (None,), (2, 3, 3)),
  'AutoModel': (
    AUTOMODEL, {'more': {f'fc_norm.{tap}.weight': (D,) for tap in range(3)}}, Switches(fc_norm=True), (), (2, 3, 3),
  ),
}  # fmt: skip

SPELLINGS = {  # where they are not ours
  'AutoModel': lambda tensor: tensor if 'lm_head' in tensor else f'model.{tensor}',
  'Amazon': lambda tensor: tensor.replace('layers.0.', 'midlayer.'),
}


@pytest.mark.parametrize('name', FORMS)
def test_p_eagle_heads(target, tmp_path, name):
  content, how, switches, later, taps = FORMS[name]
  w = p_eagle_weights(**how)
  drafter = load(tmp_path, target, content, w, SPELLINGS.get(name, str))
  assert drafter.config.tapped_layers(N) == taps
  assert len(drafter.config.later_windows) == len(later)
  residual = told((3, D, 1, len(TOKENS)))
  embed = w.get('embed_tokens.weight', torch.tensor(np.asarray(target.params['embed']['weight'])))
  assert_close(our_logits(target, drafter, residual), p_eagle_logits(w, embed, residual, switches, later))


LAYER = 'transformer_layer_config.'


@pytest.mark.parametrize(
  ('content', 'path', 'value', 'message'),
  [
    (SPECULATORS, 'mask_token_id', None, 'must name one mask token'),
    (AUTOMODEL, 'pard_token', MASK + 1, "'pard_token': 91"),
    (SPECULATORS, 'mask_token_id', V, '`mask_token_id` must be an id below'),
    (SPECULATORS, 'brand_new_switch', True, 'brand_new_switch'),
    (SPECULATORS, f'{LAYER}brand_new_switch', True, f'{LAYER}brand_new_switch'),
    (SPECULATORS, f'{LAYER}layer_types', ['sliding_attention'], 'layer_types'),
    (SPECULATORS, f'{LAYER}num_hidden_layers', 1, r'layers\.1\.\S+: not expected'),
    (SPECULATORS, f'{LAYER}model_type', 'gpt_oss', 'model_type'),
    (VLLM, 'layer_types', ['sliding_attention'] * 3, 'layer_types'),
    (VLLM, 'architectures', ['PEagleOfAnotherDay'], 'architectures'),
    (VLLM, 'eagle_config.use_aux_hidden_state', False, 'taps'),
    (AUTOMODEL, 'bias', True, r'fc\.bias: missing'),
    (SPECFORGE, 'norm_before_residual', None, r'norm_before_residual, which SpecForge writes into peagle_config\.json'),
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_what_a_p_eagle_head_must_not_say(target, tmp_path, content, path, value, message):
  how = next(how for one, how, *_ in FORMS.values() if one is content)
  with pytest.raises(ValueError, match=message):
    load(tmp_path, target, changed(content, path, value), p_eagle_weights(**how))


def test_what_specforge_says_beside_the_config_of_a_p_eagle_head(target, tmp_path):
  beside = {name: SPECFORGE[name] for name in ('mask_token_id', 'norm_before_residual')}
  content, w = {name: value for name, value in SPECFORGE.items() if name not in beside}, p_eagle_weights(num_later=1)
  (tmp_path / 'peagle_config.json').write_text(json.dumps(beside | {'num_depths': 8, 'num_draft_layers': 2}))
  config = load(tmp_path, target, content, w).config
  assert (config.mask_token_id, config.norm_before_residual) == (MASK, True)
  with pytest.raises(ValueError, match=r"contradict each other: \['norm_before_residual'\]"):
    load(tmp_path, target, content | {'norm_before_residual': False}, w)


# DFlash.

BLOCK = 4
CONTEXT = len(TOKENS)


def block_attention(w, x, context, s, is_causal: bool):
  """Attend with the places of a block, to the context before it and to the block."""

  def project(name, x, heads):
    out = x @ w[f'layers.0.self_attn.{name}_proj.weight'].T + w.get(f'layers.0.self_attn.{name}_proj.bias', 0)
    return out.reshape(len(x), heads, K)

  def norm(name, x):
    return rms(x, w[f'layers.0.self_attn.{name}_norm.weight'])

  both = torch.cat([context, x])
  q = rope(norm('q', project('q', both, HEADS)), s)[len(context) :]
  k, v = rope(norm('k', project('k', both, KV_HEADS)), s), project('v', both, KV_HEADS)
  k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
  query, key = torch.arange(len(context), len(both))[:, None], torch.arange(len(both))[None]
  visible = (key < len(context)) | (key <= query) | (not is_causal)
  if s.window is not None:
    visible &= query - key < s.window
  score = torch.einsum('ihk,jhk->hij', q, k) / K**0.5
  weight = score.masked_fill(~visible, -torch.inf).softmax(-1)
  out = torch.einsum('hij,jhk->ihk', weight, v).flatten(1)
  return out @ w['layers.0.self_attn.o_proj.weight'].T + w.get('layers.0.self_attn.o_proj.bias', 0)


def block_outputs(w, embed, residual, layers, *, scale: float = 1.0):
  """[B, D]: of the newest token and mask tokens; `layers` says of each its window, and whether it is causal."""
  context = rms(torch.cat([*torch.tensor(residual[:, :, 0].transpose(0, 2, 1))], -1) @ w['fc.weight'].T,
                w['hidden_norm.weight'])  # fmt: skip
  x = scale * embed[[TOKENS[-1]] + [MASK] * (BLOCK - 1)]
  for index, (window, is_causal) in enumerate(layers):
    one, s = layer_of(w, index), Switches(window=window)
    x = x + block_attention(one, rms(x, one['layers.0.input_layernorm.weight']), context, s, is_causal)
    x = x + mlp(one, rms(x, one['layers.0.post_attention_layernorm.weight']))
  return rms(x, w['norm.weight'])


def dflash_weights(num_layers: int, num_taps: int, **more) -> dict:
  w = weights({'fc.weight': (D, num_taps * D), 'hidden_norm.weight': (D,), 'norm.weight': (D,), **more})
  for index in range(num_layers):
    w |= layer_weights(index, qk_norm=True)
  return w


def of_speculators() -> dict:
  """Weights with biases, and with a head and a vocabulary of its own."""
  sizes = {'q': HEADS * K, 'k': KV_HEADS * K, 'v': KV_HEADS * K, 'o': D}
  more = {f'layers.0.self_attn.{name}_proj.bias': (size,) for name, size in sizes.items()}
  own = {name: x for name, x in eagle3_weights().items() if name in ('lm_head.weight', 'd2t', 't2d')}
  return dflash_weights(1, 2, **more) | own


QWEN3 = CONFIG | {'model_type': 'qwen3', 'head_dim': K, 'num_hidden_layers': 2, 'attention_bias': False}
Z_LAB = QWEN3 | {
  'architectures': ['DFlashDraftModel'], 'block_size': BLOCK, 'num_target_layers': N, 'is_causal': None,
  'layer_types': ['full_attention', 'sliding_attention'], 'sliding_window': 5, 'use_sliding_window': True,
  'dflash_config': {
    'mask_token_id': MASK, 'target_layer_ids': [0, 2, 4], 'projector_type': 'dflash', 'use_swa': False,
    'attention_mode': 'gqa', 'input_embedding_scale': 2.0, 'final_logit_softcapping': 3.0,
  },
}  # fmt: skip
JETSPEC = QWEN3 | {
  'architectures': ['DFlashDraftModel'], 'block_size': 16, 'layer_types': ['full_attention'] * 2,
  'dflash_config': {'mask_token_id': MASK, 'causal_head': True},
}  # fmt: skip
MODEL_OPTIMIZER = QWEN3 | {
  'architectures': ['DFlashDraftModel'], 'block_size': BLOCK, 'num_target_layers': N, 'sliding_window': 5,
  'layer_types': ['full_attention'] * 2,
  'dflash_config': {'mask_token_id': MASK, 'target_layer_ids': [0, 4], 'use_swa': True, 'swa_window_size': 5},
}  # fmt: skip
SPECULATORS_BLOCK = {
  'architectures': ['DFlashSpeculator'], 'speculators_model_type': 'dflash', 'draft_vocab_size': U,
  'block_size': BLOCK, 'mask_token_id': MASK, 'aux_hidden_state_layer_ids': [1, 6], 'sample_from_anchor': True,
  'sliding_window_non_causal': True, 'projector_type': 'dflash', 'emb_dim': 256, 'shift_label': False,
  'transformer_layer_config': QWEN3 | {
    'num_hidden_layers': 1, 'attention_bias': True, 'sliding_window': 6, 'layer_types': ['sliding_attention'],
  },
}  # fmt: skip
BLOCKS = {  # config.json, weights, layers, taps, the first place that predicts
  'z-lab': (Z_LAB, lambda: dflash_weights(2, 3), [(None, False), (5, True)], (1, 3, 5), 1),
  'JetSpec': (JETSPEC, lambda: dflash_weights(2, 2), [(None, True)] * 2, (2, 4), 1),
  'Model-Optimizer': (MODEL_OPTIMIZER, lambda: dflash_weights(2, 2), [(5, False)] * 2, (1, 5), 1),
  'speculators': (SPECULATORS_BLOCK, of_speculators, [(6, False)], (1, 6), 0),
}


@pytest.mark.parametrize('name', BLOCKS)
def test_dflash_blocks(target, tmp_path, name):
  content, make, layers, taps, first = BLOCKS[name]
  w, embed = make(), torch.tensor(np.asarray(target.params['embed']['weight']))
  drafter = load(tmp_path, target, content, w)
  assert drafter.config.tapped_layers(N) == taps
  assert drafter.config.max_depth == content['block_size'] - first
  residual = told((len(taps), D, 1, CONTEXT))
  out = block_outputs(w, embed, residual, layers, scale=2.0 if name == 'z-lab' else 1.0)[first : first + DEPTHS]
  theirs = out @ w.get('lm_head.weight', torch.tensor(np.asarray(target.head_VD))).T
  if name == 'z-lab':
    theirs = 3 * torch.tanh(theirs / 3)
  assert_close(our_logits(target, drafter, residual), theirs)


@pytest.mark.parametrize(
  ('name', 'path', 'value', 'message'),
  [
    ('z-lab', 'architectures', ['DFlash2DraftModel'], 'DFlash2DraftModel'),
    ('z-lab', 'dflash_config.projector_type', 'domino', 'Domino'),
    ('z-lab', 'dflash_config.brand_new_switch', 1, r'dflash_config\.brand_new_switch'),
    ('z-lab', 'dflash_config.use_swa', True, 'use_swa'),
    ('z-lab', 'dflash_config.swa_window_size', 4, 'contradicts itself'),
    ('z-lab', 'dflash_config.attention_mode', 'mla', 'attention_mode'),
    ('z-lab', 'dflash_config.output_multiplier', 2.0, 'output_multiplier'),
    ('z-lab', 'dflash_config.target_layer_ids', [0, 5], 'target_layer_ids'),
    ('z-lab', 'dflash_config.target_hidden_size', 64, 'target_hidden_size'),
    ('z-lab', 'dflash_config.block_size', 8, 'block_size'),
    ('z-lab', 'dflash_config.mask_token_id', None, 'mask_token_id'),
    ('z-lab', 'use_sliding_window', False, 'use_sliding_window'),
    ('z-lab', 'sliding_window', 3, '`windows`'),
    ('z-lab', 'num_target_layers', 7, 'num_target_layers'),
    ('z-lab', 'hidden_act', 'gelu', 'hidden_act'),
    ('z-lab', 'attention_bias', True, r'q_proj\.bias: missing'),
    ('JetSpec', 'is_causal', False, 'contradicts itself'),
    ('JetSpec', 'use_swa', True, 'use_swa'),
    ('JetSpec', 'dflash_config.use_swa', True, 'use_swa needs swa_window_size'),
    ('JetSpec', 'dflash_config.draft_shift', True, 'draft_shift'),
    ('speculators', 'speculators_model_type', 'dflash2', "'dflash2'.* not supported"),
    ('speculators', 'aux_hidden_state_layer_ids', None, 'aux_hidden_state_layer_ids'),
    ('speculators', 'sliding_window_non_causal', None, 'sliding_window_non_causal'),
    ('speculators', 'shift_label', True, 'shift_label'),
    ('speculators', f'{LAYER}brand_new_switch', 1, 'brand_new_switch'),
  ],
)
def test_what_a_dflash_drafter_must_not_say(target, tmp_path, name, path, value, message):
  content, make, *_ = BLOCKS[name]
  with pytest.raises(ValueError, match=message):
    load(tmp_path, target, changed(content, path, value), make())


def test_what_a_dflash_folder_must_not_hold(target, tmp_path):
  """Attention sinks, and an embedding of the mask token in a file of its own."""
  w = dflash_weights(2, 3) | {'layers.0.self_attn.sinks': torch.zeros(HEADS)}
  with pytest.raises(ValueError, match=r'self_attn\.sinks: not expected'):
    load(tmp_path, target, Z_LAB, w)
  (tmp_path / 'mask_embedding.pt').touch()
  with pytest.raises(ValueError, match=r'mask_embedding\.pt'):
    load(tmp_path, target, Z_LAB, dflash_weights(2, 3))


# DSpark.

RANK = 5
DEEPSPEC = QWEN3 | {
  'architectures': ['Qwen3DSparkModel'], 'block_size': BLOCK, 'num_target_layers': N, 'mask_token_id': MASK,
  'target_layer_ids': [0, 2], 'num_anchors': 512, 'markov_rank': RANK, 'markov_head_type': 'vanilla',
  'enable_confidence_head': True, 'confidence_head_with_markov': True, 'layer_types': ['full_attention'] * 2,
  'use_sliding_window': False, 'sliding_window': None,
}  # fmt: skip


def dspark_weights() -> dict:
  names = 'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'
  more = dict.fromkeys(names, (V, RANK)) | {'confidence_head.proj.weight': (1, D + RANK)}
  return dflash_weights(2, 2, **more, **{'lm_head.weight': (V, D), 'embed_tokens.weight': (V, D)})


def check_chain(target, drafter, w, residual, theirs):
  """Compare the logits of a block, and a chain: each token that is drafted corrects the logits of the next."""
  policy = Chain(DEPTHS)
  network, params, state, root_B, ours_UdB = scored(target, drafter, residual)
  assert_close(np.asarray(ours_UdB)[..., 0].T, theirs)
  propose = jax.jit(lambda params: network.propose(params, state, root_B, policy, tiny.context(policy)))
  grown, token, log_q = propose(params), TOKENS[-1], 0.0
  for depth in range(DEPTHS):
    above = w['markov_head.markov_w1.weight'][token]
    log_p = (theirs[depth] + above @ w['markov_head.markov_w2.weight'].T).log_softmax(-1)
    token, log_q = int(params['ids'][int(log_p.argmax())]), log_q + float(log_p.max())
    assert int(grown.token[0, depth + 1]) == token
    np.testing.assert_allclose(grown.log_q[0, depth + 1], log_q, rtol=1e-5)


def test_dspark_blocks(target, tmp_path):
  w, drafter = dspark_weights(), load(tmp_path, target, DEEPSPEC, dspark_weights())
  assert (drafter.config.max_depth, drafter.config.own_head, drafter.config.own_embedding) == (BLOCK, True, True)
  residual = told((2, D, 1, CONTEXT))
  out = block_outputs(w, w['embed_tokens.weight'], residual, [(None, False)] * 2)
  check_chain(target, drafter, w, residual, out[:DEPTHS] @ w['lm_head.weight'].T)


def test_a_dspark_block_that_says_that_places_predict_their_own_tokens(target, tmp_path):
  drafter = load(tmp_path, target, changed(DEEPSPEC, 'sample_from_anchor', False), dspark_weights())
  assert (drafter.config.is_shifted, drafter.config.max_depth) == (False, BLOCK - 1)


def test_a_dspark_of_rank_0_is_a_dflash_block(target, tmp_path):
  w = {name: x for name, x in dspark_weights().items() if '_head.m' not in name and 'confidence' not in name}
  content = changed(DEEPSPEC, 'markov_rank', 0)
  drafter = load(tmp_path, target, changed(content, 'markov_head_type', None), w)
  assert hub.kinds.name_of_kind(drafter.config) == 'dflash'
  assert drafter.config.max_depth == BLOCK


@pytest.mark.parametrize('is_shifted', [True, None])
def test_dspark_blocks_of_speculators(target, tmp_path, is_shifted):
  """A draft vocabulary: the token that corrects is one of the target's ids, what it corrects are drafted ones.

  Files older than `sample_from_anchor` are of drafters whose places predict their own tokens.
  """
  content = SPECULATORS_BLOCK | {
    'architectures': ['DSparkSpeculator'], 'speculators_model_type': 'dspark', 'markov_rank': RANK,
    'markov_head_type': 'vanilla', 'enable_confidence_head': False, 'confidence_head_alpha': 0.0, 'num_anchors': 256,
    'sample_from_anchor': is_shifted,
  }  # fmt: skip
  markov = weights({'markov_head.markov_w1.weight': (V, RANK), 'markov_head.markov_w2.weight': (U, RANK)})
  w, first = of_speculators() | markov, 0 if is_shifted else 1
  drafter, embed = load(tmp_path, target, content, w), torch.tensor(np.asarray(target.params['embed']['weight']))
  assert (drafter.config.rank, drafter.config.num_ids, drafter.config.max_depth) == (RANK, U, BLOCK - first)
  residual = told((2, D, 1, CONTEXT))
  out = block_outputs(w, embed, residual, [(6, False)])[first : first + DEPTHS]
  check_chain(target, drafter, w, residual, out @ w['lm_head.weight'].T)


@pytest.mark.parametrize(
  ('path', 'value', 'message'),
  [
    ('markov_head_type', 'gated', 'markov_head_type'),
    ('architectures', ['Gemma4DSparkModel'], 'Gemma4DSparkModel'),
    ('architectures', ['DSparkDraftModel'], 'DSparkDraftModel'),  # without the keys of speculators
    ('speculators_model_type', 'dspark', 'sample_from_anchor|architectures'),
    ('markov_rank', RANK + 1, r'markov_w1\.weight: shape'),
    ('brand_new_switch', True, 'brand_new_switch'),
  ],
)
def test_what_a_dspark_drafter_must_not_say(target, tmp_path, path, value, message):
  with pytest.raises(ValueError, match=message):
    load(tmp_path, target, changed(DEEPSPEC, path, value), dspark_weights())
