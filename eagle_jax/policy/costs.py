"""The cost of a decode step on a device and what a pair gains by it, from which `policy='auto'` chooses.

`launch/cost.py` measures once (`bench/tune.py`) and stores a `Costs`; this module models rates from it.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.policy.adaptive import AcceptanceModel, Adaptive, CostTables, StepCosts
from eagle_jax.policy.c2t import Classifier
from eagle_jax.policy.calibrated import AcceptanceTable
from eagle_jax.policy.kinds import KINDS, kind_of
from eagle_jax.policy.trees import TreePolicy

# Defaults; a cost file may hold other values for its own pair.
SPREAD = 0.35  # standard deviation of the gain of a pass, tau - 1, over the texts of a batch, relative to its mean
MARGIN = 1.05  # how many times faster than plain decoding a merely modelled policy must be to be preferred


class Bytes(NamedTuple):
  """The bytes that one pass reads."""

  weights: int
  cache: int  # of all sequences of the batch


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Milliseconds of the parts of a step, in the decode loop, with a cache of a given size."""

  num_slots: int  # of the cache; a pass reads them all
  verify_ms: dict[int, float]  # by number of nodes: target pass, verification, commit; 1 node is the plain step
  root_ms: float  # updating the drafter with the committed text, and drafting the root's children
  draft_ms: dict[int, float]  # by width: one more level
  whole_ms: dict[str, float]  # whole steps, by the policy's description
  target_bytes: Bytes
  drafter_bytes: Bytes

  @classmethod
  def of(cls, **fields: Any) -> 'StepTimes':
    """Convert from JSON, where the keys are strings and tuples are lists."""
    sizes = {name: {int(size): ms for size, ms in fields[name].items()} for name in ('verify_ms', 'draft_ms')}
    return cls(**fields | sizes | {name: Bytes(*fields[name]) for name in ('target_bytes', 'drafter_bytes')})

  def step_ms(self, policy: TreePolicy) -> float:
    """Model a policy's step as the sum of its parts, interpolated linearly between the measured sizes."""
    if policy.num_nodes == 1:
      return self.verify_ms[1]
    drafting = self.root_ms + sum(interpolate(self.draft_ms, width) for width in policy.widths[1:])
    return interpolate(self.verify_ms, policy.num_nodes) + drafting


@dataclasses.dataclass(frozen=True)
class Timings:
  """Times of the parts of a step for one device kind, pair, dtype and batch size."""

  device: str  # see `device.device_name`
  target: str
  drafter: str
  dtype: str  # of the target's weights; 'int8' or 'int4' if they were rounded, however they are stored
  batch: int
  times: tuple[StepTimes, ...]  # by the size of the cache, ascending
  bytes_per_s: float  # of all devices together: the measured rate of one times their number
  flops_per_s: float  # likewise
  versions: dict[str, str]
  date: str
  compute_dtype: str | None = dataclasses.field(default=None, kw_only=True)  # of activations; None: as `dtype`
  kernels: str = dataclasses.field(default='xla', kw_only=True)  # see `kernels.cpu.in_use`

  @property
  def floats(self) -> str:
    """The dtype of activations and caches."""
    return self.compute_dtype or self.dtype

  def floor_ms(self, num_bytes: Bytes, num_nodes: int) -> float:
    """Compute the lower bound of a pass over `num_nodes` nodes a sequence, in milliseconds.

    It is the longer of two times: the bytes at the measured bandwidth, and the FLOPs at the measured rate. Each node
    takes at least two FLOPs for every weight and for every number in the cache of its own sequence.
    """
    num_products = (num_bytes.weights * self.batch + num_bytes.cache) * num_nodes / jnp.dtype(self.floats).itemsize
    return 1000 * max(sum(num_bytes) / self.bytes_per_s, 2 * num_products / self.flops_per_s)


