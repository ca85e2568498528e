"""Layers that the target and the drafter share.

Activations are columns, [D, R]: one for each token of each sequence, R = B x T. With weights
stored [out, in], a pass over a few columns is then `W @ x`, which reads weights at memory speed on every device.
"""

import functools
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.config import TargetConfig
from eagle_jax.kernels.attention import Operands, attend
from eagle_jax.kernels.dispatch import dispatch_loop
from eagle_jax.kernels.int4 import Grouped
from eagle_jax.kernels.int8 import Quantised
from eagle_jax.kernels.matmul import matmul, matmul_float32
from eagle_jax.kernels.norm import normalise
from eagle_jax.kernels.ordering import compute_once
from eagle_jax.sharding import constrain


def held(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Any:
  """Return a parameter of a module: an array of this shape, or a rounded matrix that stands for one.

  One that is there is checked here: Flax would trace `init` for its shape, a tenth of the time of tracing a step.

  Raises:
    ValueError: it has another shape.
  """
  if not module.has_variable('params', name):
    return module.param(name, init, shape, dtype)
  given: Any = module.get_variable('params', name)
  if given.shape != shape:
    place = '/'.join((*module.path, name))
    raise ValueError(f'Parameter {place} must have the shape {shape} of its configuration, got {given.shape}.')
  return given


def project(x_IR: jax.Array, weight: Any, bias: jax.Array | None = None) -> jax.Array:
  """Return W x + b, [..., R], of the dtype of x; `weight` is [..., I], an array or a rounded matrix."""
  is_rounded = isinstance(weight, (Quantised, Grouped))
  y_OR = weight.times(x_IR).astype(x_IR.dtype) if is_rounded else matmul(weight, x_IR)
  return y_OR if bias is None else y_OR + bias[..., None]


class Linear(nn.Module):
  """A linear layer: y_OR = W_OI x_IR (+ b_O). O may be several dimensions: products of one input, fused."""

  outputs: tuple[int, ...]
  use_bias: bool = False

  @nn.compact
  def __call__(self, x_IR: jax.Array) -> jax.Array:
    return project(x_IR, **weights_of(self, (*self.outputs, x_IR.shape[0]), x_IR.dtype))


class ExpertLinear(nn.Module):
  """The stacked weights of E products like `Linear`'s."""

  num_experts: int
  outputs: tuple[int, ...]
  num_inputs: int
  use_bias: bool = False

  @nn.compact
  def __call__(self, dtype: Any) -> dict[str, Any]:
    """Return `weight` [E, ..., I], and perhaps `bias` [E, ...]."""
    return weights_of(self, (self.num_experts, *self.outputs, self.num_inputs), dtype, batch_axis=(0,))


def weights_of(
  module: Linear | ExpertLinear, shape: tuple[int, ...], dtype: Any, batch_axis: tuple[int, ...] = ()
) -> dict[str, Any]:
  """Return the parameters of linear products: the weight of this shape, and the bias if the module uses one."""
  outputs = range(len(batch_axis), len(shape) - 1)
  init = nn.initializers.lecun_normal(in_axis=-1, out_axis=outputs, batch_axis=batch_axis)
  weights = {'weight': held(module, 'weight', init, shape, dtype)}
  return weights | ({'bias': held(module, 'bias', nn.initializers.zeros, shape[:-1], dtype)} if module.use_bias else {})


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
  return matmul_float32(weight_VD, feature_DR)


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last dimension but one (the width, or that of each head), in float32 inside."""

  eps: float
  in_float32: bool = False  # whether the scale multiplies before rounding to the dtype of x
  offset: float = 0.0  # added to the scale, in float32 if that multiplies so

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    scale_D = held(self, 'scale', nn.initializers.constant(1 - self.offset), x_DR.shape[-2:-1], x_DR.dtype)
    dtype = jnp.float32 if self.in_float32 else x_DR.dtype
    scale_D = scale_D.astype(dtype) + self.offset if self.offset else scale_D.astype(dtype)
    return normalise(x_DR, scale_D, eps=self.eps).astype(x_DR.dtype)


def norm_of(config: Any, name: str | None = None) -> RMSNorm:
  """Make a norm of the form that the config's layers have."""
  return RMSNorm(config.norm_eps, config.norm_in_float32, config.norm_offset, name=name)


class Rotation(NamedTuple):
  """Angles of rotary position embedding (RoFormer, arXiv:2104.09864), of T tokens, for all heads and like layers.

  Of P pairs, all K/2 of a head, or as many of its first numbers as the model turns; 0 in a layer without RoPE.
  """

  cos: jax.Array  # [P, B, T] f32
  sin: jax.Array  # [P, B, T] f32

  @classmethod
  def of(cls, config: TargetConfig, position_BT: jax.Array) -> 'Rotation':
    """Compute the angles of the config's layers at absolute positions, i32.

    Pairs have wavelengths from 2 pi to 2 pi theta, `rope_slowdown` times slower where there is one.
    """
    if not config.has_rope:
      return cls(*(jnp.zeros((0, *position_BT.shape)),) * 2)
    half = (config.rotary_dim or config.head_dim) // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_slowdown:
      frequency /= jnp.asarray(config.rope_slowdown, jnp.float32)
    angle = frequency[:, None, None] * position_BT.astype(jnp.float32)[None]
    tables = (compute_once(config.rope_factor * f(angle)) for f in (jnp.cos, jnp.sin))  # not in every layer and head
    return cls(*tables)

  def rotate(self, x_KR: jax.Array) -> jax.Array:
    """Rotate [..., K, R] of any float dtype, in float32: dimension i pairs with i + P (the rotate-half form)."""
    num_pairs = self.cos.shape[0]
    if not num_pairs:
      return x_KR
    cos, sin = (x.reshape(*(1,) * (x_KR.ndim - 2), num_pairs, -1) for x in self)
    low, high, rest = jnp.split(x_KR.astype(jnp.float32), (num_pairs, 2 * num_pairs), axis=-2)
    rotated_KR = jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-2)
    return rotated_KR.astype(x_KR.dtype)


