"""Continuous batching: any number of requests through a few rows, where a finished row makes room for the next request.

Rows of a batch end at different steps, the more so where each accepts as much as its own drafts are worth; a batch that
waits for its last row leaves the others idle. Here the program decodes until a few rows are done, and those are
refilled together. (Orca, Yu et al., OSDI 2022, schedules so after every step; each time costs a prefill.)
"""

import collections
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decode.buckets import bucket, pad_prompts, require_memory
from eagle_jax.decode.prefill import STATIC, of_spec, run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.state import SHARED, DecodeState, Limits, Params, Spec
from eagle_jax.decode.step import decode_step
from eagle_jax.kernels.tiling import round_up_slots
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import fetched, using

_NEAR = 32  # refills' worth of waiting requests, among which those of like length are chosen


class Request(NamedTuple):
  """A prompt to be answered."""

  id: int  # keys the noise
  token: list[int]
  temperature: float = 0.0  # read where the rows' sampling has a temperature a row


Waiting = collections.deque[tuple[int, Request]]  # by their numbers


@functools.partial(jax.jit, static_argnames=STATIC)
def empty(*arguments, **static) -> DecodeState:
  """Make a state as `run_prefill` makes it of these arguments, with all rows done and free."""
  shapes = jax.eval_shape(functools.partial(run_prefill, **static), *arguments)
  state = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
  *_, sampling, limits = arguments
  return state._replace(is_done=~state.is_done, sampling=sampling, limits=limits).constrained()


@functools.partial(jax.jit, donate_argnames='state')
def insert(state: DecodeState, fresh: DecodeState, row_R: jax.Array) -> DecodeState:
  """Put freshly prefilled rows, which have slots for their prompts alone, in the place of rows `row_R`.

  A row beyond the last one is dropped.
  """

  def put(old, new):
    return jax.tree.map(lambda x, y: x.at[(row_R, *map(slice, y.shape[1:]))].set(y, mode='drop'), old, new)

  sampling = state.sampling
  if sampling.temperature.ndim:
    sampling = sampling._replace(temperature=put(sampling.temperature, fresh.sampling.temperature))
  by_sequence = [name for name in DecodeState._fields if name not in SHARED]
  rows: dict[str, Any] = {name: put(getattr(state, name), getattr(fresh, name)) for name in by_sequence}
  return state._replace(sampling=sampling, **rows).constrained()


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def advance(params: Params, state: DecodeState, num_done: jax.Array, *, spec: Spec) -> DecodeState:
  """Decode until `num_done` rows are done."""
  return jax.lax.while_loop(
    lambda state: state.is_done.sum() < num_done, lambda state: decode_step(params, state, spec=spec), state
  )


def in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[Any]:
  """Put what was numbered 0, 1, ... in order; yield each as soon as those before it are there."""
  early: dict[int, Any] = {}
  number = 0
  for at, one in numbered:
    early[at] = one
    while number in early:
      yield early.pop(number)
      number += 1


_EMPTY, _PREFILL, _INSERT, _ADVANCE = map(Program, (empty, run_prefill, insert, advance))


