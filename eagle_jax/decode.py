"""Decoding as users call it: prompts in, text and statistics out; and the pure core for JAX pipelines.

    params, spec = build(target, drafter)              arrays, and what the program is made for
    state = prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=128)
    state = decode_loop(params, state, spec=spec)      or decode_step, one cycle at a time
    tokens_BN, length_B, num_accepted_BN = result(state)

Requests are checked, and padded in NumPy, before any tracing.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.config import Eagle3Config, require_match
from eagle_jax.cost import Costs, find
from eagle_jax.device import device_name
from eagle_jax.draft.drafter import Drafter, NoDrafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.policy import Adaptive, Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.loop import decode_loop, decode_step, result
from eagle_jax.prefill import pad_prompts, prefill, prepare, run_prefill
from eagle_jax.processes import require_same
from eagle_jax.program import Program
from eagle_jax.request import known_integers, require_loaded, require_valid, token_ids
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import fetched, is_shared, mesh_of, param_sharding, put, using
from eagle_jax.state import DecodeState, Params, Spec
from eagle_jax.target.transformer import Target, TransformerTarget
from eagle_jax.text import Detokenizer

__all__ = [
  'Chunk', 'Generation', 'build', 'decode_loop', 'decode_step', 'generate', 'prefill', 'result', 'stream',
]  # fmt: skip

log = logging.getLogger('eagle_jax')

_PREFILL, _LOOP, _STEP = Program(run_prefill), Program(decode_loop), Program(decode_step)


@dataclasses.dataclass(frozen=True)
class Generation:
  """What `generate` returns; the lists go by prompt."""

  tokens: list[list[int]]  # new tokens only, with the EOS that ended them, if one did
  text: list[str] | None  # without special tokens; None without a tokenizer
  num_accepted: list[list[int]]  # by target pass: the drafted tokens emitted from it
  # Of the batch: num_new_tokens, num_target_passes, tau, nodes_per_pass, levels_per_pass (drafted), tok_per_s (0 where
  # there was no target pass), prefill_s, decode_s, compile_s, policy.
  stats: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Chunk:
  """What one step of `stream` adds. The first chunk is the prefill's token, with `num_accepted` 0."""

  text: str  # whole characters only: incomplete UTF-8 waits for the next chunk
  tokens: list[int]
  num_accepted: int  # drafted tokens among them


def build(
  target: Target,
  drafter: Drafter | None,
  *,
  policy: str | TreePolicy = 'auto',
  batch: int = 1,
  costs: Costs | None = None,
) -> tuple[Params, Spec]:
  """The arrays and the static description of a decode program.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None for plain decoding.
    policy: 'auto', 'plain', or a policy object.
    batch: rows that will be decoded together, for 'auto'.
    costs: measured ones, for 'auto' and `Adaptive`; default those stored for this device and pair, if there are any.

  Returns:
    `params`, which shares the target's arrays, and `spec`, static and hashable.

  Raises:
    ValueError: unknown policy, a tree without a drafter, or a drafter for another target.
  """
  chosen, drafter, costs = settle(target, drafter, policy=policy, batch=batch, costs=costs)
  network = TransformerTarget(target.config, target.params['embed']['weight'].dtype)
  if isinstance(chosen, Plain) or drafter is None:
    return Params(target.params, {}), Spec(network, NoDrafter(), Plain())
  require_match(drafter.config, target.config)
  num_ids = drafter.config.draft_vocab_size or drafter.config.vocab_size
  if (fanout := max(chosen.fanouts)) > num_ids:
    raise ValueError(
      f'{chosen.describe()} asks each node for {fanout} children, but the draft vocabulary has {num_ids} ids. '
      'Lower the fanout, or the ranks of the paths.'
    )
  params = drafter.params | _borrowed(target, drafter)
  economies = costs.economies(chosen) if isinstance(chosen, Adaptive) and costs else ()
  network = dataclasses.replace(network, tapped_layers=drafter.config.tapped_layers(target.config.num_layers))
  head: Any = Eagle3 if isinstance(drafter.config, Eagle3Config) else Eagle
  spec = Spec(network, head(drafter.config, params['fc']['weight'].dtype), chosen)
  return Params(target.params, params, economies), spec


