"""More prompts than rows: finished rows are refilled, and nothing that is said or accepted changes by it."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

import tiny
from eagle_jax import decode
from eagle_jax.config import Eagle3Config
from eagle_jax.decode import batching
from eagle_jax.decode.program import Program
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.trees import Chain, DynamicTree, Plain
from listen import compile_events
from tiny_costs import COSTS

VOCAB = 12  # so few that a random drafter is right now and then
EAGLE3 = Eagle3Config(
  vocab_size=VOCAB, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=48, target_width=32, taps=(0, 1, 1)
)
DRAFTER = tiny.drafter(dataclasses.replace(tiny.DRAFTER, vocab_size=VOCAB))
ADAPTIVE = Adaptive(3, 3, 3, 8, smaller=(1, 4), thresholds=(1e-3, 1e-3))  # drafts, whatever it costs
SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in (Chain(3), ADAPTIVE)]
POLICIES = Plain(), DynamicTree(3, 3, 3, 8, lookup=True), *SLOW
SAMPLINGS = {
  'greedy': {},
  'sampled': {'temperature': 0.9, 'top_k': 40, 'seed': 3, 'row_ids': [4, 4, 0, 9, 5, 6, 7]},
}
STATS = ('num_new_tokens', 'num_target_passes', 'tau', 'policy')
NUM_NEW = 20


@pytest.fixture(scope='module')
def target():
  """Its text hangs on all that came before, and ends now and then."""
  config = dataclasses.replace(tiny.TARGET, vocab_size=VOCAB, eos_ids=(0,))
  made = tiny.target(config)
  made.params['embed']['weight'] *= 50
  return made


@pytest.fixture(scope='module')
def prompts():
  rng = np.random.default_rng(1)
  return [rng.integers(1, VOCAB, size).tolist() for size in (3, 40, 1, 17, 9, 30, 5)]


def fields(out, *, names=STATS):
  return out.tokens, out.num_accepted, {name: out.stats[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize('sampling', SAMPLINGS)
@pytest.mark.parametrize('policy', POLICIES, ids=lambda policy: type(policy).__name__)
def test_refill_matches_single_sequence(target, prompts, policy, sampling):
  costs = COSTS if isinstance(policy, Adaptive) else None
  how = {'max_new_tokens': NUM_NEW, 'policy': policy, 'costs': costs, **SAMPLINGS[sampling]}
  whole = decode.generate(target, DRAFTER, prompts, **how)
  assert len({len(tokens) for tokens in whole.tokens}) > 2  # they end at different steps
  assert (sum(map(sum, whole.num_accepted)) >= 3) == (policy != Plain())
  for batch_size in (1, 3):
    out = decode.generate(target, DRAFTER, prompts, batch_size=batch_size, **how)
    if isinstance(policy, Adaptive):  # a batch weighs costs as its rows do in the mean, so its trees are its own
      assert out.tokens == whole.tokens
    else:
      assert fields(out) == fields(whole)


def test_cache_holds_the_longest_prompt_and_its_new_tokens(target):
  """Both fill their buckets, and a finished sequence still writes its last path behind them."""
  prompts = np.random.default_rng(2).integers(1, VOCAB, (5, 16)).tolist()
  how = {'max_new_tokens': 24, 'policy': DynamicTree(3, 3, 3, 8), 'eos_ids': ()}
  whole = decode.generate(target, DRAFTER, prompts, **how)
  assert fields(decode.generate(target, DRAFTER, prompts, batch_size=2, **how)) == fields(whole)


def test_refill_matches_single_sequence_with_eagle3_head(target, prompts):
  head = {'head': {'weight': jax.random.normal(jax.random.key(2), (VOCAB, 32))}}
  drafter = Drafter(EAGLE3, Eagle3(EAGLE3).init_params(jax.random.key(3)) | head)
  how = {'max_new_tokens': NUM_NEW, 'policy': Chain(2)}
  whole = decode.generate(target, drafter, prompts, **how)
  assert fields(decode.generate(target, drafter, prompts, batch_size=3, **how)) == fields(whole)


def test_batch_size_of_all_prompts_is_one_batch(target, prompts):
  how = {'max_new_tokens': 8, 'policy': Chain(3)}
  whole = decode.generate(target, DRAFTER, prompts, **how)
  with compile_events() as events:
    for batch_size in (len(prompts), 100, np.int64(7)):
      assert fields(decode.generate(target, DRAFTER, prompts, batch_size=batch_size, **how)) == fields(whole)
  assert not any('backend_compile' in event for event in events)


def test_other_prompts_of_similar_length_compile_nothing(target, prompts):
  how = {'policy': Chain(2), 'batch_size': 3}
  first = decode.generate(target, DRAFTER, prompts, max_new_tokens=20, **how)
  others = [[1 + token % 11 for token in prompt] for prompt in prompts]
  again = decode.generate(target, DRAFTER, others, max_new_tokens=18, temperature=0.5, eos_ids=[7], **how)
  assert first.stats['compile_s'] > 0
  assert again.stats['compile_s'] == 0
  assert again.stats['decode_s'] > 0
  assert again.stats['prefill_s'] > 0


@pytest.mark.parametrize('batch_size', [3, 100])
def test_generate_each_yields_answers_in_order(target, prompts, batch_size):
  how = {'max_new_tokens': NUM_NEW, 'policy': Chain(3), 'batch_size': batch_size, 'seed': 2, 'temperature': 0.8}
  whole = decode.generate(target, DRAFTER, prompts, **how)
  answers = decode.generate_each(target, DRAFTER, prompts, **how)
  assert answers.stats['num_new_tokens'] == 0
  for number, answer in enumerate(answers):
    assert (answer.tokens, answer.num_accepted) == (whole.tokens[number], whole.num_accepted[number])
    assert answers.stats['num_new_tokens'] >= sum(map(len, whole.tokens[: number + 1]))
  assert number == len(prompts) - 1
  assert {name: answers.stats[name] for name in STATS} == {name: whole.stats[name] for name in STATS}


def test_first_answer_comes_before_the_rest_is_decoded(target, prompts):
  """So an interrupted run keeps the answers it has yielded."""
  made = []

  class Watched(type(batching._ADVANCE)):
    def compile(self, *args, **static):
      made.append(args)
      return super().compile(*args, **static)

  with mock.patch.object(batching, '_ADVANCE', Watched(batching.advance)):
    answers = decode.generate_each(target, None, prompts * 3, batch_size=1, max_new_tokens=4)
    assert not made
    for number, _ in enumerate(answers):
      assert len(made) == number + 1


def test_last_answers_do_not_wait_for_each_other(target, prompts):
  take_finished = batching.Batcher._take_finished
  with mock.patch.object(batching.Batcher, '_take_finished', autospec=True, side_effect=take_finished) as take:
    answers = decode.generate_each(target, None, prompts, batch_size=3, max_new_tokens=NUM_NEW)
    num_calls = [take.call_count for _ in answers]
  assert len(prompts) > 4
  assert num_calls[-1] > num_calls[-3]


def test_refills_share_one_insert_program(target):
  with mock.patch.object(batching, '_INSERT', Program(batching.insert)) as insert:
    decode.generate(target, DRAFTER, [[1, 2], [3], [4]], batch_size=1, max_new_tokens=4, policy=Chain(2))
  assert len(insert._compiled) == 1


def test_in_order_holds_back_early_items():
  seen = []

  def numbered():
    for number in (2, 0, 3, 1, 4):
      yield number, str(number)
      seen.append(list(came))

  came = []
  for one in batching.in_order(numbered()):
    came.append(one)
  assert seen == [[], ['0'], ['0'], ['0', '1', '2', '3'], ['0', '1', '2', '3', '4']]


@pytest.mark.parametrize('batch_size', [0, -1, 1.5, 'many'])
def test_bad_batch_size_is_refused(target, prompts, batch_size):
  with pytest.raises(ValueError, match=f'`batch_size`.* {batch_size!r}'):
    decode.generate(target, None, prompts, batch_size=batch_size)


def test_at_batch_models_refilled_sequences_without_waiting():
  waiting, refilled = COSTS.at_batch(4), COSTS.at_batch(4, is_refilled=True)
  for one, other in zip(
    sorted(waiting.policies, key=lambda rate: rate.kind),
    sorted(refilled.policies, key=lambda rate: rate.kind),
    strict=True,
  ):
    assert one.policy == other.policy
    assert (one.tok_per_s < other.tok_per_s) == (one.tau > 1)
  assert refilled.times == waiting.times
