"""One budget of nodes for a whole batch, spent where the drafter is surest (TETRIS, arXiv:2502.15197)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.policy.tuned import TunedTree
from eagle_jax.tree import Candidates


@dataclasses.dataclass(frozen=True)
class PooledTree(TunedTree):
  """Dynamic trees of a batch that share a budget of nodes: the likeliest of all sequences are verified.

  A target pass takes the size of the largest tree, so a budget saves time only where every tree stays within one of
  `smaller`. TETRIS drafts chains; a tree's paths are pooled alike, since no node is likelier than its parent.

  Attributes:
    mean_nodes: the budget for each unfinished sequence, root included; a sequence has at most `num_nodes`. Changing it
      does not recompile.

  Example:
    >>> eagle_jax.PooledTree(width=4, fanout=4, max_depth=5, num_nodes=16, smaller=(8,), mean_nodes=6).sizes
    (8, 16)
  """

  mean_nodes: float = 16.0
  name: ClassVar[str] = 'pooled'
  tunable: ClassVar[tuple[str, ...]] = ('mean_nodes',)

  def __post_init__(self):
    super().__post_init__()
    require(self, 'mean_nodes', self.mean_nodes >= 1, 'at least 1, the root')

  def select(self, arrays: Any, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    best_BN, _ = jax.lax.top_k(candidates.score, self.num_nodes)
    descending_n = -jnp.sort(-jnp.where(is_live_B[:, None], best_BN, -jnp.inf).reshape(-1))
    budget = (arrays['mean_nodes'] * is_live_B.sum(dtype=jnp.float32)).astype(jnp.int32)
    least = jnp.take(descending_n, budget - 1, mode='clip')
    score_BA = jnp.where(candidates.score >= least, candidates.score, -jnp.inf)
    return super().select(arrays, candidates._replace(score=score_BA), is_live_B)
