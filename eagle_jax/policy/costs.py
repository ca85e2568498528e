"""What a cycle costs on a device, and what a pair gains by it: measured once, stored, and read by `policy='auto'`.

`launch/cost.py` measures (`bench/tune.py`); here is what it writes, and how a policy is chosen from it.
"""

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.policy.adaptive import AcceptanceModel, Adaptive, CostTables, StepCosts
from eagle_jax.policy.kinds import KINDS, kind_of
from eagle_jax.policy.trees import TreePolicy

# Defaults of what a cost file may say of its own pair.
SPREAD = 0.35  # how far the gain of a pass, tau - 1, differs between the texts of a batch, over its mean
MARGIN = 1.05  # how much faster than plain decoding a policy must be that is only modelled
UNEVEN = 0.05  # of a smaller size's time: one that is faster by more was timed in a calmer moment

log = logging.getLogger('eagle_jax')


class Bytes(NamedTuple):
  """What a pass must read."""

  weights: int
  cache: int  # of all batch rows


@dataclasses.dataclass(frozen=True)
class Times:
  """Milliseconds of the parts of a cycle, in the decode loop, behind a cache of some size."""

  num_slots: int  # a pass reads them all
  verify_ms: dict[int, float]  # by number of nodes: target pass, verification, commit; 1 node is the plain step
  root_ms: float  # taking in committed text, and drafting the root's children
  draft_ms: dict[int, float]  # by its width: one more level
  whole_ms: dict[str, float]  # whole cycles, by the policy's description
  target_bytes: Bytes
  drafter_bytes: Bytes

  @classmethod
  def of(cls, **fields: Any) -> 'Times':
    """From JSON, whose keys are strings and whose lists are no tuples."""
    sizes = {name: {int(size): ms for size, ms in fields[name].items()} for name in ('verify_ms', 'draft_ms')}
    return cls(**fields | sizes | {name: Bytes(*fields[name]) for name in ('target_bytes', 'drafter_bytes')})

  def cycle_ms(self, policy: TreePolicy) -> float:
    """Modelled: the sum of the parts, between measured sizes by straight lines."""
    if policy.num_nodes == 1:
      return self.verify_ms[1]
    drafting = self.root_ms + sum(between(self.draft_ms, width) for width in policy.widths[1:])
    return between(self.verify_ms, policy.num_nodes) + drafting


def unsteady(times: Times) -> list[tuple[str, int, int]]:
  """Sizes that were faster than a smaller one by more than `UNEVEN`, as no pass over more nodes and no wider level is.

  Returns:
    ('verify_ms' or 'draft_ms', the slowest smaller size, the size), ascending; empty where times are steady.
  """
  found = []
  for field in ('verify_ms', 'draft_ms'):
    ms = getattr(times, field)
    slowest = min(ms)
    for size in sorted(ms):
      if ms[size] < (1 - UNEVEN) * ms[slowest]:
        found.append((field, slowest, size))
      slowest = max(slowest, size, key=lambda size: ms[size])
  return found


@dataclasses.dataclass(frozen=True)
class Parts:
  """What the parts of a cycle take: of one device kind, pair, dtype and batch."""

  device: str  # see `device.device_name`
  target: str
  drafter: str
  dtype: str  # of the target's weights: 'int8' where they were rounded, whatever they are held as
  batch: int
  times: tuple[Times, ...]  # by the size of the cache, ascending
  bytes_per_s: float  # of all devices together, from what one was measured to do; so the next
  flops_per_s: float
  versions: dict[str, str]
  date: str
  compute_dtype: str | None = dataclasses.field(default=None, kw_only=True)  # of activations; None: as `dtype`

  @property
  def floats(self) -> str:
    """The dtype of activations and caches."""
    return self.compute_dtype or self.dtype

  def floor_ms(self, num_bytes: Bytes, num_rows: int) -> float:
    """What no pass over `num_rows` rows a batch row can go below.

    That is its bytes at the measured bandwidth, or its FLOPs at the measured rate: the longer. They are at least two a
    row for each weight, and for each number in the cache of its own batch row.
    """
    num_products = (num_bytes.weights * self.batch + num_bytes.cache) * num_rows / jnp.dtype(self.floats).itemsize
    return 1000 * max(sum(num_bytes) / self.bytes_per_s, 2 * num_products / self.flops_per_s)


