"""Measures what `policy='auto'` reads: the times of a cycle's parts, and what policies come to on questions."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cost import KINDS, Calibration, Costs, Measured, device_name
from eagle_jax.decode import build, generate
from eagle_jax.draft import Outlook
from eagle_jax.draft.drafter import Drafter, NoDrafter
from eagle_jax.draft.policy import Adaptive, Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.loop import decode_loop
from eagle_jax.prefill import prepare, run_prefill
from eagle_jax.program import Program
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of, using
from eagle_jax.state import Params, Spec
from eagle_jax.target.transformer import Target
from eagle_jax.train.answers import features
from eagle_jax.train.replay import Nodes, Traced, observe, trace
from eagle_jax.train.shards import Example
from eagle_jax.tree import NO_TOKEN, Candidates

NUM_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8, 10)
CANDIDATES: tuple[TreePolicy, ...] = (
  Chain(1), Chain(2), Chain(3), Chain(4), Chain(6), DynamicTree(2, 2, 3, 6), DynamicTree(3, 3, 3, 8),
  DynamicTree(3, 3, 4, 12), DynamicTree(4, 4, 5, 16), DynamicTree(6, 6, 5, 24), DynamicTree(8, 8, 6, 32), DynamicTree(),
)  # fmt: skip
NUM_TIMED = 3  # candidates of the best modelled rate that are decoded with, besides plain and adaptive
NUM_KNOTS = 24
NUM_CYCLES = 32
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Blank(NoDrafter):
  """Proposes trees of unused nodes, at no cost: what is left of a cycle is verification."""

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, outlook: Outlook) -> Candidates:
    shape = root_B.shape[0], policy.num_nodes
    zero_BA = jnp.zeros(shape)
    token_BA = jnp.full(shape, NO_TOKEN).at[:, 0].set(root_B)
    return Candidates(token_BA, jnp.zeros(shape, jnp.int32).at[:, 0].set(-1), zero_BA, zero_BA.at[:, 1:].set(-1))


def cycle_ms(target: Target, params: Params, spec: Spec, *, batch: int, num_prompt: int) -> float:
  """Milliseconds a target pass of the decode loop, everything in it included: the least of a few runs."""
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, target.config.vocab_size, (batch, num_prompt)).astype(np.int32)
  arguments, static = prepare(
    params,
    tokens_BL,
    np.full(batch, num_prompt, np.int32),
    spec=spec,
    max_new_tokens=NUM_CYCLES,
    sampling=Sampling.of(),
    row_ids=None,
    eos_ids=(),
  )
  best, loop = float('inf'), Program(decode_loop)
  with using(mesh_of(target.params)):
    for _ in range(REPEATS):
      state = run_prefill(*arguments, **static)
      run, _ = loop.compile(params, state, spec=spec)
      jax.block_until_ready(state)
      start = time.perf_counter()
      state = jax.block_until_ready(run(params, state))
      best = min(best, (time.perf_counter() - start) / int(state.num_passes.max()))
  return 1000 * best


def part_costs(target: Target, drafter: Drafter, *, batch: int, num_prompt: int, progress: Callable) -> dict[str, Any]:
  """`verify_ms`, `root_ms` and `draft_ms` of `Costs`.

  A level costs what three more of them add to a cycle; the root's share is what a chain of one adds to verification.
  """

  def ms(policy: TreePolicy, **changes) -> float:
    params, spec = build(target, drafter, policy=policy)
    return cycle_ms(target, params, dataclasses.replace(spec, **changes), batch=batch, num_prompt=num_prompt)

  verify_ms = {1: ms(Plain())}
  for size in progress(NUM_NODES[1:], desc='nodes'):
    verify_ms[size] = ms(DynamicTree(10, 10, min(6, size - 1), size), drafter=Blank())
  draft_ms = {}
  for width in progress(WIDTHS, desc='widths'):
    shallow, deep = (ms(DynamicTree(width, width, max_depth, 3)) for max_depth in (2, 5))
    draft_ms[width] = max((deep - shallow) / 3, 0.0)
  return {'verify_ms': verify_ms, 'root_ms': max(ms(Chain(1)) - verify_ms[2], 0.0), 'draft_ms': draft_ms}


def recorded(target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[Example]:
  """Plain greedy answers, ready to be traced."""
  answers = [generate(target, None, [prompt], max_new_tokens=max_new_tokens).tokens[0] for prompt in prompts]
  texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
  made = features(target, [text[:-1] for text in texts])
  return [
    Example(number, np.asarray(text, np.int32), np.arange(len(text)) >= len(prompt), feature)
    for number, (prompt, text, feature) in enumerate(zip(prompts, texts, made, strict=True))
  ]


def calibration(nodes: Nodes, traced: Traced) -> Calibration:
  """Values of paths as measured: means of equally many nodes, made to rise with the log-probability."""
  order = np.argsort(nodes.log_q)
  parts = [part for part in np.array_split(order, NUM_KNOTS) if len(part)]
  value = np.maximum.accumulate([nodes.is_accepted[part].mean() for part in parts])
  growth = np.nan_to_num(traced.acceptance)
  log_q = [nodes.log_q[part].mean() for part in parts]
  return Calibration(tuple(map(float, log_q)), tuple(map(float, value)), tuple(map(float, growth)))


def tune(
  target: Target,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  batch: int = 1,
  num_prompt: int = 64,
  max_new_tokens: int = 64,
  progress: Callable = lambda x, **_: x,
) -> Costs:
  """Times the parts of a cycle, traces the candidates on `prompts`, and decodes with the most promising ones.

  Args:
    target, drafter: the pair.
    prompts: token ids; what the gain is measured on, so of the kind that will come.
    batch: rows decoded together.
    num_prompt: context that the parts are timed at, tokens.
    max_new_tokens: an answer.
    progress: wraps what takes long, as tqdm does.
  """
  parts = part_costs(target, drafter, batch=batch, num_prompt=num_prompt, progress=progress)
  examples = recorded(target, prompts, max_new_tokens=max_new_tokens)
  num_ids = drafter.config.draft_vocab_size or drafter.config.vocab_size
  traces = {
    policy: trace(target, drafter, examples, policy=policy, num_rows=min(8, len(examples)))
    for policy in progress(CANDIDATES, desc='traces')
    if max(policy.fanouts) <= num_ids
  }
  widest = max(traces, key=lambda policy: policy.num_nodes)
  nodes = observe(target, drafter, examples, policy=widest, num_rows=min(8, len(examples)))
  costs = Costs(
    device=device_name(),
    target=target.config.name,
    drafter=drafter.config.name,
    dtype=str(target.params['embed']['weight'].dtype),
    batch=batch,
    num_prompt=num_prompt,
    **parts,
    policies=(),
    calibration=calibration(nodes, traces[widest]),
    versions={name: version(name) for name in ('eagle_jax', 'jax', 'jaxlib')},
    date=datetime.date.today().isoformat(),
  )
  ranked = sorted(traces, key=lambda policy: -traces[policy].tau / costs.cycle_ms(policy))[:NUM_TIMED]
  measured = [decoded(target, drafter, prompts, policy, batch, max_new_tokens) for policy in (Plain(), *ranked)]
  costs = dataclasses.replace(costs, policies=_best_first(measured))
  for policy in progress(adaptive_forms(costs), desc='adaptive'):
    measured.append(decoded(target, drafter, prompts, policy, batch, max_new_tokens, costs=costs))
  return dataclasses.replace(costs, policies=_best_first(measured))


def adaptive_forms(costs: Costs) -> list[Adaptive]:
  """Adaptive trees around the best fixed one, with the sizes below theirs at which a pass was timed."""
  best = next((measured.policy for measured in costs.policies if measured.kind != 'plain'), Chain(3))
  forms = []
  for width, num_nodes in ((1, best.num_nodes), (3, max(8, best.num_nodes)), (4, max(16, best.num_nodes))):
    max_depth = max(best.max_depth, 4)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < num_nodes]
    if num_nodes <= 1 + width + (max_depth - 1) * width * width:
      forms.append(Adaptive(width, width, max_depth, num_nodes, smaller=tuple(sizes)))
  return forms


def decoded(
  target: Target,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  policy: TreePolicy,
  batch: int,
  max_new_tokens: int,
  *,
  costs: Costs | None = None,
) -> Measured:
  """Real decoding of the prompts, `batch` together, compiled before it is timed."""
  groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
  num_new = num_decoded = num_passes = 0
  seconds = 0.0
  for group in groups:
    for _ in range(2):
      out = generate(target, drafter, group, max_new_tokens=max_new_tokens, policy=policy, costs=costs)
      if not out.stats['compile_s']:
        break
    num_new, seconds = num_new + out.stats['num_new_tokens'], seconds + out.stats['decode_s']
    num_decoded += out.stats['num_new_tokens'] - len(group)
    num_passes += out.stats['num_target_passes']
  kind = next(name for name, form in KINDS.items() if type(policy) is form)
  sizes: dict[str, Any] = {field.name: getattr(policy, field.name) for field in dataclasses.fields(KINDS[kind])}
  return Measured(kind, sizes, num_new / seconds, num_decoded / max(num_passes, 1))


def _best_first(measured: Sequence[Measured]) -> tuple[Measured, ...]:
  return tuple(sorted(measured, key=lambda one: -one.tok_per_s))
