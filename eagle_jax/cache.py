"""The key-value cache, and the only code that knows its slots.

A pass *writes* its new rows past `length` and leaves `length` alone; a *commit* moves the accepted rows down and
advances it. What lies past `length` is scratch that nothing reads, so rejected rows need no clean-up.

    slots of one row:   [ committed: 0 .. length-1 | new rows of this pass | never read ]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.sharding import CACHE_AXES, constrain


class KVCache(NamedTuple):
  """Keys and values of every layer: one array a layer, head-major, which XLA keeps in place inside a `while_loop`."""

  keys: tuple[jax.Array, ...]  # a layer: [B, G, S, K], rotated already
  values: tuple[jax.Array, ...]  # a layer: [B, G, S, K]
  length: jax.Array  # [B] i32, committed rows

  @property
  def num_slots(self) -> int:
    return self.keys[0].shape[2]


def init(*, num_layers: int, batch: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype) -> KVCache:
  """An empty cache. Scratch must stay finite, since masked slots are multiplied by 0: hence zeros."""
  shape = (batch, num_kv_heads, num_slots, head_dim)

  def zeros() -> tuple[jax.Array, ...]:
    return tuple(constrain(jnp.zeros(shape, dtype), CACHE_AXES) for _ in range(num_layers))

  return KVCache(
    keys=zeros(),
    values=zeros(),
    length=jnp.zeros(batch, jnp.int32),
  )


def write(kv_BGSK: jax.Array, new_BGTK: jax.Array, start_B: jax.Array) -> jax.Array:
  """Writes T new rows at each batch row's own `start`. `start + T <= S` is the caller's duty: an update slice clamps.

  One update slice a batch row, because XLA does that in place; a `vmap` would make it a scatter, whose bounds check
  reads the old slots and makes XLA:CPU copy the cache.
  """

  def write_row(row, kv_BGSK):
    new_1GTK = jax.lax.dynamic_slice_in_dim(new_BGTK, row, 1)
    return jax.lax.dynamic_update_slice(kv_BGSK, new_1GTK, (row, 0, start_B[row], 0))

  return constrain(jax.lax.fori_loop(0, kv_BGSK.shape[0], write_row, kv_BGSK), CACHE_AXES)


def visible(length_B: jax.Array, mask_BTM: jax.Array, *, num_slots: int) -> jax.Array:
  """[B, T, S] bool: which slots each new row may attend to.

  Args:
    length_B: [B] i32, committed rows: every new row sees all of them.
    mask_BTM: [B, T, M] bool, who sees whom among the M rows that lie past `length`.
    num_slots: S, static.
  """

  def visible_row(length, mask_TM):
    new_S = jnp.arange(num_slots) - length  # slot -> index among the new rows
    is_new_S = (new_S >= 0) & (new_S < mask_TM.shape[1])
    return (new_S < 0)[None] | (is_new_S[None] & jnp.take(mask_TM, new_S, axis=1, mode='clip'))

  return jax.vmap(visible_row)(length_B, mask_BTM)


def commit(cache: KVCache, path_BP: jax.Array, count_B: jax.Array) -> KVCache:
  """Keeps the `count` first nodes of each row's path: moves them down to the prefix and advances `length`.

  Args:
    cache: holds a pass's rows past `length`, one a tree node.
    path_BP: [B, P] i32, node ids, the root (node 0) first; what follows the first `count` is moved too, as scratch.
    count_B: [B] i32, rows to keep: 0 freezes a finished row.
  """
  keys, values = cache.keys, cache.values
  if path_BP.shape[1] > 1:  # the root lies in its place already
    slot_BP = cache.length[:, None] + path_BP[:, 1:]
    keys, values = jax.tree.map(lambda kv: _move(kv, slot_BP, cache.length + 1), (keys, values))
  return KVCache(keys, values, cache.length + count_B)


def _move(kv_BGSK: jax.Array, slot_BP: jax.Array, start_B: jax.Array) -> jax.Array:
  """Copies rows to `start`; reads all before writing, since the ranges overlap."""
  rows_BGPK = jax.vmap(lambda kv_GSK, slot_P: jnp.take(kv_GSK, slot_P, axis=1, mode='clip'))(kv_BGSK, slot_BP)
  return write(kv_BGSK, rows_BGPK, start_B)
