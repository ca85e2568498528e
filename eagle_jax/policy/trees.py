"""Tree policies: how large a tree grows, which of its nodes the target verifies, and when growing stops.

`num_nodes` includes the root; `max_depth` is the number of edges from the root to the deepest leaf.
"""

import dataclasses
import functools
import itertools
import numbers
import operator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import require
from eagle_jax.tree import Candidates

# EAGLE-1's tree, as paths of sibling ranks: 25 drafted nodes (`mc_sim_7b_63` in the reference's choices.py).
EAGLE1_PATHS = (
  *((0,), (1,), (2,), (3,)),
  *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
  *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
  *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
  *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)

LOOKUPS = False, True, 'route'  # see `TreePolicy.lookup`
MAX_DEPTH = 256  # every level is one drafter pass in every step, so deeper trees never pay off


class Level(NamedTuple):
  """One level of the growing trees as a policy sees it: a frontier, and its children once they are drafted."""

  depth: int | jax.Array  # [] i32, edges from the root to the frontier
  log_q: jax.Array  # [B, W] f32, log-probability of each frontier node's path, nats; -inf where unused
  is_live: Any = None  # [B] bool, sequences that are not done; drafters leave it to `draft.interface.DraftContext`
  log_p: Any = None  # [B, W, C] f32, log-probability of each child given its parent's path; None before drafting
  # [B, W] f32, nats: entropy of the distribution that each frontier node was drawn from, and of that of its children
  # (None before drafting). None unless the policy `needs_entropy`.
  entropy: Any = None
  child_entropy: Any = None
  score: Any = None  # [B, W] f32, of each frontier node, 0 for the root: see `TreePolicy.score`

  @property
  def is_used(self) -> jax.Array:
    """Return which frontier nodes are used, [B, W] bool: none in sequences that are done."""
    return self.is_live[:, None] & (self.log_q > -jnp.inf)


