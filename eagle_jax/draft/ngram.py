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
  """The text of each row, to be looked into.

  What is remembered of a path (the text, or the text and drafted tokens behind it) is its match [B, W, S] i32: of how
  many of the path's newest tokens those up to each place are a copy. One token more, and copies that go on with it are
  one longer, a place further; all others end.
  """

  text: jax.Array  # [B, S] i32
  newest: jax.Array  # [B] i32, where its last token stands

  def match(self) -> jax.Array:
    """[B, 1, S] i32, of the text's own end."""
    match_B1S = jnp.zeros_like(self.text)[:, None]
    for back in reversed(range(MAX_MATCH)):
      place_B1 = self.newest[:, None] - back
      token_B1 = jnp.take_along_axis(self.text, place_B1, axis=1, mode='clip')
      match_B1S = self.extended(match_B1S, jnp.where(place_B1 >= 0, token_B1, NO_TOKEN))
    return match_B1S

  def extended(self, match_BWS: jax.Array, token_BW: jax.Array) -> jax.Array:
    """[B, W, S] i32, of each path with one token more. What the newest token would match is itself: it counts not."""
    index_1S = jnp.arange(self.text.shape[1])[None]
    earlier_BS = jnp.where(index_1S < self.newest[:, None], self.text, NO_TOKEN)
    agrees_BWS = (earlier_BS[:, None] == token_BW[..., None]) & (token_BW[..., None] != NO_TOKEN)
    before_BWS = jnp.pad(match_BWS[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return jnp.where(agrees_BWS, jnp.minimum(before_BWS + 1, MAX_MATCH), 0)

  def after(self, match_BWS: jax.Array) -> Evidence:
    """What followed the longest earlier match of each path, of equally long ones the last."""
    length_BW = match_BWS.max(axis=2)
    index_11S = jnp.arange(match_BWS.shape[2])[None, None]
    place_BW = jnp.where(match_BWS == length_BW[..., None], index_11S, 0).max(axis=2)
    token_BW = jnp.take_along_axis(self.text, place_BW + 1, axis=1, mode='clip')
    weight_BW = FIRST + GROWTH * jnp.log(jnp.maximum(length_BW, 1).astype(jnp.float32))
    is_found_BW = length_BW > 0
    return Evidence(jnp.where(is_found_BW, token_BW, NO_TOKEN), jnp.where(is_found_BW, weight_BW, 0.0))
