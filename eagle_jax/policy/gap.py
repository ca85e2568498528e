"""Fewer siblings where the drafter is sure of the best one: the rule of JetSpec's tree (arXiv:2606.18394)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree, offer_likeliest

_LARGEST_GAP = 1e3  # nats; beyond any of two float32 probabilities, and finite where only one child is offered


@dataclasses.dataclass(frozen=True)
class GapTree(TunedTree):
  """A dynamic tree whose nodes offer fewer children, the further the likeliest is ahead of the next.

  A node offers round(fanout * sigmoid(-steepness * (g - 1))) children, at least one, where g is the difference of its
  two best log-probabilities, in nats. JetSpec, whose siblings share their children, has one g for each depth.

  Attributes:
    steepness: at least 0, which offers half the children everywhere. Changing it does not recompile.

  Example:
    >>> eagle_jax.GapTree(width=4, fanout=4, max_depth=5, num_nodes=16).fanouts
    (4, 4, 4, 4, 4)
  """

  steepness: float = 1.0
  name: ClassVar[str] = 'gap'
  tunable: ClassVar[tuple[str, ...]] = ('steepness',)

  def __post_init__(self):
    super().__post_init__()
    require(self, 'steepness', self.steepness >= 0, 'at least 0')

  def score(self, arrays: Any, level: Level) -> jax.Array:
    fanout = level.log_p.shape[2]
    best_BWC = level.log_p[..., :2]
    gap_BW1 = best_BWC[..., :1] - best_BWC[..., 1:] if fanout > 1 else jnp.zeros_like(best_BWC)
    gap_BW1 = jnp.minimum(gap_BW1, _LARGEST_GAP)
    num_BW1 = jnp.maximum(jnp.round(fanout * jax.nn.sigmoid(-arrays['steepness'] * (gap_BW1 - 1))), 1)
    return offer_likeliest(super().score(arrays, level), num_BW1)