@dataclasses.dataclass(frozen=True)
class Costs(Parts):
  """And what the pair gains with them, on some questions, behind the smallest of the caches."""

  policies: tuple['Rate', ...]  # in real decoding, best first, plain decoding among them
  modelled: tuple['Rate', ...]  # tau by traces, over the sum of the parts
  calibrations: tuple['Calibration', ...]  # by the temperature of the text, ascending
  num_ids: int  # size of the draft vocabulary that all this is for
  is_quantised: bool  # and whether the drafter's matrices are in 8 bits
  vocabularies: tuple['Vocabulary', ...]
  spread: float = SPREAD
  margin: float = MARGIN
  lookup_weights: tuple[float, float] | None = None  # of `draft.lookup`; None: its defaults

  @property
  def speedup(self) -> float:
    """Of the best policy over plain decoding."""
    return self.policies[0].tok_per_s / plain_tok_per_s(self.policies)

  def at_batch(self, batch: int, *, is_refilled: bool = False) -> 'Costs':
    """Model the costs of another batch size: the larger it is, the less a tree for each sequence pays.

    A policy yields its tau, less what a batch loses by waiting for its slowest sequence, in its modelled cycle. So
    little is known of it that plain decoding, whose rate is modelled from its real one, comes first if others seem
    hardly faster.

    Args:
      batch: sequences decoded together.
      is_refilled: whether the places of finished sequences are refilled at once, so that none waits for the slowest.
    """
    if batch == self.batch:
      return self
    times = times_of_rows(self.times, batch / self.batch)
    plain_ms = times[0].verify_ms[1]
    plain = plain_tok_per_s(self.policies) * batch / self.batch * self.times[0].verify_ms[1] / plain_ms
    share = 1 if is_refilled else slowest_share(batch, spread=self.spread)

    def rate(one: Rate) -> Rate:
      gain = 1 + (one.tau - 1) * share
      return dataclasses.replace(one, tok_per_s=plain * gain * plain_ms / times[0].cycle_ms(one.policy))

    known = {one.policy: one for one in (*self.modelled, *self.policies)}
    rates = sorted(
      map(rate, known.values()), key=lambda one: one.tok_per_s / (1 if one.kind == 'plain' else self.margin)
    )
    return dataclasses.replace(self, batch=batch, times=times, policies=tuple(rates[::-1]))

  def tables(self, policy: Adaptive) -> CostTables:
    """Tabulate what an adaptive policy reads. Without thresholds, levels and nodes must bring the best speedup."""
    knots = sorted({log_q for one in self.calibrations for log_q in one.log_q})

    def prices(times: Times) -> Sequence[Any]:
      passes = [between(times.verify_ms, size) for size in policy.sizes]
      return times.verify_ms[1], passes, [between(times.draft_ms, width) for width in policy.widths]

    def gains(one: Calibration) -> Sequence[Any]:
      growth = [*one.growth, *[one.growth[-1]] * policy.max_depth][: policy.max_depth]
      return growth, knots, np.interp(knots, one.log_q, one.value)

    def stacked(*rows: Sequence[Any]) -> list[jax.Array]:
      return [jnp.asarray(field, jnp.float32) for field in zip(*rows, strict=True)]

    level_tokens, node_tokens = policy.thresholds or (self.speedup,) * 2
    return CostTables(
      jnp.float32(level_tokens),
      jnp.float32(node_tokens),
      jnp.asarray([times.num_slots for times in self.times], jnp.float32),
      StepCosts(*stacked(*map(prices, self.times))),
      jnp.asarray([one.temperature for one in self.calibrations], jnp.float32),
      AcceptanceModel(*stacked(*map(gains, self.calibrations))),
    )


@dataclasses.dataclass(frozen=True)
class Rate:
  """What a policy comes to."""

  kind: str  # a key of KINDS
  sizes: dict[str, Any]  # its fields
  tok_per_s: float  # of the whole batch
  tau: float

  @classmethod
  def of(cls, policy: TreePolicy, *, tok_per_s: float, tau: float) -> 'Rate':
    kind = kind_of(policy)
    return cls(kind, {f.name: getattr(policy, f.name) for f in dataclasses.fields(KINDS[kind])}, tok_per_s, tau)

  @property
  def policy(self) -> TreePolicy:
    return KINDS[self.kind](**self.sizes)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What a drafter comes to that drafts only its first `num_ids` ids, with a chain of three."""

  num_ids: int
  is_quantised: bool
  coverage: float  # share of the target's answers' tokens among them
  tau: float
  cycle_ms: float


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What became of drafted nodes, by the drafter's log-probability of their path."""

  temperature: float  # of the text
  log_q: tuple[float, ...]  # ascending, nats
  value: tuple[float, ...]  # share accepted, never falling
  growth: tuple[float, ...]  # by depth of a frontier: see `adaptive.AcceptanceModel`

  @classmethod
  def of(cls, *, temperature: float, **curves: Sequence[float]) -> 'Calibration':
    """From JSON, whose lists are no tuples."""
    return cls(temperature, **{name: tuple(curve) for name, curve in curves.items()})


def plain_tok_per_s(rates: Sequence[Rate]) -> float:
  """Of plain decoding, which is among them."""
  return next(rate.tok_per_s for rate in rates if rate.kind == 'plain')


def between(by_size: Mapping[int, float], size: float) -> float:
  """By straight lines; beyond the largest measured size, along the last one."""
  sizes = sorted(by_size)
  if size <= sizes[-1] or len(sizes) == 1:
    return float(np.interp(size, sizes, [by_size[s] for s in sizes]))
  slope = (by_size[sizes[-1]] - by_size[sizes[-2]]) / (sizes[-1] - sizes[-2])
  return by_size[sizes[-1]] + slope * (size - sizes[-1])


