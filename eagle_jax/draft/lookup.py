"""What the text itself suggests: the token that followed the longest earlier match of what was said last.

Prompt lookup (SYSTEMS.md section 2.5) drafts that token and no other; SAM-Decoding (2.6) leaves the choice between it
and a drafter's tree to the match's length. Here it is evidence: it raises one logit of the drafter, so both stand in
one distribution, and tree policies, noise and calibration see nothing but a better drafter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.tree import NO_TOKEN

MAX_MATCH = 16  # tokens; a longer match counts as one of so many
# Nats for a match of m tokens: FIRST + GROWTH * ln(m). The likeliest weights for 1, 2, 4, 8 and 16 tokens, fitted one
# by one on 70 greedy answers of SmolLM2, were 1.5, 2.75, 4, 5.75 and 9; at temperature 1, 1.75, 2.75, 3.75, then 4.5.
FIRST, GROWTH = 1.5, 2.0


class Evidence(NamedTuple):
  """What followed an earlier match."""

  token: jax.Array  # [B, W] i32, a target id; NO_TOKEN where nothing matched
  weight: jax.Array  # [B, W] f32, nats to be added to its logit


class Lookup(NamedTuple):
  """The text of each row, to be looked into."""

  text: jax.Array  # [B, S] i32
  newest: jax.Array  # [B] i32, where its last token stands

  def path(self) -> jax.Array:
    """[B, 1, MAX_MATCH] i32: the newest tokens of each row, the last first. A path through a tree goes on from it."""
    place_BM = self.newest[:, None] - jnp.arange(MAX_MATCH)[None]
    token_BM = jnp.take_along_axis(self.text, place_BM, axis=1, mode='clip')
    return jnp.where(place_BM >= 0, token_BM, NO_TOKEN)[:, None]

  def after(self, path_BWM: jax.Array) -> Evidence:
    """What followed the longest earlier match of each path, of equally long ones the last.

    All places are compared at once, in MAX_MATCH x S steps of a vector unit.

    Args:
      path_BWM: [B, W, MAX_MATCH] i32, the newest tokens of each path, the last first.
    """
    num_slots = self.text.shape[1]
    index_11S = jnp.arange(num_slots)[None, None]
    agrees_BWS = jnp.broadcast_to(index_11S < self.newest[:, None, None], (*path_BWM.shape[:2], num_slots))
    length_BWS = jnp.zeros(agrees_BWS.shape, jnp.int32)
    for m in range(MAX_MATCH):
      back_BS = jnp.pad(self.text, ((0, 0), (m, 0)))[:, :num_slots]  # what stood m places before
      agrees_BWS &= (back_BS[:, None] == path_BWM[..., m, None]) & (index_11S >= m)
      length_BWS += agrees_BWS.astype(jnp.int32)
    length_BW = length_BWS.max(axis=2)
    place_BW = jnp.where(length_BWS == length_BW[..., None], index_11S, 0).max(axis=2)
    is_found_BW = length_BW > 0
    token_BW = jnp.take_along_axis(self.text, place_BW + 1, axis=1, mode='clip')
    weight_BW = FIRST + GROWTH * jnp.log(jnp.maximum(length_BW, 1).astype(jnp.float32))
    return Evidence(jnp.where(is_found_BW, token_BW, NO_TOKEN), jnp.where(is_found_BW, weight_BW, 0.0))


def extended(path_NM: jax.Array, token_n: jax.Array) -> jax.Array:
  """[n, M] i32: paths one token longer. Of paths of no length, which nobody looks up, there are none."""
  return jnp.concatenate([token_n[:, None], path_NM], axis=1)[:, : path_NM.shape[1]]
