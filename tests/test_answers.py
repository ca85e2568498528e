"""The target's answers against `generate`, features against a whole pass, shards byte by byte, masks by hand."""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TargetConfig
from eagle_jax.decode.batching import Request
from eagle_jax.decode.generate import generate
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import features
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.train.answers import Answerer, synthesize
from eagle_jax.train.conversations import Conversation
from eagle_jax.train.shards import Data, make_conversations, make_shards, read_shard, write_shard
from tiny_chat import TOY, Toy, spoken

CONFIG = TargetConfig(
  vocab_size=31, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_width=32, max_context=128,
  eos_ids=(0,),
)  # fmt: skip
SIZES = {'num_rows': 4, 'num_refill': 2, 'max_prompt': 32, 'max_new_tokens': 16}
DATA = Data(num_shards=2, shard_size=12, temperatures=(1.0, 0.0, 0.7), seed=5, **SIZES)


@pytest.fixture(scope='module')
def target():
  """Its text hangs on all that came before, and ends now and then."""
  params = TransformerTarget(CONFIG).init_params(jax.random.key(1))
  params['embed']['weight'] *= 50
  params['head']['weight'] = (params['head']['weight'] * 40).at[0].multiply(2)
  return Target(CONFIG, params, TOY)


def alone(target, request: Request, *, seed: int) -> list[int]:
  """Return what `generate` answers to one request."""
  made = generate(
    target, None, [request.token], max_new_tokens=16, row_ids=[request.id], seed=seed, temperature=request.temperature
  )
  return made.tokens[0]


@functools.cache
def _pass_of_64():
  network, causal_1LL = TransformerTarget(CONFIG), jnp.tri(64, dtype=bool)[None]
  position_1L, cache = jnp.arange(64)[None], network.init_cache(1, 0)
  return jax.jit(lambda params, token_1L: network.forward(params, token_1L, position_1L, causal_1LL, cache)[0].feature)


def whole_pass(target, token) -> np.ndarray:
  """Compute the features [n, D] of a text in one teacher-forced pass over it alone."""
  padded_1L = np.zeros((1, 64), np.int32)
  padded_1L[0, : len(token)] = token
  return np.asarray(_pass_of_64()(target.params, padded_1L)[:, 0, : len(token)].T)


def requests(count: int) -> list[Request]:
  rng = np.random.default_rng(0)
  lengths, temperatures = itertools.cycle((3, 9, 1, 30, 16, 5)), itertools.cycle((0.0, 1.0, 0.7))
  return [
    Request(7 * i, rng.integers(1, 31, next(lengths)).tolist(), next(temperatures)) for i in range(count)
  ]  # fmt: skip


@pytest.fixture(scope='module')
def expected(target):
  return {request.id: alone(target, request, seed=5) for request in requests(14)}


@pytest.mark.parametrize(('num_rows', 'num_refill'), [(4, 2), (1, 1)])
def test_answers_are_those_of_generate(target, expected, num_rows, num_refill):
  answerer = Answerer(target, **SIZES | {'num_rows': num_rows, 'num_refill': num_refill}, seed=5, taps=(1,))
  answers = list(answerer.answer(requests(14)))
  assert {answer.request.id: answer.token.tolist() for answer in answers} == expected
  assert len({len(token) for token in expected.values()}) > 3  # they end in different steps
  for answer in answers:
    seen = answer.request.token + answer.token.tolist()[:-1]
    feature, tap = np.split(answer.feature.astype(np.float32), 2, axis=1)
    np.testing.assert_allclose(feature, whole_pass(target, seen), rtol=1e-2, atol=1e-2)
    rms = np.sqrt(np.square(tap).mean(axis=1, keepdims=True))  # the tapped layer feeds the norm, whose scales are 1
    np.testing.assert_allclose(tap / rms, feature, rtol=2e-2, atol=2e-2)


def test_answers_without_features(target, expected):
  answers = list(Answerer(target, **SIZES, seed=5, records_features=False).answer(requests(14)))
  assert {answer.request.id: answer.token.tolist() for answer in answers} == expected
  assert all(answer.feature.shape == (len(answer.request.token) + len(answer.token) - 1, 0) for answer in answers)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_refill': 5}, 'num_refill.* 4; got 5'),
    ({'num_refill': 0}, 'num_refill.*got 0'),
    ({'max_new_tokens': 97}, 'max_prompt 32 [+] max_new_tokens 97 .*128'),
  ],
)
def test_impossible_sizes_are_errors(target, changes, message):
  with pytest.raises(ValueError, match=message):
    Answerer(target, **SIZES | changes)


