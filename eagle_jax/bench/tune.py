"""Measure the costs that `policy='auto'` reads: times of the parts of a step, and rates of policies on questions."""

import dataclasses
import datetime
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.buckets import bucket, pad_prompts, require_memory, slots_for
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import Work
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, tau
from eagle_jax.device import bytes_per_s, flops_per_s, num_cores, ran_on
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.evaluate.calibration import answer_plainly, make_examples
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import Nodes, Traced, observe, trace
from eagle_jax.kernels.cpu import in_use
from eagle_jax.models.transformer import Target
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.costs import Bytes, Calibration, Costs, Rate, StepTimes, Timings, Vocabulary
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of, num_devices, to_host, use_mesh
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates

SHAPES: tuple[Chain | DynamicTree, ...] = (
  Chain(1), Chain(2), Chain(3), Chain(4), Chain(6), DynamicTree(2, 2, 3, 6), DynamicTree(3, 3, 3, 8),
  DynamicTree(3, 3, 4, 12), DynamicTree(4, 4, 5, 16), DynamicTree(6, 6, 5, 24), DynamicTree(8, 8, 6, 32), DynamicTree(),
)  # fmt: skip
CANDIDATES: tuple[TreePolicy, ...] = tuple(dataclasses.replace(shape, lookup=True) for shape in SHAPES)
DEEP = 3, 7, 8  # width, depth and nodes of an adaptive tree for text that repeats itself
NUM_TIMED = 3  # how many of the best modelled candidates are timed in real decoding, besides plain and adaptive
TEMPERATURES = (0.0, 1.0)  # of the texts for calibration; rates are measured on the first
NUM_KNOTS = 12  # of a calibration curve
NUM_HALVINGS = 3  # of the draft vocabulary
SLACK = 0.02  # relative: a few prompts cannot tell drafters apart whose rates differ by less
DEPTHS = 2, 8  # of two trees; the difference of their steps is the time of the levels between
CONTEXTS = (64, 960)  # tokens
NUM_STEPS = 16
NUM_ROUNDS = 6
VOCABULARY_ROUNDS = 15  # more, since sizes differ by a few percent at most
MAX_COMPILERS = 8  # threads; each takes memory, also on a GPU, where the compiler times alternatives


class Parts(NamedTuple):
  """The sizes of the parts that are timed."""

  num_nodes: tuple[int, ...]  # of target passes; 1 and 2 among them
  widths: tuple[int, ...]  # of levels
  whole: tuple[TreePolicy, ...]  # as whole steps, to compare with the sum of the parts


ALL_PARTS = Parts((1, 2, 4, 8, 16, 32, 64), (1, 4, 10), (Chain(3), DynamicTree()))
FEW_PARTS = Parts((1, 2, 4, 8, 16, 64), (1, 10), ())  # for contexts after the first: each is a program to compile


@dataclasses.dataclass(frozen=True)
class EmptyTrees(NoDrafter):
  """A drafter that proposes trees of unused nodes at no cost, so that a step consists of verification alone."""

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    shape = root_B.shape[0], policy.num_nodes
    zero_BA = jnp.zeros(shape)
    token_BA = jnp.full(shape, NO_TOKEN).at[:, 0].set(root_B)
    return Candidates(token_BA, jnp.zeros(shape, jnp.int32).at[:, 0].set(NO_PARENT), zero_BA, zero_BA.at[:, 1:].set(-1))


Variants = Mapping[Hashable, tuple[Params, Spec]]  # programs to be timed, by any name


def num_slots_for(variants: Variants, *, num_prompt: int, max_new_tokens: int) -> int:
  """Count the cache slots that are enough for every variant."""
  return max(slots_for(num_prompt, bucket(max_new_tokens), spec.max_path) for _, spec in variants.values())


