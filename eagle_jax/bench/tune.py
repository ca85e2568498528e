"""Measure the costs that `policy='auto'` reads: times of the parts of a step, and rates of policies on questions."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.bench.timing import CONTEXTS, copy_state, measure_times, prefill_variants, time_steps
from eagle_jax.decode.buckets import pad_prompts
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import Work
from eagle_jax.decode.prefill import run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.step import decode_loop, tau
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.evaluate.calibration import answer_plainly, make_examples
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import Nodes, Traced, observe, trace
from eagle_jax.models.transformer import Target
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.costs import Calibration, Costs, Rate, Timings, Vocabulary
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.sharding import mesh_of, to_host, use_mesh

CANDIDATES: tuple[Chain | DynamicTree, ...] = (  # with lookup, if the drafter has logits that it can raise
  Chain(1), Chain(2), Chain(3), Chain(4), Chain(6), DynamicTree(2, 2, 3, 6), DynamicTree(3, 3, 3, 8),
  DynamicTree(3, 3, 4, 12), DynamicTree(4, 4, 5, 16), DynamicTree(6, 6, 5, 24), DynamicTree(8, 8, 6, 32), DynamicTree(),
)  # fmt: skip
DEEP = 3, 7, 8  # width, depth and nodes of an adaptive tree for text that repeats itself
NUM_TIMED = 3  # how many of the best modelled candidates are timed in real decoding, besides plain and adaptive
TEMPERATURES = (0.0, 1.0)  # of the texts for calibration; rates are measured on the first
NUM_KNOTS = 12  # of a calibration curve
NUM_HALVINGS = 3  # of the draft vocabulary
SLACK = 0.02  # relative: a few prompts cannot tell drafters apart whose rates differ by less
VOCABULARY_ROUNDS = 15  # more, since sizes differ by a few percent at most


def path_values(nodes: Nodes, traced: Traced, *, temperature: float) -> Calibration:
  """Fit acceptance to the paths' log-probability, as means over groups of nodes, made to increase monotonically.

  Groups have equal summed confidence. Groups of equal size would resolve little, since most nodes of a tree are almost
  never accepted.
  """
  order = np.argsort(nodes.log_q)
  confidence = np.cumsum(np.exp(nodes.log_q[order].astype(np.float64)))
  ends = np.searchsorted(confidence, np.linspace(0, confidence[-1], NUM_KNOTS + 1)[1:-1])
  parts = [part for part in np.split(order, ends) if len(part)]
  value = np.maximum.accumulate([nodes.is_accepted[part].mean() for part in parts])
  growth = np.nan_to_num(traced.acceptance)
  log_q = [nodes.log_q[part].mean() for part in parts]
  return Calibration(temperature, tuple(map(float, log_q)), tuple(map(float, value)), tuple(map(float, growth)))


def tune(
  target: Target,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  batch: int = 1,
  contexts: Sequence[int] = CONTEXTS,
  max_new_tokens: int = 64,
  progress: Callable = lambda x, **_: x,
) -> Costs:
  """Choose a draft vocabulary and its bits, time the parts of a step, and find the fastest policy.

  The rates of `CANDIDATES` are modelled from traces, for the first context. The prompts are then decoded with the best
  of them and with similar adaptive trees.

  Args:
    target, drafter: the pair.
    prompts: token ids of prompts to measure rates on; choose them like those in later use.
    batch: sequences decoded together.
    contexts: tokens before the passes that are timed, ascending.
    max_new_tokens: maximum number of new tokens of an answer.
    progress: wraps long-running iterables, as tqdm does.
  """
  answers: dict[float, list[Example]] = {}
  for temperature in TEMPERATURES:
    plain = answer_plainly(target, prompts, temperature=temperature, max_new_tokens=max_new_tokens)
    answers[temperature] = make_examples(target, drafter, plain)
  greedy = answers[TEMPERATURES[0]]
  lookup = kind_of(drafter.config).has_logits
  tried = try_vocabularies(target, drafter, greedy, batch=batch, num_prompt=contexts[0], progress=progress)
  best = largest_of_the_fastest(tried)
  drafter = drafter.reduced(best.num_ids, is_quantised=best.is_quantised)
  timings = measure_times(target, drafter, batch=batch, contexts=contexts, progress=progress)
  candidates = [dataclasses.replace(one, lookup=lookup) for one in CANDIDATES if max(one.fanouts) <= best.num_ids]
  widest = max(candidates, key=lambda policy: policy.num_nodes)
  traced = {temperature: trace(target, drafter, one, policy=widest) for temperature, one in answers.items()}
  others = [policy for policy in candidates if policy != widest]
  modelled = model_rates(
    target, drafter, greedy, others, widest=traced[TEMPERATURES[0]], timings=timings, progress=progress
  )
  costs = Costs(
    **vars(timings),
    policies=modelled,
    modelled=modelled,
    calibrations=tuple(
      path_values(observe(target, drafter, answers[temperature], policy=widest), one, temperature=temperature)
      for temperature, one in traced.items()
    ),
    num_ids=best.num_ids,
    is_quantised=best.is_quantised,
    vocabularies=tried,
  )
  drafting = [rate.policy for rate in modelled if rate.kind != 'plain']
  chosen = [Plain(), *drafting[:NUM_TIMED], *adaptive_candidates(costs)]
  options: Any = {'batch': batch, 'max_new_tokens': max_new_tokens, 'costs': costs, 'progress': progress}
  return dataclasses.replace(costs, policies=measure_rates(target, drafter, prompts, chosen, **options))


def model_rates(
  target: Target,
  drafter: Drafter,
  answers: Sequence[Example],
  policies: Sequence[TreePolicy],
  *,
  widest: Traced,
  timings: Timings,
  progress: Callable,
) -> tuple[Rate, ...]:
  """Model the rates of policies and of plain decoding, as traced tau over modelled step; best first.

  A policy is traced only if it would be the fastest so far with the tau of `widest`, whose trees contain all others.
  """
  times = timings.times[0]

  def modelled(policy: TreePolicy, tau: float) -> Rate:
    return Rate.of(policy, tok_per_s=1000 * timings.batch * tau / times.step_ms(policy), tau=tau)

  rates = [modelled(Plain(), 1.0), modelled(widest.policy, widest.tau)]
  for policy in progress(sorted(policies, key=times.step_ms), desc='traces'):
    most = modelled(policy, min(policy.max_depth + 1, widest.tau * (1 + SLACK)))
    if most.tok_per_s > max(rate.tok_per_s for rate in rates):
      rates.append(modelled(policy, trace(target, drafter, answers, policy=policy).tau))
  return tuple(sorted(rates, key=lambda rate: -rate.tok_per_s))


def try_vocabularies(
  target: Target, drafter: Drafter, answers: Sequence[Example], *, batch: int, num_prompt: int, progress: Callable
) -> tuple[Vocabulary, ...]:
  """Measure the drafter as it is, quantised, and with its first half, quarter, ... of ids in the faster of the two.

  One without weights is measured as it is, and one whose vocabulary is fixed with all its ids.
  """
  ids = np.asarray(drafter.params.get('ids', np.arange(drafter.config.vocab_size)))
  tokens = np.concatenate([answer.token[answer.is_answer] for answer in answers])
  policy = Chain(3, lookup=kind_of(drafter.config).has_logits)
  options: Any = {'batch': batch, 'num_prompt': num_prompt, 'progress': progress}

  def measured(kinds: Sequence[tuple[int, bool]]) -> tuple[Vocabulary, ...]:
    reduced = {kind: drafter.reduced(kind[0], is_quantised=kind[1]) for kind in kinds}
    variants: Any = {kind: build(target, reduced[kind], policy=policy) for kind in kinds}
    ms = time_steps(target, variants, **options, num_rounds=VOCABULARY_ROUNDS)
    taus = {kind: trace(target, reduced[kind], answers, policy=policy).tau for kind in kinds}
    return tuple(
      Vocabulary(*kind, float(np.isin(tokens, ids[: kind[0]]).mean()), taus[kind], ms[kind]) for kind in kinds
    )

  whole = measured([(len(ids), is_quantised) for is_quantised in sorted({drafter.is_quantised, bool(drafter.params)})])
  num_halvings = 0 if drafter.has_fixed_ids else NUM_HALVINGS
  sizes = [len(ids) >> n for n in range(1, num_halvings + 1) if len(ids) >> n]
  is_quantised = largest_of_the_fastest(whole).is_quantised
  return (*whole, *(measured([(size, is_quantised) for size in sizes]) if sizes else ()))


def largest_of_the_fastest(tried: Sequence[Vocabulary]) -> Vocabulary:
  """Choose the largest vocabulary whose rate is within `SLACK` of the best; of equal sizes, the faster.

  The largest, since other texts need ids that the measured ones do not.
  """
  rate = {one: one.tau / one.cycle_ms for one in tried}
  fastest = [one for one in tried if rate[one] >= (1 - SLACK) * max(rate.values())]
  return max(fastest, key=lambda one: (one.num_ids, rate[one]))


def adaptive_candidates(costs: Costs) -> list[Adaptive]:
  """Make adaptive trees around the best fixed policy: a chain, a bushy one, and `DEEP`.

  They have few sizes, since each is one more pass to compile.
  """
  best = costs.modelled[0].policy
  max_depth, lookup = max(best.max_depth, 4), any(rate.policy.lookup for rate in costs.modelled)
  shapes = (1, max_depth, max_depth + 1), (3, max_depth, max(8, best.num_nodes)), DEEP
  return [
    Adaptive(width, width, depth, num_nodes, lookup, smaller=(1, *_halves(num_nodes)))
    for width, depth, num_nodes in shapes
    if num_nodes <= 1 + width + (depth - 1) * width * width
  ]


def _halves(num_nodes: int) -> list[int]:
  """Return half the nodes, and for many nodes also a quarter, ascending."""
  return [num_nodes // 4, num_nodes // 2] if num_nodes >= 16 else [num_nodes // 2]


def _padded_length(prompts: Sequence[Sequence[int]]) -> int:
  """Return the first of 256, 1024, ... tokens that holds the longest prompt."""
  longest = max(map(len, prompts))
  return next(length for length in (4**n for n in itertools.count(4)) if length >= longest)


def measure_rates(
  target: Target,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  policies: Sequence[TreePolicy],
  *,
  batch: int,
  max_new_tokens: int,
  costs: Costs,
  progress: Callable,
) -> tuple[Rate, ...]:
  """Decode the prompts, `batch` at a time, with each policy in turn, and time it without compiling; best first.

  Prompts are padded to one of few lengths, so that each policy is compiled only a few times (and once more for a
  smaller last batch). A pass reads every slot, so for most prompts every policy takes a little longer than with
  `generate`, and more so the more nodes it has. Prefill is not timed.
  """
  groups = sorted((prompts[start : start + batch] for start in range(0, len(prompts), batch)), key=_padded_length)
  totals = {policy: np.zeros(3) for policy in policies}  # new tokens, target passes, seconds
  prefill, loop = Program(run_prefill), Program(decode_loop)
  with use_mesh(mesh_of(target.params)):
    for group in progress(groups, desc='decoding'):
      variants: Any = {
        policy: build(target, drafter, policy=policy, batch=len(group), costs=costs) for policy in policies
      }
      padded = pad_prompts(group, _padded_length(group))
      first = prefill_variants(variants, *padded, prefill=prefill, max_new_tokens=max_new_tokens, eos_ids=None)
      for policy, (params, spec) in variants.items():
        run, compile_s = loop.compile(params, first[policy], spec=spec)
        if compile_s:  # time only a warm program
          jax.block_until_ready(run(params, copy_state(first[policy])))
        state = copy_state(first[policy])
        start = time.perf_counter()
        work = to_host(Work.of(run(params, state)))
        totals[policy] += work.num_tokens.sum(), work.num_passes.sum(), time.perf_counter() - start
  for program in (prefill, loop):
    program.forget()

  def rate(policy: TreePolicy) -> Rate:
    num_new, num_passes, seconds = totals[policy].tolist()
    num_tokens = tau(int(num_new), int(num_passes), num_sequences=len(prompts))
    return Rate.of(policy, tok_per_s=num_new / seconds, tau=num_tokens)

  return tuple(sorted(map(rate, policies), key=lambda one: -one.tok_per_s))
