"""The drafter as users hold it, and the one that drafts nothing."""

import dataclasses
from typing import Any

import jax

from eagle_jax.config import DrafterConfig
from eagle_jax.draft import Outlook
from eagle_jax.draft.policy import TreePolicy
from eagle_jax.tree import Candidates, root_only


@dataclasses.dataclass(frozen=True)
class Drafter:
  """A loaded drafter: what `load_drafter` returns and `decode` takes. The target's embedding and head are not in it."""

  config: DrafterConfig
  params: dict[str, Any]  # nested dict of arrays; logical axes in `sharding.PARAM_AXES`


@dataclasses.dataclass(frozen=True)
class NoDrafter:
  """Plain decoding: the same loop, with nothing drafted and nothing to remember."""

  def init(self, batch: int, num_slots: int) -> Any:
    return ()

  def absorb(self, params, state, token_BP, taps, count_B) -> Any:
    return state

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, outlook: Outlook) -> Candidates:
    return root_only(root_B)