def settle(
  target: Target, drafter: Drafter | None, *, policy: str | TreePolicy, batch: int = 1, costs: Costs | None = None
) -> tuple[TreePolicy, Drafter | None, Costs | None]:
  """What a request for a policy comes to; arguments as in `build`.

  Returns:
    The policy; the drafter, with the draft vocabulary that costs were measured with; and the costs, if they are used.
  """
  require_loaded(target, drafter)
  if drafter is not None and costs is None and (policy == 'auto' or isinstance(policy, Adaptive)):
    costs = find_costs(target, drafter, batch=batch)
  chosen = _resolve(policy, target, drafter, costs, batch)
  if drafter is None or costs is None:
    return chosen, drafter, costs
  return chosen, drafter.first_ids(costs.num_ids), costs.at_batch(batch)


def find_costs(target: Target, drafter: Drafter, *, batch: int = 1) -> Costs | None:
  """What `launch/cost.py` measured for this device and pair, or what is shipped for such a device."""
  dtype = str(target.params['embed']['weight'].dtype)
  names = {'target': target.config.name, 'drafter': drafter.config.name, 'dtype': dtype}
  return find(device=device_name(mesh_of(target.params)), **names, batch=batch)


def _borrowed(target: Target, drafter: Drafter) -> dict[str, jax.Array]:
  """Embedding and head, and the head's ids: the target's by reference (of a draft vocabulary, a copy of the rows), or
  the drafter's own."""
  mesh = mesh_of(target.params)

  def place(x, name):
    return jax.device_put(x) if mesh is None else put(x, param_sharding([name, 'weight'], x.shape, mesh))

  own = drafter.params
  embed_VD = own.get('embed', target.params['embed'])['weight']
  ids_U = own['ids'] if 'ids' in own else place(np.arange(target.config.vocab_size, dtype=np.int32), 'ids')
  if 'head' in own:
    head_UD = own['head']['weight']
  else:
    head_UD = place(target.head_VD[ids_U], 'head') if 'ids' in own else target.head_VD
  whole = {'whole_head': target.head_VD} if 'ids' in own and 'head' not in own else {}
  return {'embed': embed_VD, 'head': head_UD, 'ids': ids_U, **whole}


