"""A target of one layer, and a drafter that computes what it does.

The target's embeddings are of unit rms, which its input norm leaves alone. The drafter's fc passes the embedding
through, and its layer *is* the target's layer. So it computes the target's own next feature (but for the first prompt
token, which no drafter sees, and the final norm, a scale): nearly all that it drafts must be accepted.
"""

import dataclasses

import jax
import jax.numpy as jnp

import tiny
from eagle_jax.draft.drafter import Drafter
from eagle_jax.models.transformer import Target

WIDTH = tiny.TARGET.width
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [30, 31, 32, 33, 34], [90, 80, 70, 60, 50, 40, 30, 20, 10], [9, 9, 9, 9, 8, 7]]
NUM_NEW = 64


def target() -> Target:
  config = dataclasses.replace(tiny.TARGET, num_layers=1)
  params = tiny.target(config).params
  embed_VD = params['embed']['weight']
  embed_VD /= jnp.sqrt(jnp.square(embed_VD).mean(axis=1, keepdims=True))
  qkv_GQKD, o_DH = (params['layer_0']['attn'][name]['weight'] for name in ('qkv', 'o'))
  sharper_GQKD = 3.0 * qkv_GQKD.at[:, -1].multiply(0.5)  # attention looks somewhere, and what it sees counts
  attn = {'qkv': {'weight': sharper_GQKD}, 'o': {'weight': 1.5 * o_DH}}
  head = {'weight': 40 * params['head']['weight']}  # confident, or dynamic trees would be flat
  return Target(
    config, {**params, 'head': head, 'embed': {'weight': embed_VD}, 'layer_0': {**params['layer_0'], 'attn': attn}}
  )


def drafter_of(target: Target, *, noise: float) -> Drafter:
  """The target's layer behind an fc that passes the embedding through, plus `noise` times the feature, shuffled."""
  fields = dataclasses.asdict(target.config)
  names = ('vocab_size', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width', 'norm_eps', 'rope_theta')
  config = dataclasses.replace(tiny.DRAFTER, **{name: fields[name] for name in names}, fc_bias=False)
  shuffle_DD = jax.random.orthogonal(jax.random.key(5), WIDTH)
  fc = {'weight': jnp.concatenate([jnp.eye(WIDTH), noise * shuffle_DD], axis=1)}
  layer = {name: target.params['layer_0'][name] for name in ('attn', 'mlp_norm', 'mlp')}
  return Drafter(config, {'fc': fc, 'layer': layer})