@pytest.mark.parametrize('count', [0, 33])
def test_impossible_requests_are_errors(target, count):
  with pytest.raises(ValueError, match=f'Request 3 has {count} tokens; 1 to 32 are needed'):
    list(Answerer(target, **SIZES).answer([Request(3, [1] * count, 0.0)]))


def test_features_of_whole_texts(target, monkeypatch):
  monkeypatch.setattr('eagle_jax.evaluate.features._TOKENS_PER_PASS', 64)  # several passes, the last one not full
  texts = [request.token for request in requests(13)]
  for text, feature in zip(texts, features(target, texts), strict=True):
    assert feature.dtype == jnp.bfloat16
    np.testing.assert_allclose(feature.astype(np.float32), whole_pass(target, text), rtol=1e-2, atol=1e-2)


def test_self_synthesis_is_decided_by_seed_and_number(target):
  def synthesized(numbers, seed=5, **settings):
    refused = collections.Counter()
    conversations = synthesize(Answerer(target, **SIZES, seed=seed), numbers, refused, **settings)
    assert len(conversations) + refused.total() == len(numbers)
    return conversations, refused

  everything, refused = synthesized(range(30))
  assert refused.keys() == {'self-synthesis: a message was cut short', 'self-synthesis: an empty message'}
  assert len(set(everything)) > 5
  assert synthesized(range(30))[0] == everything
  assert synthesized(range(12))[0] + synthesized(range(12, 30))[0] == everything
  assert synthesized(range(30), seed=6)[0] != everything


def test_self_synthesis_goes_on_after_the_template_s_opening(target):
  expected = []
  for number in range(16):
    said, texts = 'U', []
    for then in ('.\nA', '.\nU', '.\nA'):  # after the user's message, the assistant's, the user's
      token = alone(target, Request(~number, TOY.encode(said), 1.0), seed=5) if len(said) <= 32 else [5]
      texts.append(TOY.decode(token))
      said += texts[-1] + then
      if token[-1] != 0 or not texts[-1]:
        break
    else:
      expected.append(Conversation((texts[0], texts[2])))
  refused = collections.Counter()
  assert synthesize(Answerer(target, **SIZES, seed=5), range(16), refused, num_turns=2) == expected
  assert (len(expected) > 1, refused.total()) == (True, 16 - len(expected))


def test_self_synthesis_refuses_long_prompts(target):
  refused = collections.Counter()
  synthesize(Answerer(target, **SIZES | {'max_prompt': 25}, seed=5), range(30), refused, num_turns=3)
  assert refused['self-synthesis: a prompt is too long'] > 0


def conversations(count: int) -> list[Conversation]:
  """Make conversations of one to three turns, some of them answered."""
  letters = 'bcdefghijklm'
  return [
    Conversation(tuple(letters[i % 7 : i % 7 + 1 + turn] for turn in range(1 + i % 3)), ('yes', 'no')[: i % 2 + 1 : 2])
    for i in range(count)
  ]


def shards(target, folder, data=DATA, given=None, refused=None) -> list[Example]:
  given = conversations(40) if given is None else given
  paths = list(make_shards(target, given, folder, data, collections.Counter() if refused is None else refused))
  assert [path.name for path in paths] == [f'shard_{i:04d}.safetensors' for i in range(data.num_shards)]
  return [example for path in paths for example in read_shard(path)]


def test_every_turn_is_answered_after_what_was_said(target, tmp_path):
  refused = collections.Counter()
  examples = shards(target, tmp_path, refused=refused)
  assert [example.id for example in examples] == list(range(24))
  num_turns = []
  for example, conversation in zip(examples, conversations(24), strict=True):
    text, marks = spoken(example)
    spans = [match.span() for match in re.finditer(r'\^+', marks)]
    num_turns.append(len(spans))
    # Between the answers stands what the template makes of the user's messages.
    pieces = [text[a:b] for a, b in zip([0, *(end for _, end in spans)], [start for start, _ in spans], strict=False)]
    said = [f'U{message}.\nA' for message in conversation.users]
    assert pieces == [said[0], *('\n' + turn for turn in said[1 : len(spans)])]
    for start, end in spans:
      prompt, temperature = example.token[:start].tolist(), DATA.temperatures[example.id % 3]
      assert example.token[start:end].tolist() == alone(target, Request(example.id, prompt, temperature), seed=5)
    if len(spans) < len(conversation.users):
      assert example.token[-1] != 0 or len(text) + len(said[len(spans)]) + 1 > DATA.max_prompt
    np.testing.assert_allclose(
      example.feature.astype(np.float32), whole_pass(target, example.token[:-1].tolist()), rtol=1e-2, atol=1e-2
    )
  assert set(num_turns) == {1, 2, 3}
  # Both shards' conversations that ended early, no more: what lies beyond them in the file was not looked at.
  assert refused.total() == sum(len(c.users) > n for c, n in zip(conversations(24), num_turns, strict=True)) > 0


