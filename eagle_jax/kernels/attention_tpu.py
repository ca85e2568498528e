"""Attention over the cache in one kernel for TPU: no score leaves fast memory, no block of slots past the text is read.

XLA writes the scores of a pass and reads them twice, for their sum and for the weighted values. Here the softmax is
computed while blocks of slots come in (FlashAttention, arXiv:2205.14135). It begins with the new entries, of which
each query sees at least its own, so later blocks always find a largest score.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eagle_jax.device import precision

LANES = 128  # that a TPU keeps the last dimension in: a shorter one is copied into as many before a kernel reads it
MAX_BLOCK = 512  # slots
MAX_SCORES = 2**19  # of a block: 2 MB
MAX_BYTES = 2**19  # of queries; the mask, in integers, may take twice that: fast memory holds several such arrays


def is_supported(q_BGJTK: jax.Array, k_BGMK: jax.Array, keys_BGSK: jax.Array) -> bool:
  """Return whether `attend` takes these operands: a TPU's dtypes, whole lanes, blocks of slots, room in fast memory."""
  _, _, J, T, K = q_BGJTK.shape
  M, S, dtype = k_BGMK.shape[2], keys_BGSK.shape[2], keys_BGSK.dtype
  is_in_blocks = S > 0 and ((block := _block(J * T, S)) == S or block % LANES == 0)
  has_room = J * T * max(M, K) * dtype.itemsize <= MAX_BYTES
  return dtype in (jnp.float32, jnp.bfloat16) and K % LANES == 0 and is_in_blocks and has_room


def _block(num_queries: int, num_slots: int) -> int:
  """Choose how many slots are read together."""
  most = min(MAX_BLOCK, MAX_SCORES >> (num_queries - 1).bit_length())
  return math.gcd(num_slots, most) if most < num_slots else num_slots


def attend(
  q_BGJTK: jax.Array,
  k_BGMK: jax.Array,
  v_BGMK: jax.Array,
  mask_BTM: jax.Array,
  keys_BGSK: jax.Array,
  values_BGSK: jax.Array,
  length_B: jax.Array,
) -> jax.Array:
  """Return [B, G, J, T, K], attention of T queries to the new entries that they see, and to the committed ones.

  Args:
    q_BGJTK: queries, J of them a key-value head; one dtype with all keys and values.
    k_BGMK, v_BGMK: keys and values of the new entries.
    mask_BTM: bool, which of these each query sees: one at least.
    keys_BGSK, values_BGSK: one layer of the cache, S > 0. Scratch in it must be finite.
    length_B: [B] i32, committed entries; all queries see them.
  """
  B, G, J, T, K = q_BGJTK.shape
  if k_BGMK.shape[2] == 1:  # Mosaic has no product of bfloat16 with a single vector
    k_BGMK, v_BGMK = (jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))) for x in (k_BGMK, v_BGMK))
    mask_BTM = jnp.pad(mask_BTM, ((0, 0), (0, 0), (0, 1)))
  M, S, n = k_BGMK.shape[2], keys_BGSK.shape[2], J * T
  block = _block(n, S)
  mask_BnM = jnp.tile(mask_BTM, (1, J, 1)).astype(jnp.int32)

  def slots(b: Any, g: Any, step: Any, length_B: Any) -> tuple:
    last = jnp.maximum(pl.cdiv(length_B[b], block) - 1, 0)
    return b, g, jnp.minimum(step, last), 0  # a block that is there already is not read again

  def of_head(num_vectors: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, num_vectors, K), lambda b, g, step, length_B: (b, g, 0, 0))

  of_row = pl.BlockSpec((1, n, M), lambda b, g, step, length_B: (b, 0, 0))
  of_slots = pl.BlockSpec((1, 1, block, K), slots)
  column, mixture = pltpu.VMEM((n, 1), jnp.float32), pltpu.VMEM((n, K), jnp.float32)
  item_bytes = q_BGJTK.dtype.itemsize
  out_BGnK = pl.pallas_call(
    functools.partial(_kernel, block=block, precision=precision(q_BGJTK.dtype)),
    out_shape=jax.ShapeDtypeStruct((B, G, n, K), q_BGJTK.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, G, S // block),
      in_specs=[of_head(n), of_head(M), of_head(M), of_row, of_slots, of_slots],
      out_specs=of_head(n),
      scratch_shapes=[column, column, mixture],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * G * n * (M + S) * K,
      bytes_accessed=2 * B * G * (n + M + S) * K * item_bytes + mask_BnM.nbytes,
      transcendentals=B * G * n * (M + S),
    ),
    name='attend',
  )(length_B, q_BGJTK.reshape(B, G, n, K), k_BGMK, v_BGMK, mask_BnM, keys_BGSK, values_BGSK)
  return out_BGnK.reshape(q_BGJTK.shape)


def _kernel(length_B, q, k_new, v_new, mask, keys, values, out, best_n1, total_n1, mixture_nK, *, block, precision):
  """Process one block of slots of one sequence's key-value head; the first one takes the new entries too."""
  row, step = pl.program_id(0), pl.program_id(2)
  product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

  def take_in(keys_SK, values_SK, is_seen_nS):
    q_nK = q[0, 0]
    score_nS = product(q_nK, keys_SK, (((1,), (1,)), ((), ()))) * (q_nK.shape[-1] ** -0.5)
    score_nS = jnp.where(is_seen_nS, score_nS, -jnp.inf)
    top_n1 = jnp.maximum(best_n1[...], score_nS.max(axis=1, keepdims=True))
    weight_nS, shrunk_n1 = jnp.exp(score_nS - top_n1), jnp.exp(best_n1[...] - top_n1)
    best_n1[...] = top_n1
    total_n1[...] = shrunk_n1 * total_n1[...] + weight_nS.sum(axis=1, keepdims=True)
    mixed_nK = product(weight_nS.astype(values_SK.dtype), values_SK, (((1,), (0,)), ((), ())))
    mixture_nK[...] = shrunk_n1 * mixture_nK[...] + mixed_nK

  @pl.when(step == 0)
  def begin():
    best_n1[...] = jnp.full_like(best_n1, -jnp.inf)
    total_n1[...] = jnp.zeros_like(total_n1)
    mixture_nK[...] = jnp.zeros_like(mixture_nK)
    take_in(k_new[0, 0], v_new[0, 0], mask[0] > 0)

  @pl.when(step * block < length_B[row])
  def go_on():
    slot_1S = step * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    take_in(keys[0, 0], values[0, 0], slot_1S < length_B[row])

  @pl.when(step == pl.num_programs(2) - 1)
  def end():
    out[0, 0] = (mixture_nK[...] / total_n1[...]).astype(out.dtype)