class TreePolicy:
  """A rule for which trees to draft and how many of their nodes to verify. Subclass it as a frozen dataclass.

  A policy is part of the compiled program: it is static and hashable, and its sizes are Python integers. Numbers that
  may change without recompiling (costs, thresholds, a classifier's weights) are the pytree that `arrays` returns.
  The defaults never stop early, rank nodes by the probability of their path, and verify `num_nodes` of them.
  """

  name: ClassVar[str]  # in descriptions and `policy.kinds`; default the class's, also where a base class has another
  needs_costs: ClassVar[bool] = False  # whether `arrays` needs measured costs
  needs_entropy: ClassVar[bool] = False  # whether a rule reads entropies, which cost drafters a pass over their logits
  # Whether earlier matches of the text raise the drafter's logits; 'route': long ones alone, and beyond all others.
  lookup: Any = False  # see `draft.lookup`

  def __init_subclass__(cls, **keywords: Any) -> None:
    super().__init_subclass__(**keywords)
    cls.name = vars(cls).get('name', cls.__name__)

  @property
  def max_depth(self) -> int:
    """Number of edges from the root to the deepest leaf."""
    raise NotImplementedError

  @property
  def num_nodes(self) -> int:
    """Number of nodes of the largest tree that is verified, root included."""
    raise NotImplementedError

  @property
  def widths(self) -> tuple[int, ...]:
    """Frontier size at each depth 0 .. max_depth - 1; the first is 1, the root."""
    raise NotImplementedError

  @property
  def fanouts(self) -> tuple[int, ...]:
    """Number of children that each frontier node offers, by depth."""
    raise NotImplementedError

  @property
  def sizes(self) -> tuple[int, ...]:
    """Tree sizes that the target pass is compiled for, ascending; the last is `num_nodes`."""
    return (self.num_nodes,)

  def describe(self) -> str:
    """Name the policy and its sizes, as in `dynamic(width=10, fanout=10, max_depth=6, num_nodes=60)`."""
    policy: Any = self  # a dataclass
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    said = (f'{name}={value}' for name, value in values.items() if value not in (None, ()) and value is not False)
    return f'{self.name}({", ".join(said)})'

  def static(self) -> 'TreePolicy':
    """Return the policy that a program is compiled for, without the numbers that travel in `arrays`."""
    return self

  def arrays(self, costs: Any, target: Any, drafter: Any) -> Any:
    """Make the pytree of arrays that the methods below read.

    Args:
      costs: `policy.costs.Costs` of this device, pair and batch size, or None.
      target, drafter: the pair.

    Raises:
      ValueError: something that the methods need is missing.
    """
    return ()

  def at_step(self, arrays: Any, *, num_slots: int, temperature: jax.Array) -> Any:
    """Reduce `arrays` to one step, given the number of cache slots and the batch's mean temperature."""
    return arrays

  def score(self, arrays: Any, level: Level) -> jax.Array:
    """Rank a frontier's children: [B, W, C] f32, -inf for a child not offered. No child may outscore its parent."""
    return level.log_q[..., None] + level.log_p

  def keep_going(self, arrays: Any, level: Level) -> jax.Array | None:
    """Decide whether to draft the children of this frontier: [] bool, or None for always. Not called at the root."""
    return None

  def select(self, arrays: Any, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose how many nodes the target verifies, and which.

    Args:
      arrays: as `at_step` returns them.
      candidates: [B, A] fields.
      is_live_B: [B] bool, sequences that are not done.

    Returns:
      [] i32, an index into `sizes`; and [B, A] f32, a score for each candidate: the best of each sequence are verified,
      those with -inf never.
    """
    return jnp.int32(0), candidates.score


def level_starts(policy: TreePolicy) -> list[int]:
  """List the number of the first candidate of each level below the root, then the total number of candidates."""
  sizes = (width * fanout for width, fanout in zip(policy.widths, policy.fanouts, strict=True))
  return list(itertools.accumulate(sizes, initial=1))


def were_drafted(candidates: Candidates, policy: TreePolicy) -> list[jax.Array]:
  """Return for each level below the root whether it was drafted, [] bool; one that was skipped has no used node."""
  is_used_A = (candidates.log_q > -jnp.inf).any(axis=0)
  return [is_used_A[start:end].any() for start, end in itertools.pairwise(level_starts(policy))]


def _is_count(n: Any) -> bool:
  return isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 1


def _require_valid(policy, *sizes: str) -> None:
  """Raise a ValueError unless `sizes` are counts, `max_depth` at most `MAX_DEPTH`, and `lookup` one of `LOOKUPS`."""
  given = {size: getattr(policy, size) for size in sizes}
  if bad := {size: n for size, n in given.items() if not _is_count(n)}:
    fields = ', '.join(f'`{size}` = {n!r}' for size, n in bad.items())
    raise ValueError(f'{type(policy).__name__}: sizes must be integers of at least 1, got {fields}.')
  for size, n in given.items():  # Python integers: products of NumPy's small integers would overflow
    object.__setattr__(policy, size, int(n))
  require(policy, 'max_depth', policy.max_depth <= MAX_DEPTH, f'between 1 and {MAX_DEPTH}')
  is_known = isinstance(policy.lookup, (bool, str)) and policy.lookup in LOOKUPS
  require(policy, 'lookup', is_known, "True, False or 'route'")


@dataclasses.dataclass(frozen=True)
class Plain(TreePolicy):
  """Plain decoding: nothing is drafted.

  Example:
    >>> eagle_jax.Plain().num_nodes
    1
  """

  name: ClassVar[str] = 'plain'
  max_depth = 0
  num_nodes = 1
  widths = ()
  fanouts = ()

  def describe(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True)
class DynamicTree(TreePolicy):
  """EAGLE-2's tree: grow where the drafter's path probability is high, then keep the best nodes (arXiv:2406.16858).

  Attributes:
    width: nodes expanded at each depth.
    fanout: children that each of them offers.
    max_depth: edges from the root to the deepest leaf; the reference's `depth` is one less.
    num_nodes: nodes kept for the target pass, root included: the reference's `total_token`.
    lookup: also draft what followed an earlier match of the text (`draft.lookup`; not part of EAGLE-2). With 'route' a
      match of five tokens or more is drafted instead of what the drafter would say, and shorter ones are ignored
      (SAM-Decoding, arXiv:2411.10666).

  Example:
    >>> eagle_jax.DynamicTree(width=4, fanout=4, max_depth=5, num_nodes=16).widths
    (1, 4, 4, 4, 4)
  """

  name: ClassVar[str] = 'dynamic'

  width: int = 10
  fanout: int = 10
  max_depth: int = 6
  num_nodes: int = 60
  lookup: bool | str = False

  def __post_init__(self):
    _require_valid(self, 'width', 'fanout', 'max_depth', 'num_nodes')
    *_, offered = level_starts(self)
    if self.num_nodes > offered:
      raise ValueError(
        f'{self.describe()}: `num_nodes` must be at most {offered}, the nodes that these sizes can grow (root '
        f'included), got {self.num_nodes}. Lower num_nodes, or raise width, fanout or max_depth.'
      )

  @functools.cached_property
  def widths(self) -> tuple[int, ...]:
    widths = [1]
    while len(widths) < self.max_depth:
      widths.append(min(self.width, widths[-1] * self.fanout))
    return tuple(widths)

  @property
  def fanouts(self) -> tuple[int, ...]:
    return (self.fanout,) * self.max_depth


@dataclasses.dataclass(frozen=True)
class Chain(TreePolicy):
  """A chain of `max_depth` tokens, each the likeliest after the one before; `lookup` as in `DynamicTree`.

  Example:
    >>> eagle_jax.Chain(3, lookup=True).describe()
    'chain(max_depth=3, lookup=True)'
  """

  name: ClassVar[str] = 'chain'

  max_depth: int = 4
  lookup: bool | str = False

  def __post_init__(self):
    _require_valid(self, 'max_depth')

  @property
  def num_nodes(self) -> int:
    return self.max_depth + 1

  @property
  def widths(self) -> tuple[int, ...]:
    return (1,) * self.max_depth

  @property
  def fanouts(self) -> tuple[int, ...]:
    return (1,) * self.max_depth


@dataclasses.dataclass(frozen=True)
class StaticTree(TreePolicy):
  """A fixed tree, as EAGLE-1 and Medusa use: each node is a path of sibling ranks (0 is the likeliest).

  Example:
    >>> eagle_jax.StaticTree([(0,), (1,), (0, 0)]).max_depth
    2
  """

  name: ClassVar[str] = 'static'

  paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

  def __post_init__(self):
    try:
      object.__setattr__(self, 'paths', tuple(tuple(map(operator.index, path)) for path in self.paths))
    except TypeError:
      require(self, 'paths', False, 'a list of tuples of integers such as [(0,), (0, 0)]')
    known = {(), *self.paths}
    is_set = () not in self.paths and len(known) == len(self.paths) + 1 > 1
    orphans = [path for path in self.paths if path and path[:-1] not in known]
    if not is_set or orphans or any(rank < 0 for path in self.paths for rank in path):
      raise ValueError(
        f'StaticTree: `paths` must be one or more distinct, non-empty paths of ranks >= 0, with the parent of each '
        f'(the root is implied; leave it out), got {self.paths!r:.80}. Paths without their parent: {orphans}.'
      )
    _require_valid(self)

  @property
  def max_depth(self) -> int:
    return max(map(len, self.paths))

  @property
  def num_nodes(self) -> int:
    return len(self.paths) + 1

  @functools.cached_property
  def _levels(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Paths by depth, root first; within a level, nodes with children come first, since they are the frontier."""
    parents = {path[:-1] for path in self.paths}
    levels: list[tuple[tuple[int, ...], ...]] = [((),)]
    for depth in range(1, self.max_depth + 1):
      level = [path for path in self.paths if len(path) == depth]
      levels.append(tuple(sorted(level, key=lambda path: (path not in parents, path))))
    return tuple(levels)

  @functools.cached_property
  def widths(self) -> tuple[int, ...]:
    parents = {path[:-1] for path in self.paths}
    return tuple(sum(path in parents for path in level) for level in self._levels[:-1])

  @functools.cached_property
  def fanouts(self) -> tuple[int, ...]:
    return tuple(1 + max(path[-1] for path in level) for level in self._levels[1:])

  @functools.cached_property
  def _scores(self) -> np.ndarray:
    """Scores [d, W, C] f32 by the parent's depth, the parent's frontier slot, and the child's rank."""
    scores = np.full((self.max_depth, max(self.widths), max(self.fanouts)), -np.inf, np.float32)
    children = [path for level in self._levels[1:] for path in level]
    for number, path in enumerate(children, start=1):
      scores[len(path) - 1, self._levels[len(path) - 1].index(path[:-1]), path[-1]] = -number
    return scores

  def score(self, arrays: Any, level: Level) -> jax.Array:
    """Score children by their place in the tree, earlier ones higher; -inf for ranks outside it."""
    *_, width, fanout = level.log_p.shape
    score_WC = jnp.asarray(self._scores)[level.depth, :width, :fanout]
    return jnp.broadcast_to(score_WC, level.log_p.shape)

  def describe(self) -> str:
    return f'{self.name}(num_nodes={self.num_nodes}, max_depth={self.max_depth})'
