"""Continuous batching: decode any number of requests in the rows of one batch, refilling finished rows with new ones.

Sequences of a batch end at different steps, all the more as their acceptance rates differ; a batch that waits for its
last sequence leaves the other rows idle. Here the program decodes until a few rows are done, and those are refilled
together, since each refill costs a prefill. (Orca, Yu et al., OSDI 2022, schedules after every step.)
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.buckets import bucket, pad_prompts, require_memory
from eagle_jax.decode.prefill import STATIC, run_prefill
from eagle_jax.decode.program import Clock, Program
from eagle_jax.decode.state import SHARED, DecodeState, Limits, Params, Spec
from eagle_jax.decode.step import decode_step
from eagle_jax.kernels.tiling import round_up_slots
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import to_device, to_host, use_mesh

_LOOKAHEAD = 32  # how many refills' worth of waiting requests are searched for prompts of similar length


class Request(NamedTuple):
  """A prompt to be decoded."""

  id: int  # keys the noise
  token: list[int]
  temperature: float = 0.0  # used if the batch's sampling has one temperature a sequence


Waiting = collections.deque[tuple[int, Request]]  # with their numbers


@functools.partial(jax.jit, static_argnames=STATIC)
def empty(*arguments, **static) -> DecodeState:
  """Make a state with the shapes that `run_prefill` returns for these arguments, with all rows done and free."""
  shapes = jax.eval_shape(functools.partial(run_prefill, **static), *arguments)
  state = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
  *_, sampling, limits = arguments
  return state._replace(is_done=~state.is_done, sampling=sampling, limits=limits).constrained()


@functools.partial(jax.jit, donate_argnames='state')
def insert(state: DecodeState, fresh: DecodeState, row_n: jax.Array) -> DecodeState:
  """Write freshly prefilled sequences, which have slots for their prompts alone, to rows `row_n` of the batch.

  Args:
    state: of the batch; donated.
    fresh: n sequences.
    row_n: [n] i32; an index past the last row drops its sequence.
  """

  def put(old, new):
    return jax.tree.map(lambda x, y: x.at[(row_n, *map(slice, y.shape[1:]))].set(y, mode='drop'), old, new)

  sampling = state.sampling
  if sampling.temperature.ndim:
    sampling = sampling._replace(temperature=put(sampling.temperature, fresh.sampling.temperature))
  by_sequence = [name for name in DecodeState._fields if name not in SHARED]
  fields: dict[str, Any] = {name: put(getattr(state, name), getattr(fresh, name)) for name in by_sequence}
  return state._replace(sampling=sampling, **fields).constrained()


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def advance(params: Params, state: DecodeState, num_done: jax.Array, *, spec: Spec) -> DecodeState:
  """Decode until `num_done` rows are done."""
  return jax.lax.while_loop(
    lambda state: state.is_done.sum() < num_done, lambda state: decode_step(params, state, spec=spec), state
  )


def in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[Any]:
  """Sort items numbered 0, 1, ...; yield each as soon as all before it have arrived."""
  early: dict[int, Any] = {}
  next_number = 0
  for number, item in numbered:
    early[number] = item
    while next_number in early:
      yield early.pop(next_number)
      next_number += 1


_EMPTY, _PREFILL, _INSERT, _ADVANCE, _STEP = map(Program, (empty, run_prefill, insert, advance, decode_step))


class Batcher:
  """Run requests in the rows of one batch, with programs compiled once for each bucket of prompt lengths."""

  def __init__(
    self,
    params: Params,
    spec: Spec,
    mesh: Mesh | None,
    *,
    batch_size: int,
    num_refill: int,
    max_prompt: int,
    max_new_tokens: int,
    num_new: int,
    sampling: Sampling,
    eos_ids: Sequence[int],
  ):
    """Prepare the batch; programs are compiled when they first run.

    Args:
      params, spec, mesh: of the decode program.
      batch_size: sequences decoded together.
      num_refill: finished rows that are refilled together, 1 to `batch_size`.
      max_prompt: tokens of the longest prompt.
      max_new_tokens: maximum number of new tokens for each prompt.
      num_new: size of the output for them, static.
      sampling: shared by all sequences; a temperature [batch_size] is replaced by each request's own.
      eos_ids: any of these tokens ends a sequence.
    """
    self._params, self._spec, self._mesh = params, spec, mesh
    self._batch_size, self._num_refill = batch_size, num_refill
    # In NumPy: every state holds them, and states are donated.
    self._limits, self._sampling = jax.device_get((Limits.of(max_new_tokens, eos_ids), sampling))
    # A finished row has all tokens but the root in its cache, and each step still writes a path to it.
    self._num_slots = round_up_slots(bucket(max_prompt) + num_new + spec.max_path - 1)
    require_memory(spec.target, batch_size, self._num_slots)
    self._static = {'spec': spec.for_prefill(), 'num_new': num_new}
    self.clock = Clock()

  def run(
    self, requests: Iterable[Request], take: Program, has_ended: Callable[[int, Any], bool] | None = None
  ) -> Iterator[tuple[int, Any]]:
    """Decode the requests; yield the number of each as it finishes, with its outputs, which depend on it alone.

    Args:
      requests: prompts of 1 to `max_prompt` tokens.
      take: (state, row_n [n] i32) -> the outputs of these rows, a pytree of arrays [n, ...], fetched to the host.
      has_ended: (number, outputs) -> whether a request has ended though the device goes on, asked on the host before
        each step; None: decode many steps at a time.
    """
    waiting = collections.deque(enumerate(requests))
    running: dict[int, int] = {}  # number of the request, by row
    with use_mesh(self._mesh):
      state = self._make_empty()
    while waiting or running:
      with use_mesh(self._mesh):
        state = self._refill(state, waiting, running)
        if has_ended is None:
          num_done = self._num_done(len(waiting), len(running))
          state = self._run('decode_s', _ADVANCE, self._params, state, np.int32(num_done), spec=self._spec)
        finished = self._take_finished(state, running, take, has_ended)
        if has_ended and not finished:
          state = self._run('decode_s', _STEP, self._params, state, spec=self._spec)
      yield from finished

  def _run(self, name: str, program: Program, *args: Any, **static: Any) -> Any:
    """Run a program, whose seconds count as `name`."""
    args = jax.tree.map(lambda x: to_device(x, x.dtype) if isinstance(x, (np.ndarray, np.generic)) else x, args)
    run = self.clock.compile(program, *args, **static)
    with self.clock.adds_to(name):
      return jax.block_until_ready(run(*args))

  def _num_done(self, num_waiting: int, num_running: int) -> int:
    """Count the rows, free ones included, that have to be done before the host looks at them: a refill's worth."""
    if num_waiting:
      return min(self._num_refill, num_waiting)
    return self._batch_size - num_running + min(self._num_refill, num_running)

  def _refill(self, state: DecodeState, waiting: Waiting, running: dict[int, int]) -> DecodeState:
    """Move requests from `waiting` to free rows, `num_refill` at a time, for as long as there are both."""
    while waiting and self._batch_size - len(running) >= min(self._num_refill, len(waiting)):
      free = [row for row in range(self._batch_size) if row not in running]
      chosen = self._pop_next(waiting)
      rows = free[: len(chosen)]
      running |= {row: number for row, (number, _) in zip(rows, chosen, strict=True)}
      fresh = self._prefill([request for _, request in chosen])
      row_n = np.asarray(self._pad(rows, self._batch_size), np.int32)
      state = self._run('prefill_s', _INSERT, state, fresh, row_n)
    return state

  def _pop_next(self, waiting: Waiting) -> list[tuple[int, Request]]:
    """Take the first waiting request, and others near it in the queue of about its length, to save padding."""

    def size(item: tuple[int, Request]) -> int:
      return bucket(len(item[1].token))

    near = itertools.islice(waiting, _LOOKAHEAD * self._num_refill)
    fitting = [item for item in near if size(item) <= size(waiting[0])]
    chosen = sorted(fitting, key=size, reverse=True)[: self._num_refill]
    for item in chosen:
      waiting.remove(item)
    return chosen

  def _prefill(self, chosen: Sequence[Request]) -> DecodeState:
    """Prefill up to `num_refill` requests, in a batch of that many."""
    prompts = self._pad([request.token for request in chosen], [0])
    tokens_nL, length_n = pad_prompts(prompts, max(len(request.token) for request in chosen))
    temperature_n = np.asarray(self._pad([request.temperature for request in chosen], 0.0), np.float32)
    id_n = np.asarray(self._pad([request.id for request in chosen], 0), np.int32)
    arguments = self._arguments(tokens_nL, length_n, id_n, temperature_n)
    return self._run('prefill_s', _PREFILL, *arguments, num_slots=tokens_nL.shape[1], **self._static)

  def _arguments(self, tokens_nL, length_n, id_n, temperature_n) -> tuple:
    """Make the traced arguments of `run_prefill`."""
    sampling = self._sampling
    if sampling.temperature.ndim:
      sampling = sampling._replace(temperature=temperature_n)
    return self._params._replace(policy=()), tokens_nL, length_n, id_n, sampling, self._limits

  def _pad(self, values: list, filler: Any) -> list:
    return values + [filler] * (self._num_refill - len(values))

  def _make_empty(self) -> DecodeState:
    zero_B = np.zeros(self._batch_size, np.int32)
    arguments = self._arguments(zero_B[:, None], zero_B + 1, zero_B, zero_B.astype(np.float32))
    return self._run('prefill_s', _EMPTY, *arguments, num_slots=self._num_slots, **self._static)

  def _take_finished(
    self, state: DecodeState, running: dict[int, int], take: Program, has_ended: Callable[[int, Any], bool] | None
  ) -> list[tuple[int, Any]]:
    """Free the rows whose requests have ended; return their numbers and outputs."""
    is_done_B = to_host(state.is_done)
    rows = [row for row in sorted(running) if has_ended or is_done_B[row]]
    by_refill = -(-len(rows) // self._num_refill) * self._num_refill
    size = self._batch_size if has_ended else by_refill  # few sizes, few programs
    outputs = to_host(self._run('decode_s', take, state, np.resize(rows, size).astype(np.int32)))
    each = {row: jax.tree.map(lambda x, n=n: x[n], outputs) for n, row in enumerate(rows)}
    ended = [row for row in rows if (has_ended and has_ended(running[row], each[row])) or is_done_B[row]]
    return [(running.pop(row), each[row]) for row in ended]
