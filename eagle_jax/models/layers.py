"""Layers that the target and the drafter share.

Activations are columns, [D, R]: one for each token of each sequence, R = B x T. With weights
stored [out, in], a pass over a few columns is then `W @ x`, which reads weights at memory speed on every device.
"""

from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.kernels.attention import Operands, attend
from eagle_jax.kernels.einsum import einsum_float32
from eagle_jax.kernels.int8 import Quantised
from eagle_jax.kernels.matmul import matmul
from eagle_jax.kernels.ordering import compute_once
from eagle_jax.sharding import constrain


def held(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Any:
  """Return a parameter of a module: an array of this shape, or a `Quantised` matrix that stands for one."""
  given = module.get_variable('params', name) if module.has_variable('params', name) else None
  return given if isinstance(given, Quantised) else module.param(name, init, shape, dtype)


class Linear(nn.Module):
  """y_OR = W_OI x_IR (+ b_O), where O may be several dimensions: products of one input, read and made as one."""

  outputs: tuple[int, ...]
  use_bias: bool = False

  @nn.compact
  def __call__(self, x_IR: jax.Array) -> jax.Array:
    init = nn.initializers.lecun_normal(in_axis=-1, out_axis=range(len(self.outputs)))
    weight_OI = held(self, 'weight', init, (*self.outputs, x_IR.shape[0]), x_IR.dtype)
    y_OR = weight_OI.times(x_IR).astype(x_IR.dtype) if isinstance(weight_OI, Quantised) else matmul(weight_OI, x_IR)
    if self.use_bias:
      y_OR += self.param('bias', nn.initializers.zeros, self.outputs, x_IR.dtype)[..., None]
    return y_OR


class Embedding(nn.Module):
  """A vector for each vocabulary id, [V, D]: looked up by `__call__`, scored against by `apply_head`."""

  vocab_size: int
  width: int
  dtype: Any = jnp.float32

  def setup(self):
    self.weight = held(self, 'weight', nn.initializers.normal(0.02), (self.vocab_size, self.width), self.dtype)

  def __call__(self, token_R: jax.Array) -> jax.Array:
    return embed(self.weight, token_R).astype(self.dtype)


def embed(weight_VD: jax.Array | Quantised, token_R: jax.Array) -> jax.Array:
  """Return [D, R]. For an id outside the vocabulary (an unused tree node) it is some vector, which nobody uses."""
  if isinstance(weight_VD, Quantised):
    return weight_VD.take(token_R).T
  return jnp.take(weight_VD, token_R, axis=0, mode='clip').T


def apply_head(weight_VD: jax.Array | Quantised, feature_DR: jax.Array) -> jax.Array:
  """Return [V, R] f32, the logits of the language-model head over some vocabulary.

  The vocabulary stays the leading axis: compilers fuse a transposition into the product, which costs more than it does.
  """
  if isinstance(weight_VD, Quantised):
    return weight_VD.times(feature_DR)
  return einsum_float32('vd,dr->vr', weight_VD, feature_DR)


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last dimension but one (the width, or that of each head), in float32 inside."""

  eps: float

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    scale_D = self.param('scale', nn.initializers.ones, x_DR.shape[-2:-1], x_DR.dtype)
    x32_DR = x_DR.astype(jnp.float32)
    rms_R = jnp.sqrt(jnp.square(x32_DR).mean(axis=-2, keepdims=True) + self.eps)
    return (x32_DR / rms_R).astype(x_DR.dtype) * jax.lax.broadcast_in_dim(scale_D, x_DR.shape, (x_DR.ndim - 2,))


class Rotation(NamedTuple):
  """Angles of rotary position embedding (RoFormer, arXiv:2104.09864), of T tokens, for all heads and layers."""

  cos: jax.Array  # [K/2, B, T] f32
  sin: jax.Array  # [K/2, B, T] f32

  @classmethod
  def of(cls, config: Any, position_BT: jax.Array) -> 'Rotation':
    """Compute the angles of a `TargetConfig` or a `DrafterConfig` at absolute positions, i32.

    Pair i of K/2 has wavelengths from 2 pi to 2 pi theta, `rope_slowdown` times slower where there is one.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_slowdown:
      frequency /= jnp.asarray(config.rope_slowdown, jnp.float32)
    angle = frequency[:, None, None] * position_BT.astype(jnp.float32)[None]
    tables = (compute_once(config.rope_factor * f(angle)) for f in (jnp.cos, jnp.sin))  # not in every layer and head
    return cls(*tables)

  def rotate(self, x_KR: jax.Array) -> jax.Array:
    """Rotate [..., K, R] of any float dtype, in float32: dimension i pairs with i + K/2 (the rotate-half form)."""
    cos, sin = (x.reshape(*(1,) * (x_KR.ndim - 2), x.shape[0], -1) for x in self)
    low, high = jnp.split(x_KR.astype(jnp.float32), 2, axis=-2)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-2).astype(x_KR.dtype)


