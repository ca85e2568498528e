"""Decoding as users call it: prompts in, text and statistics out; and the pure core for JAX pipelines.

    params, spec = build(target, drafter)              arrays, and what the program is made for
    state = prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=128)
    state = decode_loop(params, state, spec=spec)      or decode_step, one cycle at a time
    tokens_BN, length_B, num_accepted_BN = result(state)

Requests are checked, and padded in NumPy, before any tracing.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.auto import settle
from eagle_jax.decode.batching import Request, Rows, in_order
from eagle_jax.decode.prefill import bucket, pad_prompts, prefill, prepare, run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.request import at_least_one, known_integers, require_pair, require_valid, token_ids
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, decode_step, result
from eagle_jax.draft.drafter import Drafter, NoDrafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.kernels.int8 import quantised
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import Adaptive, Plain, TreePolicy
from eagle_jax.processes import require_same
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import fetched, is_shared, mesh_of, placed, using
from eagle_jax.text import Detokenizer

__all__ = [
  'Answer', 'Chunk', 'Generation', 'build', 'decode_loop', 'decode_step', 'generate', 'generate_each', 'prefill',
  'result', 'stream',
]  # fmt: skip

REFILLED = 4  # a quarter of the rows at a time

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
class Answer:
  """What `generate_each` yields: of one prompt, as in `Generation`."""

  tokens: list[int]
  text: str | None
  num_accepted: list[int]


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
  waits: bool = True,
  costs: Costs | None = None,
) -> tuple[Params, Spec]:
  """The arrays and the static description of a decode program.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None for plain decoding.
    policy: 'auto', 'plain', or a policy object.
    batch: rows that will be decoded together, for 'auto'.
    waits: for 'auto', whether all rows wait for the slowest; not where finished rows are refilled.
    costs: measured ones, for 'auto' and `Adaptive`; default those stored for this device and pair, if there are any.

  Returns:
    `params`, which shares the target's arrays, and `spec`, static and hashable.

  Raises:
    ValueError: unknown policy, a tree without a drafter, or a drafter for another target.
  """
  chosen, drafter, costs = settle(target, drafter, policy=policy, batch=batch, waits=waits, costs=costs)
  network = TransformerTarget(target.config, target.dtype)
  if isinstance(chosen, Plain) or drafter is None:
    return Params(target.params, {}), Spec(network, NoDrafter(), Plain())
  num_ids = drafter.config.num_ids
  if (fanout := max(chosen.fanouts)) > num_ids:
    raise ValueError(
      f'{chosen.describe()} asks each node for {fanout} children, but the draft vocabulary has {num_ids} ids. '
      'Lower the fanout, or the ranks of the paths.'
    )
  params = drafter.params | _borrowed(target, drafter)
  economies = costs.economies(chosen) if isinstance(chosen, Adaptive) and costs else ()
  network = dataclasses.replace(network, tapped_layers=drafter.config.tapped_layers(target.config.num_layers))
  head = kind_of(drafter.config).network(drafter.config, drafter.dtype or target.dtype)
  spec = Spec(network, head, chosen)
  return Params(target.params, params, economies), spec


def _borrowed(target: Target, drafter: Drafter) -> dict[str, Any]:
  """Embedding and head, and the head's ids: the target's by reference (of a draft vocabulary, or quantised, a copy), or
  the drafter's own."""
  own, borrows = drafter.params, kind_of(drafter.config).borrows
  if not borrows:
    return {}
  embed_VD = own.get('embed', target.params['embed'])['weight']
  if 'ids' in own:
    ids_U = own['ids']
  else:
    ids_U = placed(np.arange(target.config.vocab_size, dtype=np.int32), ('ids',), mesh_of(target.params))
  if drafter.has_own_head:
    return {'embed': embed_VD, 'head': own['head']['weight'], 'ids': ids_U}
  head_UD, whole = target.head_VD, {}
  if 'ids' in own:
    head_UD, whole = target.head_of(ids_U), {'whole_head': head_UD}
  return {'embed': embed_VD, 'head': quantised(head_UD) if drafter.is_quantised else head_UD, 'ids': ids_U, **whole}


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
  batch_size: int | None = None,
) -> Generation:
  """Decodes prompts; in float32 the text is that of plain decoding, whatever drafter, policy and batch.

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
    batch_size: prompts decoded together; the others wait, and take the places of those that are done. None: all.

  Raises:
    ValueError: what came cannot be decoded; said before anything is compiled.
  """
  asked = _asked(
    target,
    drafter,
    prompts,
    batch_size=batch_size,
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
  answers = Answers(target, asked)
  each = [*answers]
  text: Any = [one.text for one in each] if target.tokenizer else None
  return Generation([one.tokens for one in each], text, [one.num_accepted for one in each], answers.stats)


def generate_each(
  target: Target,
  drafter: Drafter | None,
  prompts: Sequence[str] | Sequence[Sequence[int]],
  *,
  batch_size: int | None = None,
  max_new_tokens: int = 128,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  policy: str | TreePolicy = 'auto',
  row_ids: Sequence[int] | None = None,
  eos_ids: Sequence[int] | None = None,
  costs: Costs | None = None,
) -> 'Answers':
  """Yields what `generate` returns prompt by prompt, in their order, each as soon as it and those before it are done.

  For many prompts: what was yielded is not lost if the rest is. Arguments as there; without a `batch_size` all are
  decoded together, and done at one time.

  Raises:
    ValueError: as `generate`, at the call and not at the first answer.
  """
  asked = _asked(
    target,
    drafter,
    prompts,
    batch_size=batch_size,
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
  return Answers(target, asked)


class Answers(Iterator[Answer]):
  """Of several prompts, made as they are asked for. `stats`, as in `Generation`, is of those that are done so far; the
  seconds are of all, so `tok_per_s` is too low until all are done."""

  def __init__(self, target: Target, asked: '_Asked'):
    self._spec = asked.spec
    self._work: list[Work] = []
    self._seconds = {'prefill_s': 0.0, 'decode_s': 0.0, 'compile_s': 0.0}
    self._answers = self._make_answers(target, asked)

  def __next__(self) -> Answer:
    return next(self._answers)

  @property
  def stats(self) -> dict[str, Any]:
    return Work(*np.reshape(self._work, (-1, len(Work._fields))).T).stats(self._spec, self._seconds)

  def _make_answers(self, target: Target, asked: '_Asked') -> Iterator[Answer]:
    run = self._together if asked.batch == len(asked.ids) else self._by_and_by
    for text_S, root, num_accepted_N, work in in_order(run(asked, mesh_of(target.params))):
      tokens = _newest(text_S, root, work.num_tokens)
      text = target.tokenizer.decode(tokens) if target.tokenizer else None
      yield Answer(tokens, text, num_accepted_N[: work.num_passes].tolist())

  def _together(self, asked: '_Asked', mesh: Mesh | None) -> Iterator[tuple[int, Any]]:
    """The number of each request, and what is `_seen` of its row at the end: one batch."""
    arguments, static = asked.prepared()
    with using(mesh):
      run, prefill_compile_s = _PREFILL.compile(*arguments, **static)
      start = time.perf_counter()
      state = jax.block_until_ready(run(*arguments))
      self._seconds['prefill_s'] = time.perf_counter() - start
      run, loop_compile_s = _LOOP.compile(asked.params, state, spec=asked.spec)
      start = time.perf_counter()
      seen = fetched(_seen(run(asked.params, state)))
      self._seconds['decode_s'] = time.perf_counter() - start
    self._seconds['compile_s'] = prefill_compile_s + loop_compile_s
    rows = [jax.tree.map(lambda x, b=b: x[b], seen) for b in range(asked.batch)]
    self._work = [work for *_, work in rows]
    yield from enumerate(rows)

  def _by_and_by(self, asked: '_Asked', mesh: Mesh | None) -> Iterator[tuple[int, Any]]:
    """The same, of more requests than are decoded together, as they are finished: see `batching`."""
    row_ids = asked.how['row_ids'] or range(len(asked.ids))
    rows = Rows(
      asked.params,
      asked.spec,
      mesh,
      num_rows=asked.batch,
      num_refill=-(-asked.batch // REFILLED),
      max_prompt=max(map(len, asked.ids)),
      max_new_tokens=asked.how['max_new_tokens'],
      num_new=bucket(asked.how['max_new_tokens']),
      sampling=asked.sampling,
      eos_ids=asked.spec.target.eos_ids if asked.how['eos_ids'] is None else asked.how['eos_ids'],
    )
    for number, seen in rows.run(map(Request, row_ids, asked.ids), _SEEN_AT):
      self._seconds = {name: getattr(rows, name) for name in self._seconds}
      self._work.append(seen[-1])
      yield number, seen


def _seen(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array, 'Work']:
  """What a `Generation` is made of, by row: text, the root's place in it, `num_accepted`, and work."""
  return state.text, state.cache.length, state.num_accepted, Work.of(state)


@jax.jit
def _seen_at(state: DecodeState, row_n: jax.Array):
  """Of some rows."""
  return jax.tree.map(lambda x: x[row_n], _seen(state))


_SEEN_AT = Program(_seen_at)


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
  asked = _asked(
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
  return Stream(target, asked)


class Stream(Iterator[Chunk]):
  """The chunks of one prompt, made as they are asked for. `stats`, as in `Generation`, is of the chunks so far."""

  def __init__(self, target: Target, asked: '_Asked'):
    self._spec = asked.spec
    self._detokenizer = Detokenizer(target.tokenizer) if target.tokenizer else None
    self._work = Work(*np.zeros((len(Work._fields), 1), np.int32))
    self._seconds = {'prefill_s': 0.0, 'decode_s': 0.0, 'compile_s': 0.0}
    self._chunks = self._make_chunks(asked, mesh_of(target.params))

  def __next__(self) -> Chunk:
    return next(self._chunks)

  @property
  def stats(self) -> dict[str, Any]:
    return self._work.stats(self._spec, self._seconds)

  def _make_chunks(self, asked: '_Asked', mesh: Mesh | None) -> Iterator[Chunk]:
    arguments, static = asked.prepared()
    with using(mesh):
      run, compile_s = _PREFILL.compile(*arguments, **static)
      start = time.perf_counter()
      state = run(*arguments)
      chunk, is_done = self._chunk(state)
      self._seconds |= {'prefill_s': time.perf_counter() - start, 'compile_s': compile_s}
      if not is_done:  # now: between two chunks, what is logged of compiling would stand in the text
        run, compile_s = _STEP.compile(asked.params, state, spec=asked.spec)
        self._seconds['compile_s'] += compile_s
    yield chunk
    while not is_done:
      start = time.perf_counter()
      with using(mesh):
        state = run(asked.params, state)
      chunk, is_done = self._chunk(state)
      self._seconds['decode_s'] += time.perf_counter() - start
      yield chunk

  def _chunk(self, state: DecodeState) -> tuple[Chunk, bool]:
    """What the newest step added, and whether it was the last."""
    (text_1S, (root,), num_accepted_1N, work), is_done = fetched((_seen(state), state.is_done))
    tokens = _newest(text_1S[0], root, work.num_tokens[0] - self._work.num_tokens[0])
    self._work = work
    num_passes = int(work.num_passes[0])
    text = ''
    if self._detokenizer:
      text = self._detokenizer.push(tokens) + (self._detokenizer.flush() if is_done else '')
    return Chunk(text, tokens, int(num_accepted_1N[0, num_passes - 1]) if num_passes else 0), bool(is_done)


class _Asked(NamedTuple):
  """A request that was checked."""

  params: Params
  spec: Spec
  ids: list[list[int]]  # of the prompts
  batch: int  # of them, that are decoded together
  sampling: Sampling
  how: dict[str, Any]  # max_new_tokens, row_ids, eos_ids

  def prepared(self) -> tuple[tuple, dict[str, Any]]:
    """The arguments of `run_prefill` for all prompts, padded in NumPy."""
    tokens_BL, length_B = pad_prompts(self.ids, max(map(len, self.ids)))
    return prepare(self.params, tokens_BL, length_B, spec=self.spec, sampling=self.sampling, **self.how)


def _asked(
  target: Target, drafter: Drafter | None, prompts: Any, *, batch_size: Any = None, policy: Any, costs: Any, **how: Any
) -> _Asked:
  require_pair(target, drafter)
  ids = token_ids(target, prompts)
  batch = len(ids) if batch_size is None else min(len(ids), at_least_one('batch_size', batch_size))
  how |= {name: known_integers(name, how[name]) for name in ('row_ids', 'eos_ids')}
  require_valid(target.config, ids, **how)
  params, spec = build(target, drafter, policy=policy, batch=batch, waits=batch == len(ids), costs=costs)
  if is_shared(mesh_of(target.params)):
    require_same('The request', (ids, batch, how, spec, jax.tree.structure(params), params.economies))
  sampling = Sampling.of(**{name: how.pop(name) for name in ('temperature', 'top_k', 'top_p', 'seed')})
  return _Asked(params, spec, ids, batch, sampling, how)
