"""CaPE (Du et al., arXiv:2402.02082): more siblings beside a likeliest token that the drafter is less sure of."""

import dataclasses
import itertools
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree, offer_likeliest


@dataclasses.dataclass(frozen=True)
class CaPE(TunedTree):
  """A dynamic tree whose nodes offer more children, the less probable their likeliest child is.

  With `width=1` this is the paper's tree: a chain of likeliest tokens, whose siblings have no children.

  Attributes:
    fanout: the most children that any node offers.
    confidences: probabilities of the likeliest child at which a bin ends and the next begins, ascending.
    siblings: children beside the likeliest in each bin, of which there is one more than ends. Other values of either
      do not recompile; another number of them does.

  Example:
    >>> eagle_jax.CaPE(width=1, max_depth=5, num_nodes=16).widths
    (1, 1, 1, 1, 1)
  """

  fanout: int = 8
  confidences: tuple[float, ...] = (0.3, 0.6, 0.8)
  siblings: tuple[int, ...] = (7, 5, 3, 1)
  name: ClassVar[str] = 'cape'
  tunable: ClassVar[tuple[str, ...]] = 'confidences', 'siblings'

  def __post_init__(self):
    super().__post_init__()
    ends, num_siblings = self.confidences, tuple(map(int, self.siblings))
    if not all(itertools.starmap(operator.lt, itertools.pairwise(ends))):
      raise ValueError(f'CaPE: `confidences` must ascend, got {ends}.')
    if num_siblings != self.siblings or min(num_siblings, default=-1) < 0 or len(num_siblings) != len(ends) + 1:
      raise ValueError(f'CaPE: `siblings` must be {len(ends) + 1} integers of at least 0, got {self.siblings}.')
    object.__setattr__(self, 'siblings', num_siblings)

  def score(self, arrays: Any, level: Level) -> jax.Array:
    confidence_BW1 = jnp.exp(level.log_p[..., :1])
    bin_BW1 = (confidence_BW1 >= arrays['confidences'].reshape(1, 1, -1)).sum(axis=2, keepdims=True)
    return offer_likeliest(super().score(arrays, level), 1 + arrays['siblings'][bin_BW1])
