"""The interface of the target, the model whose text is produced, to the decode loop."""

from typing import Any, Protocol

import jax

from eagle_jax.cache import KVCache, NewEntries


class TargetNetwork(Protocol):
  """Pure functions over parameters; static and hashable. `tests/oracle.py` is the smallest one."""

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens that end a sequence unless the caller passes others."""
    ...

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    """Make an empty cache; `num_slots` may be 0."""
    ...

  def forward(self, params, token_BT, position_BT, mask_BTT, cache: KVCache) -> tuple[Any, NewEntries]:
    """Run T tokens behind the committed ones: return taps ([..., B, T] arrays), and entries to append to the cache.

    See `Transformer.forward`.
    """
    ...

  def logits(self, params, taps: Any) -> jax.Array:
    """Return [V, B, T] f32, next-token logits after the tokens of these taps."""
    ...
