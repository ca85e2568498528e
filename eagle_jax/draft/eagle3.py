"""The EAGLE-3 head (arXiv:2503.01840): fused features of three target layers, and a head of its own.

Positions are shifted as in EAGLE-1/2: position t combines the fused feature of token t with the embedding of the *next*
token. The output need not resemble a target feature: the drafter's own norm and head turn it into a distribution, and
it replaces the fused feature in the next draft step.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.config import Eagle3Config
from eagle_jax.draft.eagle import Eagle
from eagle_jax.models.layers import Attention, AttentionFn, Linear, RMSNorm, Rotation, SwiGLU, embed, no_attention


class Eagle3Head(nn.Module):
  """The module: `fc` over the taps, a layer whose attention reads [embedding, feature], and the final norm."""

  config: Eagle3Config

  def setup(self):
    c = self.config
    if c.fc_norm:
      self.fc_norm = [RMSNorm(c.norm_eps) for _ in range(c.num_taps)]
    if c.norm_before_fc:
      self.input_norm = RMSNorm(c.norm_eps)
    if c.num_taps:
      self.fc = Linear((c.width,), c.fc_bias)
    self.embedding_norm, self.feature_norm, self.mlp_norm, self.norm = (RMSNorm(c.norm_eps) for _ in range(4))
    self.attn, self.mlp = Attention(c.as_layer()), SwiGLU(c.ffn_width, c.mlp_bias)

  def fuse(self, taps: tuple[jax.Array, ...]) -> jax.Array:
    """Fuse the taps, each [target width, R], into features [D, R]."""
    if self.config.fc_norm:
      taps = tuple(norm(tap_DR) for norm, tap_DR in zip(self.fc_norm, taps, strict=True))
    joined = jnp.concatenate(taps)
    return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

  def __call__(self, embedding_DR, feature_DR, position_BT, attention: AttentionFn):
    """Compute outputs [D, R], and return them with the memory that `attention` returns."""
    normed_DR = self.feature_norm(feature_DR)
    both_R = jnp.concatenate([self.embedding_norm(embedding_DR), normed_DR])
    mixed_DR, memory = self.attn(both_R, Rotation.of(self.config.as_layer(), position_BT), attention)
    x_DR = (normed_DR if self.config.norm_before_residual else feature_DR) + mixed_DR
    return x_DR + self.mlp(self.mlp_norm(x_DR)), memory

  def final(self, out_DR: jax.Array) -> jax.Array:
    """Normalise outputs for the language-model head."""
    return self.norm(out_DR)

  def everything(self, embedding_DR, taps, position_BT, attention: AttentionFn):
    """Run a pass through every parameter, for initialisation."""
    feature_DR = self.fuse(taps) if taps else embedding_DR
    return self.final(self(embedding_DR, feature_DR, position_BT, attention)[0])


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
  """`Eagle3Head` as pure functions for the decode loop (`draft.interface.DraftNetwork`).

  Its params are those of the module, `embed` [V, D] (its own, or the target's by reference), its own `head` [U, D], and
  `ids` [U] i32, the target ids that the head scores.
  """

  config: Eagle3Config
  fuses: ClassVar[frozenset[str]] = frozenset({'fc'})

  @property
  def num_layers(self) -> int:
    return 1

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise the module and `head` at random; under `jax.eval_shape`, the shapes that a checkpoint must have."""
    c = self.config
    head_UD = nn.initializers.lecun_normal(in_axis=-1, out_axis=0)(key, (c.num_ids, c.width), self.dtype)
    taps = (jnp.zeros((c.target_width, 1), self.dtype),) * c.num_taps
    column_D1 = jnp.zeros((c.width, 1), self.dtype)
    position_BT = jnp.zeros((1, 1), jnp.int32)
    variables = Eagle3Head(c).init(key, column_D1, taps, position_BT, no_attention, method='everything')
    return variables['params'] | {'head': {'weight': head_UD}}

  def fuse_taps(self, params, taps) -> jax.Array:
    if not self.config.num_taps:
      return taps.feature
    taps_DR = tuple(tap_DBP.reshape(tap_DBP.shape[0], -1).astype(self.dtype) for tap_DBP in taps.residual)
    return self._apply(params, taps_DR, method='fuse').reshape(-1, *taps.feature.shape[1:])

  def next_feature(self, params, out_DBW: jax.Array) -> jax.Array:
    if not self.config.norm_output:
      return out_DBW
    return self.pre_head(params, out_DBW.reshape(out_DBW.shape[0], -1)).reshape(out_DBW.shape)

  def pre_head(self, params, out_DR: jax.Array) -> jax.Array:
    return self._apply(params, out_DR, method='final')

  def apply_layers(self, params, token_BT, feature_DBT, position_BT, attentions: Sequence[AttentionFn]):
    embedding_DR = embed(params['embed'], token_BT.reshape(-1)).astype(self.dtype)
    feature_DR = feature_DBT.reshape(feature_DBT.shape[0], -1).astype(self.dtype)
    (attention,) = attentions
    out_DR, memory = self._apply(params, embedding_DR, feature_DR, position_BT, attention, method='__call__')
    return out_DR.reshape(feature_DBT.shape), (memory,)

  def _apply(self, params, *args, method: str) -> Any:
    own = {name: x for name, x in params.items() if name not in ('embed', 'head', 'ids', 'lookup_weights')}
    return Eagle3Head(self.config).apply({'params': own}, *args, method=method)
