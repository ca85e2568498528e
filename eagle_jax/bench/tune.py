"""Measures what `policy='auto'` reads: the times of a cycle's parts, and what policies come to on questions."""

import dataclasses
import datetime
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.buckets import bucket, pad_prompts, require_memory, slots_for
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import Work, generate
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, tau
from eagle_jax.device import bytes_per_s, flops_per_s, is_cpu, num_cores, ran_on
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.evaluate.calibration import Said, examples
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import Nodes, Traced, observe, require_traceable, trace
from eagle_jax.models.transformer import Target
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.costs import Bytes, Calibration, Costs, Parts, Rate, Times, Vocabulary
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import fetched, mesh_of, num_devices, using
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates

NUM_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8, 10)
SHAPES: tuple[Chain | DynamicTree, ...] = (
  Chain(1), Chain(2), Chain(3), Chain(4), Chain(6), DynamicTree(2, 2, 3, 6), DynamicTree(3, 3, 3, 8),
  DynamicTree(3, 3, 4, 12), DynamicTree(4, 4, 5, 16), DynamicTree(6, 6, 5, 24), DynamicTree(8, 8, 6, 32), DynamicTree(),
)  # fmt: skip
CANDIDATES: tuple[TreePolicy, ...] = tuple(dataclasses.replace(shape, lookup=True) for shape in SHAPES)
WHOLE: tuple[TreePolicy, ...] = (Chain(3), DynamicTree())  # timed as whole cycles, beside the sum of their parts
DEEP = 3, 7, 8  # width, depth and nodes of an adaptive tree for text that repeats itself
NUM_TIMED = 3  # candidates of the best modelled rate that are decoded with, besides plain and adaptive
TEMPERATURES = (0.0, 1.0)  # of the texts that paths are valued on, the first of which rates are measured on
NUM_KNOTS = 12
NUM_HALVINGS = 3  # of the draft vocabulary
SLACK = 0.02  # of a rate: drafters that differ by less are equally fast, for all that a few prompts can tell
DEPTHS = 2, 8  # of the trees whose cycles differ by what their levels take
CONTEXTS = (64, 960)  # tokens
NUM_CYCLES = 16
NUM_ROUNDS = 6
NUM_RUNS = 3  # of a form in a round
MAX_COMPILERS = 8  # threads: each takes memory, on a GPU there too, where it tries which form of a product is fastest


@dataclasses.dataclass(frozen=True)
class Blank(NoDrafter):
  """Proposes trees of unused nodes, at no cost: what is left of a cycle is verification."""

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    shape = root_B.shape[0], policy.num_nodes
    zero_BA = jnp.zeros(shape)
    token_BA = jnp.full(shape, NO_TOKEN).at[:, 0].set(root_B)
    return Candidates(token_BA, jnp.zeros(shape, jnp.int32).at[:, 0].set(NO_PARENT), zero_BA, zero_BA.at[:, 1:].set(-1))


Forms = Mapping[Hashable, tuple[Params, Spec]]  # what is timed, by any name


def room(forms: Forms, *, num_prompt: int, max_new_tokens: int) -> int:
  """Cache slots that are enough for every form."""
  return max(slots_for(num_prompt, bucket(max_new_tokens), spec.max_path) for _, spec in forms.values())


def prefilled(
  forms: Forms, tokens_BL: np.ndarray, length_B: np.ndarray, *, fills: Program, max_new_tokens: int, eos_ids: Any
) -> dict[Hashable, DecodeState]:
  """First states of greedy decoding, by the forms' names, with caches of one size.

  Forms of one drafter share a state: give a loop, which takes it for itself, a copy.

  Args:
    forms: of one target; of drafters that are shaped alike, only one may be among them.
    tokens_BL: [B, L] i32, prompts padded at the end.
    length_B: [B] i32, their lengths.
    fills: compiles `run_prefill`.
    max_new_tokens, eos_ids: as in `prefill.prefill`.
  """
  num_slots = room(forms, num_prompt=tokens_BL.shape[1], max_new_tokens=max_new_tokens)
  how: Any = {'max_new_tokens': max_new_tokens, 'sampling': Sampling.of(), 'row_ids': None, 'eos_ids': eos_ids}
  filled: dict[Callable, DecodeState] = {}  # by the program that filled it
  states = {}
  for name, (params, spec) in forms.items():
    arguments, static = prepare(params, tokens_BL, length_B, spec=spec, **how)
    fill, _ = fills.compile(*arguments, **static | {'num_slots': num_slots})
    if fill not in filled:
      filled[fill] = fill(*arguments)
    states[name] = filled[fill]
  return states


