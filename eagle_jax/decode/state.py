"""The state of decoding between two steps, and the static description of the program that runs them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import KVCache
from eagle_jax.draft.interface import DraftNetwork
from eagle_jax.kernels.tiling import Columns
from eagle_jax.models.interface import TargetNetwork
from eagle_jax.policy.trees import Plain, TreePolicy
from eagle_jax.sampling import Chooser, GumbelMax, Sampling
from eagle_jax.sharding import CACHE_AXES, constrain, to_device
from eagle_jax.tree import NO_TOKEN

SHARED = 'sampling', 'limits', 'max_path'  # fields that all sequences share; the others have a batch axis


class Params(NamedTuple):
  """The arrays that the program reads and never writes."""

  target: Any
  drafter: Any
  policy: Any = ()  # see `TreePolicy.arrays`


@dataclasses.dataclass(frozen=True)
class Spec:
  """The static description of a decode program besides shapes: hashable, without arrays."""

  target: TargetNetwork
  drafter: DraftNetwork
  policy: TreePolicy
  chooser: Chooser = GumbelMax()
  columns: Columns = dataclasses.field(default_factory=Columns.of)  # that a target pass has on a device
  is_traced: bool = False  # whether a step also shows the target's probability of every node; see `decode.record`

  @property
  def max_path(self) -> int:
    """P: most tokens that one step emits, bonus included; also the most nodes on a path, root included."""
    return self.policy.max_depth + 1

  def for_prefill(self) -> 'Spec':
    """Return what prefill depends on: all but the policy, so that policies share a compiled prefill."""
    return Spec(self.target, self.drafter, Plain(), self.chooser)


class Limits(NamedTuple):
  """The conditions that end a sequence. Traced; the number of EOS slots is static."""

  max_new_tokens: jax.Array  # [] i32, or [B], one a sequence; includes the first token (from prefill)
  eos: jax.Array  # [n] i32, any of them ends a sequence; NO_TOKEN fills unused slots

  @classmethod
  def of(cls, max_new_tokens: Any, eos_ids: Any) -> 'Limits':
    """Convert Python numbers, or traced ones; without EOS ids there is one unused slot."""
    return cls(to_device(max_new_tokens, jnp.int32), to_device([*eos_ids] or [NO_TOKEN], jnp.int32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=['value'])
@dataclasses.dataclass(frozen=True)
class Static:
  """A Python integer in a state's tree structure instead of its arrays, so that it is known while tracing."""

  value: int


class DecodeState(NamedTuple):
  """All sequences of a batch between two steps. Each advances on its own; a finished one is frozen.

  `root` is the newest token of a sequence: emitted, but not in the cache yet, since no target pass has read it. The
  next tree is rooted there, at absolute position `cache.length`.
  """

  cache: KVCache  # the target's
  drafter: Any  # the drafter's own state
  root: jax.Array  # [B] i32
  text: jax.Array  # [B, S + 1] i32, prompt and emitted tokens, by position; undefined past the root
  num_tokens: jax.Array  # [B] i32, emitted, at most max_new_tokens
  num_accepted: jax.Array  # [B, N] i32, drafted tokens emitted by each target pass; undefined past `num_passes`
  num_passes: jax.Array  # [B] i32, decode steps in which the sequence was live; prefill does not count
  num_nodes: jax.Array  # [B] i32, tree nodes in these passes, unused ones included, since they cost as much
  num_levels: jax.Array  # [B] i32, levels drafted for these passes
  is_done: jax.Array  # [B] bool
  row_id: jax.Array  # [B] i32, keys the noise
  sampling: Sampling
  limits: Limits
  max_path: Static | None = None  # slots that stay free for one step's path; None if the caller has checked

  @property
  def num_slots(self) -> int:
    """S: number of cache slots."""
    return self.text.shape[1] - 1

  @property
  def num_prompt(self) -> jax.Array:
    """Prompt lengths [B] i32: the cache holds the prompt and all emitted tokens but the root."""
    return self.cache.length + 1 - self.num_tokens

  def constrained(self) -> 'DecodeState':
    """Constrain the batch axis to the mesh: a step's result is then sharded as its argument, so nothing recompiles."""
    by_sequence = {name: getattr(self, name) for name in self._fields if name not in SHARED}

    def constrain_batch(x: jax.Array) -> jax.Array:
      return constrain(x, CACHE_AXES if x.ndim == len(CACHE_AXES) else ('batch',) + (None,) * (x.ndim - 1))

    return self._replace(**jax.tree.map(constrain_batch, by_sequence))
