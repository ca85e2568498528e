"""Evaluate a drafter on recorded text, without running the target.

A drafted node is accepted iff its path equals the text that follows, whether that text is greedy or sampled. So a
network that replays the text and its recorded features replaces the target in the same decode loop that users run. The
drafter sees the noise that the text was sampled with.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.decode.buckets import group_by_length, pad_prompts
from eagle_jax.decode.build import build
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.record import Cycle
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import decode_loop, result, step, tau
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import require_recorded, split_taps
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import to_host
from eagle_jax.tree import NO_TOKEN, DraftTree

NUM_ROWS = 8


class RecordedText(NamedTuple):
  """The parameters of `Replay`: recorded texts and features, padded at the end to S positions."""

  token: Any  # [B, S] i32, prompt and answer
  feature: Any  # [B, S, (1 + k) D], of the token at the same position, and k taps; see `evaluate.example`


class ReplayTaps(NamedTuple):
  """The outputs of a pass over recorded text."""

  feature: jax.Array  # [D, B, T], recorded at the nodes' positions
  residual: tuple[jax.Array, ...]  # [D, B, T] each, the taps
  next_token: jax.Array  # [1, B, T] i32, the tokens of the text after these positions


@dataclasses.dataclass(frozen=True)
class Replay:
  """A `models.interface.TargetNetwork` that ignores the tokens and replays the text at each position.

  At a node off the text's own path this is not the target's choice, but `verify` never accepts such a node.
  """

  vocab_size: int
  width: int  # D
  eos_ids: tuple[int, ...] = ()  # none: a recorded answer ends at its own length

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    """Make a cache without layers, which holds only the lengths."""
    return KVCache((), (), jnp.zeros(batch, jnp.int32))

  def forward(
    self, params: RecordedText, token_BT, position_BT, mask_BTT, cache: KVCache
  ) -> tuple[ReplayTaps, NewEntries]:
    feature_BTD = jnp.take_along_axis(params.feature, position_BT[..., None], axis=1, mode='clip')
    next_BT = jnp.take_along_axis(params.token, position_BT + 1, axis=1, mode='clip')
    return ReplayTaps(*split_taps(feature_BTD, self.width), next_BT[None]), NewEntries((), ())

  def logits(self, params: RecordedText, taps: ReplayTaps) -> jax.Array:
    """Return logits [V, B, T] f32: 0 at the next token, -inf elsewhere, so that no noise changes the choice."""
    is_next_VBT = jax.nn.one_hot(taps.next_token[0], self.vocab_size, axis=0, dtype=bool)
    return jnp.where(is_next_VBT, 0.0, -jnp.inf)


class FirstAnswer(NamedTuple):
  """The first answer of an `Example`, with the text before it."""

  token: np.ndarray  # [n + 1] i32, prompt and answer
  feature: np.ndarray  # [n, (1 + k) D]
  num_prompt: int  # number of tokens before the answer
  example: Example  # holds how it was sampled

  @property
  def num_new(self) -> int:
    """Number of tokens of the answer."""
    return len(self.token) - self.num_prompt


def first_answer(example: Example) -> FirstAnswer:
  """Cut an example after its first answer.

  Raises:
    ValueError: the example has no answer, or nothing before it.
  """
  num_prompt = int(np.argmax(example.is_answer))
  if num_prompt < 1:
    raise ValueError(
      f'Example {example.id} must have an answer after a prompt, got `is_answer` that is '
      f'{"True at the first token" if example.is_answer.any() else "never True"}: leave it out of the evaluation.'
    )
  end = num_prompt + int(np.argmin(np.append(example.is_answer[num_prompt:], False)))
  return FirstAnswer(example.token[:end], example.feature[: end - 1], num_prompt, example)


@dataclasses.dataclass(frozen=True)
class Traced:
  """The acceptance of a drafter on recorded answers; each list has one item for each example."""

  num_accepted: list[list[int]]  # for each target pass, as in `decode.Generation`
  num_new_tokens: list[int]  # number of tokens of each answer
  policy: TreePolicy

  def part(self, is_chosen: Sequence[bool]) -> 'Traced':
    """Return what some of the examples say."""
    chosen = [number for number, is_in in enumerate(is_chosen) if is_in]
    num_accepted, num_new = ([x[number] for number in chosen] for x in (self.num_accepted, self.num_new_tokens))
    return Traced(num_accepted, num_new, self.policy)  # type: ignore[arg-type]

  @property
  def num_passes(self) -> int:
    """Number of target passes that decoding would have taken, without prefill."""
    return sum(map(len, self.num_accepted))

  @property
  def tau(self) -> float:
    """Mean number of new tokens a target pass over all examples; see `decode.step.tau`."""
    return tau(sum(self.num_new_tokens), self.num_passes, num_sequences=len(self.num_new_tokens))

  @property
  def acceptance(self) -> tuple[float, ...]:
    """Acceptance by depth 1 .. max_depth: of the passes that accepted a parent, the share that accepted a child.

    A pass whose answer ended before a depth does not count there. NaN where no pass got that far.
    """
    accepted_n1 = np.concatenate([np.asarray(counts, np.int32) for counts in self.num_accepted])[:, None]
    emitted = [np.asarray(counts, np.int32) + 1 for counts in self.num_accepted]
    num_left = [
      num_new - 1 - (np.cumsum(counts) - counts) for num_new, counts in zip(self.num_new_tokens, emitted, strict=True)
    ]
    depth_1d = np.arange(1, self.policy.max_depth + 1)[None]
    num_hit_d = (accepted_n1 >= depth_1d).sum(axis=0)
    num_tried_d = ((accepted_n1 >= depth_1d - 1) & (np.concatenate(num_left)[:, None] >= depth_1d)).sum(axis=0)
    share_d = np.full(num_hit_d.shape, np.nan)
    return tuple(np.divide(num_hit_d, num_tried_d, out=share_d, where=num_tried_d > 0).tolist())


def trace(
  target: Target, drafter: Drafter, examples: Sequence[Example], *, policy: TreePolicy, num_rows: int = NUM_ROWS
) -> Traced:
  """Count the drafted tokens that would be accepted along recorded answers.

  With weights and features in float32, `num_accepted` equals that of `generate`. In a conversation of several turns
  only the first answer is traced. Batches of prompts of similar length share one shape, so the two programs are
  compiled once for each such shape and policy.

  Args:
    target: the target that gave the answers. Its embedding and head are read, its layers are not.
    drafter: the drafter to evaluate.
    examples: one or more.
    policy: determines the trees to draft.
    num_rows: examples decoded together.

  Raises:
    ValueError: there is no example, one has no answer after a prompt, or drafter or policy do not fit; see `build`.
  """
  num_accepted: list[list[int]] = [[] for _ in examples]
  for batch in replay_batches(target, drafter, examples, policy=policy, num_rows=num_rows):
    _, _, num_accepted_BN = result(decode_loop(batch.params, batch.state, spec=batch.spec))
    for number, row in zip(batch.numbers, to_host(num_accepted_BN), strict=False):
      num_accepted[number] = row[row >= 0].tolist()
  return Traced(num_accepted, [first_answer(example).num_new for example in examples], policy)


class Nodes(NamedTuple):
  """All n nodes that were drafted in all passes of all examples, without the roots."""

  log_q: np.ndarray  # [n] f32, the drafter's log-probability of the path, nats
  log_p: np.ndarray  # [n] f32, the drafter's log-probability given the parent, nats
  depth: np.ndarray  # [n] i32, edges from the root
  rank: np.ndarray  # [n] i32, among its siblings by `log_q`, 0 for the likeliest
  is_tried: np.ndarray  # [n] bool, whether its parent was accepted, or is the root
  is_accepted: np.ndarray  # [n] bool, whether its path equals the text


def observe(
  target: Target, drafter: Drafter, examples: Sequence[Example], *, policy: TreePolicy, num_rows: int = NUM_ROWS
) -> Nodes:
  """Record for every drafted node whether it is accepted; nodes beyond an answer's end are left out.

  Args: as in `trace`.

  Raises:
    ValueError: as `trace`, or nothing was drafted, since every answer has one token.
  """
  found: list[Nodes] = []
  for batch in replay_batches(target, drafter, examples, policy=policy, num_rows=num_rows):
    state = batch.state
    num_new_B = np.asarray([first_answer(examples[number]).num_new for number in batch.numbers])
    while not bool(state.is_done.all()):
      num_tokens_B = to_host(state.num_tokens)
      state, tree_pass, _ = _jitted_step(batch.params, state, spec=batch.spec)
      tree, path_BP = to_host((tree_pass.tree, tree_pass.verdict.path))
      for b, num_left in enumerate(num_new_B - num_tokens_B[: len(num_new_B)]):
        if num_left > 0:
          own_tree = DraftTree(*(x[b] for x in tree))
          found.append(used_nodes(own_tree, path_BP[b], max_depth=min(int(num_left), policy.max_depth)))
  if not found:
    raise ValueError(
      f'At least one answer must have more than one token, got {len(examples)} answers of a single token, which '
      'prefill emits without drafting: record longer answers.'
    )
  return Nodes(*(np.concatenate(x) for x in zip(*found, strict=True)))


_jitted_step = jax.jit(step, static_argnames='spec', donate_argnames='state')


def used_nodes(tree: DraftTree, path_P: np.ndarray, *, max_depth: int) -> Nodes:
  """Collect the used nodes of one tree, down to `max_depth`."""
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


def nodes_of_cycles(cycles: Iterable[Cycle], *, num_tokens: int, max_depth: int) -> list[Nodes]:
  """Collect the drafted nodes of a text that was decoded with a trace, as `observe` does along recorded ones.

  Args:
    cycles: of the text, from `Generation.trace`.
    num_tokens: of the text, prompt included; nodes beyond its end are left out.
    max_depth: of the policy.
  """
  return [
    used_nodes(
      DraftTree(one.token, one.parent, one.log_q),  # type: ignore[arg-type]
      one.path,
      max_depth=min(num_tokens - one.text_length, max_depth),
    )
    for one in cycles
  ]


class ReplayBatch(NamedTuple):
  """Examples to be decoded together."""

  numbers: list[int]  # of the examples, by row; further rows are idle
  params: Params
  state: DecodeState
  spec: Spec


def replay_batches(
  target: Target,
  drafter: Drafter,
  examples: Sequence[Example],
  *,
  policy: TreePolicy,
  costs: Costs | None = None,
  num_rows: int,
) -> Iterator[ReplayBatch]:
  """Prefill recorded answers, `num_rows` at a time, those to prompts of similar length together.

  Args and errors: as `trace` and `build`.
  """
  if not examples:
    raise ValueError('`examples` must hold at least one example, got none.')
  params, spec = build(target, drafter, policy=policy, costs=costs)
  require_recorded(target, drafter.config, examples)
  spec = dataclasses.replace(spec, target=Replay(target.config.vocab_size, target.config.width))
  answers = [first_answer(example) for example in examples]
  sizes = {'num_rows': num_rows, 'max_new': max(answer.num_new for answer in answers)}
  for group in group_by_length([answer.num_prompt for answer in answers]):
    max_prompt = answers[group[0]].num_prompt
    group.sort(key=lambda number: answers[number].num_new)  # so that a batch ends together
    for start in range(0, len(group), num_rows):
      numbers = group[start : start + num_rows]
      chosen = [answers[number] for number in numbers]
      yield ReplayBatch(numbers, *_begin(params, spec, chosen, max_prompt=max_prompt, **sizes), spec)


def _begin(
  params: Params, spec: Spec, answers: Sequence[FirstAnswer], *, num_rows: int, max_prompt: int, max_new: int
) -> tuple[Params, DecodeState]:
  """Make the parameters and the first state of one batch. Idle rows replay the first answer, and end at once."""
  num_idle = num_rows - len(answers)
  rows = [*answers, *[answers[0]] * num_idle]
  # The limit of a sequence is its own answer's length. It cuts tokens that are accepted past the end, as an EOS inside
  # a path or `max_new_tokens` cut them when the answer was generated, so `Replay`'s padding never counts.
  limit_B = np.asarray([answer.num_new for answer in answers] + [1] * num_idle, np.int32)
  prompt_BL, length_B = pad_prompts([row.token[: row.num_prompt].tolist() for row in rows], max_prompt)
  examples = [row.example for row in rows]
  temperature_B = jnp.asarray([example.temperature for example in examples], jnp.float32)
  seed_B = jnp.asarray([example.seed for example in examples], jnp.int32)
  (_, *request, limits), static = prepare(
    params,
    prompt_BL,
    length_B,
    spec=spec,
    max_new_tokens=max_new,
    sampling=Sampling.of()._replace(temperature=temperature_B, seed=seed_B),
    row_ids=[example.id for example in examples],
    eos_ids=None,
  )
  params = params._replace(target=jax.device_put(_pad_texts(rows, max_prompt + max_new)))
  return params, run_prefill(params, *request, limits._replace(max_new_tokens=limit_B), **static)


def _pad_texts(rows: Sequence[FirstAnswer], max_tokens: int) -> RecordedText:
  """Pad the texts and features to the bucket of `max_tokens`."""
  token_BS, _ = pad_prompts([row.token.tolist() for row in rows], max_tokens)
  feature_BSD = np.zeros((*token_BS.shape, rows[0].feature.shape[1]), rows[0].feature.dtype)
  for row_SD, row in zip(feature_BSD, rows, strict=True):
    row_SD[: len(row.feature)] = row.feature
  return RecordedText(token_BS, feature_BSD)
