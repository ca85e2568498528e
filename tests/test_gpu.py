"""On a real GPU: forms that only run there, compared with those that run everywhere. Skipped elsewhere.

python -m pytest tests/test_gpu.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import decode
from eagle_jax.evaluate import random_pairs
from eagle_jax.kernels import attention, attention_gpu
from eagle_jax.policy.trees import Chain, DynamicTree

pytestmark = pytest.mark.skipif(jax.default_backend() != 'gpu', reason='no GPU is here')


def relative_error(found, expected):
  found, expected = (np.asarray(x, np.float32) for x in (found, expected))
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
  ('B', 'G', 'J', 'T', 'M', 'K', 'S', 'lengths'),
  [
    (1, 2, 4, 60, 60, 128, 1024, [1000]),
    (3, 2, 1, 4, 13, 64, 320, [5, 319, 320]),
    (2, 3, 3, 10, 20, 64, 192, [0, 192]),
  ],
)
def test_the_kernel_sees_the_same(B, G, J, T, M, K, S, lengths):
  if not attention_gpu.is_hopper():
    pytest.skip('the kernel is for Hopper GPUs')
  keys = iter(jax.random.split(jax.random.key(0), 6))
  q, *rows = (
    jax.random.normal(next(keys), shape, jnp.bfloat16)
    for shape in ((B, G, J, T, K), (B, G, M, K), (B, G, M, K), (B, G, S, K), (B, G, S, K))
  )
  mask_BTM = jax.random.bernoulli(next(keys), 0.4, (B, T, M)).at[:, jnp.arange(T), M - T + jnp.arange(T)].set(True)
  length_B = jnp.asarray(lengths, jnp.int32)

  @jax.jit
  def both(q, k, v, keys, values):
    found = attention_gpu.attend(q, k, v, mask_BTM, keys, values, length_B)
    q, k, v, keys, values = (x.astype(jnp.float32) for x in (q, k, v, keys, values))
    return found, attention.reference(attention.Operands(q, k, v, mask_BTM, keys, values, length_B))

  assert relative_error(*both(q, *rows)) < 0.004


@pytest.mark.parametrize('policy', [Chain(3), DynamicTree(4, 4, 4, 24, lookup=True)])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_text_is_that_of_plain_decoding(policy, temperature):
  target, drafter = random_pairs.random_pair('tiny', dtype='float32')
  prompts = np.random.default_rng(0).integers(0, target.config.vocab_size, (3, 40)).tolist()
  how = {'max_new_tokens': 48, 'temperature': temperature, 'seed': 3}
  plain = decode.generate(target, None, prompts, policy='plain', **how)
  assert decode.generate(target, drafter, prompts, policy=policy, **how).tokens == plain.tokens
