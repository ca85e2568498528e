"""What drafters share that fill all depths of a tree in one pass, so that no depth knows what is drafted above it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import TargetConfig
from eagle_jax.draft.expand import Children, Frontier, first_width, grow, likeliest
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import WEIGHTS, Evidence
from eagle_jax.models.layers import CachedAttention, DecoderLayer, Rotation, apply_head, no_attention
from eagle_jax.models.transformer import see_window
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import NO_TOKEN, Candidates


class Depths(NamedTuple):
  """What a drafter says of each depth d below the root, whatever was drafted above."""

  best: Children  # fields [d, B, C], likeliest first, and entropies [d, B]
  log_p: jax.Array  # [d, B, U] f32, of all drafted ids

  @classmethod
  def of(cls, logits_UdB: jax.Array, ids_U: jax.Array, policy: TreePolicy, context: DraftContext) -> 'Depths':
    """Turn logits f32 of the drafted ids into what is offered, with the target's noise."""
    num_ids, num_depths, batch = logits_UdB.shape
    id_UB = jnp.broadcast_to(ids_U[:, None], (num_ids, batch))
    noise_UdB = jnp.stack([context.noise(depth + 1, id_UB) for depth in range(num_depths)], axis=1)
    log_p_UdB = jax.nn.log_softmax(logits_UdB + noise_UdB, axis=0)
    best = likeliest(log_p_UdB, max(policy.fanouts), has_entropy=policy.needs_entropy)
    return cls(best._replace(token=jnp.take(ids_U, best.token, mode='clip')), log_p_UdB.transpose(1, 2, 0))

  def offer(self, depth: int | jax.Array, width: int, fanout: int) -> Children:
    """Offer the same children to all nodes of a level; none below the last depth."""

    def take(x_dB, nothing):
      x_B = jnp.take(x_dB, depth, axis=0, mode='fill', fill_value=nothing)
      return jnp.repeat(x_B[:, None], width, axis=1)

    token_BWC, log_p_BWC = take(self.best.token, NO_TOKEN), take(self.best.log_p, -jnp.inf)
    entropy_BW = None if self.best.entropy is None else take(self.best.entropy, 0.0)
    return Children(token_BWC[..., :fanout], log_p_BWC[..., :fanout], entropy_BW)

  def log_p_of(self, depth: int | jax.Array, ids_U: jax.Array, token_BW: jax.Array) -> jax.Array:
    """Look up log-probabilities of tokens as children at a level, [B, W]; -inf for ids that are not drafted."""
    log_p_BU = jnp.take(self.log_p, depth, axis=0, mode='fill', fill_value=-jnp.inf)
    is_it_BWU = token_BW[..., None] == ids_U[None, None]
    log_p_BW = jnp.take_along_axis(log_p_BU, jnp.argmax(is_it_BWU, axis=2), axis=1)
    return jnp.where(is_it_BWU.any(axis=2), log_p_BW, -jnp.inf)

  def grow(self, params, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""

    def offer(token_BW, evidence: Evidence | None, depth: int | jax.Array, fanout: int) -> Children:
      offered = self.offer(depth, token_BW.shape[1], fanout)
      if evidence is None:
        return offered
      return add_evidence(offered, evidence, self.log_p_of(depth, params['ids'], evidence.token))

    return grow_levels(offer, params, root_B, policy, context)


def grow_levels(
  offer: Callable[..., Children], params, root_B: jax.Array, policy: TreePolicy, context: DraftContext
) -> Candidates:
  """Grow every sequence's candidates, if levels need nothing of the network any more.

  Args:
    offer: (tokens of the nodes [B, W], evidence or None, depth, fanout) -> their children; the root's depth is an int.
    params: the drafter's.
    root_B, policy, context: see `draft.interface.DraftNetwork.propose`.
  """
  lookup = context.lookup if policy.lookup else None

  def children(token_BW, match_BWS, depth: int | jax.Array, fanout: int) -> Children:
    evidence = None
    if lookup is not None:
      evidence = lookup.find_next(match_BWS, params.get('lookup_weights', WEIGHTS))
    return offer(token_BW, evidence, depth, fanout)

  def step(match_BWS, frontier: Frontier, depth: jax.Array, fanout: int) -> tuple[Children, Any]:
    if lookup is not None:
      match_BWS = lookup.descend(match_BWS, frontier.parent_slot, frontier.token)
    return children(frontier.token, match_BWS, depth, fanout), match_BWS

  match_B1S = None if lookup is None else lookup.match()
  roots = children(root_B[:, None], match_B1S, 0, policy.fanouts[0])
  match_BWS = None if match_B1S is None else jnp.repeat(match_B1S, first_width(policy), axis=1)
  return grow(roots, step, match_BWS, root_B, policy, context)


def add_evidence(children: Children, evidence: Evidence, log_p_BW: jax.Array) -> Children:
  """Raise the logit of each node's suggested token, whose log-probability is `log_p_BW`, before the best are taken."""
  own_BW1, weight_BW1, token_BW1 = log_p_BW[..., None], evidence.weight[..., None], evidence.token[..., None]
  others_BWC = jnp.where(children.token == token_BW1, -jnp.inf, children.log_p)
  raised_BWn = jnp.concatenate([own_BW1 + weight_BW1, others_BWC], axis=2)
  log_total_BW1 = jnp.log1p(jnp.exp(own_BW1) * jnp.expm1(weight_BW1))
  log_p_BWC, index_BWC = jax.lax.top_k(raised_BWn - log_total_BW1, children.token.shape[2])
  token_BWn = jnp.concatenate([token_BW1, children.token], axis=2)
  return Children(jnp.take_along_axis(token_BWn, index_BWC, axis=2, mode='clip'), log_p_BWC)


def score_depths(head_UD: Any, out_DBd: jax.Array, pre_head: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Apply the language-model head to the outputs of all depths: logits [U, d, B] f32."""
  width, batch, num_depths = out_DBd.shape
  read_DR = pre_head(out_DBd.swapaxes(1, 2).reshape(width, -1)).astype(head_UD.dtype)
  return apply_head(head_UD, read_DR).reshape(-1, num_depths, batch)


class See(NamedTuple):
  """What the columns of a pass see in one layer."""

  window: int | None  # so many positions, each its own included; None: all
  mask: jax.Array  # [B, T, T] bool, which of the new columns


def init_layers(layer: TargetConfig, keys: jax.Array, dtype: Any) -> list[Any]:
  """Initialise like decoder layers at random, one for each key; return the parameters of each."""
  column_D1, rotation = jnp.zeros((layer.width, 1), dtype), Rotation.of(layer, jnp.zeros((1, 1), jnp.int32))
  return [DecoderLayer(layer).init(key, column_D1, rotation, no_attention)['params'] for key in keys]


def run_layers(
  layer: TargetConfig,
  layers: Sequence[Any],
  x_DR: jax.Array,
  position_BT: jax.Array,
  sees: Sequence[See],
  cache: KVCache,
) -> tuple[jax.Array, NewEntries]:
  """Run T columns of each sequence through like decoder layers behind a cache, which is only read.

  Args:
    layer: of all of them.
    layers: the parameters of each.
    x_DR: [D, B x T].
    position_BT: [B, T] i32.
    sees: what the columns see in each layer.
    cache: of these layers.

  Returns:
    Outputs [D, R], and the new entries.
  """
  rotation, new = Rotation.of(layer, position_BT), []
  for params, see, keys, values in zip(layers, sees, cache.keys, cache.values, strict=True):
    oldest_BT, mask_BTT = see_window(see.window, position_BT, see.mask)
    attention = CachedAttention(keys, values, cache.length, mask_BTT, None, oldest_BT)
    x_DR, entries = DecoderLayer(layer).apply({'params': params}, x_DR, rotation, attention)
    new.append(entries)
  return x_DR, NewEntries(*zip(*new, strict=True))
