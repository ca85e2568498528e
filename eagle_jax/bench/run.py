"""A whole benchmark at one temperature, from questions to a report in a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_jax.bench.calibration import calibrate
from eagle_jax.bench.measure import Bench
from eagle_jax.bench.plots import plot
from eagle_jax.bench.questions import Question
from eagle_jax.bench.summary import report, write
from eagle_jax.draft.policy import DynamicTree


def run(
  bench: Bench, questions: Sequence[Question], temperature: float, log: Path, folder: Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
  """Measures, calibrates the drafter along plain decoding's answers, writes and plots; arguments as `Bench.measure`.

  Returns:
    What `folder` holds as report.json: `summary.report`, the settings, and `calibration` where anything was drafted.
  """
  measured = bench.measure(questions, temperature, log, settings)
  answers = list(tqdm(measured, desc=f'answers, temperature {temperature:g}'))
  summary = {**report(answers, bench.policy), **settings, 'temperature': temperature}
  drafter, is_drafted = bench.drafter, bench.policy.num_nodes > 1 and any(len(a.plain.tokens) > 1 for a in answers)
  if drafter is not None and is_drafted and not drafter.has_own_head:  # no traces of EAGLE-3 heads are recorded
    how = {'policy': DynamicTree(), 'seed': bench.options['seed']}
    summary['calibration'] = calibrate(bench.target, drafter, answers, **how)
  write(summary, folder)
  plot(summary, folder)
  return summary
