"""Typical acceptance: which token it takes, how often, and that greedy text stays the target's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
import oracle
import tiny
from eagle_jax import decode
from eagle_jax.sampling import Sampling, choose
from eagle_jax.tree import NO_TOKEN

NUM_DRAWS = 100_000
RULE = eagle_jax.TypicalAcceptance(epsilon=0.2, delta=0.5)
LOGITS = np.log(np.asarray([0.3, 0.25, 0.15, 0.12, 0.1, 0.08], np.float32))
SAMPLINGS = (
  {'temperature': 1.0},
  {'temperature': 0.7, 'top_k': 4},
  {'temperature': 1.5, 'top_p': 0.8},
)


def p_of(logits_V: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
  """Compute what the target draws from, [V], by sorting and in float64."""
  keep_V = oracle.numpy_keep(logits_V, temperature, top_k, top_p)
  p_V = np.where(keep_V, np.exp(logits_V.astype(np.float64) / temperature), 0)
  return p_V / p_V.sum()


def least_p(p_V: np.ndarray, rule: eagle_jax.TypicalAcceptance) -> float:
  positive = p_V[p_V > 0]
  return min(rule.epsilon, rule.delta * np.exp((positive * np.log(positive)).sum()))


def expected(p_V: np.ndarray, children: list[int], rule: eagle_jax.TypicalAcceptance) -> np.ndarray:
  """Compute the distribution [V] of the token that the rule takes, if children do not depend on the noise."""
  enough = [child for child in children if p_V[child] > least_p(p_V, rule)]
  if not enough:
    return p_V
  is_child_V = np.isin(np.arange(len(p_V)), children)
  taken_V = np.where(is_child_V, p_V, 0)
  taken_V[max(enough, key=lambda child: p_V[child])] += p_V[~is_child_V].sum()
  return taken_V


def drawn(rule, children: list[int], sampling: dict) -> np.ndarray:
  """Count what the rule takes, [V], as shares of `NUM_DRAWS` positions."""
  child_T = jnp.asarray([*children, NO_TOKEN])
  take = jax.vmap(functools.partial(rule.choose, jnp.asarray(LOGITS), child_T, Sampling.of(seed=3, **sampling), 0))
  tokens = np.asarray(jax.jit(take)(jnp.arange(NUM_DRAWS)))
  return np.bincount(tokens, minlength=len(LOGITS)) / NUM_DRAWS


def excess(share_V: np.ndarray, expected_V: np.ndarray) -> float:
  """Compute the total variation between the two, over the expected one of so many exact draws."""
  usual = np.sqrt(2 * expected_V * np.maximum(1 - expected_V, 0) / (np.pi * NUM_DRAWS)).sum() / 2
  return np.abs(share_V - expected_V).sum() / 2 / max(usual, 1e-9)


@pytest.mark.parametrize('children', [[], [1, 2], [5], [0, 5], [2, 4]], ids=str)
@pytest.mark.parametrize('sampling', SAMPLINGS, ids=str)
def test_what_is_taken_has_the_distribution_that_follows_from_the_rule(children, sampling):
  p_V = p_of(LOGITS, **sampling)
  assert excess(drawn(RULE, children, sampling), expected(p_V, children, RULE)) < 3


def test_the_children_change_what_is_taken():
  p_V = p_of(LOGITS, **SAMPLINGS[0])
  assert excess(expected(p_V, [1, 2], RULE), p_V) > 10
  assert excess(expected(p_V, [1, 2], RULE), expected(p_V, [2, 4], RULE)) > 10


def test_a_rule_that_asks_for_certainty_is_exact():
  certain = eagle_jax.TypicalAcceptance(epsilon=1, delta=np.inf)
  assert (drawn(certain, [0, 1], SAMPLINGS[0]) == drawn(eagle_jax.GumbelMax(), [0, 1], SAMPLINGS[0])).all()


def test_greedy_text_is_the_target_s_own():
  target, drafter = tiny.target(), tiny.drafter()
  expected = decode.generate(target, None, tiny.PROMPTS[:4], **tiny.HOW)
  out = decode.generate(target, drafter, tiny.PROMPTS[:4], policy=eagle_jax.Chain(3), chooser=RULE, **tiny.HOW)
  assert out.tokens == expected.tokens
  assert out.stats['chooser'] == RULE.name


def test_a_sampled_text_is_of_own_draws_and_of_tokens_that_are_likely_enough():
  target, drafter, rule, draws = tiny.target(), tiny.drafter(), eagle_jax.TypicalAcceptance(), {'temperature': 0.1}
  prompts, how = tiny.PROMPTS[1:5], {'policy': eagle_jax.DynamicTree(3, 3, 3, 8), **tiny.HOW, 'seed': 5, **draws}
  exact, out = (decode.generate(target, drafter, prompts, chooser=one, **how) for one in (eagle_jax.GumbelMax(), rule))
  choose_all = jax.jit(jax.vmap(choose, (0, None, None, 0)))
  is_own = []
  for row, (prompt, tokens) in enumerate(zip(prompts, out.tokens, strict=True)):
    taps = target.network.read(target.params, jnp.asarray([prompt + tokens]))
    positions = np.arange(len(prompt), len(prompt) + len(tokens))
    logits_NV = target.network.logits(target.params, taps)[:, 0].T[positions - 1]
    own_N = choose_all(logits_NV, Sampling.of(seed=5, **draws), row, positions)
    is_own += (np.asarray(tokens) == own_N).tolist()
    for token, own, logits_V in zip(tokens, own_N, np.asarray(logits_NV), strict=True):
      p_V = p_of(logits_V, **draws)
      assert token == own or p_V[token] > least_p(p_V, rule)
  assert 0.2 < np.mean(is_own) < 0.95
  assert out.stats['tau'] > exact.stats['tau'] + 0.2


@pytest.mark.parametrize(
  'number',
  [{'epsilon': 0}, {'epsilon': 1.1}, {'epsilon': np.nan}, {'delta': 0}, {'delta': np.nan}, {'delta': [1, 2]}],
  ids=str,
)
def test_numbers_out_of_range_are_refused(number):
  (name,) = number
  with pytest.raises(ValueError, match=name):
    eagle_jax.TypicalAcceptance(**number)


def test_numbers_may_be_of_any_kind():
  rule = eagle_jax.TypicalAcceptance(epsilon=jnp.float32(0.25), delta=np.float64(0.5))
  assert hash(rule) == hash(eagle_jax.TypicalAcceptance(0.25, 0.5))
