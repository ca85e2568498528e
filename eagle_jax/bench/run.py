"""Run a whole benchmark at one temperature, from questions to a report in a folder."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from eagle_jax.bench.measure import Bench, near_tie
from eagle_jax.bench.plots import plot
from eagle_jax.bench.questions import Question
from eagle_jax.bench.summary import report, write
from eagle_jax.decode.request import Options
from eagle_jax.evaluate.answered import Answered
from eagle_jax.evaluate.calibration import calibrate
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.progress import progress_bar

log = logging.getLogger('eagle_jax')


def run(
  bench: Bench,
  questions: Sequence[Question],
  temperature: float,
  answers_log: Path,
  folder: Path,
  settings: Mapping[str, Any],
) -> dict[str, Any]:
  """Measure, calibrate the drafter along plain decoding's answers, and write and plot a report.

  Args:
    bench: the pair and its options.
    questions, temperature, answers_log, settings: as in `Bench.measure`.
    folder: where the report and the plots are written.

  Returns:
    The content of report.json: `summary.report`, the settings, `too_long` with the turns that do not fit the context,
    and `calibration` if anything was drafted.

  Raises:
    ValueError: as `Bench.measure`, or no question fits the context.
  """
  measured = bench.measure(questions, temperature, answers_log, settings)
  total = bench.num_repeats * sum(len(bench.turns(question)) for question in questions)
  answers = list(progress_bar(measured, desc=f'answers, temperature {temperature:g}', total=total))
  if not answers:
    raise ValueError(
      f'At least one of {len(questions)} questions must fit the context of {bench.target.config.max_context} tokens '
      f'together with max_new_tokens={bench.options["max_new_tokens"]}: lower it, or ask shorter questions.'
    )
  too_long = _too_long(bench, questions, answers)
  summary = report(answers, bench.policy, near_tie=near_tie(bench.target))
  summary |= {**settings, 'temperature': temperature, 'too_long': too_long}
  may_differ = 'lossy' in Options(**bench.options).chooser.name
  if not may_differ and (num_apart := summary['details']['pooled']['far_apart']):
    is_exact = bench.target.dtype == jnp.float32
    why = 'which is a defect: report it' if is_exact else f'since {bench.target.dtype} rounds by the shape of a pass'
    log.warning('%d of %d texts differ from plain decoding beyond near ties, %s.', num_apart, len(answers), why)
  drafter, is_drafted = bench.drafter, bench.policy.num_nodes > 1 and any(len(a.plain.tokens) > 1 for a in answers)
  if drafter is not None and is_drafted:
    log.info('calibrating the drafter on %d answers ...', len(answers))
    summary['calibration'] = calibrate(bench.target, drafter, answers, policy=DynamicTree(), seed=bench.options['seed'])
  write(summary, folder)
  plot(summary, folder)
  return summary


def _too_long(bench: Bench, questions: Sequence[Question], answers: Sequence[Answered]) -> list[str]:
  """List the turns that were not asked, and log them."""
  asked = {(answer.task, answer.question_id, answer.turn) for answer in answers}
  too_long = [
    f'{question.task}/{question.id}, turn {turn + 1}'
    for question in questions
    for turn in range(len(bench.turns(question)))
    if (question.task, question.id, turn) not in asked
  ]
  if too_long:
    log.warning('skipped %d turns that do not fit the context: %s', len(too_long), '; '.join(too_long))
  return too_long
