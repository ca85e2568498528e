"""Training: losses and packing against plain loops, shards that survive, and a drafter that learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.decode import generate
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.policy import Chain
from eagle_jax.target.transformer import Target, TransformerTarget
from eagle_jax.train import losses
from eagle_jax.train.data import epochs, frequent_ids, pack
from eagle_jax.train.features import Data, Example, answer, generate_shards, read_shard
from eagle_jax.train.loop import train
from eagle_jax.train.step import Frozen, Recipe, predict

CONFIG = TargetConfig(
  vocab_size=31, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_width=32, max_context=256
)  # fmt: skip
DRAFTER = DrafterConfig(vocab_size=31, width=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_width=32)
DATA = Data(num_shards=3, batch=4, max_prompt=8, max_new_tokens=20, temperatures=(1.0,))


@dataclasses.dataclass(frozen=True)
class Letters:
  """A tokenizer of letters, enough to prompt with."""

  def encode_prompt(self, text):
    return [ord(letter) - ord('a') for letter in text]

  def decode(self, ids):
    return ' '.join(map(str, ids))


@pytest.fixture(scope='module')
def target():
  params = TransformerTarget(CONFIG).init_params(jax.random.key(0))
  params['embed']['weight'] *= 50  # else the text hardly depends on what came before
  return Target(CONFIG, params, Letters())


def example(rng, num_rows, num_prompt):
  tokens = rng.integers(0, 31, num_rows + 1).astype(np.int32)
  return Example(tokens, rng.normal(size=(num_rows, 16)).astype(np.float16), num_prompt)


def test_losses_equal_loops():
  rng = np.random.default_rng(0)
  a_UR, b_UR, weight_R = rng.normal(size=(5, 4)) * 2, rng.normal(size=(5, 4)), np.array([1.0, 0.0, 1.0, 1.0])
  huber = cross = 0.0
  for row in (0, 2, 3):
    error = np.abs(a_UR[:, row] - b_UR[:, row])
    huber += np.mean([0.5 * e * e if e < 1 else e - 0.5 for e in error]) / 3
    p, q = (np.exp(x[:, row]) / np.exp(x[:, row]).sum() for x in (b_UR, a_UR))
    cross -= sum(p * np.log(q)) / 3
  a, b, weight = (jnp.float32(x) for x in (a_UR, b_UR, weight_R))
  np.testing.assert_allclose(losses.smooth_l1(a, b, weight), huber, rtol=1e-5)
  np.testing.assert_allclose(losses.soft_cross_entropy(a, b, weight), cross, rtol=1e-5)


def test_packing_shifts_tokens_by_one_and_trains_the_row_before_the_answer():
  rng = np.random.default_rng(1)
  first, second = example(rng, 6, 3), example(rng, 9, 5)
  packed = pack([first, second], num_rows=10)
  assert packed.next_token[:5].tolist() == first.token[1:6].tolist()
  assert packed.next_token[5:].tolist() == second.token[1:6].tolist()
  assert packed.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
  assert packed.sequence.tolist() == [0] * 5 + [1] * 5
  np.testing.assert_array_equal(packed.next_feature[:4], packed.feature[1:5])
  # Row t stands in for feature t + 1, which predicts token t + 2: the first answer token is number num_prompt.
  assert packed.weight.tolist() == [0, 1, 1, 1, 1] + [0, 0, 0, 1, 1]


def test_every_epoch_holds_every_example_once():
  rng = np.random.default_rng(2)
  examples = [example(rng, n, 2) for n in (5, 9, 3, 7, 6)]
  rows, seen = epochs(examples, num_rows=16, seed=0), 0
  while seen < len(examples):
    packed = next(rows)
    starts = np.flatnonzero((packed.position == 0) & (packed.sequence >= 0))
    seen += len(starts)
    assert (packed.sequence >= 0).sum() <= 16
  assert seen == len(examples)


def test_packed_sequences_do_not_see_each_other():
  rng = np.random.default_rng(3)
  first, second = example(rng, 6, 2), example(rng, 9, 2)
  network = Eagle(DRAFTER)
  params = network.init_params(jax.random.key(0))
  frozen = Frozen(jax.random.normal(jax.random.key(1), (31, 16)), jnp.zeros((1, 16)))

  def outputs(examples):
    packed = pack(examples, num_rows=16)
    return np.asarray(predict(params, frozen, jnp.float32(packed.feature).T, packed, network=network))

  np.testing.assert_allclose(outputs([first, second])[:, 5:13], outputs([second])[:, :8], rtol=1e-4, atol=1e-5)


def test_frequent_ids_come_from_answers_and_hold_the_forced():
  tokens = np.array([7, 7, 7, 7, 2, 2, 2, 5, 5, 9], np.int32)
  examples = [Example(tokens, np.zeros((9, 1), np.float16), 4)]
  assert frequent_ids(examples, size=3, vocab_size=31, forced=[30]).tolist() == [2, 5, 30]


def test_recorded_features_are_those_of_a_whole_pass(target):
  prompts = [[1, 2, 3], [4]]
  network = TransformerTarget(CONFIG)
  for prompt, recorded in zip(prompts, answer(target, prompts, DATA, temperature=1.0, seed=0), strict=True):
    assert recorded.token[: len(prompt)].tolist() == prompt
    assert len(recorded.token) == len(recorded.feature) + 1 == len(prompt) + DATA.max_new_tokens
    num_rows = len(recorded.feature)
    position_1L = jnp.arange(num_rows)[None]
    causal_1LL = jnp.tri(num_rows, dtype=bool)[None]
    cache = network.init_cache(1, num_rows)
    taps, _ = network.forward(target.params, recorded.token[None, :-1], position_1L, causal_1LL, cache)
    np.testing.assert_allclose(recorded.feature.T, taps.feature[:, 0], atol=2e-2)


def test_shards_go_on_where_they_stopped(target, tmp_path):
  prompts = ['abc', 'much too long for it', 'd', 'ef', 'ghi', 'jkl', 'm', 'no', 'p', 'qrs', 'tu', 'v', 'wx']
  whole = list(generate_shards(target, iter(prompts), tmp_path / 'a', DATA))
  generator = generate_shards(target, iter(prompts), tmp_path / 'b', DATA)
  next(generator)
  generator.close()
  resumed = list(generate_shards(target, iter(prompts), tmp_path / 'b', DATA))
  assert len(whole) == 3
  for a, b in zip(sum(whole, []), sum(resumed, []), strict=True):
    assert a.token.tolist() == b.token.tolist()
    assert a.num_prompt == b.num_prompt
    np.testing.assert_array_equal(a.feature, b.feature)
  with pytest.raises(ValueError, match='suffice for 3 shards'):
    list(generate_shards(target, iter(prompts), tmp_path / 'c', dataclasses.replace(DATA, num_shards=4)))


def test_a_damaged_shard_is_named(tmp_path):
  path = tmp_path / 'shard_0000.safetensors'
  path.write_bytes(b'\x10\x00')
  with pytest.raises(ValueError, match='shard_0000'):
    read_shard(path)


def test_a_trained_drafter_is_accepted_more(target):
  """The whole way: the target's answers, a short training, longer acceptance than before."""
  prompts = [[token] for token in range(24)]
  examples = answer(target, prompts, dataclasses.replace(DATA, max_new_tokens=60), temperature=1.0, seed=3)
  recipe = Recipe(num_steps=150, num_rows=256, learning_rate=3e-3, warmup_steps=10)
  reports = []

  def report(step, drafter, metrics):
    reports.append((step, drafter, metrics))

  drafter, metrics = train(target, DRAFTER, examples[:20], examples[20:], recipe, report=report, report_every=75)
  assert [step for step, _, _ in reports] == [75, 150]
  assert metrics['cross_entropy'] < reports[0][2]['cross_entropy']
  untrained = dataclasses.replace(drafter, params=Eagle(DRAFTER).init_params(jax.random.key(9)))
  taus = [
    generate(target, d, prompts[:8], max_new_tokens=40, policy=Chain(3)).stats['tau'] for d in (untrained, drafter)
  ]
  assert taus[1] > taus[0] + 0.3
