"""Evaluate many policies on recorded text from one tree a position, which is grown once.

Whether a drafted node is accepted depends on the text that follows, not on the policy that decodes it. So the whole
tree is grown at every position of the text, by real passes of the drafter. A policy whose trees are parts of it is then
replayed by its own rules: no pass of any network, and the same acceptance as decoding's, to the token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decode.buckets import bucket, slots_for
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import num_drafted, step
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import NUM_ROWS, Traced, first_answer, replay_batches
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import Level, TreePolicy, level_starts
from eagle_jax.sharding import to_host
from eagle_jax.tree import Candidates

_PAST_END = -2  # no candidate's token, not even an unused one's


@dataclasses.dataclass(frozen=True)
class Whole(TreePolicy):
  """Grow the trees of another policy to their full depth, and verify none of their nodes."""

  policy: TreePolicy
  lookup: bool | str = False
  needs_entropy: ClassVar[bool] = True
  num_nodes = 1

  @property
  def max_depth(self) -> int:
    return self.policy.max_depth

  @property
  def widths(self) -> tuple[int, ...]:
    return self.policy.widths

  @property
  def fanouts(self) -> tuple[int, ...]:
    return self.policy.fanouts

  def describe(self) -> str:
    return f'whole({self.policy.describe()})'

  def arrays(self, costs: Any, target: Any, drafter: Any) -> Any:
    return self.policy.arrays(costs, target, drafter) if ranks_by_rule(self.policy) else ()

  def score(self, arrays: Any, level: Level) -> jax.Array:
    return self.policy.score(arrays, level)


def ranks_by_rule(policy: TreePolicy) -> bool:
  """Return whether a policy ranks children by another score than the probability of their path."""
  return type(policy).score is not TreePolicy.score


class Grown(NamedTuple):
  """The whole trees at n positions of a text, in its order."""

  candidates: Candidates  # [n, A] fields
  path: Any  # [n, D] i32, the candidate that is the text's own token at each depth; A where none is


@dataclasses.dataclass(frozen=True)
class Positions:
  """The whole trees at every position of recorded answers."""

  policy: TreePolicy  # whose trees they are
  examples: Sequence[Example]
  grown: list[Grown]  # of each example; position i is where i + 1 tokens of the answer are known

  def holds(self, policy: TreePolicy) -> bool:
    """Return whether this policy's trees are parts of these: they grow alike, perhaps to a smaller depth."""
    depth, own = policy.max_depth, self.policy
    is_alike = policy.widths == own.widths[:depth] and policy.fanouts == own.fanouts[:depth]
    return is_alike and policy.lookup == own.lookup and _ranking(policy) == _ranking(own)


def _ranking(policy: Any) -> Any:
  """Identify the rule and the numbers by which a policy ranks children; None for the probability of their path."""
  if not ranks_by_rule(policy):
    return None
  others = 'num_nodes', 'max_depth', 'smaller', 'least_accepted'  # no `score` reads these
  return type(policy), [getattr(policy, f.name) for f in dataclasses.fields(policy) if f.name not in others]


