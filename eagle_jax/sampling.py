"""Draw tokens from logits: temperature, top-k, top-p, and noise keyed by position.

Gumbel-max: the token with the largest perturbed logit is a sample of the softmax. The noise is keyed by the *position*
of the token being drawn (seed, row id, absolute position), not by a tree node or a step. So a seed fixes the text,
whatever is drafted, and temperature 0 is greedy decoding in the same program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.kernels.argmax import argmax
from eagle_jax.kernels.random import fold_in, random_bits
from eagle_jax.sharding import to_device

_SIGN = np.uint32(1 << 31)  # the bit of a float's sign


class Sampling(NamedTuple):
  """Sampling parameters: traced, so changing them never recompiles; each a scalar, or [B], one number a sequence."""

  temperature: jax.Array  # [] f32, 0 is greedy
  top_k: jax.Array  # [] i32, 0 keeps all
  top_p: jax.Array  # [] f32, in (0, 1]; 1 keeps all
  seed: jax.Array  # [] i32

  @classmethod
  def of(cls, *, temperature=0.0, top_k=0, top_p=1.0, seed=0) -> 'Sampling':
    """Convert numbers or arrays, traced or not, to the fields' dtypes."""
    return cls(
      to_device(temperature, jnp.float32), to_device(top_k, jnp.int32), to_device(top_p, jnp.float32),
      to_device(seed, jnp.int32),
    )  # fmt: skip

  def vmap_axes(self) -> Any:
    """Return `in_axes` for a `vmap` over sequences; None for shared scalars, so that branches on them stay branches."""
    axes: Any = [0 if field.ndim else None for field in self]
    return Sampling(*axes)


def position_noise(seed, row_id, position, token_U: jax.Array) -> jax.Array:
  """Compute standard Gumbel noise of these tokens at one position: [U] f32.

  The result equals `jax.random.gumbel` over the whole vocabulary, indexed by token. The generator is counter-based, so
  each token's bits follow from its id: nothing is computed for other tokens, and no gather is needed.

  Args:
    seed, row_id: [] i32.
    position: [] i32, absolute position of the token being drawn, counted without padding.
    token_U: [U] i32, target ids.
  """
  seed, row_id, position = (jnp.asarray(number).astype(jnp.uint32) for number in (seed, row_id, position))
  key = fold_in(fold_in((jnp.zeros_like(seed), seed), row_id), position)
  bits_U = random_bits(key, token_U.astype(jnp.uint32))
  one = jnp.uint32(0x3F800000)  # the bits of 1.0: with 23 random ones behind them, a number in [1, 2)
  uniform_U = jax.lax.bitcast_convert_type(bits_U >> 9 | one, jnp.float32) - 1
  return -jnp.log(-jnp.log(jnp.maximum(uniform_U, jnp.finfo(jnp.float32).tiny)))


