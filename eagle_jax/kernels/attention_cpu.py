"""Attention over the cache in a compiled kernel for CPUs: all queries of a key-value head share what is read.

XLA:CPU computes the scores of every slot, committed or not, on one core a head, and writes them. See `cpu_attention.h`.
"""

import jax
import jax.numpy as jnp

from eagle_jax.kernels import cpu

MAX_QUERIES = 64  # of a head; XLA's products of more are as fast


def is_supported(q_BGJTK: jax.Array, keys_BGSK: jax.Array) -> bool:
  """Return whether `attend` takes these operands on this machine; compile the kernels when it first does.

  Of a cache that a mesh splits, each device would gather all.
  """
  is_few = q_BGJTK.dtype == keys_BGSK.dtype == jnp.float32 and q_BGJTK.shape[3] <= MAX_QUERIES
  return is_few and jax.sharding.get_abstract_mesh().size <= 1 and cpu.library() is not None


def attend(
  q_BGJTK: jax.Array,
  k_BGMK: jax.Array,
  v_BGMK: jax.Array,
  mask_BTM: jax.Array,
  keys_BGSK: jax.Array,
  values_BGSK: jax.Array,
  length_B: jax.Array,
  oldest_BT: jax.Array | None = None,
  sinks_GJ: jax.Array | None = None,
) -> jax.Array:
  """Return [B, G, J, T, K] f32, attention of T queries to the new entries that they see, and to committed ones.

  Args:
    q_BGJTK: queries, J of them a key-value head; float32 with all keys and values.
    k_BGMK, v_BGMK: keys and values of the new entries.
    mask_BTM: bool, which of these each query sees.
    keys_BGSK, values_BGSK: one layer of the cache. What it holds past the committed entries is not read.
    length_B: [B] i32, committed entries: all queries see them, or those from `oldest_BT` on.
    oldest_BT: [B, T] i32, the first slot that each query sees; None for slot 0.
    sinks_GJ: a logit more in each head's softmax, of no entry; None: there is none.
  """
  B, G, J, T, _ = q_BGJTK.shape
  if oldest_BT is None:
    oldest_BT = jnp.zeros((B, T), jnp.int32)
  sinks_GJ = jnp.full((G, J), -jnp.inf) if sinks_GJ is None else sinks_GJ.astype(jnp.float32)
  arrays = q_BGJTK, k_BGMK, v_BGMK, mask_BTM, keys_BGSK, values_BGSK, length_B, oldest_BT, sinks_GJ
  return cpu.call('attention', q_BGJTK.shape, *arrays)
