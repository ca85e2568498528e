"""The user's entry points: prompts in, text and statistics out. Requests are checked and padded before any tracing."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.auto import resolve_policy
from eagle_jax.decode.batching import Batcher, Request, in_order
from eagle_jax.decode.buckets import bucket, pad_prompts
from eagle_jax.decode.build import assemble
from eagle_jax.decode.commit import require_numbers
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.program import Clock, Program
from eagle_jax.decode.record import Cycle, run_traced, traced_step
from eagle_jax.decode.request import (
  Options,
  Prompt,
  at_least_one,
  known_integers,
  require_pair,
  require_valid,
  stop_strings,
  takes_options,
  token_ids,
)
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, decode_step, tau
from eagle_jax.draft.drafter import Drafter
from eagle_jax.models.transformer import Target
from eagle_jax.processes import require_same
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import is_shared, mesh_of, to_host, use_mesh
from eagle_jax.text import StopDetector

REFILL_PARTS = 4  # a quarter of the batch is refilled at a time

_PREFILL, _LOOP, _STEP, _TRACED = map(Program, (run_prefill, decode_loop, decode_step, traced_step))


@dataclasses.dataclass(frozen=True)
class Generation:
  """The result of `generate`; each list has one item for each prompt."""

  tokens: list[list[int]]  # new tokens only, including the EOS if one ended the text
  text: list[str] | None  # without special tokens; None without a tokenizer
  num_accepted: list[list[int]]  # for each target pass, the number of drafted tokens emitted from it
  # Of the batch: num_new_tokens, num_target_passes, tau, nodes_per_pass, levels_per_pass (drafted), tok_per_s (0 if
  # there was no target pass), prefill_s, decode_s, compile_s, policy, chooser, weights (their dtype).
  stats: dict[str, Any]
  trace: list[list[Cycle]] | None = None  # the cycles of each prompt, one a target pass; None unless asked for


@dataclasses.dataclass(frozen=True)
class Answer:
  """The result of `generate_each` for one prompt; fields as in `Generation`."""

  tokens: list[int]
  text: str | None
  num_accepted: list[int]


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The text and tokens of one step of `stream`. The first chunk is prefill's token, with `num_accepted` 0."""

  text: str  # complete characters only: incomplete UTF-8 waits for the next chunk
  tokens: list[int]
  num_accepted: int  # number of drafted tokens among them


@takes_options
def generate(
  target: Target,
  drafter: Drafter | None,
  prompts: Sequence[Prompt],
  *,
  batch_size: int | None = None,
  trace: bool = False,
  options: Options,
) -> Generation:
  """Decode prompts; in float32 the text equals that of plain decoding, whatever the drafter, policy and batch.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None for plain decoding.
    prompts: strings, each formatted as a user's message if the target has a chat template; conversations, lists of
      `{'role': ..., 'content': ...}`; or lists or arrays of token ids, used unchanged.
    batch_size: prompts decoded together; the others wait for one of these to finish. None: all together.
    trace: also return what each target pass verified and accepted. Decoding then waits for the host after every step,
      in a program of its own.
    options: passed as keywords: max_new_tokens=128, temperature=0.0, top_k=0, top_p=1.0, seed=0, policy='auto',
      row_ids=None, eos_ids=None, costs=None, chooser=GumbelMax(), stop=(). See `decode.request.Options`.

  Returns:
    A `Generation`.

  Raises:
    ValueError: the request cannot be decoded; raised before anything is compiled.

  Example:
    >>> prompts = ['Why is the sky blue?']
    >>> out = eagle_jax.generate(target, drafter, prompts, max_new_tokens=16, temperature=0.7, seed=1)
    >>> out.stats['num_new_tokens']
    16
    >>> plain = eagle_jax.generate(target, None, prompts, max_new_tokens=16, temperature=0.7, seed=1)
    >>> out.text == plain.text
    True
  """
  answers = generate_each(target, drafter, prompts, batch_size=batch_size, trace=trace, **vars(options))
  each = [*answers]
  text: Any = [one.text for one in each] if target.tokenizer else None
  tokens, num_accepted = [one.tokens for one in each], [one.num_accepted for one in each]
  return Generation(tokens, text, num_accepted, answers.stats, answers.trace)


