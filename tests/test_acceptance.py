"""A silent draft bug changes no text: it lowers acceptance. So here is a drafter whose acceptance is known."""

import pytest

import tiny_twin
from eagle_jax import decode
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree
from tiny_twin import NUM_NEW, PROMPTS

# Target passes of four rows of 64 tokens, seeds fixed. After a change that is meant to change drafting, copy the
# numbers from the failure; after any other change a difference is a bug.
NUM_PASSES_EXACT = {Chain(4): 63, StaticTree(): 53, DynamicTree(4, 4, 5, 16): 53}
NUM_PASSES_NOISY = {Chain(4): 112, StaticTree(): 82, DynamicTree(4, 4, 5, 16): 91}


@pytest.fixture(scope='module')
def target():
  return tiny_twin.target()


def num_passes(target, policy, *, noise: float) -> int:
  drafter = tiny_twin.drafter_of(target, noise=noise)
  return decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy).stats['num_target_passes']


def test_the_text_is_worth_predicting(target):
  tokens = decode.generate(target, None, PROMPTS, max_new_tokens=NUM_NEW).tokens
  assert all(len(set(row)) > 12 for row in tokens)


@pytest.mark.parametrize('policy', NUM_PASSES_EXACT, ids=lambda p: p.describe())
def test_a_drafter_that_is_the_target(target, policy):
  passes = num_passes(target, policy, noise=0.0)
  fewest = len(PROMPTS) * -(-(NUM_NEW - 1) // (policy.max_depth + 1))
  assert passes < 1.25 * fewest
  assert passes == NUM_PASSES_EXACT[policy]


@pytest.mark.parametrize('policy', NUM_PASSES_NOISY, ids=lambda p: p.describe())
def test_a_drafter_that_errs(target, policy):
  """Its proposals depend on features, also on those of drafted nodes."""
  assert num_passes(target, policy, noise=0.1) == NUM_PASSES_NOISY[policy]
