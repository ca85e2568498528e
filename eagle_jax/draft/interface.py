"""Drafters: what proposes trees. What the decode loop asks of one."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from eagle_jax.draft.ngram import Lookup
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates


class Outlook(NamedTuple):
  """What a proposal may look at, besides what its network knows."""

  # (depth, [U, B] i32 target ids) -> [U, B] f32: what the target adds to the logits of these ids when it draws the
  # token of each row so many edges below the root.
  noise: Callable[[int | jax.Array, jax.Array], jax.Array]
  # (depth, [B, W] f32 log-probabilities of a frontier there) -> [] bool, or True: is it worth drafting its children?
  is_level_worth: Callable[[int | jax.Array, jax.Array], Any]
  lookup: Lookup | None = None  # the text so far, if the policy looks things up in it


class DraftNetwork(Protocol):
  """Pure functions over parameters; static and hashable."""

  def init(self, batch: int, num_slots: int) -> Any:
    """The state before any text, a pytree."""
    ...

  def follow(self, params, state, token_BP: jax.Array, taps: Any) -> Any:
    """Reads on along target rows that may be committed, and keeps nothing: a pytree for `absorb`.

    Args:
      token_BP: [B, P] i32, the token *after* each of P target rows.
      taps: what the target showed at those rows, arrays [..., B, P].
    """
    ...

  def absorb(self, state, followed: Any, count_B: jax.Array) -> Any:
    """Takes in what was committed.

    Args:
      followed: what `follow` returned.
      count_B: [B] i32, how many of the P rows count. 0 leaves a batch row as it is.
    """
    ...

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, outlook: Outlook) -> Candidates:
    """What the trees may be made of, [B, A] fields, each rooted at the newest token `root_B` [B] i32."""
    ...
