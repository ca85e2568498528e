"""Compile a decode step for devices that need not be present, and read the compiler's bytes, FLOPs and estimated times.

Only shapes go in; nothing is allocated and nothing runs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from eagle_jax.bench.aot.hlo import bytes_moved, estimated_cycles, num_kernels
from eagle_jax.bench.timing import EmptyTrees, bytes_read
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.state import Params, Spec
from eagle_jax.decode.step import decode_step
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.kernels.tiling import Columns
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.policy.trees import DynamicTree, Plain, TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import param_shardings, partition

# XLA:TPU copies weights into fast memory ahead of their use, and `cost_analysis` counts such a byte three times: read,
# written, read again. Without these copies 'bytes accessed' is what crosses the main memory's bus.
NO_COPIES_AHEAD = {'xla_msa_enable': 'false'}


class Estimate(NamedTuple):
  """The compiler's numbers for a program on one device; NaN where it gives none, as XLA:GPU for FLOPs and times."""

  bytes_needed: float  # weights and caches, once a pass; see `ShapedPair.bytes_needed`
  bytes_moved: float  # over the main memory's bus, as the compiler placed the buffers; on a GPU all are in main memory
  bytes_accessed: float  # by all operations, as if no result stayed in fast memory
  flops: float
  optimal_s: float  # the longer of bytes and FLOPs at the device's rates; NaN also if negative
  cycles: float  # sum of the compiler's estimates for its operations, without our own kernels
  num_kernels: float  # operations that run one after the other
  temporary_bytes: float

  @classmethod
  def of(cls, counted: Any, placed: Any, bytes_needed: float) -> 'Estimate':
    """Combine a program compiled with NO_COPIES_AHEAD and the same program as it would run."""
    cost, hlo = counted.cost_analysis() or {}, placed.as_text()
    optimal_s = cost.get('optimal_seconds', np.nan)
    return cls(
      bytes_needed=bytes_needed,
      bytes_moved=bytes_moved(hlo),
      bytes_accessed=cost.get('bytes accessed', np.nan),
      flops=cost.get('flops', np.nan),
      optimal_s=optimal_s if optimal_s >= 0 else np.nan,
      cycles=estimated_cycles(hlo),
      num_kernels=num_kernels(hlo),
      temporary_bytes=placed.memory_analysis().temp_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True)
class ShapedPair:
  """A target and a drafter as shapes on a mesh."""

  target: TargetConfig
  drafter: DrafterConfig
  mesh: Mesh
  num_prompt: int = 1024  # tokens
  batch: int = 1
  max_new_tokens: int = 128
  dtype: Any = jnp.bfloat16
  is_quantised: bool = False  # whether the drafter is

  @property
  def network(self) -> Any:
    """The drafter's, of any kind that borrows the target's head."""
    return kind_of(self.drafter).network(self.drafter, self.dtype)

  def params(self) -> Params:
    """Return the shapes of the parameters of target and drafter, as `decode.build` makes them."""

    def shapes(network) -> Any:
      return jax.eval_shape(network.init_params, jax.random.key(0))

    target = self._placed(shapes(TransformerTarget(self.target, self.dtype)))
    head = target.get('head', target['embed'])['weight']
    num_ids = self.drafter.num_ids
    drafts = {'head': {'weight': jax.ShapeDtypeStruct((num_ids, head.shape[1]), head.dtype)}}
    own = shapes(self.network) | drafts | {'ids': jax.ShapeDtypeStruct((num_ids,), jnp.int32)}
    if self.is_quantised:
      own = jax.eval_shape(lambda own: Drafter(self.drafter, own).quantised().params, own)
    own = self._placed(own)
    borrowed = {'embed': target['embed']['weight'], 'head': own['head']['weight']}
    return Params(target, own | borrowed | ({'whole_head': head} if self.drafter.draft_vocab_size else {}))

  def spec(self, policy: TreePolicy, drafter: Any = None) -> Spec:
    """Return the static description, with `drafter` in place of the pair's if it is given."""
    network = TransformerTarget(self.target, self.dtype)
    columns = Columns.of(self.mesh.devices.flat[0].platform)
    return Spec(network, drafter or self.network, policy, columns=columns)

  def prefill(self, spec: Spec) -> tuple[Any, Any]:
    """Compile prefill, and return it with the shapes of the state that it returns."""
    arguments, static = self._prefill_arguments(spec)
    with jax.set_mesh(self.mesh):
      lowered = run_prefill.lower(*arguments, **static)
      program = lowered.compile()
    return program, place(lowered.out_info, program.output_shardings)

  def state(self, spec: Spec) -> Any:
    """Return the shapes of the state behind the prompt; for several devices, prefill is compiled to place them."""
    if self.mesh.size > 1:
      return self.prefill(spec)[1]
    arguments, static = self._prefill_arguments(spec)
    with jax.set_mesh(self.mesh):
      shapes = jax.eval_shape(functools.partial(run_prefill, **static), *arguments)
    return place(shapes, jax.tree.map(lambda _: NamedSharding(self.mesh, partition((), (), self.mesh)), shapes))

  def compile(self, run: Any, state: Any, spec: Spec, options: Mapping[str, str] | None = None) -> Any:
    """Compile `run`, which is `decode.decode_step` or `decode_loop`, for `state`."""
    params = self.params()
    with jax.set_mesh(self.mesh):
      return run.lower(params, state, spec=spec).compile(options)

  def bytes_needed(self, state: Any, *, num_drafts: int) -> float:
    """Count the bytes that each device must read for a target pass and `num_drafts` drafter passes."""
    caches = state.cache, state.drafter.cache if num_drafts else ()
    target_pass, drafter_pass = bytes_read(self.params(), *caches, has_tied_head=self.target.tied_head)
    return (sum(target_pass) + num_drafts * sum(drafter_pass)) / self.mesh.size

  def _prefill_arguments(self, spec: Spec) -> tuple[tuple, dict[str, Any]]:
    """Return the traced arguments of `run_prefill`, and its static ones."""
    return prepare(
      self.params(),
      np.zeros((self.batch, self.num_prompt), np.int32),
      np.ones(self.batch, np.int32),
      spec=spec,
      max_new_tokens=self.max_new_tokens,
      sampling=Sampling.of(),
      row_ids=None,
      eos_ids=(1,),
    )

  def _placed(self, shapes: Any) -> Any:
    return place(shapes, param_shardings(shapes, self.mesh))


