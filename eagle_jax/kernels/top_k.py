"""The largest scores of a vocabulary, and where they are."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.kernels.dispatch import dispatch

PART = 512  # scores of a vocabulary that one block of a GPU's threads sorts


def reference(score_RU: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Return `jax.lax.top_k`: of equal scores the first."""
  best_RC, index_RC = jax.lax.top_k(score_RU, count)
  return best_RC, index_RC


def top_k_of_parts(score_RU: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Return the largest of the largest of each part, because XLA:GPU gives a whole column to one block of threads.

  `count` is at most `PART`.
  """
  num_columns, size = score_RU.shape
  padded_RU = jnp.pad(score_RU, ((0, 0), (0, -size % PART)), constant_values=-jnp.inf)  # of equals, the first counts
  best_RNC, place_RNC = jax.lax.top_k(padded_RU.reshape(num_columns, -1, PART), count)
  index_RNC = place_RNC + PART * jnp.arange(best_RNC.shape[1]).reshape(1, -1, 1)
  best_RC, place_RC = jax.lax.top_k(best_RNC.reshape(num_columns, -1), count)
  return best_RC, jnp.take_along_axis(index_RNC.reshape(num_columns, -1), place_RC, axis=1, mode='clip')


def top_k(score_RU: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Return the `count` largest scores of each of R vocabularies, and their indices, [R, count] each."""
  whole, in_parts = (functools.partial(form, count=count) for form in (reference, top_k_of_parts))
  return dispatch(score_RU, default=whole, gpu=in_parts if count <= PART < score_RU.shape[1] else None)