def perturbation(sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
  """Compute temperature x noise for the logits of the token at `position`: [U] f32; 0 if greedy.

  A branch skips the noise of greedy decoding, unless every sequence of a `vmap` has its own temperature, or the
  compiler turns the branch into a select.
  """

  def noise():
    return sampling.temperature * position_noise(sampling.seed, row_id, position, token_U)

  return jax.lax.cond(sampling.temperature > 0, noise, lambda: jnp.zeros(token_U.shape))


def _least_kept(logits_V: jax.Array, weight_V: jax.Array, need: jax.Array) -> jax.Array:
  """Find the largest logit, [] f32, that with all above it weighs `need`, by bisection, without a sort; -inf if none.

  Floats are bisected by their place in the order of all of them.
  """
  order_V = _order(logits_V)

  def decide_bit(i, least):
    candidate = least | (jnp.uint32(1) << jnp.uint32(31 - i))
    return jnp.where(jnp.where(order_V >= candidate, weight_V, 0).sum() >= need, candidate, least)

  least = jax.lax.fori_loop(0, 32, decide_bit, jnp.uint32(0))
  return jnp.where(least > 0, _float_of(least), -jnp.inf)


def _order(x_V: jax.Array) -> jax.Array:
  """Map floats to u32 [V] with the same order."""
  bits_V = jax.lax.bitcast_convert_type(x_V, jnp.uint32)
  return jnp.where(bits_V < _SIGN, bits_V | _SIGN, ~bits_V)


def _float_of(order: jax.Array) -> jax.Array:
  """Return the float of this `_order`."""
  return jax.lax.bitcast_convert_type(jnp.where(order < _SIGN, ~order, order ^ _SIGN), jnp.float32)


def _bound(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
  """Find the least logit, [] f32, that passes top-k, then top-p."""

  def least_of_k():
    return _least_kept(logits_V, jnp.ones_like(logits_V), sampling.top_k.astype(jnp.float32))

  def least_of_p():
    kept_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    p_V = jax.nn.softmax(kept_V / jnp.maximum(sampling.temperature, 1e-6))  # greedy keeps its token
    return jnp.maximum(least, _least_kept(logits_V, p_V, sampling.top_p))

  least = jax.lax.cond(sampling.top_k > 0, least_of_k, lambda: -jnp.inf)
  return jax.lax.cond(sampling.top_p < 1, least_of_p, lambda: least)


def keep(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
  """Find the tokens that pass top-k, then top-p: [V] bool. Tokens that tie with the last one kept are kept.

  Top-p keeps the smallest set of the likeliest tokens whose probability, after temperature and top-k, reaches p.
  """
  return ~(logits_V < _bound(logits_V, sampling))


def perturbed(logits_V: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
  """Filter logits and add noise, so that the largest is the target's choice: [V] f32; unchanged if greedy.

  Args:
    logits_V: [V] f32.
    sampling: how to draw.
    row_id, position: [] i32, see `position_noise`.
  """
  return _apply_to_perturbed(lambda score_V: score_V, logits_V, sampling, row_id, position)


def choose(logits_V: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
  """Draw the target's own token at `position`, [] i32, which does not depend on the tree. See `perturbed`."""
  return _apply_to_perturbed(argmax, logits_V, sampling, row_id, position)


def _apply_to_perturbed(function: Callable, logits_V: jax.Array, sampling: Sampling, row_id, position) -> Any:
  """Apply a function to the perturbed logits.

  A branch skips all of this for greedy decoding, and one inside it skips the filters; its condition is made of scalars
  that no `vmap` over sequences batches. `function` is applied inside the branch, and filters leave it as one number,
  since on a mesh the result of a branch is replicated on every device.
  """

  def sampled():
    is_filtered = (sampling.top_k > 0) | (sampling.top_p < 1)
    least = jax.lax.cond(is_filtered, lambda: _bound(logits_V, sampling), lambda: -jnp.inf)
    kept_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    noise_V = position_noise(sampling.seed, row_id, position, jnp.arange(logits_V.shape[0]))
    return function(kept_V + sampling.temperature * noise_V)

  return jax.lax.cond(sampling.temperature > 0, sampled, lambda: function(logits_V))


class Chooser(Protocol):
  """An acceptance rule: chooses the token after a node, drafted or not. Frozen, hashable, without arrays."""

  @property
  def name(self) -> str:
    """Name for statistics; it contains `lossy` if the rule may change the text."""
    ...

  def choose(self, logits_V: jax.Array, child_T: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
    """Choose the token at `position`, [] i32. A child that holds this token is accepted.

    Args:
      logits_V: [V] f32, of the target, after the path that ends before `position`.
      child_T: [T] i32, tokens of the node's children, NO_TOKEN elsewhere. A lossless rule ignores them.
      sampling: how to draw.
      row_id, position: [] i32, see `position_noise`.
    """
    ...

  def noise(self, sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
    """Compute the noise that the rule adds to the logits of these tokens, as far as drafters may use it: [U] f32."""
    ...


@dataclasses.dataclass(frozen=True)
class GumbelMax:
  """The lossless acceptance rule: the token with the largest perturbed logit, so the seed fixes the text."""

  name: ClassVar[str] = 'gumbel-max'

  def choose(self, logits_V: jax.Array, child_T: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
    return choose(logits_V, sampling, row_id, position)

  def noise(self, sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
    return perturbation(sampling, row_id, position, token_U)
