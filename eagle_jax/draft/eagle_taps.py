"""The EAGLE-2 head with taps: middle layers of the target add to what the layer reads at the target's own tokens.

x = W [e; f] + W_t [norm(t_1); norm(t_2); ...], where e is the embedding of the next token, f the target's feature and
t_i the input of a middle layer, as EAGLE-3 reads them (arXiv:2503.01840), each with a norm of its own, as in EAGLE-3.1
(arXiv:2605.09992). At drafted tokens there are no taps, so nothing is added, and a level of a tree costs what it costs
EAGLE-2. With W_t = 0 the head is EAGLE-2's, from which training may go on.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.config import EagleTapsConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.models.layers import Linear, RMSNorm


class TapFusion(nn.Module):
  """The module: a norm of each tap, then `fc` over all of them."""

  config: EagleTapsConfig

  @nn.compact
  def __call__(self, taps: tuple[jax.Array, ...]) -> jax.Array:
    """Fuse the taps, each [D, R], into what they add, [D, R]."""
    normed = [RMSNorm(self.config.norm_eps, name=f'norm_{tap}')(tap_DR) for tap, tap_DR in enumerate(taps)]
    return Linear((self.config.width,), name='fc')(jnp.concatenate(normed))


@dataclasses.dataclass(frozen=True)
class EagleTaps(Eagle):
  """`Eagle` with a `TapFusion` under `taps` in its params. Features have 2D numbers: the second half is added."""

  config: EagleTapsConfig
  fuses: ClassVar[frozenset[str]] = frozenset({'taps'})

  def extend(self, params: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Add taps whose `fc` is zeros, and what `Eagle` adds."""
    taps = (jnp.zeros((self.config.target_width, 1), self.dtype),) * len(self.config.taps)
    fusion = TapFusion(self.config).init(jax.random.key(0), taps)['params']
    silent = {'fc': jax.tree.map(jnp.zeros_like, fusion['fc'])}
    return super().extend(params, key) | {'taps': fusion | silent}

  def fuse_taps(self, params, taps) -> jax.Array:
    taps_DR = tuple(tap_DBP.reshape(tap_DBP.shape[0], -1).astype(self.dtype) for tap_DBP in taps.residual)
    added_DR: Any = TapFusion(self.config).apply({'params': params['taps']}, taps_DR)
    return jnp.concatenate([taps.feature.astype(self.dtype), added_DR.reshape(taps.feature.shape)])

  def next_feature(self, params, out_DBW: jax.Array) -> jax.Array:
    feature_DBW = super().next_feature(params, out_DBW)
    return jnp.concatenate([feature_DBW, jnp.zeros_like(feature_DBW)])
