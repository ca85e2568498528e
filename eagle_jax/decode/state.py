"""What decoding remembers between two steps, and the static description of the program that runs them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import KVCache
from eagle_jax.draft.interface import DraftNetwork
from eagle_jax.kernels.tiling import free_columns
from eagle_jax.models.interface import TargetNetwork
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Chooser, GumbelMax, Sampling
from eagle_jax.sharding import CACHE_AXES, constrain
from eagle_jax.tree import NO_TOKEN

SHARED = 'sampling', 'limits', 'max_path'  # fields that all sequences share; of the others each has its own


class Params(NamedTuple):
  """Every array the program reads and never writes."""

  target: Any
  drafter: Any
  policy: Any = ()  # what `TreePolicy.arrays` returns


@dataclasses.dataclass(frozen=True)
class Spec:
  """What the compiled program depends on besides shapes. Static and hashable; holds no array."""

  target: TargetNetwork
  drafter: DraftNetwork
  policy: TreePolicy
  chooser: Chooser = GumbelMax()
  # Columns of activations that a target pass has at least, over the sequences of a device.
  min_columns: int = dataclasses.field(default_factory=free_columns)
  is_traced: bool = False  # whether a step also shows the target's probability of every node; see `decode.record`

  @property
  def max_path(self) -> int:
    """P: tokens one step may emit, the bonus included; also the nodes on the longest path, the root included."""
    return self.policy.max_depth + 1


class Limits(NamedTuple):
  """When a sequence ends. Traced; the number of EOS slots is static."""

  max_new_tokens: jax.Array  # [] i32, or [B], one a sequence; the first token (from prefill) included
  eos: jax.Array  # [n] i32, any of them ends a sequence; NO_TOKEN fills unused slots

  @classmethod
  def of(cls, max_new_tokens: Any, eos_ids: Any) -> 'Limits':
    """From Python numbers, or traced ones; without EOS ids, one unused slot."""
    return cls(jnp.int32(max_new_tokens), jnp.asarray([*eos_ids] or [NO_TOKEN], jnp.int32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=['value'])
@dataclasses.dataclass(frozen=True)
class Static:
  """A Python integer that is part of a state's structure: no array, and known while tracing."""

  value: int


class DecodeState(NamedTuple):
  """All sequences of a batch between two steps. Each advances on its own; a finished one is frozen.

  `root` is the newest token of a sequence: emitted, but not in the cache, since no target pass has seen it yet. So the
  next pass is rooted there, at absolute position `cache.length`.
  """

  cache: KVCache  # the target's
  drafter: Any  # the drafter's own
  root: jax.Array  # [B] i32
  text: jax.Array  # [B, S + 1] i32, prompt and emitted tokens, by position; past the root lies scratch
  num_tokens: jax.Array  # [B] i32, emitted, at most max_new_tokens
  num_accepted: jax.Array  # [B, N] i32, drafted tokens emitted by each target pass; past `num_passes` lies scratch
  num_passes: jax.Array  # [B] i32, decode steps in which the sequence was live; prefill is none
  num_nodes: jax.Array  # [B] i32, tree nodes in these passes, unused ones too: what they cost
  num_levels: jax.Array  # [B] i32, levels drafted for them
  is_done: jax.Array  # [B] bool
  row_id: jax.Array  # [B] i32, keys the noise
  sampling: Sampling
  limits: Limits
  max_path: Static | None = None  # tokens a step may append: so many slots are free; None where the caller checked

  @property
  def num_slots(self) -> int:
    """S, of the cache."""
    return self.text.shape[1] - 1

  @property
  def num_prompt(self) -> jax.Array:
    """[B] i32: all that was emitted is in the cache, but for the root."""
    return self.cache.length + 1 - self.num_tokens

  def constrained(self) -> 'DecodeState':
    """Constrain every sequence to its mesh axis: a step's result lies as its argument did, so one program runs all."""
    by_sequence = {name: getattr(self, name) for name in self._fields if name not in SHARED}

    def placed(x: jax.Array) -> jax.Array:
      return constrain(x, CACHE_AXES if x.ndim == len(CACHE_AXES) else ('batch',) + (None,) * (x.ndim - 1))

    return self._replace(**jax.tree.map(placed, by_sequence))
