"""Attention over the cache in one kernel for Hopper GPUs: no score leaves a multiprocessor, no block of slots past the
text is read.

XLA:GPU writes all scores and reads them again, and copies the cached values to join the new ones to them. Here the
softmax is computed while blocks of slots come in (FlashAttention, arXiv:2205.14135), and a long cache is split between
multiprocessors, whose results are combined at the end (Flash-Decoding). The queries of one key-value head are laid end
to end, 64 to a block of threads, the fewest that tensor cores multiply.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

TILE = 64  # queries of one block of threads
BLOCK = 64  # slots that come in together; and new entries, at most
NUM_BLOCKS = 4  # that come in to one multiprocessor


def is_hopper() -> bool:
  """Return whether the devices, of the current mesh or else of this process, are of the kind that the kernel is for."""
  described = jax.sharding.get_abstract_mesh().abstract_device
  kind = (described or jax.devices()[0]).device_kind
  return re.search(r'\bG?H(20|100|200|800)\b', kind.upper()) is not None


def is_supported(q_BGJTK: jax.Array, k_BGMK: jax.Array, keys_BGSK: jax.Array) -> bool:
  """Return whether `attend` takes these operands: two bytes a number, whole blocks of slots, and few new entries."""
  M, S, K = k_BGMK.shape[2], *keys_BGSK.shape[2:]
  is_whole = S > 0 and S % BLOCK == 0 and K in (64, 128) and M <= BLOCK
  return keys_BGSK.dtype in (jnp.bfloat16, jnp.float16) and is_whole and is_hopper()


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

  Arguments are those of `attention_tpu.attend`, as `is_supported` has them.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu  # here, because it is slow to import and rarely needed

  B, G, J, T, K = q_BGJTK.shape
  n, S = J * T, keys_BGSK.shape[2]
  num_parts, num_tiles = pl.cdiv(S, NUM_BLOCKS * BLOCK), pl.cdiv(n, TILE)
  free, free_new = (0, -n % TILE), (0, BLOCK - k_BGMK.shape[2])
  q_BGnK = jnp.pad(q_BGJTK.reshape(B, G, n, K), ((0, 0), (0, 0), free, (0, 0)))
  k_BGMK, v_BGMK = (jnp.pad(x, ((0, 0), (0, 0), free_new, (0, 0))) for x in (k_BGMK, v_BGMK))
  hidden_BTM = jnp.where(mask_BTM, 0, -jnp.inf).astype(q_BGJTK.dtype)
  hidden_BTM = jnp.pad(hidden_BTM, ((0, 0), (0, 0), free_new), constant_values=-jnp.inf)
  hidden_BnM = jnp.pad(jnp.tile(hidden_BTM, (1, J, 1)), ((0, 0), free, (0, 0)))  # queries of nobody see something too

  def shared(*shape: int) -> Any:
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, q_BGJTK.dtype, transforms=transforms)

  blocks, barriers = shared(1 + NUM_BLOCKS, BLOCK, K), plgpu.Barrier(num_barriers=1 + NUM_BLOCKS)
  column, of_part = plgpu.SMEM((TILE,), jnp.float32), (B, G, num_parts, num_tiles * TILE)
  mixture_BGPnK, best_BGPn, total_BGPn = plgpu.kernel(
    _kernel,
    out_type=[jax.ShapeDtypeStruct((*of_part, *rest), jnp.float32) for rest in ((K,), (), ())],
    scratch_types=[
      *(shared(TILE, K), shared(TILE, BLOCK), blocks, blocks, column, column),
      *(plgpu.Barrier(), plgpu.Barrier(), barriers, barriers),
    ],
    grid=(B, G, num_parts, num_tiles),
    grid_names=('row', 'head', 'part', 'tile'),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
  )(length_B, q_BGnK, k_BGMK, v_BGMK, hidden_BnM, keys_BGSK, values_BGSK)
  share_BGPn = jnp.exp2(best_BGPn - best_BGPn.max(axis=2, keepdims=True))
  share_BGPn /= (share_BGPn * total_BGPn).sum(axis=2, keepdims=True)
  out_BGnK = (mixture_BGPnK * share_BGPn[..., None]).sum(axis=2)[:, :, :n]
  return out_BGnK.astype(q_BGJTK.dtype).reshape(q_BGJTK.shape)


def _kernel(
  length_B, q, k_new, v_new, hidden, keys, values,
  mixture, best, total,
  q_nK, hidden_nM, keys_bSK, values_bSK, best_n, total_n, q_ready, hidden_ready, keys_ready, values_ready,
):  # fmt: skip
  """Process a part of the slots of one sequence's key-value head, for a tile of its queries; part 0 new entries too.

  Block 0 is of new entries, the others of slots.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  WGMMA = plgpu.Layout.WGMMA
  row, head, part, tile = map(jax.lax.axis_index, ('row', 'head', 'part', 'tile'))
  length, queries = length_B[row], pl.ds(tile * TILE, TILE)

  def first_slot(block):
    return (part * NUM_BLOCKS + block - 1) * BLOCK

  def fetch(block, k, v):
    plgpu.copy_gmem_to_smem(k, keys_bSK.at[block], keys_ready.at[block])
    plgpu.copy_gmem_to_smem(v, values_bSK.at[block], values_ready.at[block])

  plgpu.copy_gmem_to_smem(q.at[row, head, queries], q_nK, q_ready)

  @pl.when(part == 0)
  def fetch_new():
    plgpu.copy_gmem_to_smem(hidden.at[row, queries], hidden_nM, hidden_ready)
    fetch(0, k_new.at[row, head], v_new.at[row, head])

  for block in range(1, 1 + NUM_BLOCKS):

    @pl.when(first_slot(block) < length)
    def fetch_slots(block=block):
      here = row, head, pl.ds(first_slot(block), BLOCK)
      fetch(block, keys.at[here], values.at[here])

  def take_in(block, so_far, shown):
    return _attend_block(so_far, q_nK, block, (keys_bSK, keys_ready), (values_bSK, values_ready), shown)

  def take_in_new(_, so_far):
    plgpu.barrier_wait(hidden_ready)
    return take_in(0, so_far, lambda score_nM: score_nM + hidden_nM[...].astype(jnp.float32))

  def take_in_slots(block, so_far):
    def shown(score_nS):
      slot_nS = first_slot(block) + plgpu.broadcasted_iota(jnp.int32, score_nS.shape, 1, layout=WGMMA)
      return jnp.where(slot_nS < length, score_nS, -jnp.inf)

    return take_in(block, so_far, shown)

  plgpu.barrier_wait(q_ready)
  nothing = (
    plgpu.layout_cast(jnp.zeros(q_nK.shape, jnp.float32), WGMMA),
    plgpu.layout_cast(jnp.full(TILE, -jnp.inf), WGMMA.reduce(1)),
    plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), WGMMA.reduce(1)),
  )
  so_far = jax.lax.fori_loop(0, jnp.where(part == 0, 1, 0), take_in_new, nothing)
  num_blocks = jnp.clip((length - first_slot(1) + BLOCK - 1) // BLOCK, 0, NUM_BLOCKS)
  so_far = jax.lax.fori_loop(1, 1 + num_blocks, take_in_slots, so_far)
  mixture[row, head, part, queries], best_n[...], total_n[...] = so_far
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(best_n, best.at[row, head, part, queries])
  plgpu.copy_smem_to_gmem(total_n, total.at[row, head, part, queries])
  plgpu.wait_smem_to_gmem(0)


def _attend_block(so_far, q_nK, block, keys, values, shown):
  """Add a block of keys and values to a running softmax: (weighted values, greatest score, sum of weights).

  Scores are logarithms to the base of 2, which a GPU raises to powers. `shown` hides those that a query does not see;
  `keys` and `values` are all blocks in shared memory, and the barriers that say which are there.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  (keys_bSK, keys_ready), (values_bSK, values_ready) = keys, values
  mixture_nK, best_n, total_n = so_far
  scale = math.log2(math.e) / math.sqrt(q_nK.shape[1])

  def product(score_nS):
    plgpu.wgmma(score_nS, q_nK, keys_bSK.at[block].transpose((1, 0)))  # a view made outside would not be lowered
    return score_nS[...]

  plgpu.barrier_wait(keys_ready.at[block])
  score_nS = shown(scale * pl.run_scoped(product, plgpu.ACC((TILE, BLOCK), jnp.float32)))
  top_n = jnp.maximum(best_n, score_nS.max(axis=1))
  weight_nS = jnp.exp2(score_nS - jax.lax.broadcast_in_dim(top_n, score_nS.shape, [0]))
  shrunk_n = jnp.exp2(best_n - top_n)
  total_n = shrunk_n * total_n + weight_nS.sum(axis=1)
  mixture_nK *= jax.lax.broadcast_in_dim(shrunk_n, mixture_nK.shape, [0])
  weight_nS = weight_nS.astype(values_bSK.dtype)

  def mix(mixture_nK):
    plgpu.wgmma(mixture_nK, weight_nS, values_bSK.at[block])

  plgpu.barrier_wait(values_ready.at[block])
  return pl.run_state(mix)(plgpu.ACC.init(mixture_nK)), top_n, total_n
