"""Rows of a comparison of drafters and policies, and the tables made of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.policy.kinds import kind_of
from eagle_jax.policy.trees import TreePolicy

CYCLES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0)  # plain steps
LOOKUP_WORDS = {False: '', True: ' + lookup', 'route': ' + route'}
FIXED = 'chain', 'dynamic', 'static', 'gap'  # kinds that always verify `num_nodes`


@dataclasses.dataclass(frozen=True)
class Row:
  """One drafter with one policy at one temperature."""

  drafter: str
  policy: TreePolicy
  temperature: float
  tau: float
  nodes: float  # verified by a target pass, on average
  passes: float  # levels drafted for it, on average
  rate: float | None  # tokens/s; None where nothing was measured on this device
  measured: bool = False  # whether it was decoded, or replayed with a modelled rate
  cycle: float | None = None  # plain steps that a modelled step takes
  by_task: Mapping[str, float] = dataclasses.field(default_factory=dict)  # tau

  @property
  def kind(self) -> str:
    return kind_of(self.policy)

  @property
  def series(self) -> str:
    """Name the drafter, and how it looks things up."""
    return self.drafter + LOOKUP_WORDS[self.policy.lookup]

  def to_json(self) -> dict[str, Any]:
    names = 'drafter', 'kind', 'tau', 'nodes', 'passes', 'rate', 'temperature', 'measured'
    return {'policy': self.policy.describe(), **{name: getattr(self, name) for name in names}}


def merit(row: Row) -> float:
  """Return the key that sorts rows by rate, or by tau where no rate is known, the best first."""
  return -(row.tau if row.rate is None else row.rate)


def table(rows: Sequence[Row]) -> str:
  """Format the comparison as Markdown: at equal nodes, at equal cost, best rates, and tau of the best by task."""
  parts = []
  for temperature in sorted({row.temperature for row in rows}):
    modelled = [row for row in rows if row.temperature == temperature and not row.measured]
    parts += [f'## Temperature {temperature:g}', _at_equal_nodes(modelled), _stopping(modelled)]
    if all(row.cycle is not None for row in modelled):
      parts.append(_at_equal_cycle(modelled))
    parts.append(_best(modelled))
    if decoded := [row for row in rows if row.temperature == temperature and row.measured]:
      title = f'Decoded, tokens/s of this machine:\n\n| drafter | policy | tau | nodes | tokens/s |\n{"|---" * 5}|'
      parts.append('\n'.join([title, *map(_decoded_line, decoded)]))
  return '\n\n'.join(parts)


def _decoded_line(row: Row) -> str:
  return f'| {row.series} | {row.policy.describe()} | {row.tau:.2f} | {row.nodes:.1f} | {row.rate:.1f} |'


def _at_equal_nodes(rows: Sequence[Row]) -> str:
  """Tau of the kinds with a fixed number of nodes; of several shapes of a kind, the best."""
  best: dict[tuple[int, str], float] = {}
  for row in rows:
    if row.kind in FIXED:
      key = row.policy.num_nodes, f'{row.series}, {row.kind}'
      best[key] = max(best.get(key, 0.0), row.tau)
  series = sorted({name for _, name in best})
  lines = [f'Tau at equal nodes:\n\n| nodes | {" | ".join(series)} |', f'|---{"|---" * len(series)}|']
  for n in sorted({n for n, _ in best}):
    lines.append(f'| {n} | {" | ".join(_number(best.get((n, name))) for name in series)} |')
  return '\n'.join(lines)


def _number(x: float | None) -> str:
  return '' if x is None else f'{x:.2f}'


def dynamic_tau(rows: Sequence[Row], series: str, nodes: float) -> float:
  """Interpolate the tau of the best dynamic tree with so many nodes, between the sizes that were compared."""
  best: dict[int, float] = {1: 1.0}
  for row in rows:
    if row.kind == 'dynamic' and row.series == series:
      best[row.policy.num_nodes] = max(best.get(row.policy.num_nodes, 0.0), row.tau)
  sizes = sorted(best)
  return float(np.interp(nodes, sizes, [best[n] for n in sizes]))


def _stopping(rows: Sequence[Row]) -> str:
  """Kinds whose number of nodes varies, beside a dynamic tree with as many."""
  head = '| drafter | policy | nodes | levels | tau | tau of a dynamic tree | difference |'
  lines = [f'Policies that stop or cut, beside the best dynamic tree of as many nodes:\n\n{head}', f'{"|---" * 7}|']
  for row in sorted(
    (row for row in rows if row.kind not in (*FIXED, 'plain')), key=lambda row: (row.series, row.nodes)
  ):
    alike = dynamic_tau(rows, row.series, row.nodes)
    lines.append(
      f'| {row.series} | {row.policy.describe()} | {row.nodes:.1f} | {row.passes:.1f} | {row.tau:.2f} | {alike:.2f} '
      f'| {row.tau - alike:+.2f} |'
    )
  return '\n'.join(lines)


def _at_equal_cycle(rows: Sequence[Row]) -> str:
  """The best tau of each kind whose modelled step takes at most so many plain steps."""
  series = sorted({f'{row.series}, {row.kind}' for row in rows if row.kind != 'plain'})
  lines = [f'Tau at equal cost, in plain steps, modelled:\n\n| step | {" | ".join(series)} |']
  lines.append(f'|---{"|---" * len(series)}|')
  for cycle in CYCLES:
    cells = []
    for name in series:
      own = [row for row in rows if f'{row.series}, {row.kind}' == name and (row.cycle or 0) <= cycle]
      cells.append(_number(max((row.tau for row in own), default=None)))
    lines.append(f'| {cycle} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def _best(rows: Sequence[Row], *, num_rows: int = 12) -> str:
  """The best rates, or tau where none is modelled, and the best of every drafter; with tau of each task."""
  ranked = sorted(rows, key=merit)
  shown = ranked[:num_rows]
  for series in dict.fromkeys(row.series for row in ranked):
    own = next(row for row in ranked if row.series == series and row.kind != 'plain')
    shown += [] if own in shown else [own]
  tasks = list(rows[0].by_task)
  head = ['drafter', 'policy', 'tau', 'nodes', 'levels', 'plain steps', 'tokens/s', *tasks]
  lines = [f'Best, tokens/s modelled, then tau by task:\n\n| {" | ".join(head)} |', f'{"|---" * len(head)}|']
  for row in shown:
    rate = '' if row.rate is None else f'{row.rate:.1f}'
    numbers = [_number(row.tau), f'{row.nodes:.1f}', f'{row.passes:.1f}', _number(row.cycle), rate]
    by_task = [_number(row.by_task[task]) for task in tasks]
    lines.append(f'| {" | ".join([row.series, row.policy.describe(), *numbers, *by_task])} |')
  return '\n'.join(lines)
