"""The real pair: what speculation writes is what the target writes."""

import functools

import pytest

from eagle_jax import Chain, DynamicTree, StaticTree, decode, hub
from eagle_jax.bench.measure import NEAR_TIE, gap_at_divergence
from eagle_jax.decode.step import tau
from eagle_jax.kernels import cpu
from eagle_jax.models import rounded
from eagle_jax.sampling import Sampling

pytestmark = pytest.mark.real

PROMPTS = (
  'Explain why the sky is blue.',
  'A train travels 60 miles in 1.5 hours. What is its average speed?',
  'Write a Python function that returns the n-th Fibonacci number.',
  'Summarize: The mitochondrion is an organelle found in the cells of most eukaryotes. It makes most of the ATP.',
  'Who wrote Pride and Prejudice?',
  'Write a short poem about the sea, in two stanzas.',
  'List five tips for better sleep.',
  'Translate "good morning, my friend" into French and explain each word.',
)


@pytest.fixture(scope='module')
def pair(smollm2):
  return smollm2, hub.load_drafter('smollm2-135m-eagle2', smollm2)


@pytest.fixture(scope='module')
def decoded(pair):
  """What a policy writes, plain decoding among them; decoded once for all tests."""

  @functools.cache
  def decoded(prompts, max_new_tokens, temperature, policy):
    how = {'max_new_tokens': max_new_tokens, 'temperature': temperature, 'seed': 7, 'policy': policy}
    return decode.generate(*pair, prompts, **how)

  return decoded


def assert_same_text(target, decoded, prompts, max_new_tokens, temperature, policy):
  plain, speculative = (decoded(prompts, max_new_tokens, temperature, one) for one in ('plain', policy))
  sampling = Sampling.of(temperature=temperature, seed=7)
  for row, (ours, theirs) in enumerate(zip(speculative.tokens, plain.tokens, strict=True)):
    if ours != theirs:
      same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
      prompt = target.tokenizer.encode_prompt(prompts[row])
      gap = gap_at_divergence(target, prompt, theirs, ours, sampling, row)
      assert gap < NEAR_TIE, f'prompt {row} differs at new token {same}, where the best two are {gap} apart'
      print(f'near tie: prompt {row}, new token {same}, gap {gap}')  # noqa: T201  (to be seen, never hidden)
  assert speculative.stats['tau'] > 1.2


@pytest.mark.parametrize('temperature', [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_speculative_text_is_plain_text(smollm2, decoded, temperature):
  policy = DynamicTree(width=4, fanout=4, max_depth=4, num_nodes=16)
  assert_same_text(smollm2, decoded, PROMPTS[:2], 24, temperature, policy)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('policy', [Chain(), StaticTree(), DynamicTree()], ids=lambda policy: policy.describe())
def test_speculative_text_is_plain_text_at_length(smollm2, decoded, policy, temperature):
  assert_same_text(smollm2, decoded, PROMPTS, 64, temperature, policy)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_target_in_8_bits_writes_its_plain_text_to_the_last_token(smollm2, temperature):
  if cpu.library() is None:
    pytest.skip('without the C++ kernels its passes round by their shapes')
  target = rounded.rounded_target(smollm2)
  drafter, how = hub.load_drafter('smollm2-135m-eagle2', target), {'temperature': temperature, 'seed': 7}
  plain, *others = (
    decode.generate(target, drafter, PROMPTS[:4], max_new_tokens=64, policy=policy, **how)
    for policy in ('plain', Chain(3), DynamicTree(4, 4, 4, 16))
  )
  assert [other.tokens for other in others] == [plain.tokens] * 2


@pytest.mark.slow
@pytest.mark.parametrize('is_quantised', [False, True])
def test_the_shipped_drafter_accepts_what_it_did(pair, decoded, is_quantised):
  """Silent drafting bugs leave the text right and acceptance low."""
  target, drafter = pair
  if is_quantised:
    out = decode.generate(target, drafter.quantised(), PROMPTS[:5], max_new_tokens=64, policy=DynamicTree())
  else:
    out = decoded(PROMPTS, 64, 0.0, DynamicTree())
  num_new, num_passes = (sum(map(len, rows[:5])) for rows in (out.tokens, out.num_accepted))
  assert tau(num_new, num_passes, num_sequences=5) >= 3.7
