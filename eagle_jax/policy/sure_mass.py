"""The product of DDD and SVIP: draft on while enough of the frontier's probability comes from sure distributions."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.policy.svip import rejection, require_scale
from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree


@dataclasses.dataclass(frozen=True)
class SureMass(TunedTree):
  """A dynamic tree that stops where the paths of a frontier are too unlikely, each weighted by 1 - sqrt(c H).

  Attributes:
    scale: c, as in `svip.SVIP`.
    least_mass: the weighted sum of the paths' probabilities below which no children are drafted. Changing either does
      not recompile.

  Example:
    >>> eagle_jax.SureMass(num_nodes=32, least_mass=0.5).widths[:3]
    (1, 10, 10)
  """

  max_depth: int = 10
  scale: float = 0.15
  least_mass: float = 0.4
  name: ClassVar[str] = 'sure_mass'
  tunable: ClassVar[tuple[str, ...]] = 'scale', 'least_mass'
  needs_entropy: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    require_scale(self)

  def keep_going(self, arrays: Any, level: Level) -> jax.Array:
    is_used_BW = level.is_live[:, None] & (level.log_q > -jnp.inf)
    value_BW = jnp.exp(level.log_q) * jnp.maximum(1 - rejection(arrays, level), 0)
    return (jnp.where(is_used_BW, value_BW, 0).sum(axis=1) >= arrays['least_mass']).any()
