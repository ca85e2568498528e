"""Plot a benchmark and costs as PNG files."""

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.bench.comparison import Row
from eagle_jax.files import replacing
from eagle_jax.policy.costs import Costs, Timings, plain_tok_per_s

log = logging.getLogger('eagle_jax')


def plot(report: Mapping[str, Any], folder: Path) -> list[Path]:
  """Plot a histogram of accepted lengths, acceptance by depth and task, and calibration if the report has it.

  Args:
    report: from `summary.report`, optionally with `calibration`.
    folder: where the files are written.

  Returns:
    The paths of the files; none without matplotlib.
  """
  if not _has_matplotlib():
    return []
  pooled = report['details']['pooled']
  with _figure(folder / 'accepted.png', 'drafted tokens accepted by a target pass', 'share of passes') as axes:
    count = np.asarray(pooled['num_accepted'])
    axes.bar(np.arange(len(count)), count / max(count.sum(), 1))
  with _figure(folder / 'acceptance_by_depth.png', 'depth of the node', 'accepted, given its parent was') as axes:
    for task, details in report['details'].items():
      acceptance = np.asarray(details['acceptance'], float)
      is_pooled = task == 'pooled'
      axes.plot(np.arange(1, len(acceptance) + 1), acceptance, marker='o', lw=3 if is_pooled else 1, label=task)
    axes.set_ylim(0, 1)
    axes.legend()
  paths = [folder / 'accepted.png', folder / 'acceptance_by_depth.png']
  if calibration := report.get('calibration'):
    paths.append(folder / 'calibration.png')
    with _figure(paths[-1], "drafter's confidence", 'share accepted, given the parent was') as axes:
      axes.plot([0, 1], [0, 1], color='0.7', lw=1)
      confidence, acceptance = (np.asarray(calibration[name], float) for name in ('confidence', 'acceptance'))
      axes.plot(confidence, acceptance, marker='o')
      axes.set_title(f'expected calibration error {calibration["expected_error"]:.3f}')
  return paths


def plot_costs(costs: Timings, path: Path) -> None:
  """Plot target and drafter passes with their lower bounds; for `Costs`, also speedups and draft vocabularies.

  Args:
    costs: measured costs.
    path: of the PNG file; nothing is written without matplotlib.
  """
  if not _has_matplotlib():
    return
  with _figure(path, 'tree nodes, or width of a level', 'ms') as axes:
    for times in costs.times:
      passes = (
        ('target pass', times.verify_ms, times.target_bytes),
        ('drafted level', times.draft_ms, times.drafter_bytes),
      )
      for name, measured, num_bytes in passes:
        label = f'{name}, {times.num_slots} slots'
        (line,) = axes.plot([*measured], [*measured.values()], marker='o', label=label)
        floor = [costs.floor_ms(num_bytes, num_nodes) for num_nodes in measured]
        axes.plot([*measured], floor, ls=':', color=line.get_color(), label=f'{label}, floor')
    axes.set_xscale('log', base=2)
    axes.legend()
  if not isinstance(costs, Costs):
    return
  with _figure(path.with_stem(f'{path.stem}_speedup'), 'num_nodes', 'speedup over plain decoding') as axes:
    for name, rates in (('modelled', costs.modelled), ('decoded', costs.policies)):
      points = sorted((rate.policy.num_nodes, rate.tok_per_s / plain_tok_per_s(rates)) for rate in rates)
      axes.plot(*zip(*points, strict=True), marker='o', ls='', label=name)
    axes.axhline(1, color='0.7', lw=1)
    axes.set_xscale('log', base=2)
    axes.legend()
  with _figure(
    path.with_stem(f'{path.stem}_vocabulary'), 'ids in the draft vocabulary', 'relative to the largest'
  ) as axes:
    largest = max(costs.vocabularies, key=lambda one: (one.num_ids, not one.is_quantised))
    for is_quantised in sorted({one.is_quantised for one in costs.vocabularies}):
      alike = [one for one in costs.vocabularies if one.is_quantised == is_quantised]
      for field, label in (('tau', 'tau'), ('cycle_ms', 'time of a step'), ('coverage', "target's tokens covered")):
        points = sorted((one.num_ids, getattr(one, field) / getattr(largest, field)) for one in alike)
        style = {'marker': 'o', 'ls': '--' if is_quantised else '-'}
        axes.plot(*zip(*points, strict=True), **style, label=f'{label}, 8 bits' if is_quantised else label)
    axes.set_xscale('log', base=2)
    axes.legend()


def plot_comparison(rows: Sequence[Row], folder: Path) -> list[Path]:
  """Plot tau against nodes, and rates against tau, by drafter and kind of policy; temperatures above 0 are hollow.

  Args:
    rows: from `compare.compare`, and perhaps `compare.decode_best`.
    folder: where the files are written.

  Returns:
    The paths of the files; none without matplotlib.
  """
  if not _has_matplotlib():
    return []
  drafting = [row for row in rows if row.kind != 'plain' and not row.measured]
  paths = [_scatter(drafting, 'nodes', 'tau', folder / 'tau_against_nodes.png', is_log=True)]
  if all(row.rate is not None for row in drafting):
    paths.append(_scatter(drafting, 'tau', 'rate', folder / 'rate_against_tau.png'))
  return paths


def _scatter(rows: Sequence[Row], x: str, y: str, path: Path, *, is_log: bool = False) -> Path:
  labels = {'nodes': 'nodes a target pass', 'tau': 'tau', 'rate': 'tokens/s, modelled'}
  names = sorted({f'{row.series}, {row.kind}' for row in rows})
  with _figure(path, labels[x], labels[y]) as axes:
    for number, name in enumerate(names):
      for is_sampled in (False, True):
        own = [row for row in rows if f'{row.series}, {row.kind}' == name and (row.temperature > 0) == is_sampled]
        points = [[getattr(row, field) for row in own] for field in (x, y)]
        style: dict[str, Any] = {'fillstyle': 'none'} if is_sampled else {'label': name}
        axes.plot(*points, ls='', marker='os^Dv'[number // 10 % 5], ms=4, color=f'C{number % 10}', **style)
    if is_log:
      axes.set_xscale('log', base=2)
    axes.legend(fontsize='xx-small')
  return path


def _has_matplotlib() -> bool:
  found = importlib.util.find_spec('matplotlib') is not None
  if not found:
    log.info('matplotlib is not installed (extra: bench): nothing is plotted')
  return found


@contextmanager
def _figure(path: Path, x: str, y: str) -> Iterator[Any]:
  from matplotlib.figure import Figure  # without pyplot: no window, no global state

  figure = Figure(figsize=(6, 4), layout='constrained')
  axes = figure.subplots()
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  yield axes
  with replacing(path) as temporary:
    figure.savefig(temporary, format='png', dpi=120)
