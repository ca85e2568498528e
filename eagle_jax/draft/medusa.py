"""Medusa's heads (arXiv:2401.10774): each drafts one depth of the tree, all of them from the target's newest feature.

The target draws x_{t+1} from its feature f_t; head d reads f_t too, and predicts x_{t+2+d}. It knows nothing of what is
drafted above, so all nodes of a depth offer the same children, and the log-probabilities along a path are added. Only
with lookup do siblings differ: each also offers what followed its own path in the text.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.config import MedusaConfig
from eagle_jax.draft.eagle import divide_for_head, take_position
from eagle_jax.draft.expand import Children, Frontier, first_width, grow, likeliest
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import WEIGHTS, Evidence
from eagle_jax.kernels.einsum import einsum_float32
from eagle_jax.kernels.int8 import Quantised
from eagle_jax.models.layers import apply_head
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import NO_TOKEN, Candidates


class Depths(NamedTuple):
  """What the heads say of each depth d below the root, whatever was drafted above."""

  best: Children  # fields [d, B, C], likeliest first, and entropies [d, B]
  log_p: jax.Array  # [d, B, U] f32, of all drafted ids

  def offer(self, depth: int | jax.Array, width: int, fanout: int) -> Children:
    """Offer the same children to all nodes of a level; none below the last head."""

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


@dataclasses.dataclass(frozen=True)
class Medusa:
  """Medusa's heads as a `draft.interface.DraftNetwork`; its state is the newest feature, [B, D].

  Its params are `block_0`, `block_1`, ..., each with `weight` [d, D, D] and `bias` [d, D] of all heads; `head`, the
  target's [U, D], or [d, U, D] if each has its own; and `ids` [U] i32, the target ids that are scored.
  `lookup_weights` and `logit_divisor` are those of `draft.eagle.Eagle`.
  """

  config: MedusaConfig
  dtype: Any = jnp.float32

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise blocks that change nothing, and heads of their own at random."""
    c, init = self.config, nn.initializers.lecun_normal(in_axis=-1, out_axis=1, batch_axis=(0,))
    shapes = {'weight': (c.max_depth, c.width, c.width), 'bias': (c.max_depth, c.width)}
    block = {name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()}
    head = {'head': {'weight': init(key, (c.max_depth, c.num_ids, c.width), self.dtype)}} if c.own_heads else {}
    return {f'block_{layer}': block for layer in range(c.num_layers)} | head

  def read(self, params, feature_DR: jax.Array, num_heads: int) -> jax.Array:
    """Run features through the residual blocks of the first heads: [D, d, R]."""
    x_dDR = jnp.broadcast_to(feature_DR.astype(self.dtype), (num_heads, *feature_DR.shape))
    for layer in range(self.config.num_layers):
      block = jax.tree.map(lambda x: x[:num_heads], params[f'block_{layer}'])
      y_dDR = multiply_each(block['weight'], x_dDR).astype(self.dtype)
      x_dDR += nn.silu(y_dDR + block['bias'][..., None])
    return x_dDR.swapaxes(0, 1)

  def pre_head(self, params, out_DR: jax.Array) -> jax.Array:
    """Turn outputs into the inputs of the language-model heads; see `draft.eagle.Eagle.pre_head`."""
    return divide_for_head(params, out_DR)

  def score(self, params, out_DdB: jax.Array) -> jax.Array:
    """Apply the language-model heads: logits [U, d, B] f32."""
    head, (width, num_heads, batch) = params['head'], out_DdB.shape
    read_DdB = self.pre_head(params, out_DdB).astype(head.dtype)
    if not self.config.own_heads:
      return apply_head(head, read_DdB.reshape(width, -1)).reshape(-1, num_heads, batch)
    first_dUD = jax.tree.map(lambda x: x[:num_heads], head)
    return multiply_each(first_dUD, read_DdB.swapaxes(0, 1)).swapaxes(0, 1)

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> jax.Array:
    return take_position(taps.feature, length_B - 1)

  def update(self, params, state: jax.Array, token_BP, taps, count_B) -> jax.Array:
    newest_BD = take_position(taps.feature, jnp.maximum(count_B - 1, 0))
    return jnp.where(count_B[:, None] > 0, newest_BD, state)

  def depths(self, params, feature_BD: jax.Array, policy: TreePolicy, context: DraftContext) -> Depths:
    """Run as many heads as the policy has levels."""
    (batch, _), ids_U, num_heads = feature_BD.shape, params['ids'], min(policy.max_depth, self.config.max_depth)
    id_UB = jnp.broadcast_to(ids_U[:, None], (len(ids_U), batch))
    noise_UdB = jnp.stack([context.noise(depth + 1, id_UB) for depth in range(num_heads)], axis=1)
    logits_UdB = self.score(params, self.read(params, feature_BD.T, num_heads)) + noise_UdB
    log_p_UdB = jax.nn.log_softmax(logits_UdB, axis=0)
    best = likeliest(log_p_UdB, max(policy.fanouts), has_entropy=policy.needs_entropy)
    return Depths(best._replace(token=jnp.take(ids_U, best.token, mode='clip')), log_p_UdB.transpose(1, 2, 0))

  def propose(self, params, state: jax.Array, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    lookup, depths = context.lookup if policy.lookup else None, self.depths(params, state, policy, context)

    def children(match_BWS, depth: int | jax.Array, width: int, fanout: int) -> Children:
      offered = depths.offer(depth, width, fanout)
      if lookup is None:
        return offered
      evidence = lookup.find_next(match_BWS, params.get('lookup_weights', WEIGHTS))
      return add_evidence(offered, evidence, depths.log_p_of(depth, params['ids'], evidence.token))

    def step(match_BWS, frontier: Frontier, depth: jax.Array, fanout: int) -> tuple[Children, Any]:
      if lookup is not None:
        match_BWS = lookup.descend(match_BWS, frontier.parent_slot, frontier.token)
      return children(match_BWS, depth, frontier.token.shape[1], fanout), match_BWS

    match_B1S = None if lookup is None else lookup.match()
    roots = children(match_B1S, 0, 1, policy.fanouts[0])
    match_BWS = None if match_B1S is None else jnp.repeat(match_B1S, first_width(policy), axis=1)
    return grow(roots, step, match_BWS, root_B, policy, context)


def multiply_each(weight_dOI: Any, x_dIR: jax.Array) -> jax.Array:
  """Multiply the matrix of each head with its own columns: [d, O, R] f32."""
  if isinstance(weight_dOI, Quantised):
    each = (jax.tree.map(lambda x, head=head: x[head], weight_dOI) for head in range(len(x_dIR)))
    return jnp.stack([one.times(x_IR) for one, x_IR in zip(each, x_dIR, strict=True)])
  return einsum_float32('doi,dir->dor', weight_dOI, x_dIR)


def add_evidence(children: Children, evidence: Evidence, log_p_BW: jax.Array) -> Children:
  """Raise the logit of each node's suggested token, whose log-probability is `log_p_BW`, before the best are taken."""
  own_BW1, weight_BW1, token_BW1 = log_p_BW[..., None], evidence.weight[..., None], evidence.token[..., None]
  others_BWC = jnp.where(children.token == token_BW1, -jnp.inf, children.log_p)
  raised_BWn = jnp.concatenate([own_BW1 + weight_BW1, others_BWC], axis=2)
  log_total_BW1 = jnp.log1p(jnp.exp(own_BW1) * jnp.expm1(weight_BW1))
  log_p_BWC, index_BWC = jax.lax.top_k(raised_BWn - log_total_BW1, children.token.shape[2])
  token_BWn = jnp.concatenate([token_BW1, children.token], axis=2)
  return Children(jnp.take_along_axis(token_BWn, index_BWC, axis=2, mode='clip'), log_p_BWC)
