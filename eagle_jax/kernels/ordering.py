"""Order of computation: what a compiler must compute before something else, or only once."""

import jax
import jax.numpy as jnp

from eagle_jax.kernels.einsum import einsum_float32


def reference(x: jax.Array, *dependencies: jax.Array) -> jax.Array:
  """Return x: neither function below changes a number."""
  return x


def wait_for(index_B: jax.Array, is_ready_B: jax.Array) -> jax.Array:
  """Return indices, none of them negative, that depend on a condition, so that a write there waits until it is known.

  XLA copies an array that it may have to write while it is read: in plain decoding every cache, at every step.
  """
  return jnp.where(is_ready_B, index_B, jnp.maximum(index_B, 0))


def compute_once(x_ABC: jax.Array) -> jax.Array:
  """Return a float32 table, computed once for all its readers; XLA would fuse its computation into each of them.

  It does not fuse a product. This one, by the identity, changes no number.
  """
  return einsum_float32('ij,jbt->ibt', jnp.eye(x_ABC.shape[0]), x_ABC)
