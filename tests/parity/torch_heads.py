"""A rendering in PyTorch of EAGLE heads with every switch that a published head has: what a loaded one must equal.

It runs whole sequences anew, and knows neither caches nor trees. Weights bear canonical names.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import torch

from eagle_jax import cache as kv_cache
from eagle_jax import decode
from eagle_jax.policy.trees import DynamicTree

TOLERANCE = 1e-5  # of the largest number
TOKENS, DRAFTED = [5, 9, 90, 2, 11, 7, 7], [33, 60]
D, F, V, U, HEADS, KV_HEADS, K = 32, 48, 97, 20, 4, 2, 8
EPS, THETA = 1e-5, 5000.0
CONFIG = {
  'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': D, 'intermediate_size': F,
  'num_attention_heads': HEADS, 'num_key_value_heads': KV_HEADS, 'num_hidden_layers': 1, 'vocab_size': V,
  'rms_norm_eps': EPS, 'rope_theta': THETA, 'max_position_embeddings': 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Switches:
  """A head besides its weights; biases and norms of heads are there if their weights are."""

  theta: float = THETA
  slowed: Callable = lambda frequency: frequency  # the speeds of RoPE's pairs, scaled
  rope_factor: float = 1.0  # on cosines and sines
  window: int | None = None
  norm_before_residual: bool = False
  norm_before_fc: bool = False
  fc_norm: bool = False
  norm_output: bool = False
  is_fused: bool = True  # the input is the joined taps


def rms(x, scale):
  return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * scale


def rope(x_nHK, s):
  half = K // 2
  frequency = s.slowed(s.theta ** (-torch.arange(half) / half))
  angle = torch.arange(len(x_nHK))[:, None, None] * frequency
  cos, sin = angle.cos() * s.rope_factor, angle.sin() * s.rope_factor
  low, high = x_nHK[..., :half], x_nHK[..., half:]
  return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attention(w, x, s):
  block = 'layers.0.self_attn'

  def project(name, heads):
    out = x @ w[f'{block}.{name}_proj.weight'].T + w.get(f'{block}.{name}_proj.bias', 0)
    out = out.reshape(len(x), heads, K)
    return rms(out, w[f'{block}.{name}_norm.weight']) if f'{block}.{name}_norm.weight' in w else out

  q, k, v = rope(project('q', HEADS), s), rope(project('k', KV_HEADS), s), project('v', KV_HEADS)
  k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
  score = torch.einsum('ihk,jhk->hij', q, k) / K**0.5
  row = torch.arange(len(x))
  visible = row[None] <= row[:, None]
  if s.window is not None:  # a row sees so many rows, itself included
    visible &= row[:, None] - row[None] < s.window
  weight = score.masked_fill(~visible, -torch.inf).softmax(-1)
  out = torch.einsum('hij,jhk->ihk', weight, v).flatten(1)
  return out @ w[f'{block}.o_proj.weight'].T + w.get(f'{block}.o_proj.bias', 0)


def mlp(w, x):
  def project(name, x):
    return x @ w[f'layers.0.mlp.{name}_proj.weight'].T + w.get(f'layers.0.mlp.{name}_proj.bias', 0)

  return project('down', torch.nn.functional.silu(project('gate', x)) * project('up', x))


def eagle_outputs(w, e, f, s):
  x = torch.cat([e, f], -1) @ w['fc.weight'].T + w.get('fc.bias', 0)
  y = x + attention(w, x, s)
  return y + mlp(w, rms(y, w['layers.0.post_attention_layernorm.weight']))


def griffin_outputs(w, e, f, s):
  """Two vectors a row: what the head reads, and the next feature."""
  h, norm = torch.cat([e, f], -1) @ w['fc.fc.weight'].T + w['fc.fc.bias'], w['fc.mlp.input_layernorm.weight']
  both = torch.cat([rms(rms(h, w['fc.post_attention_layernorm.weight']), norm), rms(e, norm)], -1)
  x = h + torch.nn.functional.silu(both @ w['fc.mlp.up_proj.weight'].T) @ w['fc.mlp.down_proj.weight'].T
  y = x + attention(w, x, s)
  return torch.cat([y, y], -1) + mlp(w, rms(y, w['layers.0.post_attention_layernorm.weight']))


def fused(w, taps, s):
  """What the head makes of taps [n, target width] each, or of the final feature where it is alone."""
  if not s.is_fused:
    return taps[0]
  if s.fc_norm:
    taps = [rms(tap, w[f'fc_norm.{i}.weight']) for i, tap in enumerate(taps)]
  joined = torch.cat([*taps], -1)
  if s.norm_before_fc:
    joined = rms(joined, w['input_norm.weight'])
  return joined @ w['fc.weight'].T + w.get('fc.bias', 0)


def eagle3_outputs(w, e, h, s):
  normed = rms(h, w['layers.0.hidden_norm.weight'])
  y = attention(w, torch.cat([rms(e, w['layers.0.input_layernorm.weight']), normed], -1), s)
  y = y + (normed if s.norm_before_residual else h)
  return y + mlp(w, rms(y, w['layers.0.post_attention_layernorm.weight']))


def drafted_outputs(w, embed, tokens, drafted, features, s, *, is_eagle3):
  """Outputs of a prefix, whose features are given, and of one drafted token after another; and what the head reads."""
  outputs = eagle3_outputs if is_eagle3 else griffin_outputs if 'fc.fc.weight' in w else eagle_outputs
  for number in range(len(drafted) + 1):
    out = outputs(w, embed[tokens + drafted[:number]], features, s)
    features = torch.cat([features, rms(out[-1:], w['norm.weight']) if s.norm_output else out[-1:, -D:]])
  return out, rms(out, w['norm.weight']) if is_eagle3 else out[:, :D]


# Weights to run it with.


def weights(shapes: dict) -> dict:
  drawn = torch.Generator().manual_seed(0)
  return {
    name: 0.3 * torch.randn(shape, generator=drawn) + (1.0 if 'norm' in name else 0.0) for name, shape in shapes.items()
  }


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


def griffin_weights() -> dict:
  shapes = {'fc.fc.weight': (D, 2 * D), 'fc.fc.bias': (D,), 'fc.post_attention_layernorm.weight': (D,)}
  shapes |= {
    'fc.mlp.input_layernorm.weight': (D,),
    'fc.mlp.up_proj.weight': (F, 2 * D),
    'fc.mlp.down_proj.weight': (D, F),
  }
  return weights(shapes | layer_shapes(D) | {'layers.0.mlp.down_proj.weight': (2 * D, F)})


def eagle3_weights(target_width: int = D) -> dict:
  norms = {f'layers.0.{name}.weight': (D,) for name in ('input_layernorm', 'hidden_norm')}
  shapes = {'fc.weight': (D, 3 * target_width), 'norm.weight': (D,), 'lm_head.weight': (U, D), **norms}
  out = weights(shapes | layer_shapes(2 * D))
  ids = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:U].sort().values
  out['d2t'], out['t2d'] = ids - torch.arange(U), torch.isin(torch.arange(V), ids)
  return out


# What we make of the same.


def our_outputs(target, drafter, token, taps, drafted):
  """Outputs [n, D] of the prefix and of one drafted token after another, and their logits [n, U]."""
  params, spec = decode.build(target, drafter, policy=DynamicTree(2, 2, 2, 4))
  network, params = spec.drafter, params.drafter
  token_1L, length_1 = jnp.asarray(token)[None], jnp.asarray([len(token)])
  state = network.start(params, token_1L, taps, length_1, num_slots=32, first_B=length_1)
  empty = kv_cache.init(drafter.config, num_layers=1, batch=1, num_slots=0, dtype=jnp.float32)
  prefix_DBL, _ = network.apply_behind(params, empty, token_1L, taps)
  outputs, earlier, feature = [prefix_DBL], None, state.feature.T[..., None]
  for number, new in enumerate(drafted):
    mask = jnp.ones((1, 1, number + 1), bool)
    rows = jnp.asarray([[new]]), network.next_feature(params, feature), jnp.asarray([[len(token) + number]]), mask
    feature, earlier = network.forward(params, *rows, state.cache, earlier)
    outputs.append(feature)
  out_Dn = jnp.concatenate(outputs, axis=-1)[:, 0]
  return np.asarray(out_Dn.T), np.asarray((params['head'] @ network.pre_head(params, out_Dn)).T)


def assert_close(ours, theirs):
  theirs = theirs.numpy()
  assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


def told(shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)
