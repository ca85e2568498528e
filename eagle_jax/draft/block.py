"""The block drafter: an EAGLE head that drafts all depths in one pass, by slots, and corrects each by the token above.

The committed text is read as by EAGLE-2, whose output at the newest place predicts the root's children. Behind it stand
slots, one for each further depth, with a learned vector in place of what is not known yet (P-EAGLE, arXiv:2602.01469;
DFlash, arXiv:2602.06036). A slot knows nothing of the tokens drafted above it. So each node adds a correction that its
own token gives, of low rank, and its children depend on it (DSpark, arXiv:2607.05147; TreeFlash, arXiv:2606.03819). A
level of a tree then costs that and the language-model head, but no layer.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.config import BlockConfig
from eagle_jax.draft.eagle import Eagle, EagleState
from eagle_jax.draft.expand import Children
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import Evidence
from eagle_jax.draft.one_pass import grow_levels
from eagle_jax.models.layers import AttentionFn, embed, project
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import NO_TOKEN, Candidates


@dataclasses.dataclass(frozen=True)
class Block(Eagle):
  """`Eagle` with slots, and with `slot` [D], `above` [r, D] and `below` [D, r] in its params.

  Features of 2D numbers mark slots: zeros, then the vector. `fc` gives the same for all slots, to which it is added.
  """

  config: BlockConfig

  def extend(self, params: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Add slots that hold nothing, and a correction that is none."""
    rank, width, dtype = self.config.rank, self.config.width, self.dtype
    above_rD = nn.initializers.lecun_normal(in_axis=-1, out_axis=0)(key, (rank, width), dtype)
    return super().extend(params, key) | {
      'slot': {'bias': jnp.zeros(width, dtype)},
      'above': {'weight': above_rD},
      'below': {'weight': jnp.zeros((width, rank), dtype)},
    }

  def next_feature(self, params, out_DBW: jax.Array) -> jax.Array:
    """Return what slots read, whatever came out above."""
    slot_DBW = jnp.broadcast_to(params['slot']['bias'][:, None, None], out_DBW.shape).astype(out_DBW.dtype)
    return jnp.concatenate([jnp.zeros_like(out_DBW), slot_DBW])

  def apply_layers(self, params, token_BT, feature_DBT, position_BT, attentions: Sequence[AttentionFn]):
    """Run places of the text as `Eagle`; slots read no token, and their outputs are corrected by those given."""
    if feature_DBT.shape[0] == self.config.width:
      return super().apply_layers(params, token_BT, feature_DBT, position_BT, attentions)
    out_DBT, memories = super().apply_layers(params, jnp.zeros_like(token_BT), feature_DBT, position_BT, attentions)
    return self.correct(params, out_DBT, token_BT), memories

  def correct(self, params, out_DBW: jax.Array, token_BW: jax.Array) -> jax.Array:
    """Add what the token above tells of the next one; nothing where it is NO_TOKEN."""
    embedding_DR = embed(params['embed'], token_BW.reshape(-1)).astype(self.dtype)
    hidden_rR = nn.silu(project(embedding_DR, **params['above']))
    correction_DBW = project(hidden_rR, **params['below']).reshape(out_DBW.shape)
    return out_DBW + jnp.where(token_BW[None] == NO_TOKEN, 0, correction_DBW)

  def fill_slots(self, params, state: EagleState, num_slots: int) -> jax.Array:
    """Run the slots of depths 1, 2, ... behind the committed text: outputs [D, B, d], not corrected."""
    batch, width = state.feature.shape
    none_Bd = jnp.full((batch, num_slots), NO_TOKEN)
    feature_DBd = self.next_feature(params, jnp.zeros((width, batch, num_slots), self.dtype))
    return self.forward(params, none_Bd, feature_DBd, *kv_cache.behind(state.cache, num_slots), state.cache)[0]

  def propose(self, params, state: EagleState, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    slots_DBd = self.fill_slots(params, state, max(policy.max_depth - 1, 1))

    def offer(token_BW, evidence: Evidence | None, depth: int | jax.Array, fanout: int) -> Children:
      if isinstance(depth, int):  # of the root
        out_DBW = state.feature.T[..., None]
      else:
        slot_DB1 = jax.lax.dynamic_index_in_dim(slots_DBd, depth - 1, axis=2)
        out_DBW = self.correct(params, jnp.repeat(slot_DB1, token_BW.shape[1], axis=2), token_BW)
      noise = functools.partial(context.noise, depth + 1)
      return self.top_children(params, out_DBW, noise, fanout, evidence, has_entropy=policy.needs_entropy)

    return grow_levels(offer, params, root_B, policy, context)
