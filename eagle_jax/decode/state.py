"""What decoding remembers between two steps, and the static description of the program that makes them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import KVCache
from eagle_jax.draft.interface import DraftNetwork
from eagle_jax.models.interface import TargetNetwork
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import CACHE_AXES, constrain
from eagle_jax.tree import NO_TOKEN

SHARED = 'sampling', 'limits', 'room'  # fields of a state that all its rows share; of the others each row has its own


class Params(NamedTuple):
  """Every array the program reads and never writes."""

  target: Any
  drafter: Any
  economies: Any = ()  # a `policy.adaptive.Economies`, where the policy weighs costs


def tile_rows(platform: str) -> int:
  """Rows that a matrix product has at no more cost than one row, on 'cpu', 'gpu' or 'tpu'.

  A TPU keeps a product of one row from its matrix unit: by the compiler's own estimate a plain step of Llama-3.1-8B's
  shape, over four v5e, takes 22.9 million cycles, and 7.2 with 8 rows, 7 of them unused.
  """
  return 8 if platform == 'tpu' else 1


@dataclasses.dataclass(frozen=True)
class Spec:
  """What the compiled program depends on besides shapes. Static and hashable; holds no array."""

  target: TargetNetwork
  drafter: DraftNetwork
  policy: TreePolicy
  # Of a target pass, over the batch rows of a device.
  min_rows: int = dataclasses.field(default_factory=lambda: tile_rows(jax.default_backend()))

  @property
  def max_path(self) -> int:
    """P: tokens one step may emit, the bonus included; also the nodes on the longest path, the root included."""
    return self.policy.max_depth + 1


class Limits(NamedTuple):
  """When a row ends. Traced; the number of EOS slots is static."""

  max_new_tokens: jax.Array  # [] i32, or [B], one a row; the first token (from prefill) included
  eos: jax.Array  # [n] i32, any of them ends a row; NO_TOKEN fills unused slots

  @classmethod
  def of(cls, max_new_tokens: Any, eos_ids: Any) -> 'Limits':
    """From Python numbers, or traced ones; without EOS ids, one unused slot."""
    return cls(jnp.int32(max_new_tokens), jnp.asarray([*eos_ids] or [NO_TOKEN], jnp.int32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=['max_path'])
@dataclasses.dataclass(frozen=True)
class Room:
  """How many rows a step may append: as many slots are free past every length. No array."""

  max_path: int


class DecodeState(NamedTuple):
  """All rows of a batch between two steps. Rows advance independently; a finished row is frozen.

  `root` is the newest token of a row: emitted, but not in the cache, since no target pass has seen it yet. So the next
  pass is rooted there, at absolute position `cache.length`.
  """

  cache: KVCache  # the target's
  drafter: Any  # the drafter's own
  root: jax.Array  # [B] i32
  text: jax.Array  # [B, S + 1] i32, prompt and emitted tokens, by position; past the root lies scratch
  num_tokens: jax.Array  # [B] i32, emitted, at most max_new_tokens
  num_accepted: jax.Array  # [B, N] i32, drafted tokens emitted by each target pass; past `num_passes` lies scratch
  num_passes: jax.Array  # [B] i32, decode steps in which the row was live; prefill is none
  num_nodes: jax.Array  # [B] i32, tree nodes in these passes, unused ones too: what they cost
  num_levels: jax.Array  # [B] i32, levels drafted for them
  is_done: jax.Array  # [B] bool
  row_id: jax.Array  # [B] i32, keys the noise
  sampling: Sampling
  limits: Limits
  room: Room | None = None  # None where the caller knows

  @property
  def num_slots(self) -> int:
    """S, of the cache."""
    return self.text.shape[1] - 1

  @property
  def num_prompt(self) -> jax.Array:
    """[B] i32: all that was emitted is in the cache, but for the root."""
    return self.cache.length + 1 - self.num_tokens

  def constrained(self) -> 'DecodeState':
    """The same, every row on its mesh axis: what a step returns lies as what it took, so one program runs them all."""
    by_row = {name: getattr(self, name) for name in self._fields if name not in SHARED}

    def placed(x: jax.Array) -> jax.Array:
      return constrain(x, CACHE_AXES if x.ndim == len(CACHE_AXES) else ('batch',) + (None,) * (x.ndim - 1))

    return self._replace(**jax.tree.map(placed, by_row))
