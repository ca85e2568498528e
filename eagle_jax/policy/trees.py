"""Tree policies: which nodes a drafter's children become. Static sizes and one pure function, handed to `grow`.

Sizes count as everywhere here: `num_nodes` includes the root, `max_depth` is edges from the root to the deepest leaf.
"""

import dataclasses
import functools
import itertools
import math
import numbers
import operator
from typing import Any, Protocol

import jax
import numpy as np

from eagle_jax.policy.adaptive import best_size, is_level_worth

# EAGLE-1's tree, as paths of sibling ranks: 25 drafted nodes (EAGLE.md section 5; the reference's `mc_sim_7b_63`).
EAGLE1_PATHS = (
  *((0,), (1,), (2,), (3,)),
  *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
  *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
  *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
  *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)

MAX_DEPTH = 256  # each level is a drafter pass of every step: no text is worth as many


class TreePolicy(Protocol):
  """Static and hashable: a policy is part of the compiled program."""

  @property
  def max_depth(self) -> int: ...

  @property
  def num_nodes(self) -> int: ...

  @property
  def widths(self) -> tuple[int, ...]:
    """Frontier size at each depth 0 .. max_depth-1; the root alone first."""
    ...

  @property
  def fanouts(self) -> tuple[int, ...]:
    """Children that each frontier node offers, by depth."""
    ...

  @property
  def sizes(self) -> tuple[int, ...]:
    """Numbers of nodes that a target pass may be compiled for, ascending; the last is `num_nodes`."""
    ...

  @property
  def lookup(self) -> bool:
    """May the drafter look at what the text said before? See `draft.ngram`."""
    ...

  def score(self, depth: int | jax.Array, log_q_WC: jax.Array) -> jax.Array:
    """[W, C] f32: what ranks the children of the frontier at `depth`, which may be traced. No child may outscore its
    parent."""
    ...

  def is_level_worth(self, economy: Any, log_q_BW: jax.Array, is_live_B: jax.Array, *, depth: int | jax.Array) -> Any:
    """Should the frontier at `depth` be expanded? [] bool, or True for a policy that always does."""
    ...

  def best_size(self, economy: Any, log_q_BA: jax.Array, is_live_B: jax.Array) -> jax.Array:
    """[] i32, an index into `sizes`."""
    ...

  def describe(self) -> str: ...


def level_starts(policy: TreePolicy) -> list[int]:
  """The first candidate's number of each level below the root, and behind them the number of all candidates."""
  sizes = (width * fanout for width, fanout in zip(policy.widths, policy.fanouts, strict=True))
  return list(itertools.accumulate(sizes, initial=1))


class Fixed:
  """A policy that does the same at every step."""

  num_nodes: Any
  lookup: Any = False

  @property
  def sizes(self) -> tuple[int, ...]:
    return (self.num_nodes,)

  def score(self, depth: int | jax.Array, log_q_WC: jax.Array) -> jax.Array:
    return log_q_WC

  def is_level_worth(self, economy: Any, log_q_BW: jax.Array, is_live_B: jax.Array, *, depth: int | jax.Array) -> Any:
    return True

  def best_size(self, economy: Any, log_q_BA: jax.Array, is_live_B: jax.Array) -> jax.Array:
    return jax.numpy.int32(0)


def _is_count(n: Any) -> bool:
  return isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 1


def _require_valid(policy, *sizes: str) -> None:
  """ValueError unless these fields are counts, no deeper than `MAX_DEPTH`, and `lookup` says yes or no."""
  name, given = type(policy).__name__, {size: getattr(policy, size) for size in sizes}
  if bad := {size: n for size, n in given.items() if not _is_count(n)}:
    raise ValueError(f'{name}: these must be integers, at least 1: {bad}.')
  for size, n in given.items():  # Python's: what is computed with NumPy's of few bits would overflow
    object.__setattr__(policy, size, int(n))
  if policy.max_depth > MAX_DEPTH:
    raise ValueError(f'{name}: max_depth is {policy.max_depth}; at most {MAX_DEPTH} is needed. Lower it.')
  if not isinstance(policy.lookup, bool):
    raise ValueError(f'{name}: lookup is {policy.lookup!r}; True or False is needed.')


@dataclasses.dataclass(frozen=True)
class Plain(Fixed):
  """Nothing drafted: the policy of plain decoding."""

  max_depth = 0
  num_nodes = 1
  widths = ()
  fanouts = ()

  def describe(self) -> str:
    return 'plain'


