"""Evaluation of a drafter on recorded text, without a pass of the target.

A drafted node is accepted iff its path equals the text that follows, be that text the target's greedy choice or a
sample. So a network that recites the text, with the features recorded beside it, stands in for the target in the very
decode loop that users run. The drafter sees the noise that the text was drawn with.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.decode.buckets import pad_prompts
from eagle_jax.decode.build import build
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, result, step, tau
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.example import Example
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import fetched
from eagle_jax.tree import NO_TOKEN, DraftTree

NUM_ROWS = 8


class Text(NamedTuple):
  """What `Replay` recites: its parameters. S places, padded at the end."""

  token: Any  # [B, S] i32, prompt and answer
  feature: Any  # [B, S, D], of the token at the same place


class ReplayTaps(NamedTuple):
  """What a pass over recorded text shows."""

  feature: jax.Array  # [D, B, T], recorded at the rows' positions
  next_token: jax.Array  # [1, B, T] i32, what the text says after them


@dataclasses.dataclass(frozen=True)
class Replay:
  """A `models.interface.TargetNetwork` that looks at positions alone and says what was said there.

  At a node that is not on the text's own path this is no target's choice; but the walk of `verify` reaches none.
  """

  vocab_size: int
  eos_ids: tuple[int, ...] = ()  # a recorded answer ends where it ends

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    """No layers: only the lengths."""
    return KVCache((), (), jnp.zeros(batch, jnp.int32))

  def forward(self, params: Text, token_BT, position_BT, mask_BTT, cache: KVCache) -> tuple[ReplayTaps, NewEntries]:
    feature_BTD = jnp.take_along_axis(params.feature, position_BT[..., None], axis=1, mode='clip')
    next_BT = jnp.take_along_axis(params.token, position_BT + 1, axis=1, mode='clip')
    return ReplayTaps(feature_BTD.transpose(2, 0, 1), next_BT[None]), NewEntries((), ())

  def logits(self, params: Text, taps: ReplayTaps) -> jax.Array:
    """[V, B, T] f32: 0 at the next token, -inf elsewhere. It is certain, whatever noise is added."""
    is_next_VBT = jax.nn.one_hot(taps.next_token[0], self.vocab_size, axis=0, dtype=bool)
    return jnp.where(is_next_VBT, 0.0, -jnp.inf)


class Recorded(NamedTuple):
  """The first answer of an `Example`, and what led to it."""

  token: np.ndarray  # [n + 1] i32, prompt and answer
  feature: np.ndarray  # [n, D]
  num_prompt: int  # tokens before the answer
  example: Example  # says how it was drawn

  @property
  def num_new(self) -> int:
    """Tokens of the answer."""
    return len(self.token) - self.num_prompt


def first_answer(example: Example) -> Recorded:
  """Cuts an example after its first answer.

  Raises:
    ValueError: it has no answer, or nothing before it.
  """
  num_prompt = int(np.argmax(example.is_answer))
  if num_prompt < 1:
    raise ValueError(
      f'Example {example.id} has no answer after a prompt: is_answer must be False at first, and True later. '
      'Leave it out of the evaluation.'
    )
  end = num_prompt + int(np.argmin(np.append(example.is_answer[num_prompt:], False)))
  return Recorded(example.token[:end], example.feature[: end - 1], num_prompt, example)


@dataclasses.dataclass(frozen=True)
class Traced:
  """How a drafter fared on recorded answers; the lists go by example."""

  num_accepted: list[list[int]]  # by target pass, as in `decode.Generation`
  num_new_tokens: list[int]  # of the answer
  policy: TreePolicy

  @property
  def num_passes(self) -> int:
    """Target passes that decoding would have taken, prefill apart."""
    return sum(map(len, self.num_accepted))

  @property
  def tau(self) -> float:
    """New tokens a target pass, over all examples; a row's first token comes from prefill, and does not count."""
    return tau(sum(self.num_new_tokens), self.num_passes, num_sequences=len(self.num_new_tokens))

  @property
  def acceptance(self) -> tuple[float, ...]:
    """By depth 1 .. max_depth: the share of passes that accepted a node there, of those that accepted its parent.

    A pass whose answer ended before a depth says nothing about it. NaN where no pass came so far.
    """
    accepted_R1 = np.concatenate([np.asarray(row, np.int32) for row in self.num_accepted])[:, None]
    ready = [np.asarray(row, np.int32) + 1 for row in self.num_accepted]
    room = [num_new - 1 - (np.cumsum(row) - row) for num_new, row in zip(self.num_new_tokens, ready, strict=True)]
    depth_1d = np.arange(1, self.policy.max_depth + 1)[None]
    num_hit_d = (accepted_R1 >= depth_1d).sum(axis=0)
    num_tried_d = ((accepted_R1 >= depth_1d - 1) & (np.concatenate(room)[:, None] >= depth_1d)).sum(axis=0)
    share_d = np.full(num_hit_d.shape, np.nan)
    return tuple(np.divide(num_hit_d, num_tried_d, out=share_d, where=num_tried_d > 0).tolist())