class AttentionFn(Protocol):
  """What a layer attends with. A pytree, where layers that are traced once for all take it."""

  def __call__(self, q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, /) -> tuple[jax.Array, Any]:
    """Attend with queries [B, G, J, T, K] and new keys and values [B, G, T, K].

    Returns values in the shape of the queries, and a memory: what the caller wants to keep of the pass.
    """
    ...


def no_attention(q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> tuple[jax.Array, None]:
  """Attend to nothing: parameters are initialized so."""
  return q_BGJTK, None


class CachedAttention(NamedTuple):
  """Grouped-query attention of T tokens to the committed entries, and to new ones beside the cache.

  Its memory is the keys and values, [B, G, M, K], of the M new entries so far. See `kernels.attention`.
  """

  keys: jax.Array  # [B, G, S, K], one layer of the cache, read only
  values: jax.Array  # [B, G, S, K]
  length: jax.Array  # [B] i32, committed entries; all T tokens see them, or those from `oldest` on
  mask: jax.Array  # [B, T, M] bool, which new entries each token sees: those of `earlier`, then of the T tokens
  earlier: tuple[jax.Array, jax.Array] | None = None  # memory of passes that were not committed
  oldest: jax.Array | None = None  # [B, T] i32, the first slot that each of the T tokens sees; None for slot 0

  def __call__(self, q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> tuple[jax.Array, Any]:
    k_BGMK, v_BGMK = k_BGTK, v_BGTK
    if self.earlier is not None:
      k_BGMK, v_BGMK = (jnp.concatenate(x, axis=2) for x in zip(self.earlier, (k_BGTK, v_BGTK), strict=True))
    given = Operands(q_BGJTK, k_BGMK, v_BGMK, self.mask, self.keys, self.values, self.length, self.oldest)
    return attend(given), (k_BGMK, v_BGMK)


class Attention(nn.Module):
  """Self-attention of new tokens; `attention` says to what."""

  config: Any  # a `TargetConfig` or a `DrafterConfig`

  @nn.compact
  def __call__(self, x_DR, rotation: Rotation, attention: AttentionFn):
    c = self.config
    (B, T), G, K = rotation.cos.shape[1:], c.num_kv_heads, c.head_dim
    J = c.num_heads // G

    def rotate(x_KR, name):
      if c.qk_norm:
        x_KR = RMSNorm(c.norm_eps, name=name)(x_KR)
      return rotation.rotate(x_KR)

    # A key-value head's J queries, its key and its value stand together: a mesh splits them by heads. Where it has to
    # split the weights of each head instead, their outputs meet here, not as scores.
    qkv_GQKBT = Linear((G, J + 2, K), c.qkv_bias, name='qkv')(x_DR).reshape(G, J + 2, K, B, T)
    qkv_GQKR = constrain(qkv_GQKBT, ('kv_heads', None, None, 'batch', None)).reshape(G, J + 2, K, B * T)
    q_GJKR, k_GKR = rotate(qkv_GQKR[:, :J], 'q_norm'), rotate(qkv_GQKR[:, J], 'k_norm')
    q_BGJTK = q_GJKR.reshape(G, J, K, B, T).transpose(3, 0, 1, 4, 2)
    k_BGTK, v_BGTK = (x.reshape(G, K, B, T).transpose(2, 0, 3, 1) for x in (k_GKR, qkv_GQKR[:, J + 1]))
    out_BGJTK, memory = attention(q_BGJTK, k_BGTK, v_BGTK)
    out_DR = out_BGJTK.transpose(1, 2, 4, 0, 3).reshape(c.num_heads * K, B * T)
    return Linear((c.width,), c.o_bias, name='o')(out_DR), memory


class SwiGLU(nn.Module):
  """down(silu(gate(x)) * up(x)) (GLU variants, arXiv:2002.05202)."""

  ffn_width: int

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    gate_FR, up_FR = Linear((2, self.ffn_width), name='gate_up')(x_DR)
    return Linear((x_DR.shape[0],), name='down')(nn.silu(gate_FR) * up_FR)


def route(logits_ER: jax.Array, experts_per_token: int) -> jax.Array:
  """Return [E, R] f32, each column's shares of its likeliest experts, which sum to 1; 0 for the others."""
  p_RE = jax.nn.softmax(logits_ER.astype(jnp.float32), axis=0).T
  p_Rk, expert_Rk = jax.lax.top_k(p_RE, experts_per_token)
  share_Rk = p_Rk / p_Rk.sum(axis=1, keepdims=True)
  return (jax.nn.one_hot(expert_Rk, p_RE.shape[1], axis=0) * share_Rk[None]).sum(axis=2)


class Experts(nn.Module):
  """Each column through the few of E SwiGLUs that a router chooses for it (Mixtral, arXiv:2401.04088).

  An expert runs over all columns, so shapes are static; of many columns that is E / experts_per_token times the
  arithmetic needed. One that none of a few columns chose is not even read: what their pass costs is weights. Of many
  columns some choose each expert, and to ask would only cost.
  """

  config: Any  # a `TargetConfig`

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    c = self.config
    share_ER = route(Linear((c.num_experts,), name='router')(x_DR), c.experts_per_token)
    is_asked = x_DR.shape[1] * c.experts_per_token <= 4 * c.num_experts and not self.is_initializing()
    out_DR = jnp.zeros_like(x_DR)
    for index in range(c.num_experts):
      share_1R = share_ER[index : index + 1]

      def add(expert, out_DR, share_1R=share_1R):
        # Chosen, not multiplied by 0: what a column that is not the expert's gives may have overflowed.
        own_DR = jnp.where(share_1R > 0, expert(x_DR).astype(jnp.float32) * share_1R, 0)
        return out_DR + own_DR.astype(out_DR.dtype)

      expert = SwiGLU(c.ffn_width, name=f'expert_{index}')
      if is_asked:
        out_DR = nn.cond((share_1R > 0).any(), add, lambda _, out_DR: out_DR, expert, out_DR)
      else:
        out_DR = add(expert, out_DR)
    return out_DR


class DecoderLayer(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  config: Any  # a `TargetConfig` or a `DrafterConfig`
  has_input_norm: bool = True

  @nn.compact
  def __call__(self, x_DR, rotation: Rotation, attention: AttentionFn):
    """Return [D, R], and the memory of `attention`."""
    c = self.config
    mlp = Experts(c, name='mlp') if c.num_experts else SwiGLU(c.ffn_width, name='mlp')
    read_DR = RMSNorm(c.norm_eps, name='attn_norm')(x_DR) if self.has_input_norm else x_DR
    attended_DR, memory = Attention(c, name='attn')(read_DR, rotation, attention)
    x_DR += attended_DR
    x_DR += mlp(RMSNorm(c.norm_eps, name='mlp_norm')(x_DR))
    return x_DR, memory
