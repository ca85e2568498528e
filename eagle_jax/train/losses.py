"""Training losses: pure functions of columns that give one number a row, so that masks and weights compose outside.

Predictions and targets are columns, [.., R]; what a loss returns is [R], float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def weighted_mean(x_R: jax.Array, weight_R: jax.Array) -> jax.Array:
  """[] f32: mean over the rows that count; 0 if none does."""
  return (x_R * weight_R).sum() / jnp.maximum(weight_R.sum(), 1)


def smooth_l1(predicted_DR: jax.Array, feature_DR: jax.Array) -> jax.Array:
  """[R] f32: Huber distance (beta 1) to the target's features, mean over the width (EAGLE, arXiv:2401.15077, L_reg)."""
  error_DR = jnp.abs(predicted_DR.astype(jnp.float32) - feature_DR.astype(jnp.float32))
  return jnp.where(error_DR < 1, 0.5 * error_DR**2, error_DR - 0.5).mean(axis=0)


def cross_entropy(log_q_UR: jax.Array, weight_UR: jax.Array) -> jax.Array:
  """[R] f32, nats: -sum of weight x log q over the ids.

  With the target's probabilities as weights this is EAGLE's L_cls (arXiv:2401.15077); with `top_k_of` them, HASS's
  top-K distillation (arXiv:2408.15766).
  """
  return -(weight_UR * log_q_UR).sum(axis=0)


def top_k_of(p_UR: jax.Array, k: int) -> jax.Array:
  """[U, R]: the k largest probabilities of every column, not renormalised; the others 0. Equal ones count as one."""

  def next_smaller(_, least_1R):
    return jnp.where(p_UR < least_1R, p_UR, -1).max(axis=0, keepdims=True)

  least_1R = jax.lax.fori_loop(0, k, next_smaller, jnp.full((1, p_UR.shape[1]), jnp.inf, p_UR.dtype))
  return jnp.where(p_UR >= least_1R, p_UR, 0)


def rank_of(logits_UR: jax.Array, index_R: jax.Array) -> jax.Array:
  """[R] i32: how many ids score above this one, 0 for the best; U where the index is negative (outside the ids)."""
  own_1R = jnp.take_along_axis(logits_UR, jnp.maximum(index_R, 0)[None], axis=0)
  rank_R = (~(logits_UR <= own_1R)).sum(axis=0, dtype=jnp.int32)  # so NaN is never the best
  return jnp.where(index_R < 0, logits_UR.shape[0], rank_R)


def by_chunks(row_losses: Callable, num_chunks: int) -> Callable:
  """`row_losses`, a few rows at a time, with its gradient taken on the way: no array of all rows' logits ever exists.

  Rows are independent, so the gradient of each row's loss is known as soon as the row is. Logits of the chunk at hand
  are computed once, and thrown away; a backward pass only scales what was kept, [D, .., R].

  Args:
    row_losses: (frozen, out [D, .., R], rows) -> (loss [.., R], other); `rows` and `other` pytrees of [.., R].
    num_chunks: divides R.

  Returns:
    A function as `row_losses`, differentiable in `out` alone.
  """

  def split(x):
    parts = x.reshape(*x.shape[:-1], num_chunks, x.shape[-1] // num_chunks)
    return jnp.moveaxis(parts, -2, 0)

  def join(x):
    parts = jnp.moveaxis(x, 0, -2)
    return parts.reshape(*parts.shape[:-2], -1)

  def run(frozen, out, rows, *, with_gradient: bool):
    def of_chunk(chunk):
      out, rows = chunk
      if not with_gradient:
        return row_losses(frozen, out, rows), None
      loss, pull, other = jax.vjp(lambda out: row_losses(frozen, out, rows), out, has_aux=True)
      return (loss, other), pull(jnp.ones_like(loss))[0]

    return jax.tree.map(join, jax.lax.map(of_chunk, jax.tree.map(split, (out, rows))))

  @jax.custom_vjp
  def chunked(frozen, out, rows):
    return run(frozen, out, rows, with_gradient=False)[0]

  def forward(frozen, out, rows):
    return run(frozen, out, rows, with_gradient=True)

  def backward(gradient, cotangent):
    return None, gradient * cotangent[0][None].astype(gradient.dtype), None

  chunked.defvjp(forward, backward)
  return functools.wraps(row_losses)(chunked)
