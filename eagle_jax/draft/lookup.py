"""Find the token that followed the longest earlier match of the newest tokens in the text.

Prompt lookup decoding (Saxena, 2023) drafts only that token; SAM-Decoding (arXiv:2411.10666) chooses between it and a
drafter's tree by the length of the match. Here the match is evidence that raises one logit of the drafter. Both
predictions end in one distribution, so tree policies, noise and calibration work unchanged. With the numbers of `ROUTE`
a long match decides alone, and a short one says nothing: that is SAM-Decoding's choice, made anew at every node.
`draft.ngram` drafts from the matches alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.tree import NO_TOKEN

MAX_MATCH = 16  # tokens; a longer match counts as this many
# (first, growth, least): a match of m tokens raises a logit by first + growth * ln(m) nats, if m is at least `least`.
# Chosen among a few on thirty questions to SmolLM2-135M-Instruct, greedy and sampled.
WEIGHTS = 1.0, 1.3, 1.0
ROUTE = 60.0, 0.0, 5.0  # so many nats outweigh any logit


class Evidence(NamedTuple):
  """The token that followed the longest earlier match of each path."""

  token: jax.Array  # [B, W] i32, a target id; NO_TOKEN where nothing matched
  weight: jax.Array  # [B, W] f32, nats to add to its logit


class TextLookup(NamedTuple):
  """The text of each sequence, searchable for earlier matches of a path.

  A path is the text followed by drafted tokens. Its match, [B, W, S] i32, holds for each position of the text how many
  of the path's newest tokens equal the tokens that end there. When the path grows by a token, matches that continue
  with it grow by one and move on by one position; all others become 0.
  """

  text: jax.Array  # [B, S] i32
  newest: jax.Array  # [B] i32, the position of the last token

  def match(self) -> jax.Array:
    """Match the end of the text: [B, 1, S] i32."""
    match_B1S = jnp.zeros_like(self.text)[:, None]
    for back in reversed(range(MAX_MATCH)):
      place_B1 = self.newest[:, None] - back
      token_B1 = jnp.take_along_axis(self.text, place_B1, axis=1, mode='clip')
      match_B1S = self.extend(match_B1S, jnp.where(place_B1 >= 0, token_B1, NO_TOKEN))
    return match_B1S

  def extend(self, match_BWS: jax.Array, token_BW: jax.Array) -> jax.Array:
    """Extend each path's match by one token: [B, W, S] i32. The last token would match itself, so it is left out."""
    index_1S = jnp.arange(self.text.shape[1])[None]
    earlier_BS = jnp.where(index_1S < self.newest[:, None], self.text, NO_TOKEN)
    agrees_BWS = (earlier_BS[:, None] == token_BW[..., None]) & (token_BW[..., None] != NO_TOKEN)
    before_BWS = jnp.pad(match_BWS[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return jnp.where(agrees_BWS, jnp.minimum(before_BWS + 1, MAX_MATCH), 0)

  def descend(self, match_BWS: jax.Array, parent_slot_BW: jax.Array, token_BW: jax.Array) -> jax.Array:
    """Extend the match of each node's parent, named by its place in the level above, by the node's own token."""
    of_parent_BWS = jnp.take_along_axis(match_BWS, parent_slot_BW[..., None], axis=1, mode='clip')
    return self.extend(of_parent_BWS, token_BW)

  def find_next(self, match_BWS: jax.Array, weights: Sequence[Any] | jax.Array = WEIGHTS) -> Evidence:
    """Find the token that followed the longest earlier match of each path; of equally long matches, the latest.

    Args:
      match_BWS: [B, W, S] i32, matches of the paths.
      weights: three f32 numbers; see `WEIGHTS`.
    """
    length_BW = match_BWS.max(axis=2)
    index_11S = jnp.arange(match_BWS.shape[2])[None, None]
    place_BW = jnp.where(match_BWS == length_BW[..., None], index_11S, 0).max(axis=2)
    token_BW = jnp.take_along_axis(self.text, place_BW + 1, axis=1, mode='clip')
    weight_BW = match_weights(length_BW, weights)
    is_found_BW = weight_BW > -jnp.inf
    return Evidence(jnp.where(is_found_BW, token_BW, NO_TOKEN), jnp.where(is_found_BW, weight_BW, 0.0))


def match_weights(length: jax.Array, weights: Sequence[Any] | jax.Array = WEIGHTS) -> jax.Array:
  """Return what matches of so many tokens add to a logit, f32 nats; -inf if too short. `weights` as in `find_next`."""
  first, growth, least = weights
  length = length.astype(jnp.float32)
  return jnp.where(length >= jnp.maximum(least, 1), first + growth * jnp.log(jnp.maximum(length, 1)), -jnp.inf)