def place(shapes: Any, shardings: Any) -> Any:
  """Attach shardings to shapes."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def steps(pair: ShapedPair, *, sizes: Sequence[int] = (16, 32, 60, 128)) -> dict[str, Estimate]:
  """Estimate the plain step, target passes over trees of `sizes` nodes, a draft level (by difference), and a step."""
  state = pair.state(pair.spec(DynamicTree()))

  def estimate(policy: TreePolicy, drafter: Any = None) -> Estimate:
    behind, num_drafts = (state, policy.max_depth) if drafter is None else (state._replace(drafter=()), 0)
    spec = pair.spec(policy, drafter)
    counted = as_it_runs = pair.compile(decode_step, behind, spec)
    if pair.mesh.devices.flat[0].platform == 'tpu':
      counted = pair.compile(decode_step, behind, spec, NO_COPIES_AHEAD)
    return Estimate.of(counted, as_it_runs, pair.bytes_needed(behind, num_drafts=num_drafts))

  found = {'plain step': estimate(Plain(), NoDrafter())}
  found |= {f'target pass, {size} nodes': estimate(DynamicTree(16, 16, 6, size), EmptyTrees()) for size in sizes}
  shallow, deep = estimate(DynamicTree(max_depth=5)), estimate(DynamicTree())
  found['one more level of 10'] = Estimate(*(b - a for a, b in zip(shallow, deep, strict=True)))
  return found | {'whole cycle, 60 nodes': deep}


def table(found: Mapping[str, Estimate]) -> str:
  """Format estimates as Markdown; the last columns are relative to the plain step."""
  plain = found['plain step']
  amounts = 'GFLOP', 'temporary MB', 'kernels', 'GB needed', 'GB moved', 'GB accessed', 'optimal ms', 'Mcycles'
  ratios = 'bytes_needed', 'bytes_moved', 'bytes_accessed', 'cycles'
  heads = ['program', *amounts, *(name.removeprefix('bytes_') for name in ratios)]
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  for name, one in found.items():
    gigabytes = one.bytes_needed / 1e9, one.bytes_moved / 1e9, one.bytes_accessed / 1e9
    times = 1000 * one.optimal_s, one.cycles / 1e6
    in_steps = (getattr(one, ratio) / getattr(plain, ratio) for ratio in ratios)
    numbers = one.flops / 1e9, one.temporary_bytes / 1e6, one.num_kernels, *gigabytes, *times, *in_steps
    lines.append(f'| {name} | ' + ' | '.join(f'{x:.2f}' for x in numbers) + ' |')
  return '\n'.join(lines)
