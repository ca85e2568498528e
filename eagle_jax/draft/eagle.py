"""The EAGLE-1/2 head (arXiv:2401.15077): a decoder layer, or several, that extrapolates the target's features.

Position t combines the feature f_t with the embedding of the *next* token x_{t+1}, at RoPE position t. Its output
predicts f_{t+1}: the target's own head turns it into a distribution of x_{t+2}.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import DrafterConfig
from eagle_jax.draft import griffin
from eagle_jax.draft.expand import Children, Frontier, first_width, grow, likeliest
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import WEIGHTS, Evidence
from eagle_jax.kernels.einsum import einsum_float32
from eagle_jax.kernels.ordering import wait_for
from eagle_jax.models.layers import (
  AttentionFn,
  CachedAttention,
  DecoderLayer,
  Linear,
  Rotation,
  apply_head,
  embed,
  no_attention,
)
from eagle_jax.models.transformer import see_window
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import NO_TOKEN, Candidates


class EagleHead(nn.Module):
  """The module: `fc` over [embedding, feature], perhaps GRIFFIN's fusion, then `layer`, and perhaps `layer_1`, ..."""

  config: DrafterConfig

  @nn.compact
  def __call__(self, embedding_DR, feature_DR, position_BT, attentions: Sequence[AttentionFn]):
    """Compute outputs [D, R], of GRIFFIN's head [2D, R]; return them with what each layer's attention remembers.

    `feature_DR` may have 2D numbers: the second half is added to what `fc` gives (see `eagle_taps`).
    """
    c, width, layer_config = self.config, self.config.width, self.config.as_layer()
    x_DR = Linear((width,), c.fc_bias, name='fc')(jnp.concatenate([embedding_DR, feature_DR[:width]]))
    if feature_DR.shape[0] > width:
      x_DR += feature_DR[width:]
    if c.griffin:
      x_DR = griffin.TokenFusion(c.ffn_width, c.norm_eps, name='fusion')(x_DR, embedding_DR)
    rotation, memories = Rotation.of(layer_config, position_BT), []
    for index, attention in zip(range(c.num_layers), attentions, strict=True):
      # The first has no input norm, since the feature is already normalised; there is no final norm.
      num_outputs = 2 if c.griffin and index == c.num_layers - 1 else 1
      layer = DecoderLayer(layer_config, index > 0, num_outputs, name=name_of_layer(index))
      x_DR, memory = layer(x_DR, rotation, attention)
      memories.append(memory)
    return x_DR, tuple(memories)


def name_of_layer(index: int) -> str:
  """Return the name of a layer's parameters."""
  return f'layer_{index}' if index else 'layer'


def silence(drawn: Any) -> Any:
  """Return the parameters of a part with residual branches such that these add nothing."""

  def zero(path: Any, x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x) if path[-2].key in ('o', 'down') else x

  return jax.tree_util.tree_map_with_path(zero, drawn)


class EagleState(NamedTuple):
  """The drafter's cache and newest output over the committed text."""

  cache: KVCache  # of its own layers; an entry for every committed token
  feature: jax.Array  # [B, D] or [B, 2D], the output at the newest position, which predicts the root's children


class Drafted(NamedTuple):
  """The carry from one level of a tree to the next; M counts the nodes of all levels but the last, the newest last."""

  out: jax.Array  # [D, B, W] or [2D, B, W], outputs at the level's nodes
  mask: jax.Array  # [B, W, M] bool, which drafted nodes they attend to
  memory: NewEntries  # [B, G, M, K], of those nodes
  match: Any  # [B, W, S] i32, see `lookup.TextLookup`; None without lookup