@takes_options
def generate_each(
  target: Target,
  drafter: Drafter | None,
  prompts: Sequence[Prompt],
  *,
  batch_size: int | None = None,
  trace: bool = False,
  options: Options,
) -> 'Answers':
  """Decode prompts and yield each `Answer` in order, as soon as it and those before it are done.

  Meant for many prompts: answers that were yielded survive a later failure. Arguments as in `generate`; without
  `batch_size` all prompts are decoded together and finish at the same time; with `trace` they leave their cycles in
  `Answers.trace`.

  Raises:
    ValueError: as `generate`, at the call and not at the first answer.

  Example:
    >>> prompts = ['Name a colour.', 'Name a town.', 'Name a tree.']
    >>> answers = eagle_jax.decode.generate_each(target, drafter, prompts, batch_size=2, max_new_tokens=16)
    >>> [len(answer.tokens) for answer in answers]
    [16, 16, 16]
  """
  request = _check(target, drafter, prompts, options, batch_size=batch_size)
  return Answers(target, request.traced() if trace else request)


@takes_options
def stream(target: Target, drafter: Drafter | None, prompt: Prompt, *, options: Options) -> 'Stream':
  """Decode one prompt and yield a `Chunk` for every step; joined, they equal `generate`, whose arguments they share.

  Raises:
    ValueError: as `generate`, at the call and not at the first chunk.

  Example:
    >>> chat = [{'role': 'system', 'content': 'Answer briefly.'}, {'role': 'user', 'content': 'Why is the sky blue?'}]
    >>> chunks = eagle_jax.stream(target, drafter, chat, max_new_tokens=16)
    >>> sum(len(chunk.tokens) for chunk in chunks)
    16
  """
  return Stream(target, _check(target, drafter, [prompt], options))


class CheckedRequest(NamedTuple):
  """A request that passed all checks."""

  params: Params
  spec: Spec
  ids: list[list[int]]  # tokens of each prompt
  batch_size: int  # prompts decoded together
  sampling: Sampling
  limits: dict[str, Any]  # max_new_tokens, row_ids, eos_ids
  stop: tuple[str, ...]  # strings that end a text
  names: dict[str, str]  # of the policy, the chooser and the dtype of weights, for statistics

  def prepared(self) -> tuple[tuple, dict[str, Any]]:
    """Make the arguments of `run_prefill` for all prompts, padded in NumPy."""
    tokens_BL, length_B = pad_prompts(self.ids, max(map(len, self.ids)))
    return prepare(self.params, tokens_BL, length_B, spec=self.spec, sampling=self.sampling, **self.limits)

  def traced(self) -> 'CheckedRequest':
    """Make the request whose cycles are recorded; raise a ValueError if some of its prompts have to wait."""
    if self.batch_size < len(self.ids):
      raise ValueError(
        f'trace=True decodes all prompts together; got batch_size {self.batch_size} for {len(self.ids)} prompts. '
        'Leave batch_size out, or pass fewer prompts at a time.'
      )
    if self.stop:
      raise ValueError(f'trace=True records whole texts, got stop={self.stop}: leave out one of them.')
    return self._replace(spec=dataclasses.replace(self.spec, is_traced=True))


def _check(
  target: Target, drafter: Drafter | None, prompts: Any, options: Options, *, batch_size: Any = None
) -> CheckedRequest:
  """Check a request, resolve its policy, and encode its prompts. Arguments as in `generate`."""
  require_pair(target, drafter)
  ids = token_ids(target, prompts)
  batch = len(ids) if batch_size is None else min(len(ids), at_least_one('batch_size', batch_size))
  known = {name: known_integers(name, getattr(options, name)) for name in ('row_ids', 'eos_ids')}
  options, stop = dataclasses.replace(options, **known), stop_strings(target, options.stop)
  require_valid(target.config, ids, options)
  resolved = resolve_policy(
    target, drafter, policy=options.policy, batch=batch, is_refilled=batch < len(ids), costs=options.costs
  )
  params, spec = assemble(target, resolved, chooser=options.chooser)
  if is_shared(mesh_of(target.params)):
    settings = options.limits(), options.sampling(), stop
    require_same('The request', (ids, batch, settings, spec, jax.tree.structure(params), params.policy))
  names = {'policy': resolved.policy.describe(), 'chooser': spec.chooser.name, 'weights': target.weights_name}
  return CheckedRequest(params, spec, ids, batch, Sampling.of(**options.sampling()), options.limits(), stop, names)


class Work(NamedTuple):
  """Counts of what was decoded so far, of one sequence or by sequence; see `DecodeState`."""

  num_tokens: Any
  num_passes: Any
  num_nodes: Any
  num_levels: Any

  @classmethod
  def of(cls, state: DecodeState) -> 'Work':
    return cls(*(getattr(state, name) for name in cls._fields))


