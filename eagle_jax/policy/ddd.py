"""Dynamic Depth Decoding (Brown et al., arXiv:2409.00142): draft on while the text is probably in the frontier."""

import dataclasses
from typing import Any, ClassVar

import jax

from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree


@dataclasses.dataclass(frozen=True)
class DDD(TunedTree):
  """A dynamic tree that stops where the paths of a frontier together are too unlikely.

  The paper tests at depths 5, 7 and 9 only, since each of its tests waits for the device; here every frontier is
  tested. In a batch one sequence that goes on is enough.

  Attributes:
    least_log_mass: the frontier's total log-probability below which its children are not drafted, nats. Changing it
      does not recompile.

  Example:
    >>> eagle_jax.DDD(num_nodes=16, least_log_mass=-0.5).describe()
    'ddd(width=10, fanout=10, max_depth=11, num_nodes=16, least_log_mass=-0.5)'
  """

  max_depth: int = 11
  least_log_mass: float = -0.3
  name: ClassVar[str] = 'ddd'
  tunable: ClassVar[tuple[str, ...]] = ('least_log_mass',)

  def keep_going(self, arrays: Any, level: Level) -> jax.Array:
    log_mass_B = jax.nn.logsumexp(level.log_q, axis=1)
    return (level.is_live & (log_mass_B >= arrays['least_log_mass'])).any()
