"""How large a tree pays, decided at every step: the tokens that a level or a node may bring, against its time.

Decoding yields some `rate` of tokens a millisecond. A node whose value (the probability that it is accepted) is below
`rate` x the time it adds costs more tokens than it brings; so does a level. With the rate of the best policy itself,
that rule maximises tokens over time (Dinkelbach's method for ratios). CAST sets such rates by hand, one for levels and
one for nodes (SYSTEMS.md section 2.10): `policy.Adaptive.thresholds`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Economy(NamedTuple):
  """What `policy.Adaptive` reads, for text of one temperature. Traced: other measurements compile nothing."""

  level_rate: jax.Array  # [] f32, tokens a millisecond of a row that a level must bring
  node_rate: jax.Array  # [] f32, and that nodes must
  verify_ms: jax.Array  # [M] f32, a target pass over each of the policy's sizes
  draft_ms: jax.Array  # [D] f32, drafting the children of the frontier at depth d; the first is never left out
  growth: jax.Array  # [D] f32, what nodes below a frontier at depth d bring, over the summed values of the frontier
  log_q: jax.Array  # [X] f32, ascending, nats
  value: jax.Array  # [X] f32, the share of nodes with a path of that log-probability that are accepted

  def values(self, log_q: jax.Array) -> jax.Array:
    """Probabilities of acceptance, 0 for unused nodes; between what was measured by straight lines."""
    return jnp.where(log_q > -jnp.inf, jnp.interp(log_q, self.log_q, self.value), 0)


class Economies(NamedTuple):
  """What was measured on texts of several temperatures: sampled text accepts less of the same confidence."""

  temperature: jax.Array  # [C] f32, ascending
  economy: Economy  # every field with a leading axis C

  def at(self, temperature: jax.Array) -> Economy:
    """For text of a temperature, [] f32: between those measured by straight lines, beyond them as at the nearest."""
    share_C = jax.vmap(lambda own_C: jnp.interp(temperature, self.temperature, own_C))(jnp.eye(len(self.temperature)))
    return jax.tree.map(lambda x: jnp.tensordot(share_C, x, axes=1, precision='highest'), self.economy)


def best_size(economy: Economy, log_q_BA: jax.Array, is_live_B: jax.Array, *, sizes: tuple[int, ...]) -> jax.Array:
  """[] i32, which of `sizes` the rows of a batch should verify together: the one that gains most.

  Args:
    economy: costs and values.
    log_q_BA: [B, A] f32, of each row's candidates, the root among them with 0.
    is_live_B: [B] bool, rows that gain anything at all.
    sizes: ascending, static, none above A.
  """
  best_BA, _ = jax.lax.top_k(log_q_BA, sizes[-1])
  value_BA = economy.values(best_BA).at[:, 0].set(0)  # the root itself is no gain
  total_A = jnp.cumsum(jnp.where(is_live_B[:, None], value_BA, 0).sum(axis=0))
  gain_M = total_A[jnp.asarray(sizes) - 1] - economy.node_rate * economy.verify_ms * is_live_B.sum().astype(jnp.float32)
  return jnp.argmax(gain_M).astype(jnp.int32)


def is_level_worth(economy: Economy, log_q_BW: jax.Array, is_live_B: jax.Array, *, depth: int) -> jax.Array:
  """[] bool: will the children of this frontier bring more tokens than the time to draft them is worth?

  Args:
    economy: costs and values.
    log_q_BW: [B, W] f32, of each row's frontier at `depth`.
    is_live_B: [B] bool.
    depth: static.
  """
  value_B = jnp.where(is_live_B, economy.values(log_q_BW).sum(axis=1), 0)
  cost = economy.level_rate * economy.draft_ms[depth] * is_live_B.sum().astype(jnp.float32)
  return economy.growth[depth] * value_B.sum() > cost
