"""Stop strings: the text ends before the first, whatever the drafter, policy and batch, and nothing else changes."""

import dataclasses
import random

import pytest

import tiny
from eagle_jax import decode
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.text import StopDetector
from tiny_traces import BYTES

VOCAB = 12  # so few that a random drafter is right now and then
PROMPTS = [[1, 2, 3], [10], [5, 6, 7, 8, 9, 10, 11], [4, 0, 4], [2, 2]]
HOW = {'max_new_tokens': 24, 'eos_ids': (), 'policy': DynamicTree(3, 3, 3, 8)}


@pytest.fixture(scope='module')
def target():
  """Tokens are bytes, and the text hangs on all that came before."""
  made = tiny.target(dataclasses.replace(tiny.TARGET, vocab_size=VOCAB), tokenizer=BYTES)
  made.params['embed']['weight'] *= 50
  return made


@pytest.fixture(scope='module')
def drafter():
  return tiny.drafter(dataclasses.replace(tiny.DRAFTER, vocab_size=VOCAB))


@pytest.fixture(scope='module')
def whole(target, drafter):
  return decode.generate(target, drafter, PROMPTS, **HOW)


@pytest.fixture(scope='module')
def stop(whole):
  """Ends the first text at its first token, others later, one of them never."""
  first, *_, last = whole.text
  assert last.find(first[0]) != 0
  return [first[0], whole.text[2][9:11]]


def until(text, stop):
  """The text before the first stop string, and its length with it."""
  for size in range(len(text) + 1):
    if found := [place for one in stop if (place := text[:size].find(one)) >= 0]:
      return text[: min(found)], size
  return text, len(text)


def emitted(num_accepted, num_tokens):
  """The accepted drafts of each pass that it took to emit so many tokens, prefill's first."""
  left, kept = num_tokens - 1, []
  for num in num_accepted:
    if left > 0:
      kept.append(min(num, left))
      left -= num + 1
  return kept


@pytest.mark.parametrize('batch_size', [None, 2])
def test_text_ends_before_the_first_stop_string(target, drafter, whole, stop, batch_size):
  ends = [until(text, stop) for text in whole.text]
  assert len({size for _, size in ends}) > 2
  out = decode.generate(target, drafter, PROMPTS, batch_size=batch_size, stop=stop, **HOW)
  assert out.text == [text for text, _ in ends]
  assert out.tokens == [tokens[:size] for tokens, (_, size) in zip(whole.tokens, ends, strict=True)]
  assert out.num_accepted == [emitted(num, size) for num, (_, size) in zip(whole.num_accepted, ends, strict=True)]
  assert out.stats['num_new_tokens'] == sum(map(len, out.tokens))
  assert out.stats['num_target_passes'] == sum(map(len, out.num_accepted))


def test_stream_ends_before_the_first_stop_string(target, drafter, whole, stop):
  for prompt, text, tokens in zip(PROMPTS[:3], whole.text, whole.tokens, strict=False):
    expected, size = until(text, stop)
    out = decode.stream(target, drafter, prompt, stop=stop, row_ids=[PROMPTS.index(prompt)], **HOW)
    chunks = list(out)
    assert ''.join(chunk.text for chunk in chunks) == expected
    assert sum((chunk.tokens for chunk in chunks), []) == tokens[:size]
    assert out.stats['num_new_tokens'] == size


@pytest.mark.parametrize('seed', range(20))
def test_detector_finds_the_earliest_string_however_tokens_arrive(seed):
  rng = random.Random(seed)
  text = ''.join(rng.choice('abc\U0001f600') for _ in range(40))
  stop = [''.join(rng.choice('abc\U0001f600') for _ in range(rng.randint(2, 4))) for _ in range(2)]
  ids, said = BYTES.encode(text), ''
  detector = StopDetector(BYTES, stop)
  while ids:
    size = rng.randint(1, 6)
    said += detector.push(ids[:size])
    assert not any(one in said for one in stop)
    ids = ids[size:]
  said += detector.flush()
  expected, _ = until(text, stop)
  assert said == detector.text == expected
  assert BYTES.decode(BYTES.encode(text)[: detector.num_tokens]).startswith(expected)


@pytest.mark.parametrize('stop', [[''], [1], 7, b'a'])
def test_what_is_no_stop_string_is_refused(target, stop):
  with pytest.raises(ValueError, match='`stop`') as error:
    decode.generate(target, None, PROMPTS, stop=stop)
  assert repr(stop) in str(error.value)


def test_a_trace_of_a_stopped_text_is_refused(target, drafter):
  with pytest.raises(ValueError, match=r"stop=\('a',\)"):
    decode.generate(target, drafter, PROMPTS, stop='a', trace=True)


def test_stop_strings_need_a_tokenizer(target):
  with pytest.raises(ValueError, match='no tokenizer'):
    decode.generate(dataclasses.replace(target, tokenizer=None), None, PROMPTS, stop='a')
