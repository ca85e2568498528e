"""Attention of a pass to the committed entries of the cache, and to new entries beside it."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.device import precision
from eagle_jax.kernels import attention_gpu, attention_tpu, cpu
from eagle_jax.kernels.dispatch import dispatch
from eagle_jax.kernels.einsum import einsum_float32
from eagle_jax.kernels.layout import row_major
from eagle_jax.sharding import CACHE_AXES, on_each_device

MASK_VALUE = float(jnp.finfo(jnp.float32).min)  # the score of what a query does not see; finite, to avoid NaN
FEW_QUERIES = 16
MAX_COMPILED_QUERIES = 64  # XLA:CPU's products of more are as fast as the kernel of `cpu.cc`
MAX_QUERIES = 1024  # at a time: the scores of all would be the largest array of a long prefill


class Operands(NamedTuple):
  """The arguments of every form of attention. Queries, keys and values have one dtype."""

  queries: jax.Array  # [B, G, J, T, K], J of them a key-value head
  new_keys: jax.Array  # [B, G, M, K], of earlier passes that were not committed, then of the T queries' own pass
  new_values: jax.Array  # [B, G, M, K]
  mask: jax.Array  # [B, T, M] bool, which new entries each query sees; each sees one at least
  keys: jax.Array  # [B, G, S, K], one layer of the cache, read only; what it holds past `length` must be finite
  values: jax.Array  # [B, G, S, K]
  length: jax.Array  # [B] i32, committed entries: all queries see them, or those from `oldest` on
  oldest: jax.Array | None = None  # [B, T] i32, the first slot that each query sees; None for slot 0
  sinks: jax.Array | None = None  # [G, J], a logit more in each head's softmax, of no entry; None: there is none


def reference(given: Operands) -> jax.Array:
  """Return [B, G, J, T, K]: softmax(q k / sqrt(K)) v over the slots and new entries that each query sees.

  Sinks take a part of each softmax, and give nothing for it.
  """
  keys_BGNK = jnp.concatenate([given.keys, given.new_keys], axis=2)
  values_BGNK = jnp.concatenate([given.values, given.new_values], axis=2)
  return attend_by_mask(given.queries, keys_BGNK, values_BGNK, mask_entries(given), given.sinks)


def attend_by_mask(
  q_BGJTK: jax.Array, keys_BGNK: jax.Array, values_BGNK: jax.Array, mask_BTN: jax.Array, sinks_GJ: jax.Array | None
) -> jax.Array:
  """Attend to those of N entries that the mask shows each query. The softmax is in float32."""
  score_BGJTN = einsum_float32('bgjtk,bgnk->bgjtn', q_BGJTK, keys_BGNK) * (q_BGJTK.shape[-1] ** -0.5)
  score_BGJTN = jnp.where(mask_BTN[:, None, None], score_BGJTN, MASK_VALUE)
  if sinks_GJ is not None:
    sink_BGJT1 = jnp.broadcast_to(as_scores(sinks_GJ), (*score_BGJTN.shape[:-1], 1))
    weight_BGJTN = jax.nn.softmax(jnp.concatenate([score_BGJTN, sink_BGJT1], axis=-1))[..., :-1]
  else:
    weight_BGJTN = jax.nn.softmax(score_BGJTN)
  return weighted_values(weight_BGJTN, values_BGNK)


def as_scores(sinks_GJ: jax.Array) -> jax.Array:
  """Return sinks [1, G, J, 1, 1] f32, as scores of one entry more."""
  return sinks_GJ.astype(jnp.float32)[None, :, :, None, None]


def mask_entries(given: Operands) -> jax.Array:
  """Return [B, T, S + M] bool, which slots and which new entries each query sees."""
  slots_BTS = jnp.broadcast_to(mask_slots(given), (*given.mask.shape[:2], given.keys.shape[2]))
  return jnp.concatenate([slots_BTS, given.mask], axis=2)


def mask_slots(given: Operands) -> jax.Array:
  """Return [B, T, S] bool, the slots that each query sees; [B, 1, S] where all see the same."""
  slot_S = jnp.arange(given.keys.shape[2]).reshape(1, 1, -1)
  visible_BTS = slot_S < given.length[:, None, None]
  return visible_BTS if given.oldest is None else visible_BTS & (slot_S >= given.oldest[..., None])


def compute_scores(q_BGJTK: jax.Array, keys_BGSK: jax.Array) -> jax.Array:
  """Return [B, G, J, T, S] f32, scaled dot products of queries, J of them a key-value head, with keys."""
  if q_BGJTK.shape[3] > FEW_QUERIES:
    score_BGJTS = einsum_float32('bgjtk,bgsk->bgjts', q_BGJTK, keys_BGSK)
  else:  # keys on the left: XLA:CPU reads them in place, 2 to 5 times faster
    score_BGJTS = einsum_float32('bgsk,bgjtk->bgsjt', keys_BGSK, q_BGJTK).transpose(0, 1, 3, 4, 2)
  return score_BGJTS * (q_BGJTK.shape[-1] ** -0.5)


def weighted_values(weight_BGJTS: jax.Array, values_BGSK: jax.Array) -> jax.Array:
  """Return [B, G, J, T, K], values in the proportions of the weights."""
  weight_BGJTS = weight_BGJTS.astype(values_BGSK.dtype)
  return jnp.einsum('bgjts,bgsk->bgjtk', weight_BGJTS, values_BGSK, precision=precision(values_BGSK.dtype))


def attend_apart(given: Operands) -> jax.Array:
  """Attend with the scores of slots and of new entries in two arrays: no slot is copied to stand beside a new entry.

  One softmax goes over both. On a TPU the product that computes the scores then also finds their maxima, and the one
  with the values computes the weights. Joined, scores would be written twice more and read three times more.
  """
  score_BGJTS = jnp.where(mask_slots(given)[:, None, None], compute_scores(given.queries, given.keys), MASK_VALUE)
  score_BGJTM = jnp.where(given.mask[:, None, None], compute_scores(given.queries, given.new_keys), MASK_VALUE)
  best_BGJT1 = jnp.maximum(*(x.max(-1, keepdims=True, initial=MASK_VALUE) for x in (score_BGJTS, score_BGJTM)))
  if given.sinks is not None:
    best_BGJT1 = jnp.maximum(best_BGJT1, as_scores(given.sinks))
  weight_BGJTS, weight_BGJTM = jnp.exp(score_BGJTS - best_BGJT1), jnp.exp(score_BGJTM - best_BGJT1)
  total_BGJT1 = weight_BGJTS.sum(-1, keepdims=True) + weight_BGJTM.sum(-1, keepdims=True)
  if given.sinks is not None:
    total_BGJT1 += jnp.exp(as_scores(given.sinks) - best_BGJT1)
  old_BGJTK = weighted_values(weight_BGJTS / total_BGJT1, given.values)
  return old_BGJTK + weighted_values(weight_BGJTM / total_BGJT1, given.new_values)


def attend_joined(given: Operands) -> jax.Array:
  """Attend with new entries behind the slots, in whole tiles: two products, and one kernel for the softmax of both.

  Given two arrays of scores, XLA:GPU joins the keys all the same, since they meet the same queries, transposes them,
  and handles the scores in a dozen kernels. A product of odd sizes would be padded in a kernel of its own.
  """
  free = (0, 0), (0, 0), (0, -(given.keys.shape[2] + given.new_keys.shape[2]) % 64)

  def join(slots_BGSK: jax.Array, new_BGMK: jax.Array) -> jax.Array:
    both = slots_BGSK, jnp.pad(new_BGMK, (*free, (0, 0)))
    return on_each_device(row_major, [jnp.concatenate(both, axis=2)], [CACHE_AXES])

  keys_BGNK, values_BGNK = join(given.keys, given.new_keys), join(given.values, given.new_values)
  return attend_by_mask(given.queries, keys_BGNK, values_BGNK, jnp.pad(mask_entries(given), free), given.sinks)


def attend_in_kernel(given: Operands, *, kernel: ModuleType) -> jax.Array:
  """Attend in a kernel written for the device; on a mesh, each device runs it for its own heads and sequences."""
  axes = (*CACHE_AXES, None), CACHE_AXES, CACHE_AXES, ('batch', None, None), CACHE_AXES, CACHE_AXES, ('batch',)
  return on_each_device(kernel.attend, given[: len(axes)], axes)


@jax.custom_jvp
def attend_compiled(given: Operands) -> jax.Array:
  """Attend by the kernel of `cpu.cc`, which reads no slot that is not committed; of float32 alone."""
  B, G, J, T, _ = given.queries.shape
  oldest_BT = jnp.zeros((B, T), jnp.int32) if given.oldest is None else given.oldest
  sinks_GJ = jnp.full((G, J), -jnp.inf) if given.sinks is None else given.sinks.astype(jnp.float32)
  return cpu.call('attention', given.queries.shape, *given._replace(oldest=oldest_BT, sinks=sinks_GJ))


@attend_compiled.defjvp
def _differentiate(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[jax.Array, jax.Array]:
  return attend_compiled(*primals), jax.jvp(attend_apart, primals, tangents)[1]


def attend_in_blocks(given: Operands) -> jax.Array:
  """Attend with at most `MAX_QUERIES` queries at a time."""
  T = given.queries.shape[3]
  num_blocks = -(-T // MAX_QUERIES)

  def split(x: jax.Array, axis: int) -> jax.Array:
    whole = jnp.pad(x, [(0, -T % num_blocks if i == axis else 0) for i in range(x.ndim)])
    return jnp.stack(jnp.split(whole, num_blocks, axis))

  def attend_block(block: tuple) -> jax.Array:
    q_BGJtK, mask_BtM, oldest_Bt = block
    return attend(given._replace(queries=q_BGJtK, mask=mask_BtM, oldest=oldest_Bt))

  oldest_nBt = None if given.oldest is None else split(given.oldest, 1)
  out_nBGJtK = jax.lax.map(attend_block, (split(given.queries, 3), split(given.mask, 1), oldest_nBt))
  return jnp.concatenate([*out_nBGJtK], axis=3)[..., :T, :]


def attend(given: Operands) -> jax.Array:
  """Attend to the slots and new entries that each query sees, [B, G, J, T, K], in the device's fastest form."""
  num_queries = given.queries.shape[3]
  if num_queries > MAX_QUERIES:
    return attend_in_blocks(given)
  is_few = num_queries <= MAX_COMPILED_QUERIES

  def written_for(kernel: ModuleType) -> Callable | None:
    is_taken = (
      given.oldest is None and given.sinks is None and kernel.is_supported(given.queries, given.new_keys, given.keys)
    )
    return functools.partial(attend_in_kernel, kernel=kernel) if is_taken else None

  return dispatch(
    given,
    default=attend_apart,
    cpu=attend_compiled if is_few and given.queries.dtype == jnp.float32 and cpu.is_usable() else None,
    gpu=attend_joined if num_queries > 1 else None,
    cuda=written_for(attention_gpu),
    tpu=written_for(attention_tpu),
  )
