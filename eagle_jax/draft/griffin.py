"""What GRIFFIN (arXiv:2502.11018) changes of the EAGLE-2 head: how tokens enter it, and what comes out.

In front, the embedding e of the next token enters once more, beside what `fc` made of it and of the feature:
x = W [e; f], then x + MLP [norm(x); norm(e)]. At the end, the layer gives two vectors. The target's head reads the
first, "predict"; the second, "regress", is the feature that the next step reads, and that is to resemble the target's.
Only the last product of the layer has twice the outputs, and both add the same residual.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.models.layers import Linear, RMSNorm


class TokenFusion(nn.Module):
  """The module: x + down(silu(up([norm(x_norm(x)); norm(e)]))). Both norms of x are the reference's."""

  ffn_width: int
  norm_eps: float

  @nn.compact
  def __call__(self, x_DR: jax.Array, embedding_DR: jax.Array) -> jax.Array:
    norm = RMSNorm(self.norm_eps, name='norm')
    both_R = jnp.concatenate([norm(RMSNorm(self.norm_eps, name='x_norm')(x_DR)), norm(embedding_DR)])
    hidden_FR = nn.silu(Linear((self.ffn_width,), name='up')(both_R))
    return x_DR + Linear((x_DR.shape[0],), name='down')(hidden_FR)
