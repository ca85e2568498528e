"""A drafter without weights, which drafts tokens that followed earlier matches in the text.

Prompt lookup decoding (Saxena, 2023) as a tree: each node offers the tokens that followed the longest earlier matches
of its path, the latest first among equally long ones. It pays off where a text repeats its prompt or itself, as in
edits and summaries.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import DrafterBase, TargetConfig
from eagle_jax.draft.expand import Children, Frontier, first_width, grow
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import TextLookup, match_weights
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import NO_TOKEN, Candidates


@dataclasses.dataclass(frozen=True)
class NgramConfig(DrafterBase):
  """The target's sizes that the drafter must match."""

  vocab_size: int
  target_width: int
  name: str = 'ngram'
  draft_vocab_size: None = None  # it may draft all ids
  HAS_FIXED_IDS: ClassVar[bool] = True

  @classmethod
  def for_target(cls, target: TargetConfig) -> 'NgramConfig':
    return cls(target.vocab_size, target.width)


@dataclasses.dataclass(frozen=True)
class Ngram(NoDrafter):
  """The n-gram drafter as a `draft.interface.DraftNetwork`; its state is empty, since the context holds the text."""

  config: NgramConfig
  dtype: Any = jnp.float32
  counts_all: ClassVar[bool] = False  # see `suggest`

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates from the matches of its paths."""
    lookup = context.lookup

    def step(match_BWS, frontier: Frontier, depth: jax.Array, fanout: int) -> tuple[Children, jax.Array]:
      match_BWS = lookup.descend(match_BWS, frontier.parent_slot, frontier.token)
      return suggest(lookup, match_BWS, fanout, counts_all=self.counts_all), match_BWS

    match_B1S = lookup.match()
    roots = suggest(lookup, match_B1S, policy.fanouts[0], counts_all=self.counts_all)
    return grow(roots, step, jnp.repeat(match_B1S, first_width(policy), axis=1), root_B, policy, context)


def suggest(lookup: TextLookup, match_BWS: jax.Array, fanout: int, *, counts_all: bool = False) -> Children:
  """Find `fanout` different tokens that followed the longest earlier matches of each path, likeliest first.

  Their log-probabilities are a softmax over the weights of their matches (see `lookup.WEIGHTS`) and one logit of 0 that
  stands for all other tokens.

  Args:
    lookup: the text.
    match_BWS: [B, W, S] i32, matches of the paths.
    fanout: C, static; where fewer tokens followed matches, the rest are NO_TOKEN with -inf.
    counts_all: whether the exponentials of the weights of all matches that a token followed add up, not the longest's
      alone.
  """
  next_BS = jnp.pad(lookup.text[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)
  tokens, weights = [], []
  for _ in range(fanout):
    found = lookup.find_next(match_BWS)
    is_next_BWS = next_BS[:, None] == found.token[..., None]
    weight_BW = found.weight
    if counts_all:
      weight_BW = jax.nn.logsumexp(jnp.where(is_next_BWS, match_weights(match_BWS), -jnp.inf), axis=2)
    tokens.append(found.token)
    weights.append(jnp.where(found.token != NO_TOKEN, weight_BW, -jnp.inf))
    match_BWS = jnp.where(is_next_BWS, 0, match_BWS)  # the next one is another token
  weight_BWC = jnp.stack(weights, axis=2)
  none_BW1 = jnp.zeros((*weight_BWC.shape[:2], 1))
  log_p_BWC = jax.nn.log_softmax(jnp.concatenate([weight_BWC, none_BW1], axis=2), axis=2)[..., :-1]
  token_BWC = jnp.stack(tokens, axis=2)
  if counts_all:  # a token of many short matches may come before one of a longer match
    log_p_BWC, order_BWC = jax.lax.top_k(log_p_BWC, fanout)
    token_BWC = jnp.take_along_axis(token_BWC, order_BWC, axis=2)
  return Children(token_BWC, log_p_BWC)