def prefill_variants(
  variants: Variants,
  tokens_BL: np.ndarray,
  length_B: np.ndarray,
  *,
  prefill: Program,
  max_new_tokens: int,
  eos_ids: Any,
) -> dict[Hashable, DecodeState]:
  """Make the first states of greedy decoding, by the variants' names, with caches of one size.

  Variants with the same drafter share a state, so copy it before passing it to a loop, which takes it as a donation.

  Args:
    variants: of one target; drafters with the same shapes must be the same drafter.
    tokens_BL: [B, L] i32, prompts padded at the end.
    length_B: [B] i32, their lengths.
    prefill: compiles `run_prefill`.
    max_new_tokens, eos_ids: as in `prefill.prefill`.
  """
  num_slots = num_slots_for(variants, num_prompt=tokens_BL.shape[1], max_new_tokens=max_new_tokens)
  options: Any = {'max_new_tokens': max_new_tokens, 'sampling': Sampling.of(), 'row_ids': None, 'eos_ids': eos_ids}
  by_program: dict[Callable, DecodeState] = {}
  states = {}
  for name, (params, spec) in variants.items():
    arguments, static = prepare(params, tokens_BL, length_B, spec=spec, **options)
    run, _ = prefill.compile(*arguments, **static | {'num_slots': num_slots})
    if run not in by_program:
      by_program[run] = run(*arguments)
    states[name] = by_program[run]
  return states


def copy_state(state: DecodeState) -> DecodeState:
  """Copy a state to be donated to a loop, and wait for the copy, since the loop is timed."""
  return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def num_compilers() -> int:
  """Return how many programs to compile in parallel: a compiler uses several cores only at times."""
  return min(num_cores(), MAX_COMPILERS)


def compile_loops(
  variants: Variants, first: Mapping[Hashable, DecodeState], *, mesh: Mesh | None, progress: Callable
) -> dict[Hashable, Callable]:
  """Compile each variant's decode loop for its first state, several at a time; only tracing is sequential.

  `Program` is not used here, since it is for a single thread and keeps fewer programs.
  """

  def compile_one(name: Hashable) -> Callable:
    params, spec = variants[name]
    with use_mesh(mesh):  # a thread does not inherit the mesh
      return decode_loop.lower(params, first[name], spec=spec).compile()

  with ThreadPoolExecutor(num_compilers()) as pool:
    runs = progress(pool.map(compile_one, variants), desc='compiling', total=len(variants))
    return dict(zip(variants, runs, strict=True))


def time_steps(
  target: Target,
  variants: Variants,
  *,
  batch: int,
  num_prompt: int,
  progress: Callable,
  num_rounds: int | None = None,
) -> dict[Hashable, float]:
  """Time each variant's decode loop in milliseconds a step, with caches of one size.

  Returns the least of several rounds, in each of which all variants run in turn: the speed of a shared machine drifts,
  and that drift must not distinguish variants.
  """
  network = next(spec.target for _, spec in variants.values())
  require_memory(network, batch, num_slots_for(variants, num_prompt=num_prompt, max_new_tokens=NUM_STEPS))
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, target.config.vocab_size, (batch, num_prompt)).astype(np.int32)
  length_B = np.full(batch, num_prompt, np.int32)
  mesh, best = mesh_of(target.params), dict.fromkeys(variants, float('inf'))
  with use_mesh(mesh):
    options: Any = {'prefill': Program(run_prefill), 'max_new_tokens': NUM_STEPS, 'eos_ids': ()}
    first = prefill_variants(variants, tokens_BL, length_B, **options)
    jax.block_until_ready([*first.values()])  # a GPU's compiler times kernels, so nothing else may run
    runs = compile_loops(variants, first, mesh=mesh, progress=progress)
    for _ in progress(range(num_rounds or NUM_ROUNDS), desc='rounds'):
      for name, run in runs.items():
        params, _ = variants[name]
        state = copy_state(first[name])
        start = time.perf_counter()
        state = jax.block_until_ready(run(params, state))
        best[name] = min(best[name], 1000 * (time.perf_counter() - start) / int(state.num_passes.max()))
  jitted: Any = run_prefill, decode_loop
  for one in jitted:
    one.clear_cache()  # JAX would keep all these programs
  return best