def trace(
  target: Target, drafter: Drafter, examples: Sequence[Example], *, policy: TreePolicy, num_rows: int = NUM_ROWS
) -> Traced:
  """Decodes the recorded answers anew: in float32, and with features of float32, `num_accepted` is that of `generate`.

  Of a conversation of several turns the first answer alone is traced. All batches have one shape, that of the longest
  prompt and of the longest answer, so the two programs are compiled once for each such shape and policy.

  Args:
    target: whose answers they are. Its embedding and its head are read, its layers are not.
    drafter: to be evaluated.
    examples: one or more.
    policy: which trees it drafts.
    num_rows: examples decoded together.

  Raises:
    ValueError: no example came, one has no answer after a prompt, or drafter or policy do not fit; see `build`.
  """
  num_accepted: list[list[int]] = [[] for _ in examples]
  for batch in _batches(target, drafter, examples, policy=policy, num_rows=num_rows):
    _, _, num_accepted_BN = result(decode_loop(batch.params, batch.state, spec=batch.spec))
    for number, row in zip(batch.numbers, fetched(num_accepted_BN), strict=False):
      num_accepted[number] = row[row >= 0].tolist()
  return Traced(num_accepted, [first_answer(example).num_new for example in examples], policy)


class Nodes(NamedTuple):
  """Every node that was drafted, the roots apart, in all passes of all examples; n in all."""

  log_q: np.ndarray  # [n] f32, the drafter's log-probability of the path, nats
  log_p: np.ndarray  # [n] f32, given the parent
  depth: np.ndarray  # [n] i32, edges from the root
  rank: np.ndarray  # [n] i32, among its siblings by `log_q`, 0 for the likeliest
  is_tried: np.ndarray  # [n] bool: its parent was accepted, or is the root
  is_accepted: np.ndarray  # [n] bool: its path is what the text says


def observe(
  target: Target, drafter: Drafter, examples: Sequence[Example], *, policy: TreePolicy, num_rows: int = NUM_ROWS
) -> Nodes:
  """What becomes of each drafted node; those beyond an answer's end are left out. See `trace` for the arguments.

  Raises:
    ValueError: as `trace`, or nothing was drafted, since every answer has one token.
  """
  seen: list[Nodes] = []
  for batch in _batches(target, drafter, examples, policy=policy, num_rows=num_rows):
    state = batch.state
    room_B = np.asarray([first_answer(examples[number]).num_new for number in batch.numbers])
    while not bool(state.is_done.all()):
      num_tokens_B = fetched(state.num_tokens)
      state, tree_pass = _observed(batch.params, state, spec=batch.spec)
      tree, path_BP = fetched((tree_pass.tree, tree_pass.verdict.path))
      for b, room in enumerate(room_B - num_tokens_B[: len(room_B)]):
        if room > 0:
          row = DraftTree(*(x[b] for x in tree))
          seen.append(_nodes(row, path_BP[b], max_depth=min(int(room), policy.max_depth)))
  if not seen:
    raise ValueError(
      f'None of the {len(examples)} answers is longer than one token, which prefill yields: nothing was drafted. '
      'Record longer ones.'
    )
  return Nodes(*(np.concatenate(x) for x in zip(*seen, strict=True)))


_observed = jax.jit(step, static_argnames='spec', donate_argnames='state')


