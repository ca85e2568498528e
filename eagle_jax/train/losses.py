"""Training losses, pure functions of columns: predictions [.., R], weights [R] saying which rows count."""

import jax
import jax.numpy as jnp


def weighted_mean(x_R: jax.Array, weight_R: jax.Array) -> jax.Array:
  """[] f32: mean over the rows that count; 0 if none does."""
  return (x_R * weight_R).sum() / jnp.maximum(weight_R.sum(), 1)


def smooth_l1(predicted_DR: jax.Array, feature_DR: jax.Array, weight_R: jax.Array) -> jax.Array:
  """[] f32: Huber distance (beta 1) to the target's features, mean over the width (EAGLE, arXiv:2401.15077, L_reg)."""
  error_DR = jnp.abs(predicted_DR.astype(jnp.float32) - feature_DR.astype(jnp.float32))
  huber_DR = jnp.where(error_DR < 1, 0.5 * error_DR**2, error_DR - 0.5)
  return weighted_mean(huber_DR.mean(axis=0), weight_R)


def soft_cross_entropy(logits_UR: jax.Array, target_logits_UR: jax.Array, weight_R: jax.Array) -> jax.Array:
  """[] f32, nats: cross-entropy to the target's distribution over the same ids (EAGLE, arXiv:2401.15077, L_cls)."""
  p_UR = jax.nn.softmax(target_logits_UR.astype(jnp.float32), axis=0)
  log_q_UR = jax.nn.log_softmax(logits_UR.astype(jnp.float32), axis=0)
  return weighted_mean(-(p_UR * log_q_UR).sum(axis=0), weight_R)