def measure_times(
  target: Target,
  drafter: Drafter,
  *,
  batch: int = 1,
  contexts: Sequence[int] = CONTEXTS,
  progress: Callable = lambda x, **_: x,
) -> Timings:
  """Time the parts of a step.

  Args:
    target, drafter: the pair.
    batch: sequences decoded together.
    contexts: tokens before the passes that are timed, ascending.
    progress: wraps long-running iterables, as tqdm does.
  """
  mesh = mesh_of(target.params)
  measured: list[StepTimes] = []
  read_rates = [bytes_per_s()]
  for context in contexts:
    parts = FEW_PARTS if measured else ALL_PARTS
    measured.append(time_parts(target, drafter, parts, batch=batch, num_prompt=context, progress=progress))
    read_rates.append(bytes_per_s())  # at several moments, since the times of the parts are also the best of several
  return Timings(
    target=target.config.name,
    drafter=drafter.config.name,
    dtype=target.weights_name,
    compute_dtype=str(target.dtype) if target.weights_dtype else None,
    batch=batch,
    times=tuple(measured),
    bytes_per_s=num_devices(mesh) * max(read_rates),
    flops_per_s=num_devices(mesh) * flops_per_s(str(target.dtype)),
    date=datetime.date.today().isoformat(),
    kernels=in_use(mesh),
    **ran_on(mesh),
  )


def time_parts(
  target: Target, drafter: Drafter, parts: Parts, *, batch: int, num_prompt: int, progress: Callable
) -> StepTimes:
  """Time the parts of a step for one context.

  The time of a level is the mean difference of steps of trees with `DEPTHS` levels; the root's share is the difference
  between a step of `Chain(1)` and verification of 2 nodes.
  """
  shortest = Chain(1, lookup=True)
  shallow, deep = DEPTHS
  params, spec = build(target, drafter, policy=shortest)

  def variant(policy: TreePolicy, **changes: Any) -> tuple[Params, Spec]:
    return params, dataclasses.replace(spec, policy=policy, **changes)

  num_ids = drafter.config.num_ids
  widths = [width for width in parts.widths if width <= num_ids]
  whole = [policy for policy in parts.whole if max(policy.fanouts) <= num_ids]
  variants: dict[Hashable, tuple[Params, Spec]] = {('verify', 1): build(target, drafter, policy='plain')}
  for size in parts.num_nodes[1:]:
    variants['verify', size] = variant(DynamicTree(10, 10, min(6, size - 1), size), drafter=EmptyTrees())
  for width, depth in itertools.product(widths, DEPTHS):
    variants[width, depth] = variant(DynamicTree(width, width, depth, 3, True))
  variants |= {policy.describe(): variant(policy) for policy in (shortest, *whole)}
  ms = time_steps(target, variants, batch=batch, num_prompt=num_prompt, progress=progress)
  num_slots = num_slots_for(variants, num_prompt=num_prompt, max_new_tokens=NUM_STEPS)
  state = first_state(params, spec, batch=batch, num_slots=num_slots)
  target_bytes, drafter_bytes = bytes_read(params, state.cache, state.drafter, has_tied_head=target.config.tied_head)
  return StepTimes(
    num_slots=num_slots,
    verify_ms={size: ms['verify', size] for size in parts.num_nodes},
    root_ms=max(ms[shortest.describe()] - ms['verify', 2], 0.0),
    draft_ms={width: max(ms[width, deep] - ms[width, shallow], 0.0) / (deep - shallow) for width in widths},
    whole_ms={policy.describe(): ms[policy.describe()] for policy in whole},
    target_bytes=target_bytes,
    drafter_bytes=drafter_bytes,
  )


