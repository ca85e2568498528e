"""Random networks so small that compiling them takes a second; the target's text is far from constant."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import TextLookup
from eagle_jax.models.transformer import Target, TransformerTarget

TARGET = TargetConfig(
  vocab_size=97, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64, max_context=512
)
DRAFTER = DrafterConfig(vocab_size=97, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=48)
PROMPTS = [[(10 * first + 3 * i) % 97 for i in range(1 + first % 7)] for first in range(8)]
HOW = {'max_new_tokens': 24, 'eos_ids': ()}
SAMPLINGS = ({}, {'temperature': 1.0, 'seed': 5})


@functools.cache
def _drawn(network, seed: int) -> Any:
  return jax.device_get(network.init_params(jax.random.key(seed)))


def random_params(network, seed: int) -> Any:
  """Make a network's random weights, which are drawn once in a process: op by op, which takes seconds at first."""
  return jax.tree.map(jnp.array, _drawn(network, seed))


def target(config: TargetConfig = TARGET, *, seed: int = 0, tokenizer=None) -> Target:
  return Target(config, random_params(TransformerTarget(config), seed), tokenizer)


def sure_target() -> Target:
  """A target that is sure of itself, and whose newest token counts most."""
  sure = target(seed=2)
  sure.params['embed']['weight'] *= 50
  sure.params['head']['weight'] *= 40
  return sure


def drafter(config: DrafterConfig = DRAFTER, *, seed: int = 1) -> Drafter:
  return Drafter(config, random_params(Eagle(config), seed))


def counting(period: int = 12) -> Target:
  """A target that counts: after token 0 comes 1, and after `period` - 1 comes 0 again."""
  counting = target()
  for layer in ('layer_0', 'layer_1'):
    for block, linear in (('attn', 'o'), ('mlp', 'down')):
      counting.params[layer][block][linear]['weight'] *= 0
  embed_VD = jax.random.orthogonal(jax.random.key(0), TARGET.width)[jnp.arange(TARGET.vocab_size) % TARGET.width]
  before = jnp.arange(period) - 1
  head_VD = jnp.zeros_like(embed_VD).at[:period].set(10 * embed_VD[before % period])
  counting.params['embed']['weight'], counting.params['head']['weight'] = embed_VD, head_VD
  return counting


def no_noise(depth, token_UB):
  return jnp.zeros(token_UB.shape)


def context(policy, *, batch: int = 1, noise=no_noise) -> DraftContext:
  """Make the context of a drafter behind an empty text."""
  lookup = TextLookup(jnp.zeros((batch, 1), jnp.int32), jnp.zeros(batch, jnp.int32))
  arrays = policy.arrays(None, None, None)
  return DraftContext.of(policy, arrays, noise=noise, is_live_B=jnp.ones(batch, bool), lookup=lookup)