def slowest_share(batch: int, *, spread: float = SPREAD) -> float:
  """The share of the mean gain of a pass, tau - 1, that the slowest row of a batch has: all wait for it.

  Rows' gains as if normal; the least of n of them lies Blom's quantile, (n - 3/8) / (n + 1/4), below their mean.
  """
  return max(0.0, 1 - spread * statistics.NormalDist().inv_cdf((batch - 0.375) / (batch + 0.25)))


def times_of_rows(measured: Sequence[Times], ratio: float) -> tuple[Times, ...]:
  """Modelled, of `ratio` times as many batch rows.

  To the weights a batch row's nodes are as many rows more; but every batch row reads its own cache, at what a slot
  takes between the caches that were measured.
  """
  first, last = measured[0], measured[-1]

  def passes(field: str, num_slots: int) -> dict[int, float]:
    near, far = (getattr(times, field) for times in (first, last))
    sizes = range(1, min(max(near), max(far)) + 1)  # each: so many rows may be padded where others are not
    num_more = max(last.num_slots - first.num_slots, 1)
    of_slot = {n: max(between(far, n) - between(near, n), 0.0) / num_more for n in sizes}
    of_weights = {n: between(near, n) - of_slot[n] * first.num_slots for n in sizes}
    return {n: between(of_weights, ratio * n) + ratio * of_slot[n] * num_slots for n in sizes}

  def of_rows(times: Times) -> Times:
    verify_ms, draft_ms = (passes(field, times.num_slots) for field in ('verify_ms', 'draft_ms'))
    narrowest = min(draft_ms)
    root_ms = times.root_ms * draft_ms[narrowest] / max(times.draft_ms[narrowest], 1e-9)
    target_bytes, drafter_bytes = (
      Bytes(one.weights, int(ratio * one.cache)) for one in (times.target_bytes, times.drafter_bytes)
    )
    return Times(times.num_slots, verify_ms, root_ms, draft_ms, {}, target_bytes, drafter_bytes)

  return tuple(map(of_rows, measured))


def warn_if_unsteady(parts: Parts) -> None:
  """Says in the log which times cannot be right, if some cannot; see `unsteady`."""
  names = {'verify_ms': 'target pass over {} nodes', 'draft_ms': 'level of width {}'}
  for times in parts.times:
    for field, *sizes in unsteady(times):
      slow, fast = (f'a {names[field].format(size)} took {getattr(times, field)[size]:.2f} ms' for size in sizes)
      log.warning('The machine seems busy: behind %d slots %s, but %s. Measure again.', times.num_slots, slow, fast)


def table(parts: Parts) -> str:
  """What was measured, as Markdown: parts in milliseconds, in plain steps and over their floor; then policies."""
  lines = [
    f'{parts.device}, {parts.target} + {parts.drafter}, {parts.dtype}, batch {parts.batch}',
    f'{parts.date}: reads {parts.bytes_per_s / 1e9:.1f} GB/s, computes {parts.flops_per_s / 1e9:.0f} GFLOP/s',
  ]
  for times in parts.times:
    passes = [(f'target pass, {size} nodes', ms, times.target_bytes, size) for size, ms in times.verify_ms.items()]
    root = "root's children", times.root_ms, times.drafter_bytes, 1
    levels = [(f'a level of width {width}', ms, times.drafter_bytes, width) for width, ms in times.draft_ms.items()]
    plain = times.verify_ms[1]
    lines += ['', f'| behind {times.num_slots} slots | ms | plain steps | over its floor |', '|---|---|---|---|']
    lines += [
      f'| {name} | {ms:.2f} | {ms / plain:.2f} | {ms / parts.floor_ms(num_bytes, num_rows):.2f} |'
      for name, ms, num_bytes, num_rows in (*passes, root, *levels)
    ]
    lines += [f'| whole cycle, {name} | {ms:.2f} | {ms / plain:.2f} | |' for name, ms in times.whole_ms.items()]
  if isinstance(parts, Costs):
    lines += ['', '| policy | tau | tokens/s |', '|---|---|---|']
    lines += [f'| {one.policy.describe()} | {one.tau:.2f} | {one.tok_per_s:.1f} |' for one in parts.policies]
    lines += [f'| {one.policy.describe()}, modelled | {one.tau:.2f} | {one.tok_per_s:.1f} |' for one in parts.modelled]
    lines += ['', '| draft vocabulary | bits | coverage | tau of a chain of 3 | cycle, ms |', '|---|---|---|---|---|']
    for v in parts.vocabularies:
      bits = 8 if v.is_quantised else 8 * jnp.dtype(parts.floats).itemsize
      lines.append(f'| {v.num_ids} | {bits} | {v.coverage:.1%} | {v.tau:.2f} | {v.cycle_ms:.2f} |')
  return '\n'.join(lines)