def _nodes(tree: DraftTree, path_P: np.ndarray, *, max_depth: int) -> Nodes:
  """The used nodes of one tree, down to a depth."""
  depth_T = np.zeros(len(tree.token), np.int32)
  rank_T = np.zeros(len(tree.token), np.int32)
  for node in range(1, len(tree.token)):  # parents come first
    depth_T[node] = depth_T[tree.parent[node]] + 1
    is_sibling_T = (tree.parent == tree.parent[node]) & (tree.token != NO_TOKEN)
    rank_T[node] = (tree.log_q[is_sibling_T] > tree.log_q[node]).sum()
  is_counted_T = (tree.token != NO_TOKEN) & (depth_T > 0) & (depth_T <= max_depth)
  is_accepted_T = np.isin(np.arange(len(tree.token)), path_P)
  log_p_T, is_tried_T = tree.log_q - tree.log_q[tree.parent], is_accepted_T[tree.parent]
  fields: Any = tree.log_q, log_p_T, depth_T, rank_T, is_tried_T, is_accepted_T
  return Nodes(*(x_T[is_counted_T] for x_T in fields))


def require_traceable(target: Target, drafter: Drafter) -> None:
  """ValueError if the drafter reads more of the target than is recorded."""
  if taps := drafter.config.tapped_layers(target.config.num_layers):
    raise ValueError(
      f'Drafter {drafter.config.name!r} reads the inputs of layers {taps} of the target, and recorded answers '
      'hold the final feature alone: an EAGLE-3 head cannot be traced. Decode with it instead: launch/bench.py.'
    )


class _Batch(NamedTuple):
  """Examples ready to be decoded together."""

  numbers: list[int]  # of the examples, by row; rows beyond them are idle
  params: Params
  state: DecodeState
  spec: Spec


def _batches(
  target: Target, drafter: Drafter, examples: Sequence[Example], *, policy: TreePolicy, num_rows: int
) -> Iterator[_Batch]:
  if not examples:
    raise ValueError('No example came; tracing needs one or more.')
  params, spec = build(target, drafter, policy=policy)
  require_traceable(target, drafter)
  spec = dataclasses.replace(spec, target=Replay(target.config.vocab_size))
  answers = [first_answer(example) for example in examples]
  order = sorted(range(len(answers)), key=lambda number: answers[number].num_new)  # so rows of a batch end together
  max_prompt, max_new = max(a.num_prompt for a in answers), max(a.num_new for a in answers)
  for start in range(0, len(order), num_rows):
    numbers = order[start : start + num_rows]
    chosen = [answers[number] for number in numbers]
    yield _Batch(
      numbers, *_begin(params, spec, chosen, num_rows=num_rows, max_prompt=max_prompt, max_new=max_new), spec
    )


def _begin(
  params: Params, spec: Spec, answers: Sequence[Recorded], *, num_rows: int, max_prompt: int, max_new: int
) -> tuple[Params, DecodeState]:
  """Parameters and first state of one batch. Rows left over recite the first answer, and end at once."""
  num_idle = num_rows - len(answers)
  rows = [*answers, *[answers[0]] * num_idle]
  # The limit of a row is its own answer's length. It cuts whatever is accepted past the end, as an EOS inside a path or
  # `max_new_tokens` cut it when the answer was made: so what `Replay` says there never counts.
  limit_B = np.asarray([answer.num_new for answer in answers] + [1] * num_idle, np.int32)
  prompt_BL, length_B = pad_prompts([row.token[: row.num_prompt].tolist() for row in rows], max_prompt)
  drawn = [row.example for row in rows]
  temperature_B = jnp.asarray([example.temperature for example in drawn], jnp.float32)
  seed_B = jnp.asarray([example.seed for example in drawn], jnp.int32)
  (_, *request, limits), static = prepare(
    params,
    prompt_BL,
    length_B,
    spec=spec,
    max_new_tokens=max_new,
    sampling=Sampling.of()._replace(temperature=temperature_B, seed=seed_B),
    row_ids=[example.id for example in drawn],
    eos_ids=None,
  )
  params = params._replace(target=jax.device_put(_text(rows, max_prompt + max_new)))
  return params, run_prefill(params, *request, limits._replace(max_new_tokens=limit_B), **static)


def _text(rows: Sequence[Recorded], max_tokens: int) -> Text:
  """The rows, padded to the bucket of `max_tokens`."""
  token_BS, _ = pad_prompts([row.token.tolist() for row in rows], max_tokens)
  feature_BSD = np.zeros((*token_BS.shape, rows[0].feature.shape[1]), rows[0].feature.dtype)
  for row_SD, row in zip(feature_BSD, rows, strict=True):
    row_SD[: len(row.feature)] = row.feature
  return Text(token_BS, feature_BSD)