def copied(state: DecodeState) -> DecodeState:
  """A state for a loop to take, and finished: what follows is timed."""
  return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def num_compilers() -> int:
  """Programs to compile at a time. A compiler for CPUs puts all cores to one; others leave most of them idle."""
  return 1 if is_cpu() else min(num_cores(), MAX_COMPILERS)


def compiled(
  forms: Forms, first: Mapping[Hashable, DecodeState], *, mesh: Mesh | None, progress: Callable
) -> dict[Hashable, Callable]:
  """Each form's decode loop from its first state, several compiled at a time: tracing takes turns, compiling does not.

  No `Program`, which is for one thread, and keeps fewer.
  """

  def compile_one(name: Hashable) -> Callable:
    params, spec = forms[name]
    with using(mesh):  # a thread's own
      return decode_loop.lower(params, first[name], spec=spec).compile()

  with ThreadPoolExecutor(num_compilers()) as pool:
    runs = progress(pool.map(compile_one, forms), desc='compiling', total=len(forms))
    return dict(zip(forms, runs, strict=True))


def cycles_ms(
  target: Target, forms: Forms, *, batch: int, num_prompt: int, progress: Callable
) -> dict[Hashable, float]:
  """Milliseconds a target pass of each form's decode loop, everything in it included, behind caches of one size.

  The least of several rounds, in each of which all forms run in turn: the speed of a shared machine drifts, and forms
  that were timed one after the other would differ by that.
  """
  network = next(spec.target for _, spec in forms.values())
  require_memory(network, batch, room(forms, num_prompt=num_prompt, max_new_tokens=NUM_CYCLES))
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, target.config.vocab_size, (batch, num_prompt)).astype(np.int32)
  length_B = np.full(batch, num_prompt, np.int32)
  mesh, fills, best = mesh_of(target.params), Program(run_prefill), dict.fromkeys(forms, float('inf'))
  with using(mesh):
    first = prefilled(forms, tokens_BL, length_B, fills=fills, max_new_tokens=NUM_CYCLES, eos_ids=())
    jax.block_until_ready([*first.values()])  # a GPU's compiler times kernels
    runs = compiled(forms, first, mesh=mesh, progress=progress)
    for _ in progress(range(NUM_ROUNDS), desc='rounds'):
      for name, run in runs.items():
        params, _ = forms[name]
        for _ in range(NUM_RUNS):
          state = copied(first[name])
          start = time.perf_counter()
          state = jax.block_until_ready(run(params, state))
          best[name] = min(best[name], 1000 * (time.perf_counter() - start) / int(state.num_passes.max()))
  jitted: Any = run_prefill, decode_loop
  for one in jitted:
    one.clear_cache()  # JAX would keep so many
  return best


def part_costs(
  target: Target,
  drafter: Drafter,
  *,
  batch: int = 1,
  contexts: Sequence[int] = CONTEXTS,
  progress: Callable = lambda x, **_: x,
) -> Parts:
  """Times the parts of a cycle.

  Args:
    target, drafter: the pair.
    batch: rows decoded together.
    contexts: tokens before the passes that are timed, ascending.
    progress: wraps what takes long, as tqdm does.
  """
  mesh = mesh_of(target.params)
  measured, read_rates = [], [bytes_per_s()]
  for context in contexts:
    measured.append(times(target, drafter, batch=batch, num_prompt=context, progress=progress))
    read_rates.append(bytes_per_s())  # at several moments too: the parts' times are those of their best
  return Parts(
    target=target.config.name,
    drafter=drafter.config.name,
    dtype=target.weights_name,
    compute_dtype=str(target.dtype) if target.weights_dtype else None,
    batch=batch,
    times=tuple(measured),
    bytes_per_s=num_devices(mesh) * max(read_rates),
    flops_per_s=num_devices(mesh) * flops_per_s(str(target.dtype)),
    date=datetime.date.today().isoformat(),
    **ran_on(mesh),
  )


