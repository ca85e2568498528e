"""Writing a few new keys and values of each sequence into the cache, in place."""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.layout import row_major
from eagle_jax.sharding import CACHE_AXES, on_each_device


def reference(kept: Any, new: Any, start_B: jax.Array) -> Any:
  """Let slot start + p of each sequence hold its new entry p, and every other slot what it held."""

  def write_layer(kv_BGSK: jax.Array, new_BGPK: jax.Array) -> jax.Array:
    S, P = kv_BGSK.shape[2], new_BGPK.shape[2]
    entry_BS = jnp.arange(S)[None] - start_B[:, None]
    taken_BGSK = jnp.take_along_axis(new_BGPK, entry_BS.clip(0, P - 1)[:, None, :, None], axis=2)
    is_new_BS = (entry_BS >= 0) & (entry_BS < P)
    return jnp.where(is_new_BS[:, None, :, None], taken_BGSK, kv_BGSK)

  return jax.tree.map(write_layer, kept, new)


def write_one_by_one(kept: Any, new: Any, start_B: jax.Array) -> Any:
  """Write with one update slice a sequence, because XLA does that in place.

  The bounds check of a scatter reads the old slots, and makes XLA:CPU copy the cache.
  """
  if not jax.tree.leaves(kept):  # a target that replays texts has no layers
    return kept
  new_BGNPK = row_major(jnp.stack(jax.tree.leaves(new), axis=2))  # so that a sequence's of all layers is one slice

  def write_next(done: jax.Array, kept: Any) -> Any:
    # From the last sequence to the first: in the usual order, XLA:TPU mistakes the loop for one that replaces `kept` by
    # `new`, and fails.
    row = start_B.shape[0] - 1 - done
    new_1GNPK = row_major(jax.lax.dynamic_slice_in_dim(new_BGNPK, row, 1))
    arrays, tree = jax.tree.flatten(kept)
    place = row, 0, start_B[row], 0
    written = (jax.lax.dynamic_update_slice(kv_BGSK, new_1GNPK[:, :, n], place) for n, kv_BGSK in enumerate(arrays))
    return jax.tree.unflatten(tree, map(row_major, written))

  return jax.lax.fori_loop(0, start_B.shape[0], write_next, kept)


def write_at_once(kept: Any, new: Any, start_B: jax.Array) -> Any:
  """Write with one scatter a layer, which XLA:GPU does in place: one by one, each slice would be a kernel to launch."""
  write_all = jax.vmap(lambda kv_GSK, new_GPK, start: jax.lax.dynamic_update_slice(kv_GSK, new_GPK, (0, start, 0)))
  return jax.tree.map(lambda kv_BGSK, new_BGPK: write_all(kv_BGSK, new_BGPK, start_B), kept, new)


def write(kept: Any, new: Any, start_B: jax.Array) -> Any:
  """Write P entries at each sequence's own `start`. `start + P <= S` is the caller's duty: an update slice clamps.

  Args:
    kept: a pytree of arrays [B, G, S, K].
    new: the same of [B, G, P, K].
    start_B: [B] i32.
  """

  def write_part(kept: Any, new: Any, start_B: jax.Array) -> Any:
    gpu = write_at_once if start_B.shape[0] > 1 else None
    return dispatch(kept, new, start_B, default=write_one_by_one, gpu=gpu)

  return on_each_device(write_part, (kept, new, start_B), (CACHE_AXES, CACHE_AXES, ('batch',)))
