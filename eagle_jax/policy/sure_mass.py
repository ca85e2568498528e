"""The product of DDD and SVIP: draft on while enough of the frontier's probability comes from sure distributions."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.policy.svip import EntropyTree
from eagle_jax.policy.trees import Level


@dataclasses.dataclass(frozen=True)
class SureMass(EntropyTree):
  """A dynamic tree that stops where the paths of a frontier are too unlikely, each weighted by 1 - sqrt(c H).

  Attributes:
    scale: c, as in `svip.SVIP`.
    least_mass: the weighted sum of the paths' probabilities below which no children are drafted. Changing either does
      not recompile.

  Example:
    >>> eagle_jax.SureMass(num_nodes=32, least_mass=0.5).widths[:3]
    (1, 10, 10)
  """

  least_mass: float = 0.4
  name: ClassVar[str] = 'sure_mass'
  tunable: ClassVar[tuple[str, ...]] = 'scale', 'least_mass'

  def keep_going(self, arrays: Any, level: Level) -> jax.Array:
    value_BW = jnp.exp(level.log_q) * jnp.maximum(1 - self.rejection(arrays, level), 0)
    return (jnp.where(level.is_used, value_BW, 0).sum(axis=1) >= arrays['least_mass']).any()
