"""Cost-aware trees: at every step, weigh the tokens that a level or a node is expected to bring against its time.

Let a threshold c be the tokens that decoding yields in the time of a plain step. A node is worth verifying if

    P(accepted) > c * (milliseconds it adds) / (milliseconds of a plain step)

and a level is worth drafting by the same rule, summed over its nodes. With c equal to the speedup of the best policy,
the rule maximises tokens over time (Dinkelbach's method for ratios). CAST (arXiv:2510.26577) sets two such thresholds
by hand, one for levels and one for nodes: `Adaptive.thresholds`.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree
from eagle_jax.tree import Candidates


class StepCosts(NamedTuple):
  """Milliseconds of drafting and verifying with a cache of a given size."""

  plain_ms: jax.Array  # [] f32, a step of plain decoding
  verify_ms: jax.Array  # [Z] f32, a target pass over each of the policy's sizes
  # [d] f32, drafting the children of the frontier at depth d. Depth 0 is always drafted; its time includes updating the
  # drafter with the committed text.
  draft_ms: jax.Array


class AcceptanceModel(NamedTuple):
  """Probabilities that drafted nodes are accepted, for text sampled at a given temperature."""

  growth: jax.Array  # [d] f32, expected tokens below a frontier at depth d, over the summed values of the frontier
  log_q: jax.Array  # [X] f32, path log-probabilities, ascending, nats
  value: jax.Array  # [X] f32, the share of nodes with that path log-probability that are accepted

  def values(self, log_q: jax.Array) -> jax.Array:
    """Interpolate the probability of acceptance; 0 for unused nodes. Same shape as `log_q`."""
    return jnp.where(log_q > -jnp.inf, jnp.interp(log_q, self.log_q, self.value), 0)


class CostModel(NamedTuple):
  """Costs and acceptance at one step, as the rules of `Adaptive` read them."""

  level_tokens: jax.Array  # [] f32, threshold for levels: tokens a sequence must gain per plain step's time
  node_tokens: jax.Array  # [] f32, the same threshold for nodes
  costs: StepCosts
  acceptance: AcceptanceModel


class CostTables(NamedTuple):
  """Measured costs for several cache sizes, and acceptance for several temperatures."""

  level_tokens: jax.Array  # as in `CostModel`
  node_tokens: jax.Array
  num_slots: jax.Array  # [X] f32, ascending
  costs: StepCosts  # every field with a leading axis X
  temperature: jax.Array  # [Y] f32, ascending
  acceptance: AcceptanceModel  # every field with a leading axis Y

  def at(self, *, num_slots: Any, temperature: jax.Array) -> CostModel:
    """Interpolate linearly to one cache size and temperature.

    Temperatures outside the measured range are clamped; costs are extrapolated to larger caches, since attention reads
    every slot.
    """
    costs = _interpolate(self.num_slots, self.costs, num_slots, right='extrapolate')
    acceptance = _interpolate(self.temperature, self.acceptance, temperature)
    return CostModel(self.level_tokens, self.node_tokens, costs, acceptance)


def _interpolate(knots_X: jax.Array, measured: Any, x: Any, *, right: str | None = None) -> Any:
  """Interpolate a pytree of arrays [X, ...], measured at `knots_X`, at `x`."""
  share_X = jax.vmap(lambda own_X: jnp.interp(x, knots_X, own_X, right=right))(jnp.eye(len(knots_X)))
  return jax.tree.map(lambda each: jnp.tensordot(share_X, each, axes=1, precision='highest'), measured)


def expected_tokens(
  model: CostModel, log_q_BA: jax.Array, is_live_B: jax.Array, *, sizes: tuple[int, ...]
) -> jax.Array:
  """Sum the probabilities that drafted nodes are accepted, over the batch, for each tree size: [Z] f32.

  Args:
    model: acceptance at this step.
    log_q_BA: [B, A] f32, path log-probability of each candidate; the root's is 0.
    is_live_B: [B] bool, sequences that are not done.
    sizes: tree sizes, ascending, static, none above A.
  """
  best_BA, _ = jax.lax.top_k(log_q_BA, sizes[-1])
  value_BA = model.acceptance.values(best_BA).at[:, 0].set(0)  # the root itself is no gain
  total_A = jnp.cumsum(jnp.where(is_live_B[:, None], value_BA, 0).sum(axis=0))
  return total_A[jnp.asarray(sizes) - 1]


def best_size(model: CostModel, log_q_BA: jax.Array, is_live_B: jax.Array, *, sizes: tuple[int, ...]) -> jax.Array:
  """Choose the tree size with the largest expected gain over the batch: [] i32, an index into `sizes`.

  Args: as `expected_tokens`.
  """
  steps_Z = model.costs.verify_ms / model.costs.plain_ms
  cost_Z = model.node_tokens * steps_Z * is_live_B.sum().astype(jnp.float32)
  return jnp.argmax(expected_tokens(model, log_q_BA, is_live_B, sizes=sizes) - cost_Z).astype(jnp.int32)


def is_level_worth(model: CostModel, level: Level) -> jax.Array:
  """Decide whether this frontier's children are expected to bring more tokens than drafting them costs: [] bool."""
  value_B = jnp.where(level.is_live, model.acceptance.values(level.log_q).sum(axis=1), 0)
  steps = model.costs.draft_ms[level.depth] / model.costs.plain_ms
  cost = model.level_tokens * steps * level.is_live.sum().astype(jnp.float32)
  return model.acceptance.growth[level.depth] * value_B.sum() > cost


@dataclasses.dataclass(frozen=True)
class Adaptive(TunedTree):
  """A dynamic tree that decides at every step, by measured cost, how deep to draft and how many nodes to verify.

  Attributes:
    smaller: as in `TunedTree`.
    thresholds: tokens that a plain step's time must bring when spent on levels, and when spent on nodes; None for the
      speedup of the fastest measured policy, which is best on average. Changing them does not recompile.

  Example:
    >>> eagle_jax.Adaptive(width=4, fanout=4, max_depth=5, num_nodes=16, smaller=(1, 4)).sizes
    (1, 4, 16)
  """

  smaller: tuple[int, ...] = (1,)
  thresholds: tuple[float, float] | None = None
  name: ClassVar[str] = 'adaptive'
  needs_costs: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    if self.thresholds is not None:
      try:
        object.__setattr__(self, 'thresholds', tuple(map(float, self.thresholds)))
      except (TypeError, ValueError):
        require(self, 'thresholds', False, 'two numbers')
      are_valid = len(self.thresholds) == 2 and all(0 <= tokens < math.inf for tokens in self.thresholds)
      require(self, 'thresholds', are_valid, 'two finite numbers >= 0')

  def static(self) -> 'Adaptive':
    return dataclasses.replace(self, thresholds=None)

  def arrays(self, costs: Any, target: Any, drafter: Any) -> CostTables:
    if costs is None:
      raise ValueError(
        f'{self.describe()} needs measured costs, and none are stored for this device and pair: run launch/cost.py '
        'first, or pass costs=.'
      )
    return costs.tables(self)

  def at_step(self, arrays: CostTables, *, num_slots: int, temperature: jax.Array) -> CostModel:
    return arrays.at(num_slots=num_slots, temperature=temperature)

  def keep_going(self, arrays: CostModel, level: Level) -> jax.Array:
    return is_level_worth(arrays, level)

  def select(self, arrays: CostModel, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    return best_size(arrays, candidates.log_q, is_live_B, sizes=self.sizes), candidates.score