@dataclasses.dataclass(frozen=True)
class Costs(Timings):
  """Times of a pair's steps, and the rates that policies reach on a set of questions with the smallest cache."""

  policies: tuple['Rate', ...]  # measured by decoding, best first, plain decoding among them
  modelled: tuple['Rate', ...]  # tau from traces over the modelled step, best first
  calibrations: tuple['Calibration', ...]  # by the temperature of the text, ascending
  num_ids: int  # size of the draft vocabulary that all this was measured with
  is_quantised: bool  # whether the drafter's matrices were in 8 bits
  vocabularies: tuple['Vocabulary', ...]  # the draft vocabularies that were tried
  spread: float = SPREAD
  margin: float = MARGIN
  classifier: Classifier | None = None  # see `policy.c2t`; None: launch/classifier.py has not been run
  acceptance_table: AcceptanceTable | None = None  # see `policy.calibrated`; None: likewise

  @property
  def speedup(self) -> float:
    """The rate of the best policy over that of plain decoding."""
    return self.policies[0].tok_per_s / plain_tok_per_s(self.policies)

  def at_batch(self, batch: int, *, is_refilled: bool = False) -> 'Costs':
    """Model the costs of another batch size: the larger the batch, the less a tree for each sequence pays off.

    The rate of a policy is its tau, reduced because a batch waits for its slowest sequence, over its modelled step. The
    model is rough, so plain decoding, whose rate is scaled from a measured one, is preferred unless another policy is
    `margin` times faster.

    Args:
      batch: sequences decoded together.
      is_refilled: whether finished sequences are replaced at once, so that none waits for the slowest.
    """
    if batch == self.batch:
      return self
    times = scale_times(self.times, batch / self.batch)
    plain_ms = times[0].verify_ms[1]
    plain = plain_tok_per_s(self.policies) * batch / self.batch * self.times[0].verify_ms[1] / plain_ms
    share = 1 if is_refilled else slowest_share(batch, spread=self.spread)

    def rate(one: Rate) -> Rate:
      gain = 1 + (one.tau - 1) * share
      return dataclasses.replace(one, tok_per_s=plain * gain * plain_ms / times[0].step_ms(one.policy))

    known = {one.policy: one for one in (*self.modelled, *self.policies)}
    rates = sorted(
      map(rate, known.values()), key=lambda one: one.tok_per_s / (1 if one.kind == 'plain' else self.margin)
    )
    return dataclasses.replace(self, batch=batch, times=times, policies=tuple(rates[::-1]))

  def tables(self, policy: Adaptive) -> CostTables:
    """Make the tables that an adaptive policy reads. Thresholds that it leaves open are the best policy's speedup."""
    knots = sorted({log_q for one in self.calibrations for log_q in one.log_q})

    def step_costs(times: StepTimes) -> Sequence[Any]:
      passes = [interpolate(times.verify_ms, size) for size in policy.sizes]
      levels = [interpolate(times.draft_ms, width) for width in policy.widths[1:]]
      return times.verify_ms[1], passes, [times.root_ms, *levels]

    def acceptance(one: Calibration) -> Sequence[Any]:
      growth = [*one.growth, *[one.growth[-1]] * policy.max_depth][: policy.max_depth]
      return growth, knots, np.interp(knots, one.log_q, one.value)

    def stack(*measured: Sequence[Any]) -> list[jax.Array]:
      return [jnp.asarray(field, jnp.float32) for field in zip(*measured, strict=True)]

    level_tokens, node_tokens = policy.thresholds or (self.speedup,) * 2
    return CostTables(
      jnp.float32(level_tokens),
      jnp.float32(node_tokens),
      jnp.asarray([times.num_slots for times in self.times], jnp.float32),
      StepCosts(*stack(*map(step_costs, self.times))),
      jnp.asarray([one.temperature for one in self.calibrations], jnp.float32),
      AcceptanceModel(*stack(*map(acceptance, self.calibrations))),
    )


