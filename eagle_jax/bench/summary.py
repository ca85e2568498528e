"""Summarise the answers of a benchmark: acceptance, speed, and whether the texts are identical."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.bench.measure import NEAR_TIE, num_same
from eagle_jax.evaluate.answered import Answered, Timed
from eagle_jax.evaluate.trace import Traced
from eagle_jax.files import replacing
from eagle_jax.policy.trees import TreePolicy

_DIFFERENT = 'near_ties', 'far_apart'  # see `details`
NGRAM = 4  # tokens; for measuring repetition


def summarise(answers: Sequence[Answered], policy: TreePolicy) -> dict[str, float]:
  """Compute the six numbers of a task, or of several tasks pooled.

  Returns:
    `tau`: new tokens a target pass, pooled (`decode.Generation`). `tau_paper`: see the function. `plain_tok_per_s`,
    `spec_tok_per_s`: new tokens over decode time, all repeats pooled. `speedup`: their ratio. `identical`: the share of
    texts that are equal token for token.
  """
  plain, spec = (rate(getattr(answer, which) for answer in answers) for which in ('plain', 'spec'))
  return {
    'tau': traced(answers, policy).tau,
    'tau_paper': tau_paper(answers)[0],
    'speedup': spec / plain,
    'plain_tok_per_s': plain,
    'spec_tok_per_s': spec,
    'identical': float(np.mean([answer.gap is None for answer in answers])),
  }


def details(answers: Sequence[Answered], policy: TreePolicy, *, near_tie: float = NEAR_TIE) -> dict[str, Any]:
  """Compute the details behind the six numbers.

  Returns:
    `num_answers`: number of answers.
    `nodes_per_pass`, `levels_per_pass`: nodes verified and levels drafted a target pass.
    `near_ties`, `far_apart`: number of texts that differ, by whether plain decoding's two best logits are within
    `near_tie` where they diverge. In float32, far apart is a defect; narrower dtypes round that far.
    `differing`: divergences over compared tokens, which are those up to and including a divergence.
    `plain_spread`, `spec_spread`: standard deviation of tokens/s over repeats; None for one repeat.
    `acceptance`: by depth; see `Traced.acceptance`.
    `num_accepted`: number of target passes that accepted 0, 1, ... drafted tokens.
    `repetition`: the share of `NGRAM`s of the text that occurred before in it; greedy text of small models loops, which
    raises acceptance.
    `not_in_tau_paper`: number of questions that the paper's count leaves out.
  """
  gaps = [answer.gap for answer in answers if answer.gap is not None]
  trace = traced(answers, policy)
  num_accepted = np.concatenate([np.asarray(counts, np.int64) for counts in trace.num_accepted])
  return {
    'num_answers': len(answers),
    'nodes_per_pass': _by_pass(answers, 'nodes_per_pass'),
    'levels_per_pass': _by_pass(answers, 'levels_per_pass'),
    'near_ties': sum(gap < near_tie for gap in gaps),
    'far_apart': sum(gap >= near_tie for gap in gaps),
    'differing': len(gaps) / max(len(gaps) + sum(num_same(a.plain.tokens, a.spec.tokens) for a in answers), 1),
    'plain_spread': _spread(answers, 'plain'),
    'spec_spread': _spread(answers, 'spec'),
    'acceptance': [None if np.isnan(share) else share for share in trace.acceptance],
    'num_accepted': np.bincount(num_accepted, minlength=policy.max_depth + 1).tolist(),
    'repetition': repetition(answer.plain.tokens for answer in answers),
    'not_in_tau_paper': tau_paper(answers)[1],
  }


def traced(answers: Iterable[Answered], policy: TreePolicy) -> Traced:
  """Collect the acceptance of the speculative answers, counting each once."""
  spec = [answer.spec for answer in answers if answer.repeat == 0]
  return Traced([timed.num_accepted for timed in spec], [len(timed.tokens) for timed in spec], policy)


def rate(timed: Iterable[Timed]) -> float:
  """Compute new tokens a second of decoding."""
  tokens, seconds = zip(*((len(t.tokens), t.decode_s) for t in timed), strict=True)
  return sum(tokens) / max(sum(seconds), 1e-9)


def tau_paper(answers: Iterable[Answered]) -> tuple[float, int]:
  """Compute the paper's tau, and count the questions that it leaves out.

  It is the mean over questions of tokens over the *zero-based* number of the last pass, which is 2 to 5 % above the
  pooled tau ("The paper's tau" in draft/README.md). It is undefined for a question whose turns all took one pass.
  """
  by_question: dict[tuple, list[int]] = {}
  for answer in answers:
    if answer.repeat == 0:
      count = by_question.setdefault((answer.task, answer.question_id, answer.temperature), [0, 0])
      count[0] += len(answer.spec.tokens) - 1
      count[1] += max(len(answer.spec.num_accepted) - 1, 0)
  ratios = [tokens / passes for tokens, passes in by_question.values() if passes]
  return float(np.mean(ratios)) if ratios else 1.0, len(by_question) - len(ratios)


def repetition(texts: Iterable[Sequence[int]]) -> float:
  """Compute the share of `NGRAM`s that occurred before in the same text, pooled; 0 if all texts are too short."""
  num_ngrams = num_new = 0
  for text in texts:
    ngrams = [tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)]
    num_ngrams, num_new = num_ngrams + len(ngrams), num_new + len(set(ngrams))
  return 1 - num_new / num_ngrams if num_ngrams else 0.0


def _by_pass(answers: Iterable[Answered], name: str) -> float:
  """Compute the mean of a statistic over all speculative target passes."""
  means, weights = zip(*((getattr(a.spec, name), len(a.spec.num_accepted)) for a in answers), strict=True)
  return float(np.dot(means, weights) / max(sum(weights), 1))


def _spread(answers: Iterable[Answered], which: str) -> float | None:
  by_repeat: dict[int, list[Timed]] = {}
  for answer in answers:
    by_repeat.setdefault(answer.repeat, []).append(getattr(answer, which))
  rates = [rate(timed) for timed in by_repeat.values()]
  return float(np.std(rates, ddof=1)) if len(rates) > 1 else None


def report(answers: Sequence[Answered], policy: TreePolicy, *, near_tie: float = NEAR_TIE) -> dict[str, Any]:
  """Apply `summarise` and `details` to each task and to all pooled; add the unweighted `mean` over tasks."""
  by_task: dict[str, list[Answered]] = {}
  for answer in answers:
    by_task.setdefault(answer.task, []).append(answer)
  tasks = {task: summarise(own, policy) for task, own in by_task.items()}
  pooled = summarise(answers, policy)
  groups = by_task | {'pooled': answers}
  return {
    'tasks': tasks,
    'mean': {name: float(np.mean([numbers[name] for numbers in tasks.values()])) for name in pooled},
    'pooled': pooled,
    'details': {name: details(own, policy, near_tie=near_tie) for name, own in groups.items()},
  }


def markdown(report: Mapping[str, Any]) -> str:
  """Format the six numbers of each task as a table, with the numbers of texts that differ."""
  heads = 'task', 'tau', 'tau_paper', 'plain tokens/s', 'speculative tokens/s', 'speedup', 'identical', *_DIFFERENT
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  for name, n in _table_lines(report).items():
    numbers = f'{n["tau"]:.2f} | {n["tau_paper"]:.2f} | {n["plain_tok_per_s"]:.1f} | {n["spec_tok_per_s"]:.1f}'
    different = ' | '.join(str(n[kind]) for kind in _DIFFERENT)
    lines.append(f'| {name} | {numbers} | {n["speedup"]:.2f} | {n["identical"]:.1%} | {different} |')
  return '\n'.join(lines)


def _table_lines(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Collect the numbers of each line of the table, by name."""
  lines = {**report['tasks'], 'mean': report['mean'], 'pooled': report['pooled']}
  counts = {name: report['details'].get(name, {}) for name in lines}
  return {name: {**n, **{kind: counts[name].get(kind, '') for kind in _DIFFERENT}} for name, n in lines.items()}


def write(report: Mapping[str, Any], folder: Path) -> None:
  """Write everything to `report.json`, and the table to `report.md` and `report.csv`."""
  table = io.StringIO(newline='')
  writer = csv.DictWriter(table, ['task', *report['pooled'], *_DIFFERENT])
  writer.writeheader()
  writer.writerows({'task': name, **numbers} for name, numbers in _table_lines(report).items())
  texts = {'json': json.dumps(report, indent=2), 'md': markdown(report), 'csv': table.getvalue()}
  for ending, text in texts.items():
    with replacing(folder / f'report.{ending}') as temporary:
      temporary.write_text(text.rstrip() + '\n', encoding='utf-8')
