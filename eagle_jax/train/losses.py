"""Training losses: pure functions that give one number a place, so that masks and weights compose outside.

Predictions and targets are columns, [.., R], one for each of R places; a loss returns [R], float32. `PARTS` lists those
between the distributions of target and drafter, by the names that an `Objective` weighs them with.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


def total_variation(p_UR: jax.Array, log_q_UR: jax.Array) -> jax.Array:
  """Return [R] f32: 1 - sum of min(p, q), the share of tokens that rejection sampling would reject.

  `p_UR` may sum to less than 1: what is missing is lost. Source: LK losses, arXiv:2602.23881.
  """
  return 1 - jnp.minimum(p_UR, jnp.exp(log_q_UR)).sum(axis=0)


def lk_hybrid(log_p_UR: jax.Array, log_q_UR: jax.Array, mass_1R: jax.Array | float, *, decay: float) -> jax.Array:
  """Return [R] f32, nats: KL divergence where little is accepted, total variation where much is.

  lam KL(p; q) + (1 - lam) TV with lam = exp(-decay x acceptance), which no gradient goes through; each place has its
  own. Source: LK losses, arXiv:2602.23881.

  Args:
    log_p_UR: log-probabilities of the target among the drafted ids, which sum to 1 there.
    log_q_UR: the drafter's.
    mass_1R: the target's probability of all drafted ids; the rest counts as rejected.
    decay: the larger, the sooner total variation takes over.
  """
  p_UR = jnp.exp(log_p_UR)
  variation_R = total_variation(p_UR * mass_1R, log_q_UR)
  share_R = jnp.exp(-decay * jax.lax.stop_gradient(1 - variation_R))
  divergence_R = (p_UR * (log_p_UR - log_q_UR)).sum(axis=0)
  return share_R * divergence_R + (1 - share_R) * variation_R


def perturbed_cross_entropy(log_p_UR: jax.Array, log_q_UR: jax.Array, noise_UR: jax.Array) -> jax.Array:
  """Return [R] f32, nats: the cross-entropy to the token that the target draws, under the noise that it is drawn with.

  A seed fixes the noise of each position, so decoding ranks a tree by log q + noise and accepts argmax(log p + noise):
  the very quantities here. See `sampling.position_noise`.
  """
  drawn_1R = jnp.argmax(log_p_UR + noise_UR, axis=0)[None]
  log_q_UR = jax.nn.log_softmax(log_q_UR + noise_UR, axis=0)
  return -jnp.take_along_axis(log_q_UR, drawn_1R, axis=0)[0]


class Places(NamedTuple):
  """The two distributions over the drafted ids at R places."""

  log_p_UR: jax.Array  # the target's, normalised over these ids
  log_q_UR: jax.Array  # the drafter's
  mass_1R: Any  # the target's probability of all these ids; 1 if what lies outside is not to count
  noise_UR: Any  # what the target adds to its logits as it draws; None if no part needs it


# name of an `Objective`'s weight -> (places, objective) -> [R] f32
PARTS: dict[str, Callable[[Places, Any], jax.Array]] = {
  'cross_entropy': lambda x, _: cross_entropy(x.log_q_UR, jnp.exp(x.log_p_UR)),
  'top_k_cross_entropy': lambda x, o: cross_entropy(x.log_q_UR, top_k_of(jnp.exp(x.log_p_UR), o.top_k)),
  'total_variation': lambda x, _: total_variation(jnp.exp(x.log_p_UR) * x.mass_1R, x.log_q_UR),
  'lk_hybrid': lambda x, o: lk_hybrid(x.log_p_UR, x.log_q_UR, x.mass_1R, decay=o.lk_decay),
  'perturbed_cross_entropy': lambda x, _: perturbed_cross_entropy(x.log_p_UR, x.log_q_UR, x.noise_UR),
}


def weigh_parts(objective: Any, places: Places) -> jax.Array:
  """Return [R] f32, the sum of the `PARTS` that an objective weighs."""
  parts = [
    getattr(objective, name) * part(places, objective) for name, part in PARTS.items() if getattr(objective, name)
  ]
  return sum(parts, jnp.zeros(places.log_q_UR.shape[1:]))


def rank_of(logits_UR: jax.Array, index_R: jax.Array) -> jax.Array:
  """Return [R] i32: how many ids score above this one, 0 for the best; U where the index is negative (not an id)."""
  own_1R = jnp.take_along_axis(logits_UR, jnp.maximum(index_R, 0)[None], axis=0)
  rank_R = (~(logits_UR <= own_1R)).sum(axis=0, dtype=jnp.int32)  # so NaN is never the best
  return jnp.where(index_R < 0, logits_UR.shape[0], rank_R)


def by_chunks(losses_of: Callable, num_chunks: int, *, is_frozen: bool = True) -> Callable:
  """Compute `losses_of` a few places at a time, with its gradient: no array of all places' logits ever exists.

  Places are independent, so the gradient of each place's loss is known as soon as its logits are. They are computed
  once, and dropped; the backward pass scales the gradient that was kept, [D, .., R]. `lax.map` over `jax.checkpoint`,
  which a head that learns needs, computes them a second time: the loss takes half as long again.

  Args:
    losses_of: (heads, out [D, .., R], others) -> (loss [.., R], metrics), the last two pytrees of [.., R].
    num_chunks: divides R.
    is_frozen: whether no gradient to the heads is needed.

  Returns:
    A function like `losses_of`, differentiable in the loss's dependence on `out`, and on the heads unless frozen.
  """

  def split(x):
    parts = x.reshape(*x.shape[:-1], num_chunks, x.shape[-1] // num_chunks)
    return jnp.moveaxis(parts, -2, 0)

  def join(x):
    parts = jnp.moveaxis(x, 0, -2)
    return parts.reshape(*parts.shape[:-2], -1)

  def recomputed(heads, out, others):
    of_chunk = jax.checkpoint(lambda chunk: losses_of(heads, *chunk))
    loss, metrics = jax.tree.map(join, jax.lax.map(of_chunk, jax.tree.map(split, (out, others))))
    return loss, jax.lax.stop_gradient(metrics)

  if not is_frozen:
    return functools.wraps(losses_of)(recomputed)

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