class Outputs(NamedTuple):
  """The parts of a state that answers and chunks are made from, by sequence."""

  text: Any  # [S] i32
  root: Any  # [] i32, the position of the newest token in the text
  num_accepted: Any  # [N] i32
  work: Work

  @classmethod
  def of(cls, state: DecodeState) -> 'Outputs':
    return cls(state.text, state.cache.length, state.num_accepted, Work.of(state))

  def by_sequence(self) -> list['Outputs']:
    """Fetch the outputs of a batch, and separate its sequences."""
    outputs = to_host(self)
    return [jax.tree.map(lambda x, b=b: x[b], outputs) for b in range(len(outputs.root))]

  def newest(self, num_new: Any) -> list[int]:
    """Take the last `num_new` tokens of the text."""
    return self.text[self.root + 1 - num_new : self.root + 1].tolist()

  def cut(self, num_tokens: Any) -> 'Outputs':
    """Leave out all but the first `num_tokens` new tokens; those left out came from the last pass."""
    num_extra, num_accepted = self.work.num_tokens - num_tokens, self.num_accepted.copy()
    if num_extra:
      last = self.work.num_passes - 1
      num_accepted[last] = min(num_accepted[last], num_tokens - 1 - (num_accepted[:last] + 1).sum())
    work = self.work._replace(num_tokens=num_tokens)
    return Outputs(self.text, self.root - num_extra, num_accepted, work)


@jax.jit
def _outputs_at(state: DecodeState, row_n: jax.Array) -> Outputs:
  """Gather the outputs of some rows of the batch."""
  return jax.tree.map(lambda x: x[row_n], Outputs.of(state))


_OUTPUTS_AT = Program(_outputs_at)


class _WithStats:
  """A base class that counts what was decoded, and the seconds it took."""

  def __init__(self, request: CheckedRequest):
    self._request = request
    self._work: list[Work] = []  # of each sequence that counts so far
    self._clock = Clock()

  @property
  def stats(self) -> dict[str, Any]:
    """Statistics of what was decoded so far, as in `Generation.stats`."""
    totals = np.reshape(self._work, (-1, len(Work._fields))).sum(axis=0)
    num_new, num_passes, num_nodes, num_levels = map(int, totals)
    return {
      'num_new_tokens': num_new,
      'num_target_passes': num_passes,
      'tau': tau(num_new, num_passes, num_sequences=len(self._work)),
      'nodes_per_pass': num_nodes / max(num_passes, 1),
      'levels_per_pass': num_levels / max(num_passes, 1),
      'tok_per_s': num_new / self._clock.seconds['decode_s'] if num_passes else 0.0,
      **self._clock.seconds,
      **self._request.names,
    }


