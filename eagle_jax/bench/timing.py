"""Time decode steps, and the parts of a step of a pair: target passes, levels of drafting, and what each must read."""

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
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop
from eagle_jax.device import bytes_per_s, flops_per_s, num_cores, ran_on
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.kinds import kind_of
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.kernels.cpu import in_use
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Bytes, StepTimes, Timings
from eagle_jax.policy.trees import Chain, DynamicTree, TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of, num_devices, use_mesh
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates

DEPTHS = 2, 8  # of two trees; the difference of their steps is the time of the levels between
CONTEXTS = (64, 960)  # tokens
NUM_STEPS = 16
NUM_ROUNDS = 6
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
  lookup = kind_of(drafter.config).has_logits
  shortest = Chain(1, lookup)
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
    variants[width, depth] = variant(DynamicTree(width, width, depth, 3, lookup))
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
