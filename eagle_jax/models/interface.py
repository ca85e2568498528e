"""The target: the model whose text is to be produced, faster and unchanged. What the decode loop asks of one."""

from typing import Any, Protocol

import jax

from eagle_jax.cache import KVCache, NewRows


class TargetNetwork(Protocol):
  """Pure functions over parameters; static and hashable. `tests/oracle.py` is the smallest one."""

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens that end a row unless the caller says others."""
    ...

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    """An empty cache; `num_slots` may be 0."""
    ...

  def forward(self, params, token_BT, position_BT, mask_BTT, cache: KVCache) -> tuple[Any, NewRows]:
    """Taps ([..., B, T] arrays) of T rows behind the committed ones, and what may be appended to the cache.

    See `Transformer.forward`.
    """
    ...

  def logits(self, params, taps: Any) -> jax.Array:
    """[V, B, T] f32, next-token logits after the rows of these taps."""
    ...