@dataclasses.dataclass(frozen=True)
class Rate:
  """The rate and tau of one policy, measured or modelled."""

  kind: str  # a key of KINDS
  sizes: dict[str, Any]  # the policy's fields
  tok_per_s: float  # of the whole batch
  tau: float

  @classmethod
  def of(cls, policy: TreePolicy, *, tok_per_s: float, tau: float) -> 'Rate':
    kind = kind_of(policy)
    return cls(kind, {f.name: getattr(policy, f.name) for f in dataclasses.fields(KINDS[kind])}, tok_per_s, tau)

  @property
  def policy(self) -> TreePolicy:
    """The policy.

    Raises:
      ValueError: no registered policy is of this kind, or its sizes are bad.
    """
    if self.kind not in KINDS:
      raise ValueError(f'no policy is of kind {self.kind!r}: add its class to policy.kinds.KINDS before')
    return KINDS[self.kind](**self.sizes)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The measured performance of a drafter with only its first `num_ids` ids, drafting a chain of three."""

  num_ids: int
  is_quantised: bool
  coverage: float  # share of the tokens of the target's answers that are among these ids
  tau: float
  cycle_ms: float


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Acceptance of drafted nodes by the drafter's log-probability of their path."""

  temperature: float  # at which the text was sampled
  log_q: tuple[float, ...]  # ascending, nats
  value: tuple[float, ...]  # share accepted, never falling
  growth: tuple[float, ...]  # by depth of a frontier: see `adaptive.AcceptanceModel`

  @classmethod
  def of(cls, *, temperature: float, **curves: Sequence[float]) -> 'Calibration':
    """Convert from JSON, where tuples are lists."""
    return cls(temperature, **{name: tuple(curve) for name, curve in curves.items()})


def plain_tok_per_s(rates: Sequence[Rate]) -> float:
  """Look up the rate of plain decoding, which is among `rates`."""
  return next(rate.tok_per_s for rate in rates if rate.kind == 'plain')


def interpolate(by_size: Mapping[int, float], size: float) -> float:
  """Interpolate linearly between the measured sizes; extrapolate beyond the largest along the last segment."""
  sizes = sorted(by_size)
  if size <= sizes[-1] or len(sizes) == 1:
    return float(np.interp(size, sizes, [by_size[s] for s in sizes]))
  slope = (by_size[sizes[-1]] - by_size[sizes[-2]]) / (sizes[-1] - sizes[-2])
  return by_size[sizes[-1]] + slope * (size - sizes[-1])


def slowest_share(batch: int, *, spread: float = SPREAD) -> float:
  """Estimate the slowest sequence's gain of a pass, tau - 1, relative to the batch's mean; all sequences wait for it.

  The gains are taken as normal with standard deviation `spread` times the mean. The least of n is below the mean by the
  quantile of (n - 3/8) / (n + 1/4) standard deviations (Blom's approximation).
  """
  return max(0.0, 1 - spread * statistics.NormalDist().inv_cdf((batch - 0.375) / (batch + 0.25)))


def scale_times(measured: Sequence[StepTimes], ratio: float) -> tuple[StepTimes, ...]:
  """Model the times of a batch with `ratio` times as many sequences.

  The time of the weights depends on the nodes of all sequences together. Every sequence also reads its own cache: the
  time of a slot is the slope between the smallest and the largest measured cache.
  """
  first, last = measured[0], measured[-1]

  def passes(field: str, num_slots: int) -> dict[int, float]:
    near, far = (getattr(times, field) for times in (first, last))
    sizes = range(1, min(max(near), max(far)) + 1)  # every size: some numbers of nodes are padded, others are not
    num_more = max(last.num_slots - first.num_slots, 1)
    of_slot = {n: max(interpolate(far, n) - interpolate(near, n), 0.0) / num_more for n in sizes}
    of_weights = {n: interpolate(near, n) - of_slot[n] * first.num_slots for n in sizes}
    return {n: interpolate(of_weights, ratio * n) + ratio * of_slot[n] * num_slots for n in sizes}

  def scale(times: StepTimes) -> StepTimes:
    verify_ms, draft_ms = (passes(field, times.num_slots) for field in ('verify_ms', 'draft_ms'))
    narrowest = min(draft_ms)
    root_ms = times.root_ms * draft_ms[narrowest] / max(times.draft_ms[narrowest], 1e-9)
    target_bytes, drafter_bytes = (
      Bytes(one.weights, int(ratio * one.cache)) for one in (times.target_bytes, times.drafter_bytes)
    )
    return StepTimes(times.num_slots, verify_ms, root_ms, draft_ms, {}, target_bytes, drafter_bytes)

  return tuple(map(scale, measured))
