"""The index of the largest score."""

import jax
import jax.numpy as jnp

NAN_SCORE = -2  # in the place of an index, where a score is NaN: no id, no NO_TOKEN, and no EOS


def reference(score_V: jax.Array) -> jax.Array:
  """Return the index of the largest score, [] i32; of equal ones the first; `NAN_SCORE` if any score is NaN."""
  return jnp.where(jnp.isnan(score_V).any(), NAN_SCORE, jnp.argmax(score_V)).astype(jnp.int32)


def argmax(score_V: jax.Array) -> jax.Array:
  """Return the index of the largest score in two passes, one for the score and one for its index.

  XLA:CPU makes a scalar loop of `jnp.argmax`, ten times slower than these. If a score is NaN, so is
  the largest, and equals none.
  """
  num_scores = score_V.shape[0]
  index = jnp.where(score_V == score_V.max(), jnp.arange(num_scores, dtype=jnp.int32), num_scores).min()
  return jnp.where(index == num_scores, NAN_SCORE, index)
