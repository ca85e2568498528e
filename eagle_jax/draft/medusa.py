"""Medusa's heads (arXiv:2401.10774): each drafts one depth of the tree, all of them from the target's newest feature.

The target draws x_{t+1} from its feature f_t; head d reads f_t too, and predicts x_{t+2+d}. It knows nothing of what is
drafted above, so all nodes of a depth offer the same children, and the log-probabilities along a path are added. Only
with lookup do siblings differ: each also offers what followed its own path in the text.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.config import MedusaConfig
from eagle_jax.draft.eagle import divide_for_head, take_position
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.one_pass import Depths
from eagle_jax.kernels.einsum import einsum_float32
from eagle_jax.kernels.int8 import Quantised
from eagle_jax.models.layers import apply_head
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates


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
    logits_UdB = self.score(params, self.read(params, feature_BD.T, min(policy.max_depth, self.config.max_depth)))
    return Depths.of(logits_UdB, params['ids'], policy, context)

  def propose(self, params, state: jax.Array, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    return self.depths(params, state, policy, context).grow(params, root_B, policy, context)


def multiply_each(weight_dOI: Any, x_dIR: jax.Array) -> jax.Array:
  """Multiply the matrix of each head with its own columns: [d, O, R] f32."""
  if isinstance(weight_dOI, Quantised):
    each = (jax.tree.map(lambda x, head=head: x[head], weight_dOI) for head in range(len(x_dIR)))
    return jnp.stack([one.times(x_IR) for one, x_IR in zip(each, x_dIR, strict=True)])
  return einsum_float32('doi,dir->dor', weight_dOI, x_dIR)
