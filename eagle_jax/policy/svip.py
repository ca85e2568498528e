"""SVIP (Zhang et al., arXiv:2411.18462): draft on while the drafter is sure of itself.

A drafted token is accepted with probability 1 - TV(p, q) >= 1 - sqrt(KL(q; p) / 2), and the divergence is taken to be
in proportion to the entropy H of q. So sqrt(c H) bounds the probability that the token is rejected.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree


@dataclasses.dataclass(frozen=True)
class EntropyTree(TunedTree):
  """The base of trees whose rules bound rejection by entropy.

  Attributes:
    scale: c above, 1 / nats.
  """

  max_depth: int = 10
  scale: float = 0.15
  needs_entropy: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    require(self, 'scale', self.scale >= 0, 'at least 0')

  def rejection(self, arrays: Any, level: Level) -> jax.Array:
    """Bound the probability that each frontier node is rejected, by the entropy that it was drawn from: [B, W] f32."""
    return jnp.sqrt(arrays['scale'] * level.entropy)


@dataclasses.dataclass(frozen=True)
class SVIP(EntropyTree):
  """A dynamic tree that stops where every node of a frontier comes from a distribution of high entropy.

  With `width=1, fanout=1` this is the paper's rule for chains. Its tree is ours, since none was published.

  Attributes:
    scale: c above, 1 / nats.
    most_rejected: the bound sqrt(c H) above which a node's children are not worth drafting; one node below it is
      enough. Changing either does not recompile.

  Example:
    >>> eagle_jax.SVIP(width=1, fanout=1, max_depth=7, num_nodes=8, smaller=(2, 4)).sizes
    (2, 4, 8)
  """

  most_rejected: float = 0.3
  name: ClassVar[str] = 'svip'
  tunable: ClassVar[tuple[str, ...]] = 'scale', 'most_rejected'

  def keep_going(self, arrays: Any, level: Level) -> jax.Array:
    return (level.is_used & (self.rejection(arrays, level) <= arrays['most_rejected'])).any()
