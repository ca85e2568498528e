"""Compare drafters and tree policies of a pair along one recorded set of texts, then in real decoding.

Tau, nodes and drafted levels come from trees that are grown once at every position of the target's own answers
(`evaluate.positions`), so they do not depend on the load of the machine. Rates are modelled: tokens over the times that
`launch/cost.py` measured, pass by pass.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle_jax.bench.comparison import LOOKUP_WORDS, Row, merit
from eagle_jax.bench.measure import generate_warm
from eagle_jax.bench.questions import Question, tokenizer_of
from eagle_jax.decode.auto import find_costs
from eagle_jax.decode.step import tau
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of as drafter_kind
from eagle_jax.evaluate.acceptance import tabulate
from eagle_jax.evaluate.calibration import AnswerTokens, answer_plainly, make_examples
from eagle_jax.evaluate.classifier import fit, label
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.positions import Positions, Replayed, grow_everywhere, replay
from eagle_jax.models.transformer import Target
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.costs import Costs, StepTimes, interpolate
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import LOOKUPS, Chain, DynamicTree, Plain, StaticTree, TreePolicy, level_starts

NUM_NODES = (2, 4, 8, 16, 26, 32, 64)
WIDTHS = (2, 4, 10)
DEPTHS = (3, 6, 10)
STOPPING_NODES = (8, 16, 32, 64)
LOG_MASSES = (-0.1, -0.3, -1.0, -2.0)  # DDD; the paper's is the second
REJECTIONS = (0.2, 0.3, 0.45, 0.6)  # SVIP; the paper's is the second
MASSES = (0.1, 0.3, 0.5, 0.7)
ACCEPTED = (0.02, 0.05, 0.1, 0.2)  # C2T
THRESHOLDS = (1.0, 1.5, 2.0, 3.0)  # adaptive: tokens that a plain step's time must bring


def candidates(*, lookup: bool | str, costs: Costs | None, num_nodes: Sequence[int] = NUM_NODES) -> list[TreePolicy]:
  """List the policies to compare, of at most `max(num_nodes)` nodes, for which these costs hold enough."""
  chains = [Chain(n - 1, lookup) for n in num_nodes]
  trees = [
    DynamicTree(width, width, depth, n, lookup)
    for n, width, depth in itertools.product(num_nodes, WIDTHS, DEPTHS)
    if _can_grow(width, depth, n)
  ]
  shortest = [DynamicTree(n - 1, n - 1, 1, n, lookup) for n in num_nodes if n == 2]
  if lookup == 'route':  # other rules combine with it as with lookup
    return [*chains, *shortest, *trees]
  widest = WIDTHS[-1]
  stopping: list[TreePolicy] = []
  for n in (n for n in STOPPING_NODES if n <= max(num_nodes)):
    sizes: Any = {'num_nodes': n, 'lookup': lookup, 'smaller': (n // 4, n // 2)}
    wide = {'width': widest, 'fanout': widest, 'max_depth': DEPTHS[-1], **sizes}
    narrow = {'width': 1, 'fanout': 1, 'max_depth': n - 1, **sizes}
    stopping += [DDD(**wide, least_log_mass=x) for x in LOG_MASSES]
    stopping += [SVIP(**shape, most_rejected=x) for shape in (narrow, wide) for x in REJECTIONS]
    stopping += [SureMass(**wide, least_mass=x) for x in MASSES]
    stopping += [GapTree(widest, widest, DEPTHS[-1], n, lookup)]
    stopping += [CaPE(**sizes, width=width, max_depth=DEPTHS[-1]) for width in (1, widest)]  # the paper's is the first
    if costs is not None:
      if costs.classifier is not None:
        stopping += [C2T(**wide, least_accepted=x) for x in ACCEPTED]
      if costs.acceptance_table is not None:
        stopping += [CalibratedTree(widest, widest, DEPTHS[-1], n, lookup)]
      cut: Any = {**wide, 'smaller': tuple(sorted({1, n // 4, n // 2}))}
      stopping += [Adaptive(**cut, thresholds=(x, x)) for x in THRESHOLDS]
      stopping += [RateTree(**cut)]
  fixed = [] if lookup or StaticTree().num_nodes > max(num_nodes) else [StaticTree()]
  return [*chains, *shortest, *trees, *fixed, *stopping]


def _can_grow(width: int, depth: int, num_nodes: int) -> bool:
  largest = DynamicTree(width, width, depth, 1)
  return depth < num_nodes <= level_starts(largest)[-1]


def record_answers(
  target: Target,
  questions: Sequence[Question],
  temperatures: Sequence[float],
  *,
  max_new_tokens: int,
  progress: Callable = lambda x, **_: x,
) -> list[AnswerTokens]:
  """Answer the first turn of every question by plain decoding, at each temperature in turn."""
  encode = tokenizer_of(target).encode_prompt
  prompts, ids = [encode(question.turns[0]) for question in questions], [question.row_id for question in questions]
  return [
    answer
    for temperature in progress(temperatures, desc='answers')
    for answer in answer_plainly(target, prompts, temperature=temperature, max_new_tokens=max_new_tokens, row_ids=ids)
  ]


def grow_all(
  target: Target,
  drafter: Drafter,
  examples: Sequence[Example],
  policies: Sequence[TreePolicy],
  *,
  costs: Costs | None = None,
) -> Iterator[tuple[Positions, list[TreePolicy]]]:
  """Grow as few sets of trees as hold those of all policies; yield each with its policies."""
  left = sorted(policies, key=lambda policy: -policy.max_depth)
  while left:
    positions = grow_everywhere(target, drafter, examples, policy=left[0], costs=costs)
    yield positions, [policy for policy in left if positions.holds(policy)]
    left = [policy for policy in left if not positions.holds(policy)]


def modelled_ms(replayed: Replayed, times: StepTimes, *, is_free: bool) -> float:
  """Sum the modelled milliseconds of all passes.

  Args:
    replayed: a policy's passes.
    times: of the parts of a step.
    is_free: whether drafting takes no time, as looking things up in the text hardly does.
  """
  if isinstance(replayed.policy, Plain):
    return replayed.num_passes * times.verify_ms[1]
  verify = {n: interpolate(times.verify_ms, n) for n in {*itertools.chain(*replayed.num_nodes)}}
  of_levels = np.cumsum([0.0, times.root_ms, *(interpolate(times.draft_ms, w) for w in replayed.policy.widths[1:])])
  pairs = zip(itertools.chain(*replayed.num_nodes), itertools.chain(*replayed.num_levels), strict=True)
  return sum(verify[n] + (0.0 if is_free else of_levels[max(levels, 1)]) for n, levels in pairs)


def compare(
  target: Target,
  drafters: Sequence[Drafter],
  questions: Sequence[Question],
  temperatures: Sequence[float],
  *,
  max_new_tokens: int,
  num_nodes: Sequence[int] = NUM_NODES,
  progress: Callable = lambda x, **_: x,
) -> list[Row]:
  """Replay every policy with every drafter, without lookup and with each form of it, on the target's own answers.

  Args:
    target: answers the questions.
    drafters: each drafts for it.
    questions: of which the first turns are asked.
    temperatures: of the answers.
    max_new_tokens: maximum number of tokens of an answer.
    num_nodes: tree sizes to compare.
    progress: wraps long-running iterables, as tqdm does.

  Raises:
    ValueError: the target has no tokenizer.
  """
  known = [costs for drafter in drafters if (costs := find_costs(target, drafter)) is not None]
  answers = record_answers(target, questions, temperatures, max_new_tokens=max_new_tokens, progress=progress)
  tasks = [question.task for question in questions] * len(temperatures)
  rows: list[Row] = []
  by_taps: dict[tuple[int, ...], list[Example]] = {}
  for drafter in drafters:
    taps = drafter.config.tapped_layers(target.config.num_layers)
    if taps not in by_taps:
      by_taps[taps] = make_examples(target, drafter, answers, dtype=jnp.float32)
    examples = by_taps[taps]
    costs = next((one for one in known if one.drafter == drafter.config.name), None)
    # Verification is the target's, whatever drafts, but levels are the drafter's: one without weights takes any.
    of_times = costs or (known[0] if known and not drafter.params else None)
    times = None if of_times is None else of_times.times[0]
    for lookup in LOOKUPS if drafter_kind(drafter.config).has_logits else (False,):
      policies = candidates(lookup=lookup, costs=costs, num_nodes=num_nodes)
      reduced = drafter if costs is None else drafter.reduced(costs.num_ids, is_quantised=costs.is_quantised)
      fitting = [policy for policy in policies if max(policy.fanouts) <= reduced.config.num_ids]
      fitting += [] if rows else [Plain()]
      sets = grow_all(target, reduced, examples, fitting, costs=costs)
      for positions, own in progress(sets, desc=drafter.config.name + LOOKUP_WORDS[lookup]):
        for policy in own:
          replayed = replay(positions, policy, policy.arrays(costs, target, reduced), max_new_tokens=max_new_tokens)
          rows += rows_of(drafter.config.name, replayed, examples, tasks, times, is_free=not drafter.params)
  return rows


def rows_of(
  name: str,
  replayed: Replayed,
  examples: Sequence[Example],
  tasks: Sequence[str],
  times: StepTimes | None,
  *,
  is_free: bool,
) -> list[Row]:
  """Make the row of each temperature, and in it tau of each task."""
  rows = []
  for temperature in sorted({example.temperature for example in examples}):
    alike = [number for number, example in enumerate(examples) if example.temperature == temperature]
    part = select(replayed, alike)
    by_task = {
      task: select(replayed, [number for number in alike if tasks[number] == task]).tau for task in dict.fromkeys(tasks)
    }
    ms = None if times is None else modelled_ms(part, times, is_free=is_free)
    rate = None if not ms else 1000 * (sum(part.num_new_tokens) - len(alike)) / ms
    cycle = None if times is None or ms is None else ms / max(part.num_passes, 1) / times.verify_ms[1]
    nodes, passes = part.nodes_per_pass, part.levels_per_pass
    rows.append(Row(name, part.policy, temperature, part.tau, nodes, passes, rate, cycle=cycle, by_task=by_task))
  return rows


def select(replayed: Replayed, numbers: Sequence[int]) -> Replayed:
  """Take some of the examples."""
  parts: Any = {
    name: [getattr(replayed, name)[number] for number in numbers]
    for name in ('num_accepted', 'num_new_tokens', 'num_nodes', 'num_levels')
  }
  return dataclasses.replace(replayed, **parts)


def fit_acceptance(
  target: Target,
  drafter: Drafter,
  questions: Sequence[Question],
  temperatures: Sequence[float],
  *,
  max_new_tokens: int,
  progress: Callable = lambda x, **_: x,
) -> Costs:
  """Fit what `C2T` and `CalibratedTree` read along the target's own answers, and add it to the stored costs.

  Args: as `compare`.

  Raises:
    ValueError: no costs are stored for the pair, or as in `compare` and `evaluate.classifier.fit`.
  """
  costs = find_costs(target, drafter)
  if costs is None:
    raise ValueError(
      f'What is fitted is stored with costs, and there are none of {drafter.config.name!r} for '
      f'{target.config.name!r} on this device: run launch/cost.py first.'
    )
  answers = record_answers(target, questions, temperatures, max_new_tokens=max_new_tokens, progress=progress)
  reduced = drafter.reduced(costs.num_ids, is_quantised=costs.is_quantised)
  examples = make_examples(target, reduced, answers, dtype=jnp.float32)
  width = min(WIDTHS[-1], reduced.config.num_ids)
  positions = grow_everywhere(target, reduced, examples, policy=DynamicTree(width, width, DEPTHS[-1], 2))
  nodes = label(positions)
  return dataclasses.replace(costs, classifier=fit(nodes), acceptance_table=tabulate(nodes))


def decode_best(
  target: Target,
  drafters: Sequence[Drafter],
  questions: Sequence[Question],
  rows: Sequence[Row],
  *,
  num_best: int,
  max_new_tokens: int,
  progress: Callable = lambda x, **_: x,
) -> list[Row]:
  """Decode the questions with plain decoding and with the rows of the best modelled rates (else tau), in turns.

  Args:
    num_best: policies at each temperature, besides plain decoding.
    rows: from `compare`.
    target, drafters, questions, max_new_tokens, progress: as there.
  """
  by_name = {drafter.config.name: drafter for drafter in drafters}
  measured = []
  for temperature in sorted({row.temperature for row in rows}):
    of_temperature = sorted((row for row in rows if row.temperature == temperature), key=merit)
    drafting = [row for row in of_temperature if row.kind != 'plain'][:num_best]
    chosen = [next(row for row in of_temperature if row.kind == 'plain'), *drafting]
    stats: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(chosen))}
    for question in progress(questions, desc=f'decoding, temperature {temperature:g}'):
      prompt = target.tokenizer.encode_prompt(question.turns[0])
      how: Any = {'max_new_tokens': max_new_tokens, 'temperature': temperature, 'row_ids': [question.row_id]}
      for number, row in enumerate(chosen):
        drafter, costs = by_name[row.drafter], find_costs(target, by_name[row.drafter])
        stats[number].append(generate_warm(target, drafter, [prompt], policy=row.policy, costs=costs, **how).stats)
    for number, row in enumerate(chosen):
      measured.append(_measured(row, stats[number]))
  return measured


def _measured(row: Row, stats: Sequence[Mapping[str, Any]]) -> Row:
  total = {name: sum(one[name] for one in stats) for name in ('num_new_tokens', 'num_target_passes', 'decode_s')}
  nodes, passes = (
    sum(one[name] * one['num_target_passes'] for one in stats) / max(total['num_target_passes'], 1)
    for name in ('nodes_per_pass', 'levels_per_pass')
  )
  found = tau(total['num_new_tokens'], total['num_target_passes'], num_sequences=len(stats))
  rate = total['num_new_tokens'] / total['decode_s']
  return Row(row.drafter, row.policy, row.temperature, found, nodes, passes, rate, measured=True)