def test_an_interrupted_run_ends_with_the_same_files(target, tmp_path):
  shards(target, tmp_path / 'a')
  making = make_shards(target, conversations(40), tmp_path / 'b', DATA, collections.Counter())
  first = next(making)
  making.close()
  (tmp_path / 'b' / '.shard_0001.safetensors.half').write_bytes(b'what a killed writer leaves')
  written = first.stat().st_mtime_ns
  shards(target, tmp_path / 'b')
  assert first.stat().st_mtime_ns == written
  for name in ('shard_0000.safetensors', 'shard_0001.safetensors'):
    assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


def test_too_few_conversations_are_one_error(target, tmp_path):
  given = [*conversations(23), Conversation(('b' * 60,)), Conversation(('x x',))]
  with pytest.raises(ValueError, match="suffice for 1 shards of 12, and 2 .*'the first prompt is too long': 1"):
    shards(target, tmp_path, given=given)


def test_first_prompts_of_other_lengths_are_counted(target, tmp_path):
  refused = collections.Counter()
  data = dataclasses.replace(DATA, num_shards=1, shard_size=1, min_prompt=6, max_prompt=7)
  given = [Conversation(('b',)), Conversation(('bcde',)), Conversation(('x x',)), Conversation(('bcd',))]
  (example,) = shards(target, tmp_path, data, given, refused)
  assert (example.id, example.token[:7].tolist()) == (3, TOY.encode('Ubcd.\nA'))
  assert refused == {'the first prompt is too short': 1, 'the first prompt is too long': 1, 'the toy refuses blanks': 1}


def test_a_refused_later_turn_ends_only_its_conversation(target, tmp_path):
  data, refused = dataclasses.replace(DATA, num_shards=1, shard_size=40), collections.Counter()
  given = [Conversation(('b', 'x x'))] * 40
  examples = shards(target, tmp_path, data, given, refused)
  num_whole = sum(example.token[-1] == 0 for example in examples)
  assert refused == {'the toy refuses blanks': num_whole, 'ended early: an answer was cut short': 40 - num_whole}
  assert 0 < num_whole < 40


def test_shards_without_features_hold_the_same_texts(target, tmp_path):
  stored = shards(target, tmp_path / 'a')
  bare = shards(target, tmp_path / 'b', dataclasses.replace(DATA, stores_features=False))
  for a, b in zip(stored, bare, strict=True):
    assert (a.id, spoken(a)) == (b.id, spoken(b))
    assert b.feature.shape == (len(b.token) - 1, 0)
    assert a.feature.dtype == b.feature.dtype == jnp.bfloat16


GIVEN = [
  # a conversation, its text, its mask
  (Conversation(('b',), ('yes',)), 'Ub.\nAyes.', '    ^^^^'),
  (Conversation(('b', 'c'), ('yes',)), 'Ub.\nAyes.', '    ^^^^'),
  (Conversation(('b', 'c'), ('yes', 'no'), 's'), 'Ss.\nUb.\nAyes.\nUc.\nAno.', '        ^^^^      ^^^'),
  (Conversation(('b', 'c'), ('yes' * 6, 'no')), 'Ub.\nA' + 'yes' * 5 + 'y', '    ' + '^' * 16),
  (Conversation(('b', 'c' * 25), ('yes', 'no')), 'Ub.\nAyes.', '    ^^^^'),
  (Conversation(('b', 'c'), ('yes', 'n.o')), 'Ub.\nAyes.', '    ^^^^'),
]


