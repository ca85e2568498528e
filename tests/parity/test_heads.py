"""Heads in the layouts that others publish, against a rendering of the equations in draft/README.md in PyTorch.

The rendering runs whole sequences anew and knows neither caches nor trees.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import torch

import tiny
from eagle_jax import decode, hub
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.weights.safetensors import write_safetensors

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5  # of the largest number
D, F, V, U, HEADS, KV_HEADS, K = 32, 48, 97, 20, 4, 2, 8
EPS, THETA = 1e-5, 5000.0
CONFIG = {
  'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': D, 'intermediate_size': F,
  'num_attention_heads': HEADS, 'num_key_value_heads': KV_HEADS, 'num_hidden_layers': 1, 'vocab_size': V,
  'rms_norm_eps': EPS, 'rope_theta': THETA, 'max_position_embeddings': 2,
}  # fmt: skip
TARGET = dataclasses.replace(tiny.TARGET, num_layers=6)


def weights(shapes: dict) -> dict:
  torch.manual_seed(0)
  return {name: 0.3 * torch.randn(shape) + (1.0 if 'norm' in name else 0.0) for name, shape in shapes.items()}


def layer_shapes(in_width: int) -> dict:
  return {
    'layers.0.self_attn.q_proj.weight': (HEADS * K, in_width),
    'layers.0.self_attn.k_proj.weight': (KV_HEADS * K, in_width),
    'layers.0.self_attn.v_proj.weight': (KV_HEADS * K, in_width),
    'layers.0.self_attn.o_proj.weight': (D, HEADS * K),
    'layers.0.mlp.gate_proj.weight': (F, D),
    'layers.0.mlp.up_proj.weight': (F, D),
    'layers.0.mlp.down_proj.weight': (D, F),
    'layers.0.post_attention_layernorm.weight': (D,),
  }


def eagle_weights(*, qkv_bias: bool = False) -> dict:
  shapes = {'fc.weight': (D, 2 * D), 'fc.bias': (D,), **layer_shapes(D)}
  if qkv_bias:
    heads = ('q', HEADS), ('k', KV_HEADS), ('v', KV_HEADS)
    shapes |= {f'layers.0.self_attn.{name}_proj.bias': (n * K,) for name, n in heads}
  return weights(shapes)


def eagle3_weights(target_width: int = D) -> dict:
  norms = {f'layers.0.{name}.weight': (D,) for name in ('input_layernorm', 'hidden_norm')}
  shapes = {'fc.weight': (D, 3 * target_width), 'norm.weight': (D,), 'lm_head.weight': (U, D), **norms}
  out = weights(shapes | layer_shapes(2 * D))
  ids = torch.randperm(V)[:U].sort().values
  out['d2t'], out['t2d'] = ids - torch.arange(U), torch.isin(torch.arange(V), ids)
  return out


# The rendering.


def rms(x, scale):
  return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * scale


def rope(x_nHK):
  half = K // 2
  angle = torch.arange(len(x_nHK))[:, None, None] * THETA ** (-torch.arange(half) / half)
  low, high = x_nHK[..., :half], x_nHK[..., half:]
  return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def attention(w, x):
  def project(name, heads):
    out = x @ w[f'layers.0.self_attn.{name}_proj.weight'].T + w.get(f'layers.0.self_attn.{name}_proj.bias', 0)
    return out.reshape(len(x), heads, K)

  q, k, v = rope(project('q', HEADS)), rope(project('k', KV_HEADS)), project('v', KV_HEADS)
  k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
  score = torch.einsum('ihk,jhk->hij', q, k) / K**0.5
  score = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
  return torch.einsum('hij,jhk->ihk', score.softmax(-1), v).flatten(1) @ w['layers.0.self_attn.o_proj.weight'].T


def mlp(w, x):
  gate, up, down = (w[f'layers.0.mlp.{name}_proj.weight'] for name in ('gate', 'up', 'down'))
  return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def eagle_outputs(w, e, f):
  x = torch.cat([e, f], -1) @ w['fc.weight'].T + w['fc.bias']
  y = x + attention(w, x)
  return y + mlp(w, rms(y, w['layers.0.post_attention_layernorm.weight']))


def eagle3_outputs(w, e, h, *, norm_before_residual: bool):
  normed = rms(h, w['layers.0.hidden_norm.weight'])
  y = attention(w, torch.cat([rms(e, w['layers.0.input_layernorm.weight']), normed], -1))
  y = y + (normed if norm_before_residual else h)
  return y + mlp(w, rms(y, w['layers.0.post_attention_layernorm.weight']))


# Layouts.


def safeailab(w, folder, kind):
  rename = {name: name.replace('layers.0.', 'midlayer.') if kind == 3 else name for name in w}
  torch.save({rename[name]: x for name, x in w.items()}, folder / 'pytorch_model.bin')
  return CONFIG | ({'draft_vocab_size': U} if kind == 3 else {})


def sglang(w, folder, kind):
  prefix = 'model.layers.0.' if kind == 2 else 'midlayer.'
  write_safetensors(
    folder / 'model.safetensors', {name.replace('layers.0.', prefix): x.numpy() for name, x in w.items()}
  )
  extra = {'draft_vocab_size': U, 'architectures': ['LlamaForCausalLMEagle3']}
  return CONFIG | (extra | {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [0, 2, 3]}} if kind == 3 else {})


def speculators(w, folder, kind):
  write_safetensors(folder / 'model.safetensors', {name: x.numpy() for name, x in w.items()})
  return {
    'architectures': ['Eagle3Speculator'], 'speculators_model_type': 'eagle3', 'draft_vocab_size': U,
    'transformer_layer_config': CONFIG, 'norm_before_residual': True, 'eagle_aux_hidden_state_layer_ids': [0, 2, 5],
    'target_hidden_size': None, 'speculators_config': {'algorithm': 'eagle3'},
  }  # fmt: skip


def load(folder, content, target):
  (folder / 'config.json').write_text(json.dumps(content))
  return hub.load_drafter(folder, target)


def our_outputs(target, drafter, token, taps, drafted):
  """Outputs [n, D] of the prefix and of one drafted token after another, and their logits [n, U]."""
  params, spec = decode.build(target, drafter, policy=DynamicTree(2, 2, 2, 4))
  network, params = spec.drafter, params.drafter
  state = network.init(1, 32)
  followed = network.follow(params, state, jnp.asarray(token)[None], taps)
  state = network.absorb(state, followed, jnp.asarray([len(token)]))
  outputs, earlier, feature = [followed.out], None, state.feature.T[..., None]
  for number, new in enumerate(drafted):
    mask = jnp.ones((1, 1, number + 1), bool)
    rows = jnp.asarray([[new]]), network.feed(params, feature), jnp.asarray([[len(token) + number]]), mask
    feature, earlier = network.forward(params, *rows, state.cache, earlier)
    outputs.append(feature)
  out_Dn = jnp.concatenate(outputs, axis=-1)[:, 0]
  return np.asarray(out_Dn.T), np.asarray((params['head'] @ network.read(params, out_Dn)).T)


def assert_close(ours, theirs):
  theirs = theirs.numpy()
  assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.fixture(scope='module')
def target():
  return tiny.target(TARGET)


def told(shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


TOKENS, DRAFTED = [5, 9, 90, 2, 11, 7, 7], [33, 60]


@pytest.mark.parametrize('qkv_bias', [False, True])
@pytest.mark.parametrize('layout', [safeailab, sglang])
def test_eagle_heads(target, tmp_path, layout, qkv_bias):
  w = eagle_weights(qkv_bias=qkv_bias)
  drafter = load(tmp_path, layout(w, tmp_path, 2) | ({'qkv_bias': True} if qkv_bias else {}), target)
  feature = told((D, 1, len(TOKENS)))
  outputs, logits = our_outputs(target, drafter, TOKENS, Taps(jnp.asarray(feature)), DRAFTED)
  embed, f = torch.tensor(np.asarray(target.params['embed']['weight'])), torch.tensor(feature[:, 0].T)
  for number in range(len(DRAFTED) + 1):
    e = embed[TOKENS + DRAFTED[:number]]
    theirs = eagle_outputs(w, e, f)
    f = torch.cat([f, theirs[-1:]])
  assert_close(outputs, theirs)
  assert_close(logits, theirs @ torch.tensor(np.asarray(target.head_VD)).T)


@pytest.mark.parametrize(
  ('layout', 'taps'),
  [(safeailab, (2, 3, 3)), (sglang, (1, 3, 4)), (speculators, (0, 2, 5))],
  ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_eagle3_heads(target, tmp_path, layout, taps):
  w = eagle3_weights()
  drafter = load(tmp_path, layout(w, tmp_path, 3), target)
  assert drafter.config.tapped_layers(TARGET.num_layers) == taps
  residual = told((3, D, 1, len(TOKENS)))
  shown = Taps(jnp.zeros((D, 1, len(TOKENS))), tuple(map(jnp.asarray, residual)))
  outputs, logits = our_outputs(target, drafter, TOKENS, shown, DRAFTED)
  embed = torch.tensor(np.asarray(target.params['embed']['weight']))
  h = torch.tensor(np.concatenate(residual[:, :, 0]).T) @ w['fc.weight'].T
  for number in range(len(DRAFTED) + 1):
    e = embed[TOKENS + DRAFTED[:number]]
    theirs = eagle3_outputs(w, e, h, norm_before_residual=layout is speculators)
    h = torch.cat([h, theirs[-1:]])
  assert_close(outputs, theirs)
  assert_close(logits, rms(theirs, w['norm.weight']) @ w['lm_head.weight'].T)


@pytest.mark.parametrize('layout', [safeailab, sglang, speculators])
def test_text_with_an_eagle3_head_is_plain(target, tmp_path, layout):
  drafter = load(tmp_path, layout(eagle3_weights(), tmp_path, 3), target)
  how = {'max_new_tokens': 24, 'temperature': 1.0, 'seed': 2, 'eos_ids': ()}
  plain = decode.generate(target, None, [[1, 2, 3], [4]], **how)
  out = decode.generate(target, drafter, [[1, 2, 3], [4]], policy=DynamicTree(3, 3, 3, 8), **how)
  assert out.tokens == plain.tokens
  assert out.stats['tau'] > 1
  ours = tmp_path / 'ours'
  hub.save_drafter(drafter, ours)
  again = hub.load_drafter(ours, target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


def test_taps_are_what_enters_a_layer(target):
  """The first layer's input is the embedding; and tapping changes no logits."""
  _, spec = decode.build(target, None, policy='plain')
  tapped = dataclasses.replace(spec.target, tapped_layers=(0, 5))
  token_BL = jnp.asarray([[3, 8, 1]])
  taps = tapped.read(target.params, token_BL)
  np.testing.assert_array_equal(taps.residual[0][:, 0].T, target.params['embed']['weight'][token_BL[0]])
  np.testing.assert_array_equal(taps.feature, spec.target.read(target.params, token_BL).feature)
  assert not np.array_equal(taps.residual[1], taps.feature)
