"""The base of dynamic trees that stop early, or verify fewer nodes, by rules with numbers that can be tuned."""

import dataclasses
import math
import numbers
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.tree import Candidates


def offer_likeliest(score_BWC: jax.Array, num_BW1: jax.Array) -> jax.Array:
  """Keep the scores of each frontier node's `num_BW1` likeliest children, which come first: the others are -inf."""
  rank_11C = jnp.arange(score_BWC.shape[2], dtype=num_BW1.dtype).reshape(1, 1, -1)
  return jnp.where(rank_11C < num_BW1, score_BWC, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class TunedTree(DynamicTree):
  """A dynamic tree whose target pass is compiled for several sizes: the smallest that holds what was drafted runs.

  Attributes:
    smaller: tree sizes that a target pass may verify instead of `num_nodes`, root included, ascending; 1 verifies no
      draft. Each is one more pass to compile.
  """

  smaller: tuple[int, ...] = ()
  tunable: ClassVar[tuple[str, ...]] = ()  # fields that travel in `arrays`: another value compiles nothing

  def __post_init__(self):
    super().__post_init__()
    try:
      object.__setattr__(self, 'smaller', tuple(map(operator.index, self.smaller)))
    except TypeError:
      require(self, 'smaller', False, 'a list of integers')
    is_ascending = list(self.sizes) == sorted(set(self.sizes)) and self.sizes[0] >= 1
    require(self, 'smaller', is_ascending, f'ascending sizes of at least 1 and below num_nodes={self.num_nodes}')
    for name in self.tunable:
      object.__setattr__(self, name, self._floats(name))

  def _floats(self, name: str) -> float | tuple[float, ...]:
    """Convert a tunable field to a float, or to a tuple of floats if its default is a tuple."""
    value, is_tuple = getattr(self, name), isinstance(getattr(type(self), name), tuple)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    is_finite = all(isinstance(part, numbers.Real) and math.isfinite(part) for part in parts)
    is_right = is_finite and is_tuple == isinstance(value, (tuple, list))
    require(self, name, is_right, 'a tuple of finite numbers' if is_tuple else 'a finite number')
    return tuple(map(float, parts)) if is_tuple else float(value)

  @property
  def sizes(self) -> tuple[int, ...]:
    return (*self.smaller, self.num_nodes)

  def static(self) -> 'TunedTree':
    defaults: Any = {field.name: field.default for field in dataclasses.fields(self) if field.name in self.tunable}
    return dataclasses.replace(self, **defaults)

  def arrays(self, costs: Any, target: Any, drafter: Any) -> Any:
    return {name: jnp.float32(getattr(self, name)) for name in self.tunable}

  def select(self, arrays: Any, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    num_used_B = (candidates.score > -jnp.inf).sum(axis=1, dtype=jnp.int32)
    num_needed = jnp.where(is_live_B, num_used_B, 1).max()
    size = (jnp.asarray(self.smaller, jnp.int32) < num_needed).sum(dtype=jnp.int32)
    return size, candidates.score
