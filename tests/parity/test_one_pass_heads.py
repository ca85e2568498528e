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


def our_logits(target, drafter, residual) -> np.ndarray:
  """[d, U] of all depths behind the text, whose last three tokens come after a first pass over the others."""
  params, spec = decode.build(target, drafter, policy=Chain(DEPTHS))
  root_B, token_1L = jnp.asarray(TOKENS[-1:]), jnp.asarray(TOKENS)[None]
  shown = token_1L, Taps(jnp.zeros((D, 1, len(TOKENS))), tuple(map(jnp.asarray, residual)))

  @jax.jit
  def run(params):
    first = jax.tree.map(lambda x: x[..., :4], shown)
    rest = jax.tree.map(lambda x: jnp.pad(x[..., 4:], [(0, 0)] * (x.ndim - 1) + [(0, 1)]), shown)
    state = spec.drafter.start(params, *first, jnp.asarray([4]), 16, root_B)
    state = spec.drafter.update(params, state, *rest, jnp.asarray([3]))
    return spec.drafter.score(params, state, root_B, DEPTHS)

  return np.asarray(run(params.drafter))[..., 0].T


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
FORMS = {
  'speculators': (
    SPECULATORS,
    {'qk_norm': True, 'num_later': 1, 'more': {'input_norm.weight': (3 * D,), 'embed_tokens.weight': (V, D)}},
    Switches(norm_before_residual=True, norm_before_fc=True), (3,), (1, 3, 6),
  ),
  'vLLM': (VLLM, {'num_later': 2}, Switches(), (None, None), (2, 3, 3)),
  'AutoModel': (
    AUTOMODEL, {'more': {f'fc_norm.{tap}.weight': (D,) for tap in range(3)}}, Switches(fc_norm=True), (), (2, 3, 3),
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', FORMS)
def test_p_eagle_heads(target, tmp_path, name):
  content, how, switches, later, taps = FORMS[name]
  w = p_eagle_weights(**how)
  prefix = 'model.' if name == 'AutoModel' else ''
  drafter = load(tmp_path, target, content, w, lambda tensor: tensor if 'lm_head' in tensor else prefix + tensor)
  assert drafter.config.tapped_layers(N) == taps
  assert len(drafter.config.later_windows) == len(later)
  residual = told((3, D, 1, len(TOKENS)))
  embed = w.get('embed_tokens.weight', torch.tensor(np.asarray(target.params['embed']['weight'])))
  assert_close(our_logits(target, drafter, residual), p_eagle_logits(w, embed, residual, switches, later))


def changed(content: dict, path: str, value) -> dict:
  """With another value under a path such as `transformer_layer_config.sliding_window`; None takes the key away."""
  content = copy.deepcopy(content)
  *above, name = path.split('.')
  place = content
  for key in above:
    place = place.setdefault(key, {})
  place[name] = value
  return content


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
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_what_a_p_eagle_head_must_not_say(target, tmp_path, content, path, value, message):
  how = next(how for one, how, *_ in FORMS.values() if one is content)
  with pytest.raises(ValueError, match=message):
    load(tmp_path, target, changed(content, path, value), p_eagle_weights(**how))
