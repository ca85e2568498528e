"""Training losses: pure functions that give one number a place, so that masks and weights compose outside.

Predictions and targets are columns, [.., R], one for each of R places; a loss returns [R], float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def weighted_mean(x_R: jax.Array, weight_R: jax.Array) -> jax.Array:
  """Return [] f32, the mean over the places by their weights; 0 if all weights are 0."""
  return (x_R * weight_R).sum() / jnp.maximum(weight_R.sum(), 1)


def regression(predicted_DR: jax.Array, feature_DR: jax.Array) -> jax.Array:
  """Return [R] f32: the Huber loss to the target's features, mean over the width (EAGLE, arXiv:2401.15077, L_reg)."""
  return optax.huber_loss(predicted_DR.astype(jnp.float32), feature_DR.astype(jnp.float32)).mean(axis=0)


def cross_entropy(log_q_UR: jax.Array, weight_UR: jax.Array) -> jax.Array:
  """Return [R] f32, nats: -sum over the ids of weight x log q.

  With the target's probabilities as weights this is EAGLE's L_cls (arXiv:2401.15077); with `top_k_of` them, HASS's
  top-K distillation (arXiv:2408.15766).
  """
  return -(weight_UR * log_q_UR).sum(axis=0)


def top_k_of(p_UR: jax.Array, k: int) -> jax.Array:
  """Return [U, R]: the k largest probabilities of each column, not renormalised, and 0 elsewhere; ties count once."""

  def next_smaller(_, least_1R):
    return jnp.where(p_UR < least_1R, p_UR, -1).max(axis=0, keepdims=True)

  least_1R = jax.lax.fori_loop(0, k, next_smaller, jnp.full((1, p_UR.shape[1]), jnp.inf, p_UR.dtype))
  return jnp.where(p_UR >= least_1R, p_UR, 0)


def rank_of(logits_UR: jax.Array, index_R: jax.Array) -> jax.Array:
  """Return [R] i32: how many ids score above this one, 0 for the best; U where the index is negative (not an id)."""
  own_1R = jnp.take_along_axis(logits_UR, jnp.maximum(index_R, 0)[None], axis=0)
  rank_R = (~(logits_UR <= own_1R)).sum(axis=0, dtype=jnp.int32)  # so NaN is never the best
  return jnp.where(index_R < 0, logits_UR.shape[0], rank_R)


def by_chunks(losses_of: Callable, num_chunks: int) -> Callable:
  """Compute `losses_of` a few places at a time, with its gradient: no array of all places' logits ever exists.

  Places are independent, so the gradient of each place's loss is known as soon as its logits are. They are computed
  once, and dropped; the backward pass scales the gradient that was kept, [D, .., R]. `lax.map` over `jax.checkpoint`
  would compute them a second time: the loss would take half as long again.

  Args:
    losses_of: (frozen, out [D, .., R], others) -> (loss [.., R], metrics), the last two pytrees of [.., R].
    num_chunks: divides R.

  Returns:
    A function like `losses_of`, differentiable in `out` alone.
  """

  def split(x):
    parts = x.reshape(*x.shape[:-1], num_chunks, x.shape[-1] // num_chunks)
    return jnp.moveaxis(parts, -2, 0)

  def join(x):
    parts = jnp.moveaxis(x, 0, -2)
    return parts.reshape(*parts.shape[:-2], -1)

  def run(frozen, out, others, *, with_gradient: bool):
    def of_chunk(chunk):
      out, others = chunk
      if not with_gradient:
        return losses_of(frozen, out, others), None
      loss, pull, metrics = jax.vjp(lambda out: losses_of(frozen, out, others), out, has_aux=True)
      return (loss, metrics), pull(jnp.ones_like(loss))[0]

    return jax.tree.map(join, jax.lax.map(of_chunk, jax.tree.map(split, (out, others))))

  @jax.custom_vjp
  def chunked(frozen, out, others):
    return run(frozen, out, others, with_gradient=False)[0]

  def forward(frozen, out, others):
    return run(frozen, out, others, with_gradient=True)

  def backward(gradient, cotangent):
    return None, gradient * cotangent[0][None].astype(gradient.dtype), None

  chunked.defvjp(forward, backward)
  return functools.wraps(losses_of)(chunked)