@dataclasses.dataclass(frozen=True)
class Eagle:
  """`EagleHead` as pure functions for the decode loop (`draft.interface.DraftNetwork`).

  Its params are `fc`, `layer` and perhaps `fusion` and `layer_1`, ..., and by reference the target's `embed` [V, D] and
  `head` [U, D], with `ids` [U] i32, the target ids that the head scores. With a draft vocabulary, U < V and
  `whole_head` [V, D] is the target's full head. All matrices but `embed` and `whole_head` may be `Quantised`.
  `lookup_weights` [3] f32, where given, replaces the defaults of `draft.lookup`; `logit_divisor` [] f32 is what the
  target divides its logits by.
  """

  config: Any  # a `DrafterConfig`; subclasses have their own
  dtype: Any = jnp.float32
  fuses: ClassVar[frozenset[str]] = frozenset()  # of its params, those that `fuse_taps` reads

  @property
  def num_layers(self) -> int:
    """Number of its decoder layers, each of which has keys and values in the cache."""
    return self.config.num_layers

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise an EAGLE-2 head at random, and make it this one by `extend`.

    Under `jax.eval_shape` these are the shapes that a checkpoint must have.
    """
    return self.extend(self._draw(dataclasses.replace(self.config, **self.config.PLAIN), key), key)

  def _draw(self, config: Any, key: jax.Array) -> dict[str, Any]:
    column_D1 = jnp.zeros((config.width, 1), self.dtype)
    position_BT = jnp.zeros((1, 1), jnp.int32)
    attentions = (no_attention,) * config.num_layers
    return EagleHead(config).init(key, column_D1, column_D1, position_BT, attentions)['params']

  def extend(self, params: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Add to the parameters of a published head what this one has beyond it; its outputs stay as they are.

    Further layers and GRIFFIN's fusion add nothing yet, and GRIFFIN's two vectors are alike.
    """
    if self.config.is_plain:
      return params
    new = {name: silence(x) for name, x in self._draw(self.config, key).items() if name not in params}
    num_outputs, layer = 2 if self.config.griffin and self.num_layers == 1 else 1, params['layer']
    down = jax.tree.map(lambda x: jnp.concatenate([x] * num_outputs), layer['mlp']['down'])
    return params | new | {'layer': layer | {'mlp': layer['mlp'] | {'down': down}}}

  def fuse_taps(self, params, taps) -> jax.Array:
    """Turn the target's taps into the features [D, B, P] that the layer takes; some kinds take more than D numbers."""
    return taps.feature

  def next_feature(self, params, out_DBW: jax.Array) -> jax.Array:
    """Turn the outputs at nodes into the features [D, B, W] that their children take, as many as of `fuse_taps`."""
    return out_DBW[-self.config.width :]  # of GRIFFIN's two vectors the second

  def pre_head(self, params, out_DR: jax.Array) -> jax.Array:
    """Turn outputs into the inputs of the language-model head, [D, R]."""
    return divide_for_head(params, out_DR[: self.config.width])  # of GRIFFIN's two vectors the first

  def apply_layers(self, params, token_BT, feature_DBT, position_BT, attentions: Sequence[AttentionFn]):
    """Run T pairs of (next token, feature): outputs [D, B, T], and what each layer's attention remembers."""
    own = {'fc', 'fusion', *map(name_of_layer, range(self.num_layers))}
    variables = {'params': {name: x for name, x in params.items() if name in own}}
    embedding_DR = embed(params['embed'], token_BT.reshape(-1)).astype(self.dtype)
    feature_DR = feature_DBT.reshape(feature_DBT.shape[0], -1).astype(self.dtype)
    out: Any = EagleHead(self.config).apply(variables, embedding_DR, feature_DR, position_BT, attentions)
    return out[0].reshape(-1, *feature_DBT.shape[1:]), out[1]

  def forward(
    self, params, token_BT, feature_DBT, position_BT, mask_BTM, cache: KVCache, earlier: NewEntries | None = None
  ) -> tuple[jax.Array, NewEntries]:
    """Run `apply_layers` behind the committed entries and earlier new ones; also return all new entries so far."""
    oldest_BT, mask_BTM = see_window(self.config.as_layer().window, position_BT, mask_BTM)
    before: Any = [None] * len(cache.keys) if earlier is None else zip(*earlier, strict=True)
    attentions = [
      CachedAttention(keys, values, cache.length, mask_BTM, memory, oldest_BT)
      for keys, values, memory in zip(cache.keys, cache.values, before, strict=True)
    ]
    out_DBT, memories = self.apply_layers(params, token_BT, feature_DBT, position_BT, attentions)
    return out_DBT, NewEntries(*zip(*memories, strict=True))

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> EagleState:
    """Read the prompts from an empty cache; see `draft.interface.DraftNetwork.start`."""
    sizes = {'num_layers': self.num_layers, 'batch': len(length_B), 'num_slots': 0}
    empty = kv_cache.init(self.config, **sizes, dtype=self.dtype)
    out_DBL, entries = self.apply_behind(params, empty, token_BL, taps)
    return EagleState(kv_cache.fill(entries, length_B, num_slots=num_slots), take_position(out_DBL, length_B - 1))

  def update(self, params, state: EagleState, token_BP, taps, count_B) -> EagleState:
    """Read what was committed behind the cache; see `draft.interface.DraftNetwork.update`."""
    out_DBP, entries = self.apply_behind(params, state.cache, token_BP, taps)
    newest_BD = take_position(out_DBP, jnp.maximum(count_B - 1, 0))
    feature_BD = jnp.where(count_B[:, None] > 0, newest_BD, state.feature)
    # `append` must write only after everything has read the cache, so its count waits for the output.
    count_B = wait_for(count_B, ~jnp.isnan(newest_BD).any(axis=1))
    return EagleState(kv_cache.append(state.cache, entries, count_B), feature_BD)

  def apply_behind(self, params, cache: KVCache, token_BP, taps) -> tuple[jax.Array, NewEntries]:
    """Run causally over P target positions behind the cache: outputs [D, B, P], and their keys and values."""
    place_BP, causal_BPP = kv_cache.behind(cache, token_BP.shape[1])
    return self.forward(params, token_BP, self.fuse_taps(params, taps), place_BP, causal_BPP, cache)

  def propose(self, params, state: EagleState, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    length_B, lookup = state.cache.length, context.lookup if policy.lookup else None
    children = functools.partial(self.children, params, policy, context)

    def step(drafted: Drafted, frontier: Frontier, depth: jax.Array, fanout: int) -> tuple[Children, Drafted]:
      # A node's feature is the output at its parent; it attends to whatever its parent did, and to itself.
      of_parent_BWM = jnp.take_along_axis(drafted.mask, frontier.parent_slot[..., None], axis=1, mode='clip')
      feature_DBW = jnp.take_along_axis(
        self.next_feature(params, drafted.out), frontier.parent_slot[None], axis=2, mode='clip'
      )
      batch, width = frontier.token.shape
      itself_BWW = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
      mask_BWM = jnp.concatenate([of_parent_BWM, itself_BWW], axis=2)
      position_BW = jnp.broadcast_to(length_B[:, None] + (depth - 1), (batch, width))
      nodes = frontier.token, feature_DBW, position_BW, mask_BWM
      out_DBW, memory = self.forward(params, *nodes, state.cache, drafted.memory)
      match_BWS = drafted.match
      if lookup is not None:
        match_BWS = lookup.descend(match_BWS, frontier.parent_slot, frontier.token)
      kept = jax.tree.map(lambda x_BGMK: x_BGMK[:, :, width:], memory)
      after = Drafted(out_DBW, mask_BWM[..., width:], kept, match_BWS)
      return children(out_DBW, match_BWS, depth, fanout), after

    match_B1S = None if lookup is None else lookup.match()
    feature_DB1 = state.feature.T[..., None]
    roots = children(feature_DB1, match_B1S, 0, policy.fanouts[0])
    width, num_earlier = first_width(policy), sum(policy.widths[1:-1])
    out_DBW = jnp.repeat(feature_DB1, width, axis=2)
    match_BWS = None if match_B1S is None else jnp.repeat(match_B1S, width, axis=1)
    mask_BWM = jnp.zeros((len(root_B), width, num_earlier), bool)
    unused = [jnp.zeros((*kv.shape[:2], num_earlier, kv.shape[3]), kv.dtype) for kv in state.cache.keys]
    memory = NewEntries(tuple(unused), tuple(unused))
    return grow(roots, step, Drafted(out_DBW, mask_BWM, memory, match_BWS), root_B, policy, context)

  def children(
    self, params, policy: TreePolicy, context: DraftContext, out_DBW, match_BWS, depth: int | jax.Array, fanout: int
  ) -> Children:
    """Offer the children of nodes `depth` edges below the root, by outputs and, with lookup, by matches in the text."""
    evidence = None
    if policy.lookup:
      evidence = context.lookup.find_next(match_BWS, params.get('lookup_weights', WEIGHTS))
    noise = functools.partial(context.noise, depth + 1)
    return self.top_children(params, out_DBW, noise, fanout, evidence, has_entropy=policy.needs_entropy)

  def top_children(
    self,
    params,
    out_DBW: jax.Array,
    noise: Callable,
    fanout: int,
    evidence: Evidence | None = None,
    *,
    has_entropy: bool = False,
  ) -> Children:
    """Find the `fanout` likeliest next tokens after each node.

    For greedy decoding these are the reference's, whose confidences are at temperature 1 (`topK_genrate` in cnets.py).
    A sampled token is the best under noise that is known beforehand. The drafter adds the same noise, so its confidence
    predicts the token that will be drawn.

    Args:
      params: the drafter's.
      out_DBW: [D, B, W], outputs at the nodes.
      noise: [n, B] i32 ids -> [n, B] f32.
      fanout: C, static.
      evidence: the token that the text suggests, possibly outside the draft vocabulary; None for none.
      has_entropy: whether to compute entropies, too.
    """
    shape_BW, ids_U = out_DBW.shape[1:], params['ids']
    batch, width = shape_BW
    out_DR = self.pre_head(params, out_DBW.reshape(out_DBW.shape[0], -1)).astype(params['head'].dtype)
    noise_UB = noise(jnp.broadcast_to(ids_U[:, None], (len(ids_U), batch)))
    noise_UR = jnp.repeat(noise_UB, width, axis=1)
    logits_UR = apply_head(params['head'], out_DR) + noise_UR
    logits_nR = logits_UR if evidence is None else self.add_evidence(params, logits_UR, out_DR, noise, evidence)
    log_p_nR = jax.nn.log_softmax(logits_nR, axis=0)
    best = likeliest(log_p_nR.reshape(-1, *shape_BW), fanout, has_entropy=has_entropy)
    token_BWC = jnp.take(ids_U, best.token, mode='clip')
    if evidence is not None:
      token_BWC = jnp.where(best.token < len(ids_U), token_BWC, evidence.token[..., None])
    return best._replace(token=token_BWC)

  def add_evidence(self, params, logits_UR, out_DR, noise: Callable, evidence: Evidence) -> jax.Array:
    """Raise the logits [U, R] of the suggested tokens; with a draft vocabulary, append one logit: [U + 1, R].

    The appended logit is that of a suggested token outside the draft vocabulary, and -inf where there is none.
    """
    token_R, weight_R = evidence.token.reshape(-1), evidence.weight.reshape(-1)
    is_suggested_UR = params['ids'][:, None] == token_R[None]
    logits_UR += jnp.where(is_suggested_UR, weight_R[None], 0)
    if 'whole_head' not in params:
      return logits_UR
    noise_R = noise(evidence.token.T).T.reshape(-1)
    logit_R = einsum_float32('dr,dr->r', embed(params['whole_head'], token_R), out_DR) + noise_R + weight_R
    is_new_R = (token_R != NO_TOKEN) & ~is_suggested_UR.any(axis=0)
    return jnp.concatenate([logits_UR, jnp.where(is_new_R, logit_R, -jnp.inf)[None]])


def divide_for_head(params, out_DR: jax.Array) -> jax.Array:
  """Divide what the target's head reads, where the target divides its logits."""
  return out_DR / params['logit_divisor'].astype(out_DR.dtype) if 'logit_divisor' in params else out_DR


def take_position(out_DBP: jax.Array, index_B: jax.Array) -> jax.Array:
  """Take the outputs at one position of each sequence: [B, D]."""
  return jnp.take_along_axis(out_DBP, index_B[None, :, None], axis=2, mode='clip')[..., 0].T
