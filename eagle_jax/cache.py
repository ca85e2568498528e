"""The key-value cache, and the only code that knows its slots.

A pass *reads* the cache, and returns its new entries beside it; a commit *appends* those that were accepted. So a
rejected entry is never written, and a pass may run in a branch, where a cache that is written would be copied.

    slots of one sequence:   [ committed: 0 .. length-1 | never read ]
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.kernels.ordering import wait_for
from eagle_jax.kernels.write_kv import write
from eagle_jax.sharding import CACHE_AXES, constrain


class KVCache(NamedTuple):
  """Keys and values of every layer: one array a layer, head-major, which XLA keeps in place inside a `while_loop`."""

  keys: tuple[jax.Array, ...]  # a layer: [B, G, S, K], rotated already
  values: tuple[jax.Array, ...]  # a layer: [B, G, S, K]
  length: jax.Array  # [B] i32, committed entries


class NewEntries(NamedTuple):
  """Keys and values of the tokens that a pass ran, to be appended or forgotten."""

  keys: tuple[jax.Array, ...]  # a layer: [B, G, T, K], rotated already
  values: tuple[jax.Array, ...]  # a layer: [B, G, T, K]

  def take(self, index_BP: jax.Array) -> 'NewEntries':
    """Take these entries of each sequence, [B, G, P, K]; for an index beyond the last it is the last."""
    take_each = jax.vmap(lambda kv_GTK, index_P: jnp.take(kv_GTK, index_P, axis=1, mode='clip'))
    return jax.tree.map(lambda kv_BGTK: take_each(kv_BGTK, index_BP), self)


def init(config: Any, *, num_layers: int, batch: int, num_slots: int, dtype: Any) -> KVCache:
  """Make an empty cache; with no slots at all for a pass over whole texts. Its slots must stay finite: hence zeros.

  Args:
    config: says `num_kv_heads` and `head_dim`.
    num_layers, batch, num_slots: sizes.
    dtype: of keys and values.
  """
  shape = (batch, config.num_kv_heads, num_slots, config.head_dim)

  def zeros() -> tuple[jax.Array, ...]:
    return tuple(constrain(jnp.zeros(shape, dtype), CACHE_AXES) for _ in range(num_layers))

  return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros(batch, jnp.int32))


def fill(entries: NewEntries, length_B: jax.Array, *, num_slots: int) -> KVCache:
  """Make a cache that begins with a prompt's entries.

  Args:
    entries: [B, G, P, K], with P <= `num_slots`.
    length_B: [B] i32, how many of them are committed.
    num_slots: static.
  """

  keys, values = jax.tree.map(lambda kv_BGPK: pad_slots(kv_BGPK, num_slots), entries)
  return KVCache(keys, values, length_B)


def pad_slots(kv_BGPK: jax.Array, num_slots: int) -> jax.Array:
  """Append empty slots, up to `num_slots`: [B, G, S, K]."""
  free = num_slots - kv_BGPK.shape[2]
  return constrain(jnp.pad(kv_BGPK, ((0, 0), (0, 0), (0, free), (0, 0))), CACHE_AXES)


def behind(cache: KVCache, num_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Return the positions [B, T] of T tokens in order behind the committed ones, and their causal mask [B, T, T]."""
  position_BT = cache.length[:, None] + jnp.arange(num_tokens)[None]
  return position_BT, jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (*position_BT.shape, num_tokens))


def append(cache: KVCache, entries: NewEntries, count_B: jax.Array) -> KVCache:
  """Write P entries past each sequence's length, and keep the first `count` of them; the others nobody will read.

  Args:
    cache: has P slots free past every length.
    entries: [B, G, P, K].
    count_B: [B] i32; 0 freezes a finished sequence.
  """
  start_B = wait_for(cache.length, count_B >= 0)  # the count depends on the tokens, and these on what all layers read
  keys, values = write((cache.keys, cache.values), (entries.keys, entries.values), start_B)
  return KVCache(keys, values, cache.length + count_B)
