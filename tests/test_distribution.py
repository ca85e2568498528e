"""1e5 draws a case: the tokens that speculative steps emit follow the target's own filtered softmax.

A bound of 3 times the exact sampler's expected total variation; planted faults must break it.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.pooled import PooledTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree
from eagle_jax.sampling import Sampling, choose

VOCAB, BATCH, NUM_BATCHES = 8, 20_000, 5
PROMPT = np.asarray([1, 2, 3], np.int32)
NUM_NEW = 3  # the first comes from prefill, the other two from speculative steps
POLICIES = (Chain(2), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]), DynamicTree(3, 3, 2, 7))
RULED = (
  DDD(3, 3, 2, 7, smaller=(3,), least_log_mass=0.03),
  SVIP(3, 3, 2, 7, smaller=(3,), scale=0.15, most_rejected=0.3),
  SureMass(3, 3, 2, 7, scale=0.1, least_mass=0.7),
  GapTree(3, 3, 2, 7),
  CaPE(3, 3, 2, 7, siblings=(2, 1, 1, 0)),
  C2T(3, 3, 2, 7, smaller=(3,), least_accepted=0.4),
  CalibratedTree(3, 3, 2, 7),
  PooledTree(3, 3, 2, 7, smaller=(3,), mean_nodes=4.5),
  RateTree(3, 3, 2, 7, smaller=(1, 3)),
)
SAMPLINGS = (
  {'temperature': 1.0},
  {'temperature': 0.6},
  {'temperature': 1.5, 'top_k': 3},
  {'temperature': 1.0, 'top_p': 0.7},
  {'temperature': 0.8, 'top_k': 5, 'top_p': 0.9},
)


def next_p(prefix: tuple[int, ...], *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
  """[V], the target's distribution after the prompt and `prefix`, by sorting and in float64."""
  text = np.asarray([*PROMPT, *prefix], np.int32)
  text_hash = oracle.ingredient(jnp.asarray(text), jnp.arange(len(text))).sum(dtype=jnp.uint32)
  logits_V = np.asarray(oracle.hash_logits(text_hash[None], vocab_size=VOCAB))[:, 0]
  keep_V = oracle.numpy_keep(logits_V, temperature, top_k, top_p)
  p_V = np.where(keep_V, np.exp(logits_V.astype(np.float64) / temperature), 0)
  return p_V / p_V.sum()


def exact(sampling: dict) -> np.ndarray:
  """[V, V, V], the distribution of the first three new tokens."""
  p_VVV = np.empty((VOCAB,) * 3)
  first_V = next_p((), **sampling)
  for first in range(VOCAB):
    second_V = next_p((first,), **sampling)
    for second in range(VOCAB):
      p_VVV[first, second] = first_V[first] * second_V[second] * next_p((first, second), **sampling)
  return p_VVV


@functools.cache
def exact_of(index: int) -> np.ndarray:
  return exact(SAMPLINGS[index])


def draws(
  policy, sampling: dict, seed: int, *, drafter=None, chooser=None, least_accepted: float = 1.0, level: int = 0
) -> np.ndarray:
  """[V, V, V], the share of rows whose first three new tokens these are."""
  count_VVV = np.zeros((VOCAB,) * 3)
  num_accepted = 0
  for batch in range(NUM_BATCHES):
    row_ids = np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.int32)
    params, spec = oracle.build(policy, vocab_size=VOCAB, drafter=drafter, chooser=chooser)
    tokens_BN, length_B, num_accepted_BN = oracle.decode(
      params, spec, np.tile(PROMPT, (BATCH, 1)), np.full(BATCH, len(PROMPT), np.int32),
      level=level, max_new_tokens=NUM_NEW, sampling=Sampling.of(seed=seed, **sampling), row_ids=row_ids, eos_ids=(),
    )  # fmt: skip
    assert (length_B == NUM_NEW).all()
    np.add.at(count_VVV, tuple(np.asarray(tokens_BN)[:, :NUM_NEW].T), 1)
    num_accepted += int(jnp.maximum(num_accepted_BN, 0).sum())
  assert num_accepted > least_accepted * BATCH  # the oracle's drafter looks at the noise: much of the text was drafted
  return count_VVV / (BATCH * NUM_BATCHES)


def excess(drawn: np.ndarray, expected: np.ndarray) -> float:
  """Compute the total variation between the two, over the exact sampler's expected one."""
  expected_tv = 0.5 * np.sqrt(2 / (np.pi * BATCH * NUM_BATCHES)) * np.sqrt(expected * (1 - expected)).sum()
  return 0.5 * np.abs(drawn - expected).sum() / expected_tv


def worst(drawn_VVV: np.ndarray, expected_VVV: np.ndarray) -> float:
  """Over the first speculative token, the first two, and these with the prefill's."""
  marginals = (lambda p: p.sum(axis=(0, 2)), lambda p: p.sum(axis=0), lambda p: p)
  return max(excess(marginal(drawn_VVV), marginal(expected_VVV)) for marginal in marginals)


@pytest.mark.parametrize('index', range(len(SAMPLINGS)), ids=lambda i: '-'.join(map(str, SAMPLINGS[i].values())))
@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_draws_follow_the_target(policy, index):
  drawn = draws(policy, SAMPLINGS[index], seed=index, level=1)  # one program draws for five cases
  assert worst(drawn, exact_of(index)) < 3


@pytest.mark.slow
@pytest.mark.parametrize('number', range(len(RULED)), ids=lambda i: RULED[i].describe())
def test_draws_of_trees_by_rules_follow_the_target(number):
  index = number % len(SAMPLINGS)
  assert worst(draws(RULED[number], SAMPLINGS[index], seed=index), exact_of(index)) < 3


@pytest.mark.slow
@pytest.mark.parametrize(
  ('make', 'policy'),
  [
    *itertools.product([oracle.ngram, oracle.medusa], POLICIES),
    *itertools.product([oracle.suffix, oracle.p_eagle, oracle.dflash], POLICIES[:1]),
  ],
  ids=lambda x: x.describe() if hasattr(x, 'describe') else x.__name__,
)
def test_draws_of_drafters_that_know_nothing_follow_the_target(make, policy):
  drawn = draws(policy, SAMPLINGS[0], seed=7, drafter=make(VOCAB), least_accepted=0.2)
  assert worst(drawn, exact_of(0)) < 3


def test_the_target_is_worth_drawing_from():
  """Every case has several likely tokens, and no two cases are alike."""
  assert all(0.05 < np.square(exact_of(i).sum(axis=(0, 2))).sum() < 0.8 for i in range(len(SAMPLINGS)))
  for i, j in itertools.combinations(range(len(SAMPLINGS)), 2):
    assert worst(exact_of(i), exact_of(j)) > 10


FAULTS = {
  'noise reused': lambda logits_V, how, row_id, position: choose(logits_V, how, row_id, position // 2),
  'filter skipped': lambda logits_V, how, row_id, position: choose(
    logits_V, how._replace(top_k=0 * how.top_k, top_p=how.top_p / how.top_p), row_id, position
  ),
  'temperature ignored': lambda logits_V, how, row_id, position: choose(
    logits_V, how._replace(temperature=how.temperature / how.temperature), row_id, position
  ),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_planted_faults_exceed_the_bound(fault):
  index, chooser = 4, oracle.Perturbed(FAULTS[fault])
  assert worst(draws(POLICIES[2], SAMPLINGS[index], seed=index, chooser=chooser), exact_of(index)) > 3
