"""A whole benchmark at one temperature, from questions to a report in a folder."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from eagle_jax.bench.measure import Bench
from eagle_jax.bench.plots import plot
from eagle_jax.bench.questions import Question
from eagle_jax.bench.summary import report, write
from eagle_jax.evaluate.answered import Answered
from eagle_jax.evaluate.calibration import calibrate
from eagle_jax.policy.trees import DynamicTree

log = logging.getLogger('eagle_jax')


def run(
  bench: Bench,
  questions: Sequence[Question],
  temperature: float,
  answers_log: Path,
  folder: Path,
  settings: Mapping[str, Any],
) -> dict[str, Any]:
  """Measures, calibrates the drafter along plain decoding's answers, writes and plots; arguments as `Bench.measure`.

  Returns:
    What `folder` holds as report.json: `summary.report`, the settings, `too_long`, the turns that the context had no
    room for, and `calibration` where anything was drafted.

  Raises:
    ValueError: as `Bench.measure`, or no question has room in the context.
  """
  measured = bench.measure(questions, temperature, answers_log, settings)
  total = bench.num_repeats * sum(len(bench.turns(question)) for question in questions)
  answers = list(tqdm(measured, desc=f'answers, temperature {temperature:g}', total=total))
  if not answers:
    raise ValueError(
      f'None of {len(questions)} questions leaves room for {bench.options["max_new_tokens"]} tokens in a context of '
      f'{bench.target.config.max_context}: lower max_new_tokens, or ask others.'
    )
  too_long = _too_long(bench, questions, answers)
  summary = {**report(answers, bench.policy), **settings, 'temperature': temperature, 'too_long': too_long}
  if num_apart := summary['details']['pooled']['far_apart']:
    is_exact = bench.target.dtype == jnp.float32
    why = 'a defect: report it' if is_exact else f'as {bench.target.dtype} rounds in passes of other shapes'
    log.warning('%d of %d texts differ from plain decoding beyond near ties, %s.', num_apart, len(answers), why)
  drafter, is_drafted = bench.drafter, bench.policy.num_nodes > 1 and any(len(a.plain.tokens) > 1 for a in answers)
  if drafter is not None and is_drafted and not drafter.has_own_head:  # no traces of EAGLE-3 heads are recorded
    how = {'policy': DynamicTree(), 'seed': bench.options['seed']}
    log.info('Calibrating: the drafter reads %d answers.', len(answers))
    summary['calibration'] = calibrate(bench.target, drafter, answers, **how)
  write(summary, folder)
  plot(summary, folder)
  return summary


def _too_long(bench: Bench, questions: Sequence[Question], answers: Sequence[Answered]) -> list[str]:
  """The turns that were not asked."""
  asked = {(answer.task, answer.question_id, answer.turn) for answer in answers}
  too_long = [
    f'{question.task}/{question.id}, turn {turn + 1}'
    for question in questions
    for turn in range(len(bench.turns(question)))
    if (question.task, question.id, turn) not in asked
  ]
  if too_long:
    log.warning('%d turns are too long for the context, and left out: %s', len(too_long), '; '.join(too_long))
  return too_long
