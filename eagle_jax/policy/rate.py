"""Trees of the size that is expected to be fastest in this step alone (CaDDTree, arXiv:2606.01813)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.policy.adaptive import Adaptive, CostModel, expected_tokens
from eagle_jax.policy.trees import were_drafted
from eagle_jax.tree import Candidates


@dataclasses.dataclass(frozen=True)
class RateTree(Adaptive):
  """An `Adaptive` tree that verifies the number of nodes with the most expected tokens over the time of this step.

  The time includes that of drafting, which is spent by then. `Adaptive` instead asks of every further node that it be
  worth its time at the average step's rate. Levels are drafted by the same rule in both.

  Example:
    >>> eagle_jax.RateTree(width=4, fanout=4, max_depth=5, num_nodes=16, smaller=(1, 4)).sizes
    (1, 4, 16)
  """

  name: ClassVar[str] = 'rate'

  def select(self, arrays: CostModel, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    levels = zip(were_drafted(candidates, self), arrays.costs.draft_ms, strict=True)
    draft_ms = sum(jnp.where(is_drafted, ms, 0) for is_drafted, ms in levels)
    accepted_Z = expected_tokens(arrays, candidates.log_q, is_live_B, sizes=self.sizes)
    tokens_Z = is_live_B.sum(dtype=jnp.float32) + accepted_Z
    rate_Z = tokens_Z / (draft_ms + arrays.costs.verify_ms)
    return jnp.argmax(rate_Z).astype(jnp.int32), candidates.score