class AttentionFn(Protocol):
  """The attention function of a layer; a pytree if layers that are traced once take it as an argument."""

  def __call__(self, q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, /, *sinks: Any) -> tuple[jax.Array, Any]:
    """Attend with queries [B, G, J, T, K] and new keys and values [B, G, T, K].

    Of a model that has sinks, with these too, [G, J].

    Returns values in the shape of the queries, and a memory: what the caller wants to keep of the pass.
    """
    ...


def no_attention(q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> tuple[jax.Array, None]:
  """Attend to nothing, as when parameters are initialised."""
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

  def __call__(
    self, q_BGJTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, sinks_GJ: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    k_BGMK, v_BGMK = k_BGTK, v_BGTK
    if self.earlier is not None:
      k_BGMK, v_BGMK = (jnp.concatenate(x, axis=2) for x in zip(self.earlier, (k_BGTK, v_BGTK), strict=True))
    given = Operands(q_BGJTK, k_BGMK, v_BGMK, self.mask, self.keys, self.values, self.length, self.oldest, sinks_GJ)
    return attend(given), (k_BGMK, v_BGMK)


class Attention(nn.Module):
  """Self-attention of new tokens; `attention` says to what."""

  config: TargetConfig

  @nn.compact
  def __call__(self, x_DR, rotation: Rotation, attention: AttentionFn):
    c = self.config
    (B, T), G, K = rotation.cos.shape[1:], c.num_kv_heads, c.head_dim
    J = c.num_heads // G

    def rotate(x_KR, name):
      if c.qk_norm:
        shape = (-1, B * T) if c.joint_qk_norm else x_KR.shape
        x_KR = norm_of(c, name)(x_KR.reshape(shape)).reshape(x_KR.shape)
      return rotation.rotate(x_KR)

    # A key-value head's J queries, its key and its value stand together: a mesh splits them by heads. Where it has to
    # split the weights of each head instead, their outputs meet here, not as scores.
    qkv_GQKBT = Linear((G, J + 2, K), c.qkv_bias, name='qkv')(x_DR).reshape(G, J + 2, K, B, T)
    qkv_GQKR = constrain(qkv_GQKBT, ('kv_heads', None, None, 'batch', None)).reshape(G, J + 2, K, B * T)
    q_GJKR, k_GKR = rotate(qkv_GQKR[:, :J], 'q_norm'), rotate(qkv_GQKR[:, J], 'k_norm')
    if c.attention_scale is not None:  # what attends multiplies by 1 / sqrt(K)
      q_GJKR *= c.attention_scale * K**0.5
    q_BGJTK = q_GJKR.reshape(G, J, K, B, T).transpose(3, 0, 1, 4, 2)
    k_BGTK, v_BGTK = (x.reshape(G, K, B, T).transpose(2, 0, 3, 1) for x in (k_GKR, qkv_GQKR[:, J + 1]))
    sinks = (held(self, 'sinks', nn.initializers.normal(), (G, J), x_DR.dtype),) if c.has_sinks else ()
    out_BGJTK, memory = attention(q_BGJTK, k_BGTK, v_BGTK, *sinks)
    out_DR = out_BGJTK.transpose(1, 2, 4, 0, 3).reshape(c.num_heads * K, B * T)
    return Linear((c.width,), c.o_bias, name='o')(out_DR), memory


def activate(gate_FR: jax.Array, up_FR: jax.Array, activation: str = 'silu') -> jax.Array:
  """Return activation(gate) * up: SwiGLU with 'silu', GeGLU with 'gelu_tanh' (GLU variants, arXiv:2002.05202)."""
  return (nn.silu if activation == 'silu' else nn.gelu)(gate_FR) * up_FR


def activate_clamped(gate_FR: jax.Array, up_FR: jax.Array, limit: float, slope: float) -> jax.Array:
  """Return gpt-oss's SwiGLU, (up + 1) * gate * sigmoid(slope * gate): neither exceeds the limit, up to both sides."""
  gate_FR, up_FR = jnp.minimum(gate_FR, limit), jnp.clip(up_FR, -limit, limit)
  return (up_FR + 1) * gate_FR * nn.sigmoid(slope * gate_FR)


class SwiGLU(nn.Module):
  """down(activation(gate(x)) * up(x)); see `activate`."""

  ffn_width: int
  use_bias: bool = False
  activation: str = 'silu'
  num_outputs: int = 1  # vectors that `down` gives, one after the other

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    gate_FR, up_FR = Linear((2, self.ffn_width), self.use_bias, name='gate_up')(x_DR)
    active_FR = activate(gate_FR, up_FR, self.activation)
    return Linear((self.num_outputs * x_DR.shape[0],), self.use_bias, name='down')(active_FR)


def route(logits_ER: jax.Array, experts_per_token: int, *, is_normalised: bool = True) -> jax.Array:
  """Return [E, R] f32, each column's shares of its likeliest experts; 0 for the others.

  The shares sum to 1 if they are normalised, else they are the probabilities among all experts.
  """
  p_RE = jax.nn.softmax(logits_ER.astype(jnp.float32), axis=0).T
  share_Rk, expert_Rk = jax.lax.top_k(p_RE, experts_per_token)
  if is_normalised:
    share_Rk /= share_Rk.sum(axis=1, keepdims=True)
  return (jax.nn.one_hot(expert_Rk, p_RE.shape[1], axis=0) * share_Rk[None]).sum(axis=2)


def find_asked(share_ER: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return the experts [E] i32, those that some column chose first and in order, and [] i32, how many these are."""
  is_asked_E = (share_ER > 0).any(axis=1)
  return jnp.argsort(~is_asked_E, stable=True).astype(jnp.int32), is_asked_E.sum(dtype=jnp.int32)


class Experts(nn.Module):
  """Mixture of experts: each column passes through the few of E SwiGLUs that a router chooses (arXiv:2401.04088).

  An expert that some column chose runs over all columns, so shapes are static; for many columns that is up to
  E / experts_per_token times the arithmetic needed. An expert that no column chose is not read, since a pass of few
  columns is bound by the weights it reads. The experts run in a loop, so a program is as long for a hundred as for two.
  """

  config: TargetConfig

  @nn.compact
  def __call__(self, x_DR: jax.Array) -> jax.Array:
    c, (D, R) = self.config, x_DR.shape
    inward = ExpertLinear(c.num_experts, (2, c.ffn_width), D, c.expert_bias, name='expert_gate_up')(x_DR.dtype)
    outward = ExpertLinear(c.num_experts, (D,), c.ffn_width, c.expert_bias, name='expert_down')(x_DR.dtype)
    logits_ER = Linear((c.num_experts,), c.expert_bias, name='router')(x_DR)
    share_ER = route(logits_ER, c.experts_per_token, is_normalised=c.shares_sum_to_1)

    def run_experts(num_experts, order_E, x_DR, share_ER, *weights):
      """Sum the outputs of the first experts of the order, `num_experts` of them."""

      def add(index, out_DR):
        expert = order_E[index]
        share_1R = jax.lax.dynamic_index_in_dim(share_ER, expert)
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=expert, keepdims=False)
        inward, outward = jax.tree.map(take, weights)
        gate_FR, up_FR = project(x_DR, **inward)
        if c.gate_limit is None:
          active_FR = activate(gate_FR, up_FR, c.activation)
        else:
          active_FR = activate_clamped(gate_FR, up_FR, c.gate_limit, c.gate_slope)
        y_DR = project(active_FR, **outward)
        # A select, not a product with 0: the output for a column that is not the expert's may have overflowed.
        own_DR = jnp.where(share_1R > 0, y_DR.astype(jnp.float32) * share_1R, 0)
        return out_DR + own_DR.astype(out_DR.dtype)

      return jax.lax.fori_loop(0, num_experts, add, jnp.zeros_like(x_DR))

    given = x_DR, share_ER, inward, outward
    most = R * c.experts_per_token
    if most > 4 * c.num_experts:  # then every expert is needed almost surely, and asking would only cost time
      return run_experts(c.num_experts, jnp.arange(c.num_experts), *given)
    return dispatch_loop(
      *find_asked(share_ER),
      *given,
      sequential=lambda order_E, num_asked, *given: run_experts(num_asked, order_E, *given),
      parallel=lambda order_E, _, *given: run_experts(min(c.num_experts, most), order_E, *given),
    )


class DecoderLayer(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)), with the norms that the config asks for."""

  config: TargetConfig  # see `TargetConfig.layer` and `DrafterConfig.as_layer`
  has_input_norm: bool = True
  num_outputs: int = 1  # GRIFFIN: vectors that come out; the feed-forward network adds another share to each

  @nn.compact
  def __call__(self, x_DR, rotation: Rotation, attention: AttentionFn):
    """Return the outputs, [D, R] or [num_outputs x D, R], and the memory of `attention`."""
    c = self.config

    def read(x_DR, name, has_norm):
      return norm_of(c, name)(x_DR) if has_norm else x_DR

    def add(x_DR, branch_DR, name):
      branch_DR = read(branch_DR, name, c.has_output_norms)
      return x_DR + (branch_DR if c.residual_scale == 1 else branch_DR * c.residual_scale)

    swiglu = functools.partial(SwiGLU, c.ffn_width, c.mlp_bias, c.activation, self.num_outputs)
    mlp = Experts(c, name='mlp') if c.num_experts else swiglu(name='mlp')
    read_DR = read(x_DR, 'attn_norm', self.has_input_norm and c.has_input_norms)
    attended_DR, memory = Attention(c, name='attn')(read_DR, rotation, attention)
    x_DR = add(x_DR, attended_DR, 'attn_out_norm')
    branch_DR = mlp(read(x_DR, 'mlp_norm', c.has_input_norms))
    return add(jnp.concatenate([x_DR] * self.num_outputs), branch_DR, 'mlp_out_norm'), memory