def times(target: Target, drafter: Drafter, *, batch: int, num_prompt: int, progress: Callable) -> Times:
  """The parts of a cycle behind one context.

  A level costs what it adds to a cycle, in the mean of those between `DEPTHS`; the root's share is what a chain of one
  adds to verification.
  """
  shortest = Chain(1, lookup=True)
  shallow, deep = DEPTHS
  params, spec = build(target, drafter, policy=shortest)

  def form(policy: TreePolicy, **changes: Any) -> tuple[Params, Spec]:
    return params, dataclasses.replace(spec, policy=policy, **changes)

  num_ids = drafter.config.num_ids
  widths = [width for width in WIDTHS if width <= num_ids]
  whole = [policy for policy in WHOLE if max(policy.fanouts) <= num_ids]
  forms: dict[Hashable, tuple[Params, Spec]] = {('verify', 1): build(target, drafter, policy='plain')}
  forms |= {
    ('verify', size): form(DynamicTree(10, 10, min(6, size - 1), size), drafter=Blank()) for size in NUM_NODES[1:]
  }
  forms |= {(width, depth): form(DynamicTree(width, width, depth, 3, True)) for width in widths for depth in DEPTHS}
  forms |= {policy.describe(): form(policy) for policy in (shortest, *whole)}
  ms = cycles_ms(target, forms, batch=batch, num_prompt=num_prompt, progress=progress)
  num_slots = room(forms, num_prompt=num_prompt, max_new_tokens=NUM_CYCLES)
  state = first_state(params, spec, batch=batch, num_slots=num_slots)
  target_bytes, drafter_bytes = bytes_read(params, state.cache, state.drafter, has_tied_head=target.config.tied_head)
  return Times(
    num_slots=num_slots,
    verify_ms={size: ms['verify', size] for size in NUM_NODES},
    root_ms=max(ms[shortest.describe()] - ms['verify', 2], 0.0),
    draft_ms={width: max(ms[width, deep] - ms[width, shallow], 0.0) / (deep - shallow) for width in widths},
    whole_ms={policy.describe(): ms[policy.describe()] for policy in whole},
    target_bytes=target_bytes,
    drafter_bytes=drafter_bytes,
  )


def first_state(params: Params, spec: Spec, *, batch: int, num_slots: int) -> DecodeState:
  """The shapes of a state whose caches have so many slots."""
  prompts = pad_prompts([[0]] * batch, 1)
  how: Any = {'max_new_tokens': 1, 'sampling': Sampling.of(), 'row_ids': None, 'eos_ids': ()}
  arguments, static = prepare(params, *prompts, spec=spec, **how)
  return jax.eval_shape(functools.partial(run_prefill, **static | {'num_slots': num_slots}), *arguments)


def num_bytes(tree: Any) -> int:
  """Of all arrays, or shapes, in a pytree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_read(params: Params, cache: Any, drafter_cache: Any, *, has_tied_head: bool) -> tuple[Bytes, Bytes]:
  """What a target pass and a drafter pass must read: their weights, and their caches, once.

  Of an embedding that is no head, they read a few rows only: not counted.
  """
  weights = {name: x for name, x in params.target.items() if name != 'embed' or has_tied_head}
  own = {name: x for name, x in params.drafter.items() if name not in ('embed', 'ids', 'whole_head', 'lookup_weights')}
  return Bytes(num_bytes(weights), num_bytes(cache)), Bytes(num_bytes(own), num_bytes(drafter_cache))


def plain_answers(
  target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float
) -> list[Example]:
  """Plain decoding's, ready to be traced."""

  def say(number: int, prompt: Sequence[int]) -> Said:
    out = generate(target, None, [prompt], max_new_tokens=max_new_tokens, temperature=temperature, row_ids=[number])
    return Said(number, prompt, out.tokens[0], temperature)

  return examples(target, [say(number, prompt) for number, prompt in enumerate(prompts)])


