"""How large a tree pays, decided at every step: the tokens that a level or a node may bring, against its time.

Decoding yields some number of tokens in the time of a plain step. A node whose value (the probability that it is
accepted) is below that number x the plain steps that it adds costs more tokens than it brings; so does a level. With
the number that the best policy itself yields, its speedup, that rule maximises tokens over time (Dinkelbach's method
for ratios). CAST sets such numbers by hand, one for levels and one for nodes (SYSTEMS.md section 2.10):
`policy.Adaptive.thresholds`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Prices(NamedTuple):
  """What drafting and verifying take, behind a cache of some size. Milliseconds."""

  plain_ms: jax.Array  # [] f32, a step of plain decoding
  verify_ms: jax.Array  # [Z] f32, a target pass over each of the policy's sizes
  draft_ms: jax.Array  # [d] f32, drafting the children of the frontier at depth d; the first is never left out


class Gains(NamedTuple):
  """What they bring, in text of some temperature."""

  growth: jax.Array  # [d] f32, what nodes below a frontier at depth d bring, over the summed values of the frontier
  log_q: jax.Array  # [X] f32, ascending, nats
  value: jax.Array  # [X] f32, the share of nodes with a path of that log-probability that are accepted

  def values(self, log_q: jax.Array) -> jax.Array:
    """Probabilities of acceptance, 0 for unused nodes; between what was measured by straight lines."""
    return jnp.where(log_q > -jnp.inf, jnp.interp(log_q, self.log_q, self.value), 0)


class Economy(NamedTuple):
  """What `policy.Adaptive` reads. Traced: other measurements compile nothing."""

  level_tokens: jax.Array  # [] f32, what a level must bring a row, for each plain step's time that it takes
  node_tokens: jax.Array  # [] f32, and what nodes must
  prices: Prices
  gains: Gains


class Economies(NamedTuple):
  """What was measured behind caches of several sizes, and in texts of several temperatures."""

  level_tokens: jax.Array  # as in `Economy`
  node_tokens: jax.Array
  num_slots: jax.Array  # [X] f32, ascending
  prices: Prices  # every field with a leading axis X
  temperature: jax.Array  # [Y] f32, ascending
  gains: Gains  # every field with a leading axis Y

  def at(self, *, num_slots: Any, temperature: jax.Array) -> Economy:
    """Between what was measured by straight lines; temperatures beyond it as at the nearest, larger caches along the
    last line, since attention reads every slot."""
    prices = _between(self.num_slots, self.prices, num_slots, right='extrapolate')
    gains = _between(self.temperature, self.gains, temperature)
    return Economy(self.level_tokens, self.node_tokens, prices, gains)


def _between(knots_X: jax.Array, measured: Any, x: Any, *, right: str | None = None) -> Any:
  """A pytree of what was measured at the knots, at `x`; leading axes X."""
  share_X = jax.vmap(lambda own_X: jnp.interp(x, knots_X, own_X, right=right))(jnp.eye(len(knots_X)))
  return jax.tree.map(lambda each: jnp.tensordot(share_X, each, axes=1, precision='highest'), measured)


def best_size(economy: Economy, log_q_BA: jax.Array, is_live_B: jax.Array, *, sizes: tuple[int, ...]) -> jax.Array:
  """[] i32, which of `sizes` the rows of a batch should verify together: the one that gains most.

  Args:
    economy: costs and values.
    log_q_BA: [B, A] f32, of each row's candidates, the root among them with 0.
    is_live_B: [B] bool, rows that gain anything at all.
    sizes: ascending, static, none above A.
  """
  best_BA, _ = jax.lax.top_k(log_q_BA, sizes[-1])
  value_BA = economy.gains.values(best_BA).at[:, 0].set(0)  # the root itself is no gain
  total_A = jnp.cumsum(jnp.where(is_live_B[:, None], value_BA, 0).sum(axis=0))
  steps_Z = economy.prices.verify_ms / economy.prices.plain_ms
  gain_Z = total_A[jnp.asarray(sizes) - 1] - economy.node_tokens * steps_Z * is_live_B.sum().astype(jnp.float32)
  return jnp.argmax(gain_Z).astype(jnp.int32)


def is_level_worth(economy: Economy, log_q_BW: jax.Array, is_live_B: jax.Array, *, depth: int | jax.Array) -> jax.Array:
  """[] bool: will the children of this frontier bring more tokens than the time to draft them is worth?

  Args:
    economy: costs and values.
    log_q_BW: [B, W] f32, of each row's frontier at `depth`.
    is_live_B: [B] bool.
    depth: [] i32.
  """
  value_B = jnp.where(is_live_B, economy.gains.values(log_q_BW).sum(axis=1), 0)
  steps = economy.prices.draft_ms[depth] / economy.prices.plain_ms
  cost = economy.level_tokens * steps * is_live_B.sum().astype(jnp.float32)
  return economy.gains.growth[depth] * value_B.sum() > cost
