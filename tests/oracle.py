"""A target whose every token depends on all that its mask lets it see, and a drafter that knows it.

The next token is drawn from logits that hash every (token, position) in sight: one wrong mask bit, position or moved
slot changes the text. The drafter puts the true token at a random rank with probability `hit`, so that every accepted
length occurs; it looks at the noise as well, since a tree is lossless whatever its drafter knows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import MedusaConfig
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.state import Params, Spec
from eagle_jax.decode.step import decode_loop, result
from eagle_jax.draft.dflash import DFlash, DFlashConfig
from eagle_jax.draft.expand import Children, first_width, grow
from eagle_jax.draft.medusa import Medusa
from eagle_jax.draft.ngram import Ngram, NgramConfig
from eagle_jax.draft.peagle import PEagle, PEagleConfig
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.draft.suffix import Suffix, SuffixConfig
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import Plain
from eagle_jax.sampling import GumbelMax, choose
from tiny_costs import COSTS

PRIME, ODD = 0x9E3779B1, 0x85EBCA6B


def mix(x: jax.Array) -> jax.Array:
  """u32 to u32, every bit stirred (the finaliser of MurmurHash3)."""
  x = (x ^ (x >> 16)) * jnp.uint32(ODD)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def ingredient(token: jax.Array, position: jax.Array) -> jax.Array:
  """Compute what one token adds to the hash of a text, u32."""
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
  """A `models.interface.TargetNetwork`: tokens lie in the cache as keys, positions as values."""

  vocab_size: int = 13
  eos_ids: tuple[int, ...] = ()
  num_kv_heads: ClassVar[int] = 1
  head_dim: ClassVar[int] = 1

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    return kv_cache.init(self, num_layers=1, batch=batch, num_slots=num_slots, dtype=jnp.float32)

  def forward(self, params, token_BT, position_BT, mask_BTT, cache: KVCache) -> tuple[Taps, NewEntries]:
    def total(is_seen, part):
      return jnp.where(is_seen, part, jnp.uint32(0)).sum(axis=-1, dtype=jnp.uint32)

    token_BS, position_BS = (kv[0][:, 0, :, 0].astype(jnp.int32) for kv in (cache.keys, cache.values))
    is_committed_BS = jnp.arange(token_BS.shape[1])[None] < cache.length[:, None]
    hash_B = total(is_committed_BS, ingredient(token_BS, position_BS))
    hash_BT = hash_B[:, None] + total(mask_BTT, ingredient(token_BT, position_BT)[:, None])
    new = (x_BT.astype(jnp.float32)[:, None, :, None] for x_BT in (token_BT, position_BT))
    return Taps(pack(hash_BT)), NewEntries(*((x_BGTK,) for x_BGTK in new))

  def logits(self, params, taps: Taps) -> jax.Array:
    hash_BT = unpack(taps.feature)
    return hash_logits(hash_BT.reshape(-1), vocab_size=self.vocab_size).reshape(-1, *hash_BT.shape)


class Memory(NamedTuple):
  """The drafter's state."""

  hash: jax.Array  # [B] u32, of the text up to the newest token, included
  position: jax.Array  # [B] i32, of the newest token


def every_token(vocab_size: int, batch: int) -> jax.Array:
  """[V, B] i32"""
  return jnp.broadcast_to(jnp.arange(vocab_size)[:, None], (vocab_size, batch))


@dataclasses.dataclass(frozen=True)
class OracleDrafter:
  """A `draft.interface.DraftNetwork` whose trees hold the target's next token with probability `hit` at each node."""

  vocab_size: int = 13
  hit: float = 0.8

  def start(self, params, token_BL, taps: Taps, length_B, num_slots: int, first_B) -> Memory:
    # A prompt's own first token comes to no drafter as a token: only through its feature.
    first = Memory(unpack(taps.feature)[:, 0], jnp.zeros(len(token_BL), jnp.int32))
    return self.update(params, first, token_BL, taps, length_B)

  def update(self, params, state: Memory, token_BP, taps: Taps, count_B) -> Memory:
    index_1P = jnp.arange(token_BP.shape[1])[None]
    part_BP = ingredient(token_BP, state.position[:, None] + 1 + index_1P)
    added_B = jnp.where(index_1P < count_B[:, None], part_BP, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)
    return Memory(state.hash + added_B, state.position + count_B)

  def propose(self, params, state: Memory, root_B, policy, context):
    def children(hash_BW, depth, fanout: int) -> Children:
      noise_VB = context.noise(depth + 1, every_token(self.vocab_size, len(root_B)))
      return self.children(hash_BW, noise_VB, fanout)

    def step(parents_BW, frontier, depth, fanout: int):
      hash_BW = jnp.take_along_axis(parents_BW, frontier.parent_slot, axis=1)
      hash_BW += ingredient(frontier.token, jnp.broadcast_to(state.position[:, None] + depth, frontier.token.shape))
      return children(hash_BW, depth, fanout), hash_BW

    roots = children(state.hash[:, None], 0, policy.fanouts[0])
    hash_BW = jnp.repeat(state.hash[:, None], first_width(policy), axis=1)
    return grow(roots, step, hash_BW, root_B, policy, context)

  def children(self, hash_BW, noise_VB, fanout: int) -> Children:
    """Draw `fanout` different tokens for each node; each rank is a quarter as likely to be true as the one before."""
    assert fanout < self.vocab_size
    logits_BWV = hash_logits(hash_BW.reshape(-1), vocab_size=self.vocab_size).T.reshape(*hash_BW.shape, -1)
    true_BW = jnp.argmax(logits_BWV + noise_VB.T[:, None], axis=-1).astype(jnp.int32)  # top-k and top-p aside
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


