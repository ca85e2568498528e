"""Trees ranked by measured acceptance: the drafter's probabilities, calibrated by depth and entropy.

C2T (arXiv:2502.13652) finds that the entropy and the depth say which of equally likely nodes are accepted. Here a table
of shares takes the place of its classifier.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.policy.trees import DynamicTree, Level


class AcceptanceTable(NamedTuple):
  """How often a drafted token was accepted, given that its parent was: arrays, or the lists that a cost file holds."""

  log_p: Any  # [X] f32, nats, ascending up to 0: the drafter's log-probability of the token
  entropy: Any  # [E - 1] f32, nats, ascending: where one bin of the drafter's entropy ends and the next begins
  # [Y, E, X] f32, at most 0, rising with log_p: log of the share, at depths 1 .. Y, the last for deeper ones.
  log_accepted: Any

  def look_up(self, depth: int | jax.Array, entropy_BW: jax.Array, log_p_BWC: jax.Array) -> jax.Array:
    """Interpolate the log-probability of acceptance, [B, W, C], of tokens drawn from distributions of this entropy.

    Below the first `log_p` it falls as the drafter's own does. Bins are chosen by products, and places between two
    numbers of `log_p` by comparisons: on accelerators a gather of single numbers would take longer.
    """
    num_depths, num_bins, _ = self.log_accepted.shape
    is_depth_Y = jnp.arange(1, num_depths + 1) == jnp.clip(depth, 1, num_depths)
    bin_BW = (entropy_BW[..., None] >= self.entropy[None, None]).sum(axis=2)
    is_bin_BWE = bin_BW[..., None] == jnp.arange(num_bins)[None, None]
    one_hot = is_depth_Y.astype(jnp.float32), is_bin_BWE.astype(jnp.float32)
    own_BWX = jnp.einsum('y,bwe,yex->bwx', *one_hot, self.log_accepted, precision='highest')
    low_S, rise_BW1S = self.log_p[:-1], jnp.diff(own_BWX)[:, :, None]  # of the segments between two numbers
    share_BWCS = (log_p_BWC[..., None] - low_S[None, None, None]) / jnp.diff(self.log_p)[None, None, None]
    inside_BWC = own_BWX[..., :1] + (jnp.clip(share_BWCS, 0, 1) * rise_BW1S).sum(axis=3)
    return jnp.minimum(inside_BWC, 0) + jnp.minimum(log_p_BWC - self.log_p[0], 0)


@dataclasses.dataclass(frozen=True)
class CalibratedTree(DynamicTree):
  """A dynamic tree whose nodes are ranked by the probability that their path is accepted, as measured with the pair.

  That of a path is the product of its tokens', each looked up in a table that `launch/classifier.py` measures. Children
  of one node keep their order; those of nodes that the drafter is differently sure of are told apart.

  Example:
    >>> eagle_jax.CalibratedTree(width=4, fanout=4, max_depth=5, num_nodes=16).describe()
    'calibrated(width=4, fanout=4, max_depth=5, num_nodes=16)'
  """

  name: ClassVar[str] = 'calibrated'
  needs_costs: ClassVar[bool] = True
  needs_entropy: ClassVar[bool] = True

  def arrays(self, costs: Any, target: Any, drafter: Any) -> AcceptanceTable:
    if costs is None or costs.acceptance_table is None:
      raise ValueError(
        f'{self.describe()} needs a table of acceptance, and none is stored for this device and pair: run '
        'launch/classifier.py first (after launch/cost.py, whose file holds it), or pass costs=.'
      )
    return AcceptanceTable(*(jnp.asarray(numbers, jnp.float32) for numbers in costs.acceptance_table))

  def score(self, arrays: AcceptanceTable, level: Level) -> jax.Array:
    # No child outscores its parent, since no logarithm is above 0.
    return level.score[..., None] + arrays.look_up(level.depth + 1, level.child_entropy, level.log_p)