def calibration(
  target: Target, drafter: Drafter, temperature: float, answers: Sequence[Example], *, policy: TreePolicy
) -> Calibration:
  """Measured along answers of one temperature, in trees that are large enough to show what smaller ones would hold."""
  nodes = observe(target, drafter, answers, policy=policy)
  traced = trace(target, drafter, answers, policy=policy)
  return path_values(nodes, traced, temperature=temperature)


def path_values(nodes: Nodes, traced: Traced, *, temperature: float) -> Calibration:
  """Values of paths as measured: means of nodes of equal summed confidence, made to rise with the log-probability.

  Nodes of equal number would say little: of the trees' nodes most are all but never accepted.
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
  """Chooses a draft vocabulary and its bits, times the parts of a cycle, and finds which policy is fastest.

  All of `CANDIDATES` are traced, and their rates modelled, behind the first context; the most promising decode the
  prompts, and adaptive trees like them.

  Args:
    target, drafter: the pair.
    prompts: token ids; what the gain is measured on, so of the kind that will come.
    batch: rows decoded together.
    contexts: tokens before the passes that are timed, ascending.
    max_new_tokens: an answer.
    progress: wraps what takes long, as tqdm does.

  Raises:
    ValueError: the drafter cannot be traced: it is an EAGLE-3 head.
  """
  require_traceable(target, drafter)
  answers = {
    temperature: plain_answers(target, prompts, max_new_tokens=max_new_tokens, temperature=temperature)
    for temperature in TEMPERATURES
  }
  greedy = answers[TEMPERATURES[0]]
  tried = vocabularies(target, drafter, greedy, batch=batch, num_prompt=contexts[0], progress=progress)
  best = largest_of_the_fastest(tried)
  drafter = drafter.reduced(best.num_ids, is_quantised=best.is_quantised)
  parts = part_costs(target, drafter, batch=batch, contexts=contexts, progress=progress)
  candidates = [policy for policy in CANDIDATES if max(policy.fanouts) <= best.num_ids]
  modelled = modelled_rates(target, drafter, greedy, candidates, parts=parts, progress=progress)
  widest = max(candidates, key=lambda policy: policy.num_nodes)
  costs = Costs(
    **vars(parts),
    policies=modelled,
    modelled=modelled,
    calibrations=tuple(calibration(target, drafter, *one, policy=widest) for one in answers.items()),
    num_ids=best.num_ids,
    is_quantised=best.is_quantised,
    vocabularies=tried,
  )
  drafting = [rate.policy for rate in modelled if rate.kind != 'plain']
  chosen = [Plain(), *drafting[:NUM_TIMED], *adaptive_forms(costs)]
  how: Any = {'batch': batch, 'max_new_tokens': max_new_tokens, 'costs': costs, 'progress': progress}
  return dataclasses.replace(costs, policies=decoded(target, drafter, prompts, chosen, **how))


def modelled_rates(
  target: Target,
  drafter: Drafter,
  answers: Sequence[Example],
  policies: Sequence[TreePolicy],
  *,
  parts: Parts,
  progress: Callable,
) -> tuple[Rate, ...]:
  """Of the policies and plain decoding behind the first context: traced tau over modelled time; best first."""
  taus: dict[TreePolicy, float] = {Plain(): 1.0}
  for policy in progress(policies, desc='traces'):
    taus[policy] = trace(target, drafter, answers, policy=policy).tau
  rates = [
    Rate.of(policy, tok_per_s=1000 * parts.batch * taus[policy] / parts.times[0].cycle_ms(policy), tau=taus[policy])
    for policy in taus
  ]
  return tuple(sorted(rates, key=lambda rate: -rate.tok_per_s))


def vocabularies(
  target: Target, drafter: Drafter, answers: Sequence[Example], *, batch: int, num_prompt: int, progress: Callable
) -> tuple[Vocabulary, ...]:
  """What the drafter comes to with all its ids, with the first half of them, the first quarter, ...; as it is, and
  quantised."""
  ids = np.asarray(drafter.params.get('ids', np.arange(drafter.config.vocab_size)))
  spoken = np.concatenate([answer.token[answer.is_answer] for answer in answers])
  sizes = [len(ids) >> n for n in range(NUM_HALVINGS + 1) if len(ids) >> n]
  kinds = [*itertools.product(sizes, sorted({drafter.is_quantised, True}))]
  lesser = {kind: drafter.reduced(kind[0], is_quantised=kind[1]) for kind in kinds}
  policy = Chain(3, lookup=True)
  forms: Any = {kind: build(target, lesser[kind], policy=policy) for kind in kinds}
  ms = cycles_ms(target, forms, batch=batch, num_prompt=num_prompt, progress=progress)
  taus = {kind: trace(target, lesser[kind], answers, policy=policy).tau for kind in kinds}
  return tuple(Vocabulary(*kind, float(np.isin(spoken, ids[: kind[0]]).mean()), taus[kind], ms[kind]) for kind in kinds)


def largest_of_the_fastest(tried: Sequence[Vocabulary]) -> Vocabulary:
  """The most ids that cost no more than `SLACK` of the best rate: other texts than those it was measured on need some
  that these do not. Of equal sizes the faster."""
  rate = {one: one.tau / one.cycle_ms for one in tried}
  fastest = [one for one in tried if rate[one] >= (1 - SLACK) * max(rate.values())]
  return max(fastest, key=lambda one: (one.num_ids, rate[one]))


def adaptive_forms(costs: Costs) -> list[Adaptive]:
  """Adaptive trees around the best fixed one, a chain and a bushy one, and `DEEP`; a size more is a pass to compile."""
  best = costs.modelled[0].policy
  max_depth = max(best.max_depth, 4)
  shapes = (1, max_depth, max_depth + 1), (3, max_depth, max(8, best.num_nodes)), DEEP
  return [
    Adaptive(width, width, depth, num_nodes, lookup=True, smaller=(1, *_halves(num_nodes)))
    for width, depth, num_nodes in shapes
    if num_nodes <= 1 + width + (depth - 1) * width * width
  ]


def _halves(num_nodes: int) -> list[int]:
  """A half; of many nodes a quarter too, ascending."""
  return [num_nodes // 4, num_nodes // 2] if num_nodes >= 16 else [num_nodes // 2]


def _width(prompts: Sequence[Sequence[int]]) -> int:
  """Tokens that these are padded to: the first of 64, 256, 1024, ... that holds the longest."""
  longest = max(map(len, prompts))
  return next(width for width in (4**n for n in itertools.count(3)) if width >= longest)


def decoded(
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
  """Real decoding of the prompts, `batch` together, the policies in turn, compiled before it is timed; best first.

  Prompts are padded to one of few widths, so that each policy is compiled as few times (and once more for a last batch
  with fewer rows). A pass reads every slot: behind most prompts it costs a little more than with `generate`, with every
  policy, and the more the more nodes it has. Prefill is not timed.
  """
  groups = sorted((prompts[start : start + batch] for start in range(0, len(prompts), batch)), key=_width)
  stats: dict[TreePolicy, list[dict[str, Any]]] = {policy: [] for policy in policies}
  fills, runs = Program(run_prefill), Program(decode_loop)
  with using(mesh_of(target.params)):
    for group in progress(groups, desc='decoding'):
      forms: Any = {policy: build(target, drafter, policy=policy, batch=len(group), costs=costs) for policy in policies}
      padded = pad_prompts(group, _width(group))
      first = prefilled(forms, *padded, fills=fills, max_new_tokens=max_new_tokens, eos_ids=None)
      for policy, (params, spec) in forms.items():
        run, compile_s = runs.compile(params, first[policy], spec=spec)
        if compile_s:  # times are of a warm program
          jax.block_until_ready(run(params, copied(first[policy])))
        state = copied(first[policy])
        start = time.perf_counter()
        work = fetched(Work.of(run(params, state)))
        stats[policy].append(work.stats({'decode_s': time.perf_counter() - start}))
  for programs in (fills, runs):
    programs.forget()

  def rate(policy: TreePolicy) -> Rate:
    num_new, seconds, num_passes = (
      sum(of_group[name] for of_group in stats[policy]) for name in ('num_new_tokens', 'decode_s', 'num_target_passes')
    )
    return Rate.of(policy, tok_per_s=num_new / seconds, tau=tau(num_new, num_passes, num_sequences=len(prompts)))

  return tuple(sorted(map(rate, policies), key=lambda one: -one.tok_per_s))