class Batcher:
  """Runs requests through the rows of one batch, in programs that are compiled once for each size of prompts."""

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
    """
    Args:
      params, spec, mesh: of the decode program.
      batch_size: rows decoded together.
      num_refill: finished rows that are refilled together, 1 to `batch_size`.
      max_prompt: tokens of the longest prompt.
      max_new_tokens: of each answer, at most.
      num_new: places for them, static.
      sampling: shared by all rows; a temperature [batch_size] is replaced by each request's own.
      eos_ids: any of these ends a row.
    """
    self._params, self._spec, self._mesh = params, spec, mesh
    self._batch_size, self._num_refill = batch_size, num_refill
    # In NumPy: every state holds them, and states are donated.
    self._limits, self._sampling = jax.device_get((Limits.of(max_new_tokens, eos_ids), sampling))
    # A finished row, which has all tokens but the root in its cache, is still written to: the path of a step.
    self._num_slots = round_up_slots(bucket(max_prompt) + num_new + spec.max_path - 1)
    require_memory(spec.target, batch_size, self._num_slots)
    self._static = of_spec(spec) | {'num_new': num_new}
    self.prefill_s = self.decode_s = self.compile_s = 0.0

  def run(self, requests: Iterable[Request], take: Program) -> Iterator[tuple[int, Any]]:
    """Yield, as requests are finished, the number of each and what was taken of its row, which depends on it alone.

    Args:
      requests: prompts of 1 to `max_prompt` tokens.
      take: (state, [n] i32, rows) -> a pytree of arrays [n, ...], fetched to the host.
    """
    waiting = collections.deque(enumerate(requests))
    asked: dict[int, int] = {}  # number of the request, by row
    with using(self._mesh):
      state = self._empty()
    while waiting or asked:
      with using(self._mesh):
        state = self._refill(state, waiting, asked)
        free = self._batch_size - len(asked)
        num_done = min(self._num_refill, len(waiting)) if waiting else free + min(self._num_refill, len(asked))
        state = self._timed(_ADVANCE, 'decode_s', self._params, state, np.int32(num_done), spec=self._spec)
        finished = self._harvest(state, asked, take)
      yield from finished

  def _timed(self, program: Program, kind: str, *args: Any, **static: Any) -> Any:
    """Run a program, and add the seconds that it and its compiling took."""
    run, seconds = program.compile(*args, **static)
    self.compile_s += seconds
    start = time.perf_counter()
    out = jax.block_until_ready(run(*args))
    setattr(self, kind, getattr(self, kind) + time.perf_counter() - start)
    return out

  def _refill(self, state: DecodeState, waiting: Waiting, asked: dict[int, int]) -> DecodeState:
    """Move requests from `waiting` to free rows, `num_refill` at a time, for as long as there are both."""
    while waiting and self._batch_size - len(asked) >= min(self._num_refill, len(waiting)):
      free = [row for row in range(self._batch_size) if row not in asked]
      chosen = self._next(waiting)
      rows = free[: len(chosen)]
      asked |= {row: number for row, (number, _) in zip(rows, chosen, strict=True)}
      fresh = self._prefilled([request for _, request in chosen])
      row_R = np.asarray(self._padded(rows, self._batch_size), np.int32)
      state = self._timed(_INSERT, 'prefill_s', state, fresh, row_R)
    return state

  def _next(self, waiting: Waiting) -> list[tuple[int, Request]]:
    """Take the first request, and with it others of about its length that wait near it: less padding."""

    def size(one: tuple[int, Request]) -> int:
      return bucket(len(one[1].token))

    near = itertools.islice(waiting, _NEAR * self._num_refill)
    fitting = [one for one in near if size(one) <= size(waiting[0])]
    chosen = sorted(fitting, key=size, reverse=True)[: self._num_refill]
    for one in chosen:
      waiting.remove(one)
    return chosen

  def _prefilled(self, chosen: Sequence[Request]) -> DecodeState:
    prompts = self._padded([request.token for request in chosen], [0])
    tokens_RL, length_R = pad_prompts(prompts, max(len(request.token) for request in chosen))
    temperature_R = np.asarray(self._padded([request.temperature for request in chosen], 0.0), np.float32)
    id_R = np.asarray(self._padded([request.id for request in chosen], 0), np.int32)
    arguments = self._arguments(tokens_RL, length_R, id_R, temperature_R)
    return self._timed(_PREFILL, 'prefill_s', *arguments, num_slots=tokens_RL.shape[1], **self._static)

  def _arguments(self, tokens_RL, length_R, id_R, temperature_R) -> tuple:
    """Make the traced arguments of `run_prefill`."""
    sampling = self._sampling
    if sampling.temperature.ndim:
      sampling = sampling._replace(temperature=temperature_R)
    return self._params._replace(policy=()), tokens_RL, length_R, id_R, sampling, self._limits

  def _padded(self, values: list, filler: Any) -> list:
    return values + [filler] * (self._num_refill - len(values))

  def _empty(self) -> DecodeState:
    zero_B = np.zeros(self._batch_size, np.int32)
    arguments = self._arguments(zero_B[:, None], zero_B + 1, zero_B, zero_B.astype(np.float32))
    return self._timed(_EMPTY, 'prefill_s', *arguments, num_slots=self._num_slots, **self._static)

  def _harvest(self, state: DecodeState, asked: dict[int, int], take: Program) -> list[tuple[int, Any]]:
    """Free the rows that are done; return their requests' numbers, and what is taken of the rows."""
    is_done_B = fetched(state.is_done)
    done = {row: asked.pop(row) for row in sorted(asked) if is_done_B[row]}
    size = -(-len(done) // self._num_refill) * self._num_refill  # few sizes, few programs
    taken = fetched(self._timed(take, 'decode_s', state, np.resize([*done], size).astype(np.int32)))
    return [(number, jax.tree.map(lambda x, n=n: x[n], taken)) for n, number in enumerate(done.values())]
