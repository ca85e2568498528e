"""Drafters: what proposes trees. What the decode loop asks of one."""

from typing import Any, Protocol

import jax

from eagle_jax.draft.policy import TreePolicy
from eagle_jax.tree import DraftTree


class DraftNetwork(Protocol):
  """Pure functions over parameters; static and hashable."""

  def init(self, batch: int, num_slots: int) -> Any:
    """The state before any text, a pytree."""
    ...

  def num_scratch(self, policy: TreePolicy) -> int:
    """Cache slots needed past the committed rows."""
    ...

  def absorb(self, params, state, token_BP: jax.Array, taps: Any, count_B: jax.Array) -> Any:
    """Takes in committed text.

    Args:
      token_BP: [B, P] i32, the token *after* each of P target rows.
      taps: what the target showed at those rows, arrays [..., B, P].
      count_B: [B] i32, how many of the P count; the rest is padding. 0 leaves a row as it is.
    """
    ...

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy) -> tuple[DraftTree, Any]:
    """A tree a row, [B, T] fields, rooted at the newest token `root_B` [B] i32."""
    ...
