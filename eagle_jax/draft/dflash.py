"""DFlash (arXiv:2602.06036): a block of mask tokens behind the newest one, filled in one pass.

The taps of committed tokens are no tokens of the drafter: fused and normed, they are the context, from which each layer
makes keys and values only. These are cached. The block, whose keys and values are thrown away, sees all of the context,
and of itself everything, or what stands before. JetSpec is a DFlash whose block is causal.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import HeadSizes, TargetConfig, require, require_layers
from eagle_jax.draft.eagle import divide_for_head
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.one_pass import Depths, See, init_layers, run_layers, score_depths
from eagle_jax.models.layers import Attention, RMSNorm, Rotation, embed, project
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates


@dataclasses.dataclass(frozen=True)
class DFlashConfig(HeadSizes):
  """Decoder layers over a block, with taps of the target as their context; norms of queries and keys."""

  _: dataclasses.KW_ONLY
  taps: tuple[int, ...]  # as in `Eagle3Config`
  block_size: int  # the newest token included
  mask_token_id: int
  windows: tuple[int | None, ...]  # of each layer
  causal: tuple[bool, ...]  # of each layer, whether a place of the block sees only those before it, and itself
  is_shifted: bool = False  # whether a place predicts the token after it, as the newest token's place does then, too
  own_head: bool = False
  embedding_scale: float = 1.0  # multiplies embeddings
  logit_cap: float | None = None  # see `TargetConfig`
  name: str = 'drafter'

  def __post_init__(self):
    self._require_sizes()
    for name in ('taps', 'windows', 'causal'):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    require(self, 'taps', min(self.taps, default=-1) >= 0, 'layers numbered from 0, one or more')
    require(self, 'block_size', self.max_depth > 0, 'large enough for a token behind the newest one')
    require(self, 'mask_token_id', 0 <= self.mask_token_id < self.vocab_size, f'an id below {self.vocab_size}')
    require(
      self, 'windows', min(filter(None, self.windows), default=self.block_size) >= self.block_size, 'blocks or longer'
    )
    require(self, 'causal', len(self.causal) == len(self.windows) > 0, 'as many as windows, one a layer')

  @property
  def max_depth(self) -> int:
    """Number of tokens that a block drafts."""
    return self.block_size - (not self.is_shifted)

  @property
  def target_width(self) -> int:
    return self.width

  def as_layer(self) -> TargetConfig:
    return dataclasses.replace(super().as_layer(), qk_norm=True)

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    return require_layers(self, self.taps, num_layers)


def keep_entries(q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> tuple[jax.Array, Any]:
  """Attend to nothing, and remember keys and values."""
  return q_BGJTK, (k_BGTK, v_BGTK)


@dataclasses.dataclass(frozen=True)
class DFlash:
  """DFlash as a `draft.interface.DraftNetwork`; its state is the cache of the context.

  Its params are `fc`, `hidden_norm`, `norm` and `layer_0`, `layer_1`, ...; and `embed`, `head` and `ids` as in
  `draft.eagle.Eagle`, the head perhaps its own.
  """

  config: DFlashConfig
  dtype: Any = jnp.float32

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise all at random."""
    c, keys = self.config, jax.random.split(key, len(self.config.windows) + 2)
    init, norm = nn.initializers.lecun_normal(in_axis=-1, out_axis=0), {'scale': jnp.ones(c.width, self.dtype)}
    layers = {f'layer_{index}': x for index, x in enumerate(init_layers(c.as_layer(), keys[:-2], self.dtype))}
    fc = {'weight': init(keys[-1], (c.width, len(c.taps) * c.width), self.dtype)}
    head = {'head': {'weight': init(keys[-2], (c.num_ids, c.width), self.dtype)}} if c.own_head else {}
    return layers | head | {'fc': fc, 'hidden_norm': norm, 'norm': norm}

  def layers(self, params) -> list[Any]:
    """List the parameters of each layer."""
    return [params[f'layer_{index}'] for index in range(len(self.config.windows))]

  def norm(self, scale: dict[str, jax.Array], x_DR: jax.Array) -> jax.Array:
    out: Any = RMSNorm(self.config.norm_eps).apply({'params': scale}, x_DR)
    return out

  def read_context(self, params, taps, position_BP: jax.Array) -> NewEntries:
    """Make keys and values of the taps [D, B, P] at these positions, for every layer."""
    layer = self.config.as_layer()
    taps_DR = [tap_DBP.reshape(tap_DBP.shape[0], -1).astype(self.dtype) for tap_DBP in taps.residual]
    context_DR = self.norm(params['hidden_norm'], project(jnp.concatenate(taps_DR), **params['fc']))
    rotation, new = Rotation.of(layer, position_BP), []
    for one in self.layers(params):
      _, entries = Attention(layer).apply({'params': one['attn']}, context_DR, rotation, keep_entries)
      new.append(entries)
    return NewEntries(*zip(*new, strict=True))

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> KVCache:
    position_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1])[None], token_BL.shape)
    return kv_cache.fill(self.read_context(params, taps, position_BL), length_B, num_slots=num_slots)

  def update(self, params, state: KVCache, token_BP, taps, count_B) -> KVCache:
    position_BP, _ = kv_cache.behind(state, token_BP.shape[1])
    return kv_cache.append(state, self.read_context(params, taps, position_BP), count_B)

  def fill_block(self, params, state: KVCache, root_B: jax.Array, num_places: int) -> jax.Array:
    """Run the newest token and mask tokens behind the context: normed outputs [D, B, T]."""
    c = self.config
    token_BT = jnp.full((len(root_B), num_places), c.mask_token_id).at[:, 0].set(root_B)
    x_DR = embed(params['embed'], token_BT.reshape(-1)).astype(self.dtype)
    if c.embedding_scale != 1:
      x_DR *= jnp.asarray(c.embedding_scale, self.dtype)
    position_BT, causal_BTT = kv_cache.behind(state, num_places)
    masks = [causal_BTT if is_causal else jnp.ones_like(causal_BTT) for is_causal in c.causal]
    sees = [See(window, mask_BTT) for window, mask_BTT in zip(c.windows, masks, strict=True)]
    out_DR, _ = run_layers(c.as_layer(), self.layers(params), x_DR, position_BT, sees, state)
    return self.norm(params['norm'], out_DR).reshape(c.width, *token_BT.shape)

  def score(self, params, state: KVCache, root_B: jax.Array, num_depths: int) -> jax.Array:
    """Compute logits [U, d, B] f32 of the children of the first depths, no more than there are."""
    c = self.config
    num_depths, first = min(num_depths, c.max_depth), int(not c.is_shifted)
    # A place sees no later one if all layers are causal. Else the block is as long as it was in training.
    out_DBT = self.fill_block(params, state, root_B, first + num_depths if all(c.causal) else c.block_size)
    out_DBd = out_DBT[..., first : first + num_depths]
    logits_UdB = score_depths(params['head'], out_DBd, functools.partial(divide_for_head, params))
    return logits_UdB if c.logit_cap is None else c.logit_cap * jnp.tanh(logits_UdB / c.logit_cap)

  def propose(self, params, state: KVCache, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    depths = Depths.of(self.score(params, state, root_B, policy.max_depth), params['ids'], policy, context)
    return depths.grow(params, root_B, policy, context)
