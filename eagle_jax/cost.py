"""What a cycle costs on a device, and what a pair gains by it: measured once, stored, and read by `policy='auto'`.

`launch/cost.py` measures (`bench/tune.py`); here is what it writes, and how a policy is chosen from it.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.device import device_name
from eagle_jax.draft.economy import Economies, Gains, Prices
from eagle_jax.draft.policy import Adaptive, Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.weights.fetch import cache_folder
from eagle_jax.weights.files import replacing

VERSION = 4  # of the stored form
SHIPPED = Path(__file__).parent / 'assets' / 'costs'
KINDS = {'plain': Plain, 'chain': Chain, 'dynamic': DynamicTree, 'adaptive': Adaptive}

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


@dataclasses.dataclass(frozen=True)
class Parts:
  """What the parts of a cycle take: of one device kind, pair, dtype and batch."""

  device: str  # see `device.device_name`
  target: str
  drafter: str
  dtype: str
  batch: int
  times: tuple[Times, ...]  # by the size of the cache, ascending
  bytes_per_s: float  # measured, as are the next
  flops_per_s: float
  versions: dict[str, str]
  date: str

  def floor_ms(self, num_bytes: Bytes, num_rows: int) -> float:
    """What no pass over `num_rows` rows a batch row can go below.

    That is its bytes at the measured bandwidth, or its FLOPs at the measured rate: the longer. They are at least two a
    row for each weight, and for each number in the cache of its own batch row.
    """
    num_products = (num_bytes.weights * self.batch + num_bytes.cache) * num_rows / jnp.dtype(self.dtype).itemsize
    return 1000 * max(sum(num_bytes) / self.bytes_per_s, 2 * num_products / self.flops_per_s)


@dataclasses.dataclass(frozen=True)
class Costs(Parts):
  """And what the pair gains with them, on some questions, behind the smallest of the caches."""

  policies: tuple['Rate', ...]  # in real decoding, best first, plain decoding among them
  modelled: tuple['Rate', ...]  # tau by traces, over the sum of the parts
  calibrations: tuple['Calibration', ...]  # by the temperature of the text, ascending
  num_ids: int  # size of the draft vocabulary that all this is for
  vocabularies: tuple['Vocabulary', ...]

  @property
  def speedup(self) -> float:
    """Of the best policy over plain decoding."""
    return self.policies[0].tok_per_s / plain_tok_per_s(self.policies)

  def economies(self, policy: Adaptive) -> Economies:
    """What an adaptive policy reads; levels and nodes must bring what the best policy yields, unless it says what."""
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
    return Economies(
      jnp.float32(level_tokens),
      jnp.float32(node_tokens),
      jnp.asarray([times.num_slots for times in self.times], jnp.float32),
      Prices(*stacked(*map(prices, self.times))),
      jnp.asarray([one.temperature for one in self.calibrations], jnp.float32),
      Gains(*stacked(*map(gains, self.calibrations))),
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
    kind = next(name for name, form in KINDS.items() if type(policy) is form)
    return cls(kind, {f.name: getattr(policy, f.name) for f in dataclasses.fields(KINDS[kind])}, tok_per_s, tau)

  @property
  def policy(self) -> TreePolicy:
    return KINDS[self.kind](**self.sizes)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What a drafter comes to that drafts only its first `num_ids` ids, with a chain of three."""

  num_ids: int
  coverage: float  # share of the target's answers' tokens among them
  tau: float
  cycle_ms: float


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What became of drafted nodes, by the drafter's log-probability of their path."""

  temperature: float  # of the text
  log_q: tuple[float, ...]  # ascending, nats
  value: tuple[float, ...]  # share accepted, never falling
  growth: tuple[float, ...]  # by depth of a frontier: see `economy.Gains`

  @classmethod
  def of(cls, *, temperature: float, **curves: Sequence[float]) -> 'Calibration':
    """From JSON, whose lists are no tuples."""
    return cls(temperature, **{name: tuple(curve) for name, curve in curves.items()})


def plain_tok_per_s(rates: Sequence[Rate]) -> float:
  """Of plain decoding, which is among them."""
  return next(rate.tok_per_s for rate in rates if rate.kind == 'plain')


def between(by_size: Mapping[int, float], size: int) -> float:
  """By straight lines; beyond the largest measured size, along the last one."""
  sizes = sorted(by_size)
  if size <= sizes[-1] or len(sizes) == 1:
    return float(np.interp(size, sizes, [by_size[s] for s in sizes]))
  slope = (by_size[sizes[-1]] - by_size[sizes[-2]]) / (sizes[-1] - sizes[-2])
  return by_size[sizes[-1]] + slope * (size - sizes[-1])


def write(costs: Parts, folder: Path | None = None) -> Path:
  """Stores a measurement in place of an older one of the same device, pair, dtype and batch.

  `find` looks in the default folder of `Costs`; `Parts` alone, which say nothing of a gain, have another.
  """
  folder = folder or cache_folder() / ('costs' if isinstance(costs, Costs) else 'parts')
  name = f'{costs.device}_{costs.target}_{costs.drafter}_{costs.dtype}_{costs.batch}'
  path = folder / f'{"".join(c if c.isalnum() else "-" for c in name)}.json'
  with replacing(path) as temporary:
    temporary.write_text(json.dumps({'version': VERSION, **dataclasses.asdict(costs)}, indent=1), encoding='utf-8')
  return path


def read(path: Path) -> Costs | None:
  """A stored measurement; None, with a warning, if it is of another version or damaged."""
  return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache
def _read(path: Path, modified: int) -> Costs | None:
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
    if fields.pop('version') != VERSION:
      raise ValueError(f'not version {VERSION}')
    forms: dict[str, Callable[..., Any]] = {
      'times': Times.of,
      'policies': Rate,
      'modelled': Rate,
      'vocabularies': Vocabulary,
      'calibrations': Calibration.of,
    }
    fields |= {name: tuple(form(**one) for one in fields[name]) for name, form in forms.items()}
    return Costs(**fields)
  except (ValueError, KeyError, TypeError) as error:
    log.warning('%s holds no costs (%s): measure anew with launch/cost.py', path, error)
    return None


def find(*, target: str, drafter: str, dtype: str, batch: int) -> Costs | None:
  """What was measured here for the pair, at the nearest batch; else what is shipped for such a device; else None."""
  device = device_name()
  for folder in (cache_folder() / 'costs', SHIPPED):
    stored = [read(path) for path in sorted(folder.glob('*.json'))]
    alike = [c for c in stored if c and (c.device, c.target, c.drafter, c.dtype) == (device, target, drafter, dtype)]
    if alike:
      return min(alike, key=lambda costs: abs(np.log(costs.batch / batch)))
  return None


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
    lines += ['', '| draft vocabulary | coverage | tau of a chain of 3 | cycle, ms |', '|---|---|---|---|']
    lines += [f'| {v.num_ids} | {v.coverage:.1%} | {v.tau:.2f} | {v.cycle_ms:.2f} |' for v in parts.vocabularies]
  return '\n'.join(lines)