class Answers(_WithStats, Iterator[Answer]):
  """An iterator over the answers to several prompts, decoded on demand.

  `stats`, as in `Generation`, counts the answers that are done so far; the seconds include unfinished ones, so
  `tok_per_s` is too low until all are done.
  """

  def __init__(self, target: Target, request: CheckedRequest):
    super().__init__(request)
    self.trace: list[list[Cycle]] | None = None  # as in `Generation`
    self._detectors = [StopDetector(target.tokenizer, request.stop) for _ in request.ids if request.stop]
    self._answers = self._make_answers(target)

  def __next__(self) -> Answer:
    return next(self._answers)

  def _make_answers(self, target: Target) -> Iterator[Answer]:
    """Decode, and yield the answers in the order of the prompts."""
    is_one_batch = self._request.batch_size == len(self._request.ids)
    run = self._run_batch if is_one_batch else self._run_refilled
    for number, outputs in enumerate(in_order(run(mesh_of(target.params)))):
      tokens, text = outputs.newest(outputs.work.num_tokens), None
      require_numbers(tokens, self._request.spec.target)
      if self._detectors:
        self._detectors[number].flush()
        text = self._detectors[number].text
      elif target.tokenizer:
        text = target.tokenizer.decode(tokens)
      yield Answer(tokens, text, outputs.num_accepted[: outputs.work.num_passes].tolist())

  def _finish(self, number: int, outputs: Outputs) -> tuple[int, Outputs]:
    """Count a sequence as done; leave out what follows its stop string."""
    outputs = outputs.cut(self._detectors[number].num_tokens) if self._detectors else outputs
    self._work.append(outputs.work)
    return number, outputs

  def _has_stopped(self, number: int, outputs: Outputs) -> bool:
    """Examine a sequence's newest tokens; return whether its text has come to a stop string."""
    tokens, detector = outputs.newest(outputs.work.num_tokens), self._detectors[number]
    require_numbers(tokens, self._request.spec.target)
    detector.push(tokens[detector.num_tokens :])
    return detector.is_stopped

  def _run_batch(self, mesh: Mesh | None) -> Iterator[tuple[int, Outputs]]:
    """Decode all prompts as one batch; yield the number and the outputs of each at the end."""
    request = self._request
    arguments, static = request.prepared()
    with use_mesh(mesh):
      run = self._clock.compile(_PREFILL, *arguments, **static)
      with self._clock.adds_to('prefill_s'):
        state = jax.block_until_ready(run(*arguments))
      program = _TRACED if request.spec.is_traced else _STEP if request.stop else _LOOP
      run = self._clock.compile(program, request.params, state, spec=request.spec)
      with self._clock.adds_to('decode_s'):
        if request.spec.is_traced:
          state, self.trace = run_traced(run, request.params, state)
        elif not request.stop:
          state = run(request.params, state)
        each = self._run_to_stop(run, state) if request.stop else Outputs.of(state).by_sequence()
    yield from [self._finish(b, outputs) for b, outputs in enumerate(each)]

  def _run_to_stop(self, run: Any, state: DecodeState) -> list[Outputs]:
    """Decode step by step until every text has ended; return each sequence's outputs when it did."""
    ended: dict[int, Outputs] = {}
    while True:
      is_done_B = to_host(state.is_done)
      for b, outputs in enumerate(Outputs.of(state).by_sequence()):
        if b not in ended and (self._has_stopped(b, outputs) or is_done_B[b]):
          ended[b] = outputs
      if len(ended) == len(is_done_B):
        return [ended[b] for b in range(len(is_done_B))]
      state = run(self._request.params, state)

  def _run_refilled(self, mesh: Mesh | None) -> Iterator[tuple[int, Outputs]]:
    """Decode more prompts than fit one batch; yield the number and the outputs of each as it finishes."""
    request = self._request
    limits, row_ids = request.limits, request.limits['row_ids'] or range(len(request.ids))
    batcher = Batcher(
      request.params,
      request.spec,
      mesh,
      batch_size=request.batch_size,
      num_refill=-(-request.batch_size // REFILL_PARTS),
      max_prompt=max(map(len, request.ids)),
      max_new_tokens=limits['max_new_tokens'],
      num_new=bucket(limits['max_new_tokens']),
      sampling=request.sampling,
      eos_ids=request.spec.target.eos_ids if limits['eos_ids'] is None else limits['eos_ids'],
    )
    self._clock = batcher.clock
    has_ended = self._has_stopped if request.stop else None
    for number, outputs in batcher.run(map(Request, row_ids, request.ids), _OUTPUTS_AT, has_ended):
      yield self._finish(number, outputs)


class Stream(_WithStats, Iterator[Chunk]):
  """An iterator over the chunks of one prompt, decoded on demand. `stats`, as in `Generation`, counts them so far."""

  def __init__(self, target: Target, request: CheckedRequest):
    super().__init__(request)
    self._detector = StopDetector(target.tokenizer, request.stop) if target.tokenizer else None
    self._work = [Work(0, 0, 0, 0)]
    self._chunks = self._make_chunks(mesh_of(target.params))

  def __next__(self) -> Chunk:
    return next(self._chunks)

  def _make_chunks(self, mesh: Mesh | None) -> Iterator[Chunk]:
    """Prefill, then run a step for each chunk that is asked for."""
    params, spec = self._request.params, self._request.spec
    arguments, static = self._request.prepared()
    with use_mesh(mesh):
      run = self._clock.compile(_PREFILL, *arguments, **static)
      with self._clock.adds_to('prefill_s'):
        state = run(*arguments)
        chunk, is_done = self._chunk(state)
      if not is_done:  # compile now: between two chunks, log lines about compiling would appear within the text
        run = self._clock.compile(_STEP, params, state, spec=spec)
    yield chunk
    while not is_done:
      with self._clock.adds_to('decode_s'):
        with use_mesh(mesh):
          state = run(params, state)
        chunk, is_done = self._chunk(state)
      yield chunk

  def _chunk(self, state: DecodeState) -> tuple[Chunk, bool]:
    """Make the chunk of the newest step; also return whether it was the last."""
    (outputs,), is_done = Outputs.of(state).by_sequence(), bool(to_host(state.is_done))
    num_before = self._work[0].num_tokens
    tokens, text = outputs.newest(outputs.work.num_tokens - num_before), ''
    require_numbers(tokens, self._request.spec.target)
    if self._detector:
      text = self._detector.push(tokens)
      is_done |= self._detector.is_stopped
      text += self._detector.flush() if is_done else ''
      outputs = outputs.cut(self._detector.num_tokens)
    tokens, num_passes = tokens[: outputs.work.num_tokens - num_before], int(outputs.work.num_passes)
    self._work = [outputs.work]
    return Chunk(text, tokens, int(outputs.num_accepted[num_passes - 1]) if num_passes else 0), is_done
