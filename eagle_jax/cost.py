"""What a cycle costs on a device, and what a pair gains by it: measured once, stored, and read by `policy='auto'`.

`launch/cost.py` measures (`bench/tune.py`); here is what it writes, and how a policy is chosen from it.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.draft.economy import Economy
from eagle_jax.draft.policy import Adaptive, Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.weights.fetch import cache_folder
from eagle_jax.weights.files import replacing

VERSION = 1  # of the stored form
SHIPPED = Path(__file__).parent / 'assets' / 'costs'
KINDS = {'plain': Plain, 'chain': Chain, 'dynamic': DynamicTree, 'adaptive': Adaptive}

log = logging.getLogger('eagle_jax')


@dataclasses.dataclass(frozen=True)
class Costs:
  """Milliseconds of the parts of a cycle, in the decode loop: of one device kind, pair, dtype, batch and context."""

  device: str  # see `device_name`
  target: str
  drafter: str
  dtype: str
  batch: int
  num_prompt: int  # tokens
  verify_ms: dict[int, float]  # by number of nodes: target pass, verification, commit; 1 node is the plain step
  root_ms: float  # taking in committed text, and drafting the root's children
  draft_ms: dict[int, float]  # by its width: one more level
  policies: tuple['Measured', ...]  # best first
  calibration: 'Calibration'
  versions: dict[str, str]
  date: str

  def cycle_ms(self, policy: TreePolicy) -> float:
    """Modelled: the sum of the parts, between measured sizes by straight lines."""
    if policy.num_nodes == 1:
      return self.verify_ms[1]
    drafting = self.root_ms + sum(between(self.draft_ms, width) for width in policy.widths[1:])
    return between(self.verify_ms, policy.num_nodes) + drafting

  def economy(self, policy: Adaptive) -> Economy:
    """What an adaptive policy reads, its rate being that of the best policy measured."""
    levels = [between(self.draft_ms, width) for width in policy.widths]
    growth = [*self.calibration.growth, *[self.calibration.growth[-1]] * policy.max_depth][: policy.max_depth]
    numbers: Any = (
      self.policies[0].tok_per_s / self.batch / 1000,
      [between(self.verify_ms, size) for size in policy.sizes],
      levels,
      growth,
      self.calibration.log_q,
      self.calibration.value,
    )
    return Economy(*(jnp.asarray(x, jnp.float32) for x in numbers))


@dataclasses.dataclass(frozen=True)
class Measured:
  """A policy in real decoding."""

  kind: str  # a key of KINDS
  sizes: dict[str, Any]  # its fields
  tok_per_s: float  # of the whole batch
  tau: float

  @property
  def policy(self) -> TreePolicy:
    return KINDS[self.kind](**self.sizes)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What became of drafted nodes, by the drafter's log-probability of their path."""

  log_q: tuple[float, ...]  # ascending, nats
  value: tuple[float, ...]  # share accepted, never falling
  growth: tuple[float, ...]  # by depth of a frontier: see `economy.Economy`


def between(by_size: Mapping[int, float], size: int) -> float:
  """By straight lines; beyond the largest measured size, along the last one."""
  sizes = sorted(by_size)
  if size <= sizes[-1] or len(sizes) == 1:
    return float(np.interp(size, sizes, [by_size[s] for s in sizes]))
  slope = (by_size[sizes[-1]] - by_size[sizes[-2]]) / (sizes[-1] - sizes[-2])
  return by_size[sizes[-1]] + slope * (size - sizes[-1])


def device_name() -> str:
  """Kind and number of devices; of a CPU, the number of its cores, which decides what rows cost."""
  kind, count = jax.devices()[0].device_kind, jax.device_count()
  cores = f'-{len(os.sched_getaffinity(0))}cores' if jax.default_backend() == 'cpu' else ''
  return f'{kind}{cores}' if count == 1 else f'{count}x{kind}{cores}'


def write(costs: Costs, folder: Path | None = None) -> Path:
  """Stores a measurement in place of an older one of the same device, pair, dtype, batch and context."""
  folder = folder or cache_folder() / 'costs'
  name = f'{costs.device}_{costs.target}_{costs.drafter}_{costs.dtype}_{costs.batch}_{costs.num_prompt}'
  path = folder / f'{"".join(c if c.isalnum() else "-" for c in name)}.json'
  with replacing(path) as temporary:
    temporary.write_text(json.dumps({'version': VERSION, **dataclasses.asdict(costs)}, indent=1), encoding='utf-8')
  return path


def read(path: Path) -> Costs | None:
  """A stored measurement; None, with a warning, if it is of another version or damaged."""
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
    if fields.pop('version') != VERSION:
      raise ValueError(f'not version {VERSION}')
    fields |= {name: {int(size): ms for size, ms in fields[name].items()} for name in ('verify_ms', 'draft_ms')}
    fields['policies'] = tuple(Measured(**measured) for measured in fields['policies'])
    fields['calibration'] = Calibration(**{name: tuple(x) for name, x in fields['calibration'].items()})
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


def table(costs: Costs) -> str:
  """What was measured, as Markdown: parts in milliseconds and in plain steps, then policies."""
  plain = costs.verify_ms[1]
  parts = [(f'target pass, {size} nodes', ms) for size, ms in costs.verify_ms.items()]
  parts += [("root's children", costs.root_ms)]
  parts += [(f'a level of width {width}', ms) for width, ms in costs.draft_ms.items()]
  lines = [
    '| part | ms | plain steps |',
    '|---|---|---|',
    *(f'| {n} | {ms:.2f} | {ms / plain:.2f} |' for n, ms in parts),
  ]
  lines += ['', '| policy | tau | tokens/s |', '|---|---|---|']
  lines += [f'| {one.policy.describe()} | {one.tau:.2f} | {one.tok_per_s:.1f} |' for one in costs.policies]
  return '\n'.join(lines)