def guessed_policy(batch: int, *, platform: str) -> TreePolicy:
  """What probably pays where nothing was measured: few rows where a row costs much, the paper's tree where they are
  nearly free, and for a batch as much of it as fits: rows are free until arithmetic takes as long as reading weights.

  Args:
    batch: rows on one device.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  free_rows = 4 if platform == 'cpu' else 256
  num_nodes = min(free_rows // batch, DynamicTree().num_nodes)
  if num_nodes < 2:
    return Plain()
  return Chain(min(3, num_nodes - 1), lookup=True) if num_nodes < 16 else DynamicTree(num_nodes=num_nodes, lookup=True)


def _resolve(
  policy: str | TreePolicy, target: Target, drafter: Drafter | None, costs: Costs | None, batch: int
) -> TreePolicy:
  if policy == 'plain' or (policy == 'auto' and drafter is None):
    return Plain()
  if policy == 'auto' and costs is not None:
    best = costs.at_batch(batch).policies[0]
    source = 'when measured' if costs.batch == batch else f'modelled for {batch} rows from a measured {costs.batch}'
    log.info(
      'auto: %s, %.1f tokens/s %s (%s, %s)', best.policy.describe(), best.tok_per_s, source, costs.device, costs.date
    )
    return best.policy
  if policy == 'auto':
    mesh = mesh_of(target.params)
    num_shards = 1 if mesh is None else mesh.shape.get('data', 1)
    guess = guessed_policy(-(-batch // num_shards), platform=jax.default_backend())
    log.info('auto: %s, a guess: launch/cost.py measures what pays on this device', guess.describe())
    return guess
  if isinstance(policy, Adaptive) and costs is None:
    raise ValueError(f'{policy.describe()} weighs costs, and none are stored for this pair here: run launch/cost.py.')
  if isinstance(policy, (str, type)) or not hasattr(policy, 'fanouts'):
    raise ValueError(
      f"Unknown policy {policy!r}: pass 'auto', 'plain', or an object: DynamicTree(...), Chain(...), StaticTree(...)."
    )
  if drafter is None and not isinstance(policy, Plain):
    raise ValueError(f"{policy.describe()} needs a drafter, and none came. Load one, or pass policy='plain'.")
  return policy


def generate(
  target: Target,
  drafter: Drafter | None,
  prompts: Sequence[str] | Sequence[Sequence[int]],
  *,
  max_new_tokens: int = 128,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  policy: str | TreePolicy = 'auto',
  row_ids: Sequence[int] | None = None,
  eos_ids: Sequence[int] | None = None,
  costs: Costs | None = None,
) -> Generation:
  """Decodes a batch of prompts; in float32 the text is that of plain decoding, whatever drafter and policy.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None for plain decoding.
    prompts: strings (put through the chat template, if the target has one), or lists or arrays of token ids, taken as
      they are.
    max_new_tokens: at most so many new tokens a prompt.
    temperature: 0 is greedy.
    top_k: draw from the k likeliest tokens; 0 keeps all.
    top_p: then from the smallest set of them that holds this probability; in (0, 1].
    seed: fixes the text, together with `row_ids`.
    policy: 'auto', 'plain', or a policy object such as `DynamicTree()`.
    row_ids: key each row's noise; default 0, 1, ...
    eos_ids: tokens that end a row; default the target's, () for none.
    costs: see `build`.

  Raises:
    ValueError: what came cannot be decoded; said before anything is compiled.
  """
  params, spec, arguments, static = _request(
    target,
    drafter,
    prompts,
    policy=policy,
    costs=costs,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
    row_ids=row_ids,
    eos_ids=eos_ids,
  )
  with using(mesh_of(target.params)):
    run, prefill_compile_s = _PREFILL.compile(*arguments, **static)
    start = time.perf_counter()
    state = jax.block_until_ready(run(*arguments))
    prefill_s = time.perf_counter() - start
    run, loop_compile_s = _LOOP.compile(params, state, spec=spec)
    start = time.perf_counter()
    state = run(params, state)
    text_BS, root_B, num_accepted_BN, work = fetched(
      (state.text, state.cache.length, state.num_accepted, Work.of(state))
    )
    decode_s = time.perf_counter() - start
  tokens = [_newest(*row) for row in zip(text_BS, root_B, work.num_tokens, strict=True)]
  num_accepted = [row[:passes].tolist() for row, passes in zip(num_accepted_BN, work.num_passes, strict=True)]
  seconds = {'prefill_s': prefill_s, 'decode_s': decode_s, 'compile_s': prefill_compile_s + loop_compile_s}
  text = [target.tokenizer.decode(row) for row in tokens] if target.tokenizer else None
  return Generation(tokens, text, num_accepted, work.stats(spec, seconds))


def _newest(text_S: np.ndarray, root: np.integer, num_new: np.integer) -> list[int]:
  """The last tokens of a text up to the root's place."""
  return text_S[root + 1 - num_new : root + 1].tolist()


class Work(NamedTuple):
  """What decoding came to so far, by row; see `DecodeState`."""

  num_tokens: np.ndarray
  num_passes: np.ndarray
  num_nodes: np.ndarray
  num_levels: np.ndarray

  @classmethod
  def of(cls, state: DecodeState) -> 'Work':
    return cls(*(getattr(state, name) for name in cls._fields))

  def stats(self, spec: Spec, seconds: dict[str, float]) -> dict[str, Any]:
    """`Generation.stats`."""
    num_new, num_passes, num_nodes, num_levels = (int(np.sum(x_B)) for x_B in self)
    return {
      'num_new_tokens': num_new,
      'num_target_passes': num_passes,
      'tau': (num_new - len(self.num_tokens)) / num_passes if num_passes else 1.0,
      'nodes_per_pass': num_nodes / max(num_passes, 1),
      'levels_per_pass': num_levels / max(num_passes, 1),
      'tok_per_s': num_new / seconds['decode_s'] if num_passes else 0.0,
      **seconds,
      'policy': spec.policy.describe(),
    }


