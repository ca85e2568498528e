"""Acceptance rules that accept more of what is drafted, for a text that is no longer exactly the target's own."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.kernels.argmax import argmax
from eagle_jax.sampling import Sampling, choose, keep, perturbation
from eagle_jax.tree import NO_TOKEN


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance:
  """Accept a drafted token that is likely enough, although the target drew another.

  The target's own draw is taken if it is drafted. If it is not, the likeliest drafted token takes its place, if its
  probability p exceeds min(epsilon, delta * exp(-entropy)); p and the entropy are those of the distribution that the
  target draws from, after temperature and filters. Greedy decoding stays exact, since all of it is on one token.

  Attributes:
    epsilon: in (0, 1]; p above it is always enough.
    delta: above 0; the smaller, the less is asked where many tokens are likely.

  Raises:
    ValueError: a number outside these ranges.

  Source: Medusa, arXiv:2401.10774, section 2.3, with the defaults of its repository.

  Example:
    >>> rule = eagle_jax.TypicalAcceptance(epsilon=0.2)
    >>> out = eagle_jax.generate(target, drafter, [[1, 90, 18]], temperature=1.0, max_new_tokens=16, chooser=rule)
    >>> out.stats['chooser']
    'lossy-typical'
  """

  epsilon: float = 0.09
  delta: float = 0.3
  name: ClassVar[str] = 'lossy-typical'

  def __post_init__(self):
    for name, most, must_be in (('epsilon', 1, 'in (0, 1]'), ('delta', math.inf, 'above 0')):
      try:
        number = float(getattr(self, name))  # an array could not be hashed
      except (TypeError, ValueError):
        number = math.nan
      require(self, name, 0 < number <= most, f'a number {must_be}')
      object.__setattr__(self, name, number)

  def choose(self, logits_V: jax.Array, child_T: jax.Array, sampling: Sampling, row_id, position) -> jax.Array:
    def likely() -> jax.Array:
      kept_V = jnp.where(keep(logits_V, sampling), logits_V, -jnp.inf)
      unfiltered = sampling._replace(top_k=jnp.zeros_like(sampling.top_k), top_p=jnp.ones_like(sampling.top_p))
      own = choose(kept_V, unfiltered, row_id, position)
      log_p_V = jax.nn.log_softmax(kept_V / sampling.temperature)
      p_V = jnp.exp(log_p_V)
      entropy = -jnp.where(p_V > 0, p_V * log_p_V, 0).sum()
      p_T = jnp.where(child_T == NO_TOKEN, 0, p_V[child_T])
      best = jnp.argmax(p_T)
      is_enough = p_T[best] > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
      return jnp.where(is_enough & ~(child_T == own).any(), child_T[best], own)

    return jax.lax.cond(sampling.temperature > 0, likely, lambda: argmax(logits_V))

  def noise(self, sampling: Sampling, row_id, position, token_U: jax.Array) -> jax.Array:
    """Compute the noise of the target's own draw, so that it is often drafted: [U] f32."""
    return perturbation(sampling, row_id, position, token_U)