def ngram(vocab_size: int) -> Ngram:
  """The drafter that looks the text up in itself."""
  return Ngram(NgramConfig(vocab_size, target_width=2))


def suffix(vocab_size: int) -> Suffix:
  """The drafter that counts what followed in the text."""
  return Suffix(SuffixConfig(vocab_size, target_width=2))


@dataclasses.dataclass(frozen=True)
class OracleMedusa(Medusa):
  """Medusa's heads without weights: what they score hashes the feature and the depth."""

  def propose(self, params, state, root_B, policy, context):
    return super().propose({'ids': jnp.arange(self.config.vocab_size)}, state, root_B, policy, context)

  def read(self, params, feature_2R, num_heads: int):
    return jnp.stack([feature_2R] * num_heads, axis=1)

  def score(self, params, out_2dB):
    _, num_heads, batch = out_2dB.shape
    hash_dB = unpack(out_2dB) + jnp.arange(1, num_heads + 1, dtype=jnp.uint32)[:, None]
    return hash_logits(hash_dB.reshape(-1), vocab_size=self.config.vocab_size).reshape(-1, num_heads, batch)


@functools.cache
def at_random(form: type) -> type:
  """Make a kind of network whose random weights stand in no params, and whose only tap is the oracle's feature."""

  @dataclasses.dataclass(frozen=True)
  class AtRandom(form):
    @functools.cached_property
    def weights(self):
      row = jax.ShapeDtypeStruct((self.config.vocab_size, self.config.width), jnp.float32)
      shapes = jax.eval_shape(self.init_params, jax.random.key(0)) | {'embed': row, 'head': row}
      rng = np.random.default_rng(0)
      weights = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
      return weights | {'ids': np.arange(self.config.vocab_size, dtype=np.int32)}

    def start(self, params, token_BL, taps: Taps, *more):
      return super().start(self.weights, token_BL, taps._replace(residual=(taps.feature,)), *more)

    def update(self, params, state, token_BP, taps: Taps, count_B):
      return super().update(self.weights, state, token_BP, taps._replace(residual=(taps.feature,)), count_B)

    def propose(self, params, *more):
      return super().propose(self.weights, *more)

  return AtRandom


SIZES = {'width': 2, 'num_heads': 1, 'num_kv_heads': 1, 'head_dim': 2, 'ffn_width': 2, 'taps': (0,)}


def p_eagle(vocab_size: int) -> PEagle:
  """A head of one layer over the feature, normed, for it is large."""
  return at_random(PEagle)(PEagleConfig(vocab_size, **SIZES, target_width=2, fc_norm=True, mask_token_id=3))


def dflash(vocab_size: int) -> DFlash:
  """A block of one layer, over the feature and itself."""
  block = {'block_size': 3, 'mask_token_id': 3, 'windows': (None,), 'causal': (False,)}
  return at_random(DFlash)(DFlashConfig(vocab_size, **SIZES, **block))


def medusa(vocab_size: int) -> Medusa:
  """Heads for three depths."""
  return OracleMedusa(MedusaConfig(vocab_size, width=2, max_depth=3))


@dataclasses.dataclass(frozen=True)
class Perturbed(GumbelMax):
  """A chooser with a planted fault: it draws by another function."""

  fault: Callable[..., jax.Array] = choose

  def choose(self, logits_V, child_T, sampling, row_id, position):
    return self.fault(logits_V, sampling, row_id, position)


def build(
  policy: Any, *, vocab_size: int = 13, drafter: Any = None, arrays: Any = None, chooser: Any = None
) -> tuple[Params, Spec]:
  """Params (the pair has none) and spec of the oracle pair; `Plain()` takes no drafter."""
  drafter = NoDrafter() if isinstance(policy, Plain) else drafter or OracleDrafter(vocab_size)
  arrays = policy.arrays(COSTS, None, None) if arrays is None else arrays
  return Params({}, {}, arrays), Spec(OracleTarget(vocab_size), drafter, policy.static(), chooser or GumbelMax())


def decode(
  params: Params, spec: Spec, tokens_BL, length_B, *, loop=decode_loop, level: int = 0, **request
) -> tuple[jax.Array, ...]:
  """`result` after prefill and loop, in one program; `request` holds what `prepare` needs.

  `level` is how much the compiler does: nothing pays but for many rows.
  """
  (_, *arguments), static = prepare(params, tokens_BL, length_B, spec=spec, **request)
  return _program(loop, spec, level, **static)(params, *arguments)


@functools.cache
def _program(loop, decoding: Spec, level: int, **static):
  def run(params, *arguments):
    return result(loop(params, run_prefill(params, *arguments, **static), spec=decoding))

  return jax.jit(run, compiler_options={'xla_backend_optimization_level': level})


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
