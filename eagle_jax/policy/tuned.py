"""The base of dynamic trees that stop early, or verify fewer nodes, by rules with numbers that can be tuned."""

import dataclasses
import math
import numbers
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.policy.trees import DynamicTree
from eagle_jax.tree import Candidates


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
    name = type(self).__name__
    try:
      object.__setattr__(self, 'smaller', tuple(map(operator.index, self.smaller)))
    except TypeError:
      raise ValueError(f'{name}: `smaller` must be a list of integers, got {self.smaller!r}.') from None
    if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
      raise ValueError(
        f'{name}: `smaller` must be ascending sizes of at least 1 and below num_nodes={self.num_nodes}, '
        f'got {self.smaller}.'
      )
    for field in self.tunable:
      value = getattr(self, field)
      if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f'{name}: `{field}` must be a finite number, got {value!r}.')
      object.__setattr__(self, field, float(value))

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