@pytest.mark.parametrize('stores_features', [True, False])
def test_given_answers_by_hand(target, tmp_path, stores_features):
  refused = collections.Counter()
  data = dataclasses.replace(DATA, num_shards=1, shard_size=6, answers='given', stores_features=stores_features)
  unusable = [
    Conversation(('b',)),
    Conversation(('b', 'c')),
    Conversation(('b',), ('n.o',)),
    Conversation(('x x',), ('a',)),
  ]
  examples = shards(target, tmp_path, data, unusable + [given for given, _, _ in GIVEN], refused)
  assert [example.id for example in examples] == list(range(4, 10))
  for example, (_, text, marks) in zip(examples, GIVEN, strict=True):
    assert spoken(example) == (text, ' ' + marks)
    if stores_features:
      of_pass = whole_pass(target, example.token[:-1].tolist())
      np.testing.assert_allclose(example.feature.astype(np.float32), of_pass, rtol=1e-2, atol=1e-2)
    else:
      assert example.feature.shape == (len(example.token) - 1, 0)
  assert refused == {
    'no answers': 2,
    'an answer holds an EOS': 2,  # a first one, and a later one
    'the toy refuses blanks': 1,
    'ended early: an answer was cut short': 1,
    'ended early: a later prompt is too long': 1,
  }


def test_without_any_data(target, tmp_path):
  """The target asks and answers; an interrupted run asks the same again, and no question twice."""
  data = dataclasses.replace(DATA, shard_size=8)
  folder, refused = tmp_path / 'a', collections.Counter()
  asked = list(make_conversations(target, folder, data, refused))
  assert len(list(folder.iterdir())) == 8  # 4 x 2 parts of 8 tries
  assert len(asked) + refused.total() == 64
  assert len(set(asked)) > data.shard_size  # every part has questions of its own
  (folder / 'prompts_0003.jsonl').unlink()
  again = collections.Counter()
  assert list(make_conversations(target, folder, data, again)) == asked
  assert 0 < again.total() < refused.total()  # those of one part alone
  lazily = make_conversations(target, tmp_path / 'b', data, collections.Counter())
  examples = shards(target, tmp_path / 'b', data, lazily)
  assert 0 < len(examples) < len(asked)
  for example, conversation in zip(examples, asked[: len(examples)], strict=True):
    assert spoken(example)[0].startswith(f'U{conversation.users[0]}.\nA')
  assert len(list((tmp_path / 'b').glob('prompts_*'))) < 8


@pytest.mark.parametrize(
  ('tokenizer', 'temperature', 'message'),
  [
    (None, 1.0, 'Conversations need a tokenizer'),
    (Toy(has_chat_template=False), 1.0, 'Self-synthesis needs a chat template'),
    (TOY, 0.0, 'temperature of self-synthesis is 0.0'),
  ],
)
def test_self_synthesis_says_what_it_needs(target, tmp_path, tokenizer, temperature, message):
  speechless = dataclasses.replace(target, tokenizer=tokenizer)
  with pytest.raises(ValueError, match=message):
    next(make_conversations(speechless, tmp_path, DATA, collections.Counter(), temperature=temperature))


def test_shards_need_a_tokenizer(target, tmp_path):
  with pytest.raises(ValueError, match='Conversations need a tokenizer'):
    shards(dataclasses.replace(target, tokenizer=None), tmp_path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'answers': 'none'}, "answers is 'none'; 'target' .* or 'given'"),
    ({'num_shards': 0, 'max_prompt': -1}, "at least 1: {'num_shards': 0, 'max_prompt': -1}"),
    ({'min_prompt': 33}, 'min_prompt 33 is above max_prompt 32'),
    ({'temperatures': ()}, 'temperatures is [(][)]'),
    ({'temperatures': (1.0, float('nan'))}, 'temperatures is .*nan'),
    ({'temperatures': (-1.0,)}, 'temperatures is .*-1'),
    ({'seed': 2**31}, 'seed is 2147483648; a number from 0'),
    ({'seed': -1}, 'seed is -1; a number from 0'),
  ],
)
def test_settings_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(DATA, **changes)


def test_written_examples_are_read_again(tmp_path):
  rng = np.random.default_rng(0)
  examples = [
    Example(
      9 + n, rng.integers(0, 31, n + 1).astype(np.int32), rng.random(n + 1) < 0.5, rng.random((n, 3)).astype('f'),
      temperature, n
    )
    for n, temperature in ((4, 0.0), (1, 0.5), (7, 1.0))
  ]  # fmt: skip
  write_shard(tmp_path / 'x', examples)
  for written, read in zip(examples, read_shard(tmp_path / 'x'), strict=True):
    for a, b in zip(written, read, strict=True):
      assert np.asarray(a).dtype == np.asarray(b).dtype
      np.testing.assert_array_equal(a, b)


def test_a_damaged_shard_is_named(tmp_path):
  path = tmp_path / 'shard_0000.safetensors'
  path.write_bytes(b'\x10\x00')
  with pytest.raises(ValueError, match='shard_0000'):
    read_shard(path)