def stream(
  target: Target,
  drafter: Drafter | None,
  prompt: str | Sequence[int],
  *,
  max_new_tokens: int = 128,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  policy: str | TreePolicy = 'auto',
  row_ids: Sequence[int] | None = None,
  eos_ids: Sequence[int] | None = None,
  costs: Costs | None = None,
) -> 'Stream':
  """Yields the text of one prompt step by step; joined, it is that of `generate`. Arguments as there.

  Raises:
    ValueError: as `generate`, at the call and not at the first chunk.
  """
  params, spec, arguments, static = _request(
    target,
    drafter,
    [prompt],
    policy=policy,
    costs=costs,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
    row_ids=row_ids,
    eos_ids=eos_ids,
  )
  return Stream(target, params, spec, arguments, static)


class Stream(Iterator[Chunk]):
  """The chunks of one prompt, made as they are asked for. `stats`, as in `Generation`, is of the chunks so far."""

  def __init__(self, target: Target, params: Params, spec: Spec, arguments: tuple, static: dict[str, Any]):
    self._spec = spec
    self._detokenizer = Detokenizer(target.tokenizer) if target.tokenizer else None
    self._work = Work(*np.zeros((len(Work._fields), 1), np.int32))
    self._seconds = {'prefill_s': 0.0, 'decode_s': 0.0, 'compile_s': 0.0}
    self._chunks = self._make_chunks(target, params, arguments, static)

  def __next__(self) -> Chunk:
    return next(self._chunks)

  @property
  def stats(self) -> dict[str, Any]:
    return self._work.stats(self._spec, self._seconds)

  def _make_chunks(self, target: Target, params: Params, arguments: tuple, static: dict[str, Any]) -> Iterator[Chunk]:
    with using(mesh_of(target.params)):
      run, prefill_compile_s = _PREFILL.compile(*arguments, **static)
      start = time.perf_counter()
      state = run(*arguments)
      chunk, is_done = self._chunk(state)
      self._seconds['prefill_s'] = time.perf_counter() - start
      run, step_compile_s = _STEP.compile(params, state, spec=self._spec)
      self._seconds['compile_s'] = prefill_compile_s + step_compile_s
    yield chunk
    while not is_done:
      start = time.perf_counter()
      with using(mesh_of(target.params)):
        state = run(params, state)
      chunk, is_done = self._chunk(state)
      self._seconds['decode_s'] += time.perf_counter() - start
      yield chunk

  def _chunk(self, state: DecodeState) -> tuple[Chunk, bool]:
    """What the newest step added, and whether it was the last."""
    text_1S, (root,), num_accepted_1N, is_done, work = fetched(
      (state.text, state.cache.length, state.num_accepted, state.is_done, Work.of(state))
    )
    tokens = _newest(text_1S[0], root, work.num_tokens[0] - self._work.num_tokens[0])
    self._work = work
    num_passes = int(work.num_passes[0])
    text = ''
    if self._detokenizer:
      text = self._detokenizer.push(tokens) + (self._detokenizer.flush() if is_done else '')
    return Chunk(text, tokens, int(num_accepted_1N[0, num_passes - 1]) if num_passes else 0), bool(is_done)


def _request(
  target: Target, drafter: Drafter | None, prompts: Any, *, policy: Any, costs: Any, **how: Any
) -> tuple[Params, Spec, tuple, dict[str, Any]]:
  """What `build` returns, and the arguments of `run_prefill`: checked, and padded in NumPy."""
  require_loaded(target, drafter)
  ids = token_ids(target, prompts)
  params, spec = build(target, drafter, policy=policy, batch=len(ids), costs=costs)
  how |= {name: known_integers(name, how[name]) for name in ('row_ids', 'eos_ids')}
  require_valid(target.config, ids, **how)
  if is_shared(mesh_of(target.params)):
    require_same('The request', (ids, how, spec.policy.describe(), params.economies))
  tokens_BL, length_B = pad_prompts(ids, max(map(len, ids)))
  sampling = Sampling.of(**{name: how.pop(name) for name in ('temperature', 'top_k', 'top_p', 'seed')})
  return params, spec, *prepare(params, tokens_BL, length_B, spec=spec, sampling=sampling, **how)
