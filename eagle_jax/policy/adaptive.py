"""Cost-aware trees: at every step, weigh the tokens that a level or a node may bring against its time.

Decoding yields some number of tokens in the time of a plain step. A node whose value (the probability that it is
accepted) is below that number times the plain steps that it adds costs more tokens than it brings; so does a level.
With the number that the best policy itself yields, its speedup, that rule maximises tokens over time (Dinkelbach's
method for ratios). CAST (arXiv:2510.26577) sets such numbers by hand, one for levels and one for nodes:
`Adaptive.thresholds`.
"""

import dataclasses
import math
import operator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.policy.trees import DynamicTree, Level
from eagle_jax.tree import Candidates


class StepCosts(NamedTuple):
  """What drafting and verifying take behind a cache of some size. Milliseconds."""

  plain_ms: jax.Array  # [] f32, a step of plain decoding
  verify_ms: jax.Array  # [Z] f32, a target pass over each of the policy's sizes
  draft_ms: jax.Array  # [d] f32, drafting the children of the frontier at depth d; the first is never left out


class AcceptanceModel(NamedTuple):
  """How likely drafted nodes are accepted, in text of some temperature."""

  growth: jax.Array  # [d] f32, expected tokens below a frontier at depth d, over the summed values of the frontier
  log_q: jax.Array  # [X] f32, ascending, nats
  value: jax.Array  # [X] f32, the share of nodes with a path of that log-probability that are accepted

  def values(self, log_q: jax.Array) -> jax.Array:
    """Interpolate probabilities of acceptance; 0 for unused nodes."""
    return jnp.where(log_q > -jnp.inf, jnp.interp(log_q, self.log_q, self.value), 0)


class CostModel(NamedTuple):
  """What the rules of `Adaptive` read at one step."""

  level_tokens: jax.Array  # [] f32, what a level must bring a sequence, for each plain step's time that it takes
  node_tokens: jax.Array  # [] f32, and what nodes must
  costs: StepCosts
  acceptance: AcceptanceModel


class CostTables(NamedTuple):
  """What was measured behind caches of several sizes, and in texts of several temperatures."""

  level_tokens: jax.Array  # as in `CostModel`
  node_tokens: jax.Array
  num_slots: jax.Array  # [X] f32, ascending
  costs: StepCosts  # every field with a leading axis X
  temperature: jax.Array  # [Y] f32, ascending
  acceptance: AcceptanceModel  # every field with a leading axis Y

  def at(self, *, num_slots: Any, temperature: jax.Array) -> CostModel:
    """Interpolate linearly. Temperatures beyond the measured ones count as the nearest; costs of larger caches follow
    the last line, since attention reads every slot."""
    costs = _interpolate(self.num_slots, self.costs, num_slots, right='extrapolate')
    acceptance = _interpolate(self.temperature, self.acceptance, temperature)
    return CostModel(self.level_tokens, self.node_tokens, costs, acceptance)


def _interpolate(knots_X: jax.Array, measured: Any, x: Any, *, right: str | None = None) -> Any:
  """Interpolate a pytree of arrays [X, ...], measured at the knots, at `x`."""
  share_X = jax.vmap(lambda own_X: jnp.interp(x, knots_X, own_X, right=right))(jnp.eye(len(knots_X)))
  return jax.tree.map(lambda each: jnp.tensordot(share_X, each, axes=1, precision='highest'), measured)


def best_size(model: CostModel, log_q_BA: jax.Array, is_live_B: jax.Array, *, sizes: tuple[int, ...]) -> jax.Array:
  """[] i32: which of `sizes` the sequences of a batch should verify together, the one that gains most.

  Args:
    model: costs and values.
    log_q_BA: [B, A] f32, of each sequence's candidates, the root among them with 0.
    is_live_B: [B] bool, sequences that gain anything at all.
    sizes: ascending, static, none above A.
  """
  best_BA, _ = jax.lax.top_k(log_q_BA, sizes[-1])
  value_BA = model.acceptance.values(best_BA).at[:, 0].set(0)  # the root itself is no gain
  total_A = jnp.cumsum(jnp.where(is_live_B[:, None], value_BA, 0).sum(axis=0))
  steps_Z = model.costs.verify_ms / model.costs.plain_ms
  gain_Z = total_A[jnp.asarray(sizes) - 1] - model.node_tokens * steps_Z * is_live_B.sum().astype(jnp.float32)
  return jnp.argmax(gain_Z).astype(jnp.int32)


def is_level_worth(model: CostModel, level: Level) -> jax.Array:
  """[] bool: will the children of this frontier bring more tokens than the time to draft them is worth?"""
  value_B = jnp.where(level.is_live, model.acceptance.values(level.log_q).sum(axis=1), 0)
  steps = model.costs.draft_ms[level.depth] / model.costs.plain_ms
  cost = model.level_tokens * steps * level.is_live.sum().astype(jnp.float32)
  return model.acceptance.growth[level.depth] * value_B.sum() > cost


@dataclasses.dataclass(frozen=True)
class Adaptive(DynamicTree):
  """A dynamic tree that weighs costs at every step: how deep to draft, and how many nodes to verify.

  Attributes:
    smaller: sizes that a target pass may have instead of `num_nodes`, root included, ascending; 1 verifies no draft.
    thresholds: tokens that the time of a plain step must bring when it is spent on levels, and on nodes; None for the
      speedup of the fastest policy measured, which is best on average. Another value compiles nothing.
  """

  smaller: tuple[int, ...] = (1,)
  thresholds: tuple[float, float] | None = None
  needs_costs: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    try:
      object.__setattr__(self, 'smaller', tuple(map(operator.index, self.smaller)))
    except TypeError:
      raise ValueError(f'Adaptive: smaller must be a list of integers, got {self.smaller!r}.') from None
    if self.thresholds is not None:
      try:
        object.__setattr__(self, 'thresholds', tuple(map(float, self.thresholds)))
      except (TypeError, ValueError):
        raise ValueError(f'Adaptive: thresholds must be two numbers, got {self.thresholds!r}.') from None
      if len(self.thresholds) != 2 or not all(0 <= tokens < math.inf for tokens in self.thresholds):
        raise ValueError(f'Adaptive: thresholds must be two finite numbers, at least 0, got {self.thresholds}.')
    if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
      raise ValueError(f'Adaptive: sizes must ascend from at least 1 to num_nodes, the last; got {self.sizes}.')

  @property
  def sizes(self) -> tuple[int, ...]:
    return (*self.smaller, self.num_nodes)

  def static(self) -> 'Adaptive':
    return dataclasses.replace(self, thresholds=None)

  def arrays(self, costs: Any, target: Any, drafter: Any) -> CostTables:
    if costs is None:
      raise ValueError(
        f'{self.describe()} weighs costs, and none are stored for this device and pair: run launch/cost.py first.'
      )
    return costs.tables(self)

  def at_step(self, arrays: CostTables, *, num_slots: int, temperature: jax.Array) -> CostModel:
    return arrays.at(num_slots=num_slots, temperature=temperature)

  def keep_going(self, arrays: CostModel, level: Level) -> jax.Array:
    return is_level_worth(arrays, level)

  def select(self, arrays: CostModel, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    return best_size(arrays, candidates.log_q, is_live_B, sizes=self.sizes), candidates.score

  def describe(self) -> str:
    return super().describe().replace('dynamic', 'adaptive')
