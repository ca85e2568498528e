"""A target whose every token depends on all that its mask lets it see, and a drafter that knows it.

The next token is drawn from logits that hash every (token, position) in sight: one wrong mask bit, position or moved
slot changes the text. The drafter puts the true token at a random rank with probability `hit`, so that every accepted
length occurs; it looks at the noise as well, since a tree is lossless whatever its drafter knows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache
from eagle_jax.draft.drafter import NoDrafter
from eagle_jax.draft.grow import Children, grow, rerank
from eagle_jax.draft.policy import Plain
from eagle_jax.loop import decode_loop, result
from eagle_jax.prefill import prepare, run_prefill
from eagle_jax.sampling import Sampling, position_noise
from eagle_jax.state import Params, Spec
from eagle_jax.target.transformer import Taps

PRIME, ODD = 0x9E3779B1, 0x85EBCA6B


def mix(x: jax.Array) -> jax.Array:
  """u32 to u32, every bit stirred (the finaliser of MurmurHash3)."""
  x = (x ^ (x >> 16)) * jnp.uint32(ODD)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def ingredient(token: jax.Array, position: jax.Array) -> jax.Array:
  """u32, what one token adds to the hash of a text."""
  return mix(token.astype(jnp.uint32) * jnp.uint32(PRIME) + mix(position.astype(jnp.uint32)))


def hash_logits(hash_R: jax.Array, *, vocab_size: int) -> jax.Array:
  """[V, R] f32 in [0, 4): a pseudo-random distribution for every text."""
  token_V1 = jnp.arange(1, vocab_size + 1, dtype=jnp.uint32)[:, None]
  return (mix(mix(hash_R)[None] ^ (token_V1 * jnp.uint32(PRIME))) >> 8).astype(jnp.float32) / 2.0**22


def pack(hash_BT: jax.Array) -> jax.Array:
  """[2, B, T] f32: the halves of a hash, both exact."""
  return jnp.stack([hash_BT >> 16, hash_BT & 0xFFFF]).astype(jnp.float32)


def unpack(feature_2R: jax.Array) -> jax.Array:
  high, low = feature_2R.astype(jnp.uint32)
  return (high << 16) | low


@dataclasses.dataclass(frozen=True)
class OracleTarget:
  """A `target.TargetNetwork`: tokens lie in the cache as keys, positions as values."""

  vocab_size: int = 13
  eos_ids: tuple[int, ...] = ()

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    return kv_cache.init(num_layers=1, batch=batch, num_kv_heads=1, num_slots=num_slots, head_dim=1, dtype=jnp.float32)

  def forward(self, params, token_BT, position_BT, mask_BTT, cache: KVCache) -> tuple[Taps, KVCache]:
    def write(kv_BGSK, new_BT):
      return kv_cache.write(kv_BGSK, new_BT.astype(jnp.float32)[:, None, :, None], cache.length)

    keys, values = write(cache.keys[0], token_BT), write(cache.values[0], position_BT)
    seen_BTS = kv_cache.visible(cache.length, mask_BTT, num_slots=cache.num_slots)
    part_BS = ingredient(keys[:, 0, :, 0].astype(jnp.int32), values[:, 0, :, 0].astype(jnp.int32))
    hash_BT = jnp.where(seen_BTS, part_BS[:, None], jnp.uint32(0)).sum(axis=2, dtype=jnp.uint32)
    return Taps(pack(hash_BT)), KVCache((keys,), (values,), cache.length)

  def logits(self, params, taps: Taps) -> jax.Array:
    hash_BT = unpack(taps.feature)
    return hash_logits(hash_BT.reshape(-1), vocab_size=self.vocab_size).reshape(-1, *hash_BT.shape)


class Memory(NamedTuple):
  """What the drafter remembers, all of it from `absorb`."""

  hash: jax.Array  # [B] u32, of the text up to the newest token, included
  position: jax.Array  # [B] i32, of the newest token


class Knowledge(NamedTuple):
  """The drafter's parameters: how the target will draw."""

  sampling: Sampling
  row_id: jax.Array  # [B] i32


