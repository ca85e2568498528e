"""Logits to token: noise of a position, temperature, top-k, top-p. Plain decoding, verification and tests share it.

Gumbel-max: the token with the largest perturbed logit is a sample of the softmax. The noise belongs to the *position*
of the token being drawn (seed, row id, absolute position), not to a tree node or a step. So a seed fixes the text,
whatever is drafted, and temperature 0 is greedy decoding in the same program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from eagle_jax.kernels.argmax import argmax
from eagle_jax.kernels.random import random_bits


class Sampling(NamedTuple):
  """How tokens are drawn. Every field is traced, so another temperature or seed compiles nothing; and is a scalar, or
  [B], one number a row."""

  temperature: jax.Array  # [] f32, 0 is greedy
  top_k: jax.Array  # [] i32, 0 keeps all
  top_p: jax.Array  # [] f32, in (0, 1]; 1 keeps all
  seed: jax.Array  # [] i32

  @classmethod
  def of(cls, *, temperature=0.0, top_k=0, top_p=1.0, seed=0) -> 'Sampling':
    """From numbers, or arrays, traced or not."""
    return cls(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.int32(seed))

  def row_axes(self) -> Any:
    """`vmap`'s axes over rows: what all rows share stays a scalar, and its branches stay branches."""
    axes: Any = [0 if field.ndim else None for field in self]
    return Sampling(*axes)


def position_noise(seed, row_id, position, token_U: jax.Array) -> jax.Array:
  """[U] f32, standard Gumbel noise of these tokens at one position.

  The noise is that of `jax.random.gumbel` over a whole vocabulary, looked up by token. But its generator counts: each
  token's bits are computed from its id, so nothing is computed for other tokens, and nothing is looked up.

  Args:
    seed, row_id: [] i32.
    position: [] i32, absolute position of the token being drawn, counted in the unpadded row.
    token_U: [U] i32, target ids.
  """
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), row_id), position)
  one = jnp.uint32(0x3F800000)  # the bits of 1.0: with 23 random ones behind them, a number in [1, 2)
  bits_U = random_bits(jax.random.key_data(key), token_U.astype(jnp.uint32))
  uniform_U = jax.lax.bitcast_convert_type(bits_U >> 9 | one, jnp.float32) - 1
  return -jnp.log(-jnp.log(jnp.maximum(uniform_U, jnp.finfo(jnp.float32).tiny)))


def perturbation(sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
  """[U] f32, what is added to the logits of the token at `position`: temperature x noise; 0 where that is greedy.

  The noise is computed only where it can matter: a branch, unless every row of a `vmap` has a temperature of its own,
  or the compiler makes it a choice.
  """

  def noise():
    return sampling.temperature * position_noise(sampling.seed, row_id, position, token_U)

  return jax.lax.cond(sampling.temperature > 0, noise, lambda: jnp.zeros(token_U.shape))


def _threshold(order_V: jax.Array, weight_V: jax.Array, need: jax.Array) -> jax.Array:
  """The largest u32 `t` for which the weights of `order >= t` sum to `need`: a bisection bit by bit, never a sort."""

  def decide_bit(i, t):
    candidate = t | (jnp.uint32(1) << jnp.uint32(31 - i))
    return jnp.where(jnp.where(order_V >= candidate, weight_V, 0).sum() >= need, candidate, t)

  return jax.lax.fori_loop(0, 32, decide_bit, jnp.uint32(0))


def _order(x_V: jax.Array) -> jax.Array:
  """[V] u32 in the same order as the floats."""
  bits_V = jax.lax.bitcast_convert_type(x_V, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits_V & sign != 0, ~bits_V, bits_V | sign)


def keep(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
  """[V] bool: the tokens that top-k, then top-p, leave. Tokens that tie with the last one kept are kept.

  Top-p keeps the smallest set of the likeliest tokens whose probability, after temperature and top-k, reaches p.
  """
  order_V = _order(logits_V)

  def least_of_k():
    return _threshold(order_V, jnp.ones_like(logits_V), sampling.top_k.astype(jnp.float32))

  def least_of_p():
    kept_V = jnp.where(order_V >= least, logits_V, -jnp.inf)
    p_V = jax.nn.softmax(kept_V / jnp.maximum(sampling.temperature, 1e-6))  # greedy keeps its token
    return jnp.maximum(least, _threshold(order_V, p_V, sampling.top_p))

  least = jax.lax.cond(sampling.top_k > 0, least_of_k, lambda: jnp.uint32(0))
  least = jax.lax.cond(sampling.top_p < 1, least_of_p, lambda: least)
  return order_V >= least


def perturbed(logits_V: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
  """[V] f32, logits whose largest is the target's choice: filtered and with noise, or untouched where that is greedy.

  Args:
    logits_V: [V] f32.
    sampling: how to draw.
    row_id, position: [] i32, see `position_noise`.
  """
  return _chosen(lambda score_V: score_V, logits_V, sampling, row_id, position)


def choose(logits_V: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
  """[] i32: the target's own token at `position`, the same for every tree that leads there. See `perturbed`."""
  return _chosen(argmax, logits_V, sampling, row_id, position)


def _chosen(of: Callable, logits_V: jax.Array, sampling: Sampling, row_id, position) -> Any:
  """`of` the perturbed logits.

  What greedy decoding needs none of is in a branch, and in it the filters in one more, which hangs on scalars that no
  `vmap` over rows touches. `of` is in the branches: what leaves one a mesh holds whole on each device.
  """

  def drawn(kept_V):
    noise_V = position_noise(sampling.seed, row_id, position, jnp.arange(logits_V.shape[0]))
    return of(kept_V + sampling.temperature * noise_V)

  def filtered():
    return drawn(jnp.where(keep(logits_V, sampling), logits_V, -jnp.inf))

  def sampled():
    is_filtered = (sampling.top_k > 0) | (sampling.top_p < 1)
    return jax.lax.cond(is_filtered, filtered, lambda: drawn(logits_V))

  return jax.lax.cond(sampling.temperature > 0, sampled, lambda: of(logits_V))


class Chooser(Protocol):
  """The acceptance rule: which token follows a node, be it drafted or not. Frozen, hashable, without arrays."""

  @property
  def name(self) -> str:
    """For statistics; a rule that may change the text has `lossy` in it."""
    ...

  def choose(self, logits_V: jax.Array, child_T: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
    """[] i32: the token at `position`. A child that is this token is accepted.

    Args:
      logits_V: [V] f32, the target's, after the path that ends before `position`.
      child_T: [T] i32, the tokens drafted there, NO_TOKEN elsewhere. A lossless rule does not look at them.
      sampling: how to draw.
      row_id, position: [] i32, see `position_noise`.
    """
    ...

  def noise(self, sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
    """[U] f32: what the rule adds to the logits of these tokens at `position`, as far as drafters may know it."""
    ...


@dataclasses.dataclass(frozen=True)
class GumbelMax:
  """Choose the token with the largest perturbed logit: lossless, and the seed fixes the text."""

  name: ClassVar[str] = 'gumbel-max'

  def choose(self, logits_V: jax.Array, child_T: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
    return choose(logits_V, sampling, row_id, position)

  def noise(self, sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
    return perturbation(sampling, row_id, position, token_U)