def first_state(params: Params, spec: Spec, *, batch: int, num_slots: int) -> DecodeState:
  """Return the shapes of a state whose caches have `num_slots` slots."""
  prompts = pad_prompts([[0]] * batch, 1)
  options: Any = {'max_new_tokens': 1, 'sampling': Sampling.of(), 'row_ids': None, 'eos_ids': ()}
  arguments, static = prepare(params, *prompts, spec=spec, **options)
  return jax.eval_shape(functools.partial(run_prefill, **static | {'num_slots': num_slots}), *arguments)


def num_bytes(tree: Any) -> int:
  """Sum the bytes of all arrays, or shapes, in a pytree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_read(params: Params, cache: Any, drafter_cache: Any, *, has_tied_head: bool) -> tuple[Bytes, Bytes]:
  """Count the bytes that a target pass and a drafter pass must read: their weights and caches, once.

  An embedding that is not also the head does not count, since a pass reads only the vectors of its tokens.
  """
  weights = {name: x for name, x in params.target.items() if name != 'embed' or has_tied_head}
  own = {name: x for name, x in params.drafter.items() if name not in ('embed', 'ids', 'whole_head', 'lookup_weights')}
  return Bytes(num_bytes(weights), num_bytes(cache)), Bytes(num_bytes(own), num_bytes(drafter_cache))


def calibration(
  target: Target, drafter: Drafter, answers: Sequence[Example], *, traced: Traced, temperature: float
) -> Calibration:
  """Calibrate along the answers of one temperature, traced with trees that contain those of all candidates."""
  nodes = observe(target, drafter, answers, policy=traced.policy)
  return path_values(nodes, traced, temperature=temperature)


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
  tried = try_vocabularies(target, drafter, greedy, batch=batch, num_prompt=contexts[0], progress=progress)
  best = largest_of_the_fastest(tried)
  drafter = drafter.reduced(best.num_ids, is_quantised=best.is_quantised)
  timings = measure_times(target, drafter, batch=batch, contexts=contexts, progress=progress)
  candidates = [policy for policy in CANDIDATES if max(policy.fanouts) <= best.num_ids]
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
      calibration(target, drafter, answers[temperature], traced=one, temperature=temperature)
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
  """Measure the drafter as it is, quantised, and with its first half, quarter, ... of ids in the faster of the two."""
  ids = np.asarray(drafter.params.get('ids', np.arange(drafter.config.vocab_size)))
  tokens = np.concatenate([answer.token[answer.is_answer] for answer in answers])
  policy = Chain(3, lookup=True)
  options: Any = {'batch': batch, 'num_prompt': num_prompt, 'progress': progress}

  def measured(kinds: Sequence[tuple[int, bool]]) -> tuple[Vocabulary, ...]:
    reduced = {kind: drafter.reduced(kind[0], is_quantised=kind[1]) for kind in kinds}
    variants: Any = {kind: build(target, reduced[kind], policy=policy) for kind in kinds}
    ms = time_steps(target, variants, **options, num_rounds=VOCABULARY_ROUNDS)
    taus = {kind: trace(target, reduced[kind], answers, policy=policy).tau for kind in kinds}
    return tuple(
      Vocabulary(*kind, float(np.isin(tokens, ids[: kind[0]]).mean()), taus[kind], ms[kind]) for kind in kinds
    )

  whole = measured([(len(ids), is_quantised) for is_quantised in sorted({drafter.is_quantised, True})])
  num_halvings = 0 if drafter.has_own_head else NUM_HALVINGS
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
  max_depth = max(best.max_depth, 4)
  shapes = (1, max_depth, max_depth + 1), (3, max_depth, max(8, best.num_nodes)), DEEP
  return [
    Adaptive(width, width, depth, num_nodes, lookup=True, smaller=(1, *_halves(num_nodes)))
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