def grow_everywhere(
  target: Target,
  drafter: Drafter,
  examples: Sequence[Example],
  *,
  policy: TreePolicy,
  costs: Costs | None = None,
  num_rows: int = NUM_ROWS,
) -> Positions:
  """Grow a policy's trees to their full depth at every position of recorded answers.

  Args: as in `trace`; `costs` are what the policy's scores need.

  Raises:
    ValueError: as `trace`, or costs are missing.
  """
  zero_0A: Any = np.zeros((0, level_starts(policy)[-1]), np.float32)
  integer_0A = zero_0A.astype(np.int32)
  nowhere = Grown(Candidates(integer_0A, integer_0A, zero_0A, zero_0A, zero_0A), integer_0A[:, : policy.max_depth])
  by_number = [nowhere for _ in examples]
  whole = Whole(policy, policy.lookup)
  for batch in replay_batches(target, drafter, examples, policy=whole, costs=costs, num_rows=num_rows):
    state, steps = batch.state, []
    while not bool(state.is_done.all()):
      state, grown = _grow_step(batch.params, state, spec=batch.spec)
      steps.append(to_host(grown))
    for row, number in enumerate(batch.numbers):
      own = [jax.tree.map(lambda x_B, row=row: x_B[row], one) for one in steps]
      if own := own[: first_answer(examples[number]).num_new - 1]:
        by_number[number] = jax.tree.map(lambda *x: np.stack(x), *own)
  return Positions(policy, examples, by_number)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def _grow_step(params: Params, state: DecodeState, *, spec: Spec) -> tuple[DecodeState, Grown]:
  """Grow a tree for every sequence, [B, ...] fields, and go on by one token of the text."""
  after, _, candidates = step(params, state, spec=spec)
  depth_1D = jnp.arange(1, spec.policy.max_depth + 1)[None]
  place_BD = state.cache.length[:, None] + depth_1D  # the root stands at `length`
  next_BD = jnp.take_along_axis(params.target.token, place_BD, axis=1, mode='clip')
  end_B = state.num_prompt + state.limits.max_new_tokens
  next_BD = jnp.where(place_BD < end_B[:, None], next_BD, _PAST_END)
  return after, Grown(candidates, jax.vmap(find_path)(candidates, next_BD))