@dataclasses.dataclass(frozen=True)
class DynamicTree(Fixed):
  """EAGLE-2: grow where the drafter's path probability is high, then keep the best nodes of all (arXiv:2406.16858).

  Attributes:
    width: nodes expanded at each depth.
    fanout: children each of them offers.
    max_depth: edges from root to deepest leaf; the reference's `depth` is one less.
    num_nodes: nodes kept for the target pass, root included: the reference's `total_token`.
    lookup: raise what followed an earlier match of the text (`draft.ngram`; no part of EAGLE-2).
  """

  width: int = 10
  fanout: int = 10
  max_depth: int = 6
  num_nodes: int = 60
  lookup: bool = False

  def __post_init__(self):
    _require_valid(self, 'width', 'fanout', 'max_depth', 'num_nodes')
    *_, offered = level_starts(self)
    if self.num_nodes > offered:
      raise ValueError(
        f'{self.describe()} asks for {self.num_nodes} nodes, but growing offers only {offered} (root included). '
        'Lower num_nodes or raise width, fanout or max_depth.'
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

  def describe(self) -> str:
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    said = (f'{name}={value}' for name, value in values.items() if value is not None and value is not False)
    return f'dynamic({", ".join(said)})'


@dataclasses.dataclass(frozen=True)
class Adaptive(DynamicTree):
  """A dynamic tree that weighs costs at every step: how deep to draft, and how many nodes to verify.

  Attributes:
    smaller: sizes that a target pass may have instead of `num_nodes`, root included, ascending; 1 verifies no draft.
    thresholds: tokens that the time of a plain step must bring when it is spent on levels, and on nodes (CAST,
      SYSTEMS.md section 2.10); None for the speedup of the fastest policy measured, which is best on average.
  """

  smaller: tuple[int, ...] = (1,)
  thresholds: tuple[float, float] | None = None

  def __post_init__(self):
    super().__post_init__()
    try:
      object.__setattr__(self, 'smaller', tuple(map(operator.index, self.smaller)))
    except TypeError:
      raise ValueError(f'Adaptive: smaller is {self.smaller!r}; a list of integers is needed.') from None
    if self.thresholds is not None:
      try:
        object.__setattr__(self, 'thresholds', tuple(map(float, self.thresholds)))
      except (TypeError, ValueError):
        raise ValueError(f'Adaptive: thresholds {self.thresholds!r} came; needed are two numbers.') from None
      if len(self.thresholds) != 2 or not all(0 <= tokens < math.inf for tokens in self.thresholds):
        raise ValueError(f'Adaptive: thresholds {self.thresholds} came; needed are two numbers, at least 0.')
    if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
      raise ValueError(f'Adaptive: sizes {self.sizes} came; needed are ascending ones, at least 1, num_nodes the last.')

  @property
  def sizes(self) -> tuple[int, ...]:
    return (*self.smaller, self.num_nodes)

  def is_level_worth(self, economy: Any, log_q_BW: jax.Array, is_live_B: jax.Array, *, depth: int | jax.Array) -> Any:
    return is_level_worth(economy, log_q_BW, is_live_B, depth=depth)

  def best_size(self, economy: Any, log_q_BA: jax.Array, is_live_B: jax.Array) -> jax.Array:
    return best_size(economy, log_q_BA, is_live_B, sizes=self.sizes)

  def describe(self) -> str:
    return super().describe().replace('dynamic', 'adaptive')


@dataclasses.dataclass(frozen=True)
class Chain(Fixed):
  """The drafter's likeliest token, `max_depth` times over; `lookup` as in `DynamicTree`."""

  max_depth: int = 4
  lookup: bool = False

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

  def describe(self) -> str:
    return f'chain(max_depth={self.max_depth}{", lookup=True" * self.lookup})'


@dataclasses.dataclass(frozen=True)
class StaticTree(Fixed):
  """A tree fixed beforehand, as EAGLE-1 and Medusa use: each node a path of sibling ranks (0 is the likeliest)."""

  paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

  def __post_init__(self):
    try:
      object.__setattr__(self, 'paths', tuple(tuple(map(operator.index, path)) for path in self.paths))
    except TypeError:
      raise ValueError(f'StaticTree: paths {self.paths!r:.80} came; needed is a list: [(0,), (0, 0)].') from None
    known = {(), *self.paths}
    is_set = () not in self.paths and len(known) == len(self.paths) + 1 > 1
    orphans = [path for path in self.paths if path and path[:-1] not in known]
    if not is_set or orphans or any(rank < 0 for path in self.paths for rank in path):
      raise ValueError(
        f'StaticTree: {len(self.paths)} paths came; needed are one or more distinct, non-empty paths of ranks >= 0, '
        f'with the parent of each. Paths without their parent: {orphans}. The root is implied; leave it out.'
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
    """Nodes by depth, the root's level first; in each level those with children first, since they are the frontier."""
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
    """[d, W, C] f32, by depth of the parent, its slot, and the child's rank."""
    scores = np.full((self.max_depth, max(self.widths), max(self.fanouts)), -np.inf, np.float32)
    children = [path for level in self._levels[1:] for path in level]
    for number, path in enumerate(children, start=1):
      scores[len(path) - 1, self._levels[len(path) - 1].index(path[:-1]), path[-1]] = -number
    return scores

  def score(self, depth: int | jax.Array, log_q_WC: jax.Array) -> jax.Array:
    """The later in the template, the lower; ranks outside it never count."""
    width, fanout = log_q_WC.shape
    return jax.numpy.asarray(self._scores)[depth, :width, :fanout]

  def describe(self) -> str:
    return f'static(num_nodes={self.num_nodes}, max_depth={self.max_depth})'
