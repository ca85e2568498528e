"""The drafter of plain decoding, which drafts nothing, so that the decode loop is the same."""

import dataclasses
from typing import Any

import jax

from eagle_jax.draft.interface import DraftContext
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates, root_only


@dataclasses.dataclass(frozen=True)
class NoDrafter:
  """A `draft.interface.DraftNetwork` that drafts nothing and has no state."""

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> Any:
    return ()

  def update(self, params, state, token_BP, taps, count_B) -> Any:
    return state

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    return root_only(root_B)