@dataclasses.dataclass(frozen=True)
class OracleDrafter:
  """A `draft.DraftNetwork` whose trees hold the target's own next token with probability `hit` at each node."""

  vocab_size: int = 13
  hit: float = 0.8

  def init(self, batch: int, num_slots: int) -> Memory:
    return Memory(jnp.zeros(batch, jnp.uint32), jnp.zeros(batch, jnp.int32))

  def num_scratch(self, policy) -> int:
    return 0

  def absorb(self, params: Knowledge, state: Memory, token_BP, taps: Taps, count_B) -> Memory:
    index_1P = jnp.arange(token_BP.shape[1])[None]
    part_BP = ingredient(token_BP, state.position[:, None] + 1 + index_1P)
    added_B = jnp.where(index_1P < count_B[:, None], part_BP, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)
    # A prompt's own first token comes to no drafter as a token: only through its feature.
    first_B = jnp.where(state.position == 0, unpack(taps.feature[:, :, 0]), jnp.uint32(0))
    return Memory(state.hash + first_B + added_B, state.position + count_B)

  def propose(self, params: Knowledge, state: Memory, root_B, policy):
    depth_P = jnp.arange(1, policy.max_depth + 1)
    noise = functools.partial(position_noise, params.sampling.seed, vocab_size=self.vocab_size)
    noise_BPV = jax.vmap(lambda row, position: jax.vmap(lambda d: noise(row, position + d))(depth_P))(
      params.row_id, state.position
    )

    def step(parents_BW, frontier, depth: int, fanout: int):
      hash_BW = parents_BW
      if depth > 0:
        hash_BW = jnp.take_along_axis(parents_BW, frontier.parent_slot, axis=1)
        hash_BW += ingredient(frontier.token, jnp.broadcast_to(state.position[:, None] + depth, frontier.token.shape))
      return self.children(hash_BW, params.sampling.temperature * noise_BPV[:, depth], fanout), hash_BW

    candidates, _ = grow(step, state.hash[:, None], root_B, policy)
    return jax.vmap(lambda c: rerank(c, num_nodes=policy.num_nodes))(candidates), state

  def children(self, hash_BW, noise_BV, fanout: int) -> Children:
    """`fanout` different tokens a node; each rank is a quarter as likely to be the true one as the rank before."""
    assert fanout < self.vocab_size
    logits_BWV = hash_logits(hash_BW.reshape(-1), vocab_size=self.vocab_size).T.reshape(*hash_BW.shape, -1)
    true_BW = jnp.argmax(logits_BWV + noise_BV[:, None], axis=-1).astype(jnp.int32)  # top-k and top-p aside
    dice_BW = mix(hash_BW ^ jnp.uint32(ODD))
    rank_BW = jnp.minimum(jax.lax.clz(dice_BW).astype(jnp.int32) // 2, fanout - 1)
    is_hit_BW = (dice_BW & 0xFFFF).astype(jnp.float32) < self.hit * 2.0**16
    rank_C = jnp.arange(fanout)
    is_true_BWC = is_hit_BW[..., None] & (rank_BW[..., None] == rank_C.reshape(1, 1, -1))
    wrong_BWC = (true_BW[..., None] + 1 + rank_C.reshape(1, 1, -1)) % self.vocab_size
    return Children(
      jnp.where(is_true_BWC, true_BW[..., None], wrong_BWC),
      jnp.broadcast_to(-0.2 - 1.4 * rank_C.astype(jnp.float32), wrong_BWC.shape),
    )


def build(policy: Any, row_ids, *, vocab_size: int = 13, drafter: Any = None, **sampling) -> tuple[Params, Spec]:
  """Params and spec of the oracle pair; `Plain()` takes no drafter. `sampling` and row ids are those of `prefill`."""
  target = OracleTarget(vocab_size)
  if isinstance(policy, Plain):
    return Params({}, {}), Spec(target, NoDrafter(), policy)
  knowledge = Knowledge(Sampling.of(**sampling), jnp.asarray(row_ids, jnp.int32))
  return Params({}, knowledge), Spec(target, drafter or OracleDrafter(vocab_size), policy)


def decode(params: Params, spec: Spec, tokens_BL, length_B, *, loop=decode_loop, **request) -> tuple[jax.Array, ...]:
  """`result` after prefill and loop, in one program, cheaply compiled. `request` holds what `prepare` needs."""
  arguments, static = prepare(params, tokens_BL, length_B, spec=spec, **request)
  return _program(loop, **static)(*arguments)


@functools.cache
def _program(loop, *, spec: Spec, **static):
  def run(params, *arguments):
    return result(loop(params, run_prefill(params, *arguments, spec=spec, **static), spec=spec))

  return jax.jit(run, compiler_options={'xla_backend_optimization_level': 0})


def numpy_keep(logits_V, temperature, top_k, top_p):
  """By sorting: the k-th largest, then the first cumulative probability that reaches p; equals of the last are kept."""
  logits_V = logits_V.astype(np.float64)
  ranked_V = np.sort(logits_V)[::-1]
  keep_V = logits_V >= (ranked_V[min(top_k, len(ranked_V)) - 1] if top_k else -np.inf)
  if top_p < 1:
    ranked_V = np.sort(logits_V[keep_V])[::-1]
    p_V = np.exp((ranked_V - ranked_V[0]) / temperature)
    reached = np.argmax(np.cumsum(p_V / p_V.sum()) >= top_p)
    keep_V &= logits_V >= ranked_V[reached]
  return keep_V