def find_path(candidates: Candidates, next_D: jax.Array) -> jax.Array:
  """Follow a text through one tree whose siblings differ: the candidate at each depth, [D] i32; A once it has left."""

  def follow(node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_next_A = (candidates.parent == node) & (candidates.token == token)
    child = jnp.where(is_next_A.any(), jnp.argmax(is_next_A), len(is_next_A)).astype(jnp.int32)
    return child, child

  return jax.lax.scan(follow, jnp.int32(0), next_D)[1]


class Outcome(NamedTuple):
  """What a policy does at a position."""

  num_accepted: Any  # [] i32, drafted tokens accepted, but for a cut at the answer's end
  num_nodes: Any  # [] i32, nodes verified
  num_levels: Any  # [] i32, levels drafted


@functools.partial(jax.jit, static_argnames='policy')
def outcomes(arrays: Any, grown: Grown, num_slots_n: jax.Array, temperature_n: jax.Array, *, policy: Any) -> Outcome:
  """Apply a policy's rules at n positions, as in a batch of one: [n] fields.

  Args:
    arrays: of the policy, as returned by `TreePolicy.arrays`.
    grown: whole trees that hold the policy's; see `Positions.holds`.
    num_slots_n: cache slots of the decoding that is replayed.
    temperature_n: at which the text was sampled.
    policy: static.
  """

  def at_position(grown: Grown, num_slots: jax.Array, temperature: jax.Array) -> Outcome:
    rules = policy.at_step(arrays, num_slots=num_slots, temperature=temperature)
    *_, num_candidates = level_starts(policy)
    cut = jax.tree.map(lambda x_A: x_A[None, :num_candidates], grown.candidates)
    candidates = _drafted(rules, cut, policy)
    size, score_1A = policy.select(rules, candidates, jnp.ones(1, bool))
    num_nodes = jnp.asarray(policy.sizes, jnp.int32)[size]
    is_kept_D = _is_kept(score_1A[0], grown.path[: policy.max_depth], num_nodes)
    num_accepted = jnp.cumprod(is_kept_D.astype(jnp.int32)).sum(dtype=jnp.int32)
    return Outcome(num_accepted, num_nodes, num_drafted(candidates, policy))

  return jax.vmap(at_position)(grown, num_slots_n, temperature_n)


def _drafted(rules: Any, candidates: Candidates, policy: TreePolicy) -> Candidates:
  """Remove the levels that the policy would not have drafted. [1, A] fields, of one sequence."""
  if type(policy).keep_going is TreePolicy.keep_going:
    return candidates
  going, log_q, score = jnp.bool_(True), candidates.log_q, candidates.score
  starts = level_starts(policy)
  for depth in range(1, policy.max_depth):
    first, end = starts[depth - 1], starts[depth]
    score_1W, best_1W = jax.lax.top_k(score[:, first:end], policy.widths[depth])
    log_q_1W, entropy_1W = (jnp.take_along_axis(x[:, first:end], best_1W, axis=1) for x in (log_q, candidates.entropy))
    frontier = Level(depth, log_q_1W, jnp.ones(1, bool), entropy=entropy_1W, score=score_1W)
    keep_going = policy.keep_going(rules, frontier)
    going = going if keep_going is None else going & keep_going
    log_q, score = (x.at[:, end : starts[depth + 1]].min(jnp.where(going, jnp.inf, -jnp.inf)) for x in (log_q, score))
  return candidates._replace(log_q=log_q, score=score)


def _is_kept(score_A: jax.Array, path_D: jax.Array, num_nodes: jax.Array) -> jax.Array:
  """Return whether the text's own node at each depth is one of the tree that `tree.rerank` makes: [D] bool."""
  is_there_D = path_D < len(score_A)
  score_D = score_A[jnp.minimum(path_D, len(score_A) - 1)]
  is_equal_DA = score_A[None] == score_D[:, None]
  is_before_DA = is_equal_DA & (jnp.arange(len(score_A))[None] < path_D[:, None])
  rank_D = ((score_A[None] > score_D[:, None]) | is_before_DA).sum(axis=1)
  return is_there_D & (score_D > -jnp.inf) & (rank_D < num_nodes)


@dataclasses.dataclass(frozen=True)
class Replayed(Traced):
  """The acceptance of a policy on recorded answers, and what its passes cost; each list has one item an example."""

  num_nodes: list[list[int]]  # nodes verified by each target pass
  num_levels: list[list[int]]  # levels drafted for it

  @property
  def nodes_per_pass(self) -> float:
    return sum(map(sum, self.num_nodes)) / max(self.num_passes, 1)

  @property
  def levels_per_pass(self) -> float:
    return sum(map(sum, self.num_levels)) / max(self.num_passes, 1)


def replay(positions: Positions, policy: TreePolicy, arrays: Any = (), *, max_new_tokens: int) -> Replayed:
  """Decode recorded answers again, one at a time, from trees that were grown before.

  With weights and features in float32, the passes are those of `generate` with one prompt.

  Args:
    positions: trees that hold the policy's.
    policy: to replay.
    arrays: of the policy, as returned by `TreePolicy.arrays`.
    max_new_tokens: of the decoding that is replayed, on which the size of its cache depends.

  Raises:
    ValueError: the trees do not hold the policy's.
  """
  if not positions.holds(policy):
    raise ValueError(
      f'The trees must hold those of {policy.describe()}, got trees of {positions.policy.describe()}: grow them with '
      'the same widths and fanouts, at least as deep.'
    )
  answers = [first_answer(example) for example in positions.examples]
  counts = [len(grown.path) for grown in positions.grown]
  num_new, max_path = bucket(max_new_tokens), policy.max_depth + 1
  num_slots = [slots_for(bucket(answer.num_prompt), num_new, max_path) for answer in answers]
  temperature = [answer.example.temperature for answer in answers]
  together = jax.tree.map(lambda *x: np.concatenate(x), *positions.grown)
  per_position = (np.repeat(np.asarray(x, np.float32), counts) for x in (num_slots, temperature))
  found = to_host(outcomes(arrays, together, *per_position, policy=policy.static()))
  walked = [
    _walk(Outcome(*(x_n[end - count : end] for x_n in found)))
    for count, end in zip(counts, np.cumsum(counts), strict=True)
  ]
  accepted, nodes, levels = ([getattr(one, name) for one in walked] for name in Outcome._fields)
  return Replayed(accepted, [answer.num_new for answer in answers], policy, nodes, levels)


def _walk(outcome: Outcome) -> Outcome:
  """Visit the positions that decoding one answer visits: lists, one item a pass."""
  visited, place = [], 0
  while place < len(outcome.num_accepted):
    visited.append(place)
    place += int(outcome.num_accepted[place]) + 1
  return Outcome(*(x_n[visited].tolist() for x_n in outcome))
