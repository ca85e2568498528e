"""Text <-> ids. A tokenizer of raw bytes for the corner cases, SmolLM2's own for the facts about it."""

import random

import pytest

from eagle_jax.text import Detokenizer, Tokenizer

pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

STRINGS = (
  '',
  ' ',
  'Hello, world!',
  '  two  spaces\tand a tab\n\n',
  'in 2024, 3.14',
  'naïve café, Straße, Ελληνικά, русский, 日本語, עברית',
  '👍🏽 👨‍👩‍👧‍👦 🇨🇭',
  'def f(x):\n  return {"a": [x ** 2 for _ in range(10)]}\n',
  "don't, we'll, I'VE",
  'e\u0301 \u200b \ufeff \x00 \ufffd',
)


def byte_letters() -> list[str]:
  """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
  return [letter[byte] for byte in range(256)]


def byte_metadata(**changes) -> dict:
  """GGUF metadata of a tokenizer whose ids 0..255 are bytes, 256 an ordinary word, 257 and 258 special."""
  prefix = 'tokenizer.ggml.'
  fields = {
    'model': 'gpt2',
    'pre': 'smollm',
    'tokens': [*byte_letters(), 'ab', '<|bos|>', '<|end|>'],
    'token_type': [1] * 257 + [3, 3],
    'merges': ['a b'],
    'bos_token_id': 257,
    'eos_token_id': 258,
  }
  return {prefix + name: value for name, value in (fields | changes).items() if value is not None}


@pytest.fixture
def byte_tokenizer():
  return Tokenizer.from_gguf(byte_metadata(), eos_ids=(258,))


def in_pieces(tokenizer, ids, sizes) -> list[str]:
  """The texts a detokenizer gives when fed pieces of these sizes in turn, the flush last."""
  detokenizer, pieces, start = Detokenizer(tokenizer), [], 0
  while start < len(ids):
    size = next(sizes)
    pieces.append(detokenizer.push(ids[start : start + size]))
    start += size
  return [*pieces, detokenizer.flush()]


def test_bytes_merges_and_specials(byte_tokenizer):
  assert byte_tokenizer.vocab_size == 259
  assert byte_tokenizer.encode('cab é') == [0x63, 256, 0x20, 0xC3, 0xA9]
  assert byte_tokenizer.encode('<|bos|>a<|end|>') == [257, 0x61, 258]
  assert byte_tokenizer.decode([257, 0x63, 256, 258]) == 'cab'


@pytest.mark.parametrize(('pre', 'ids'), [('smollm', [0x31, 0x32, 0x61]), ('gpt-2', [256, 0x61])])
def test_digits_stand_alone_where_the_vocabulary_says_so(pre, ids):
  metadata = byte_metadata(pre=pre, tokens=[*byte_letters(), '12', '<|bos|>', '<|end|>'], merges=['1 2'])
  assert Tokenizer.from_gguf(metadata).encode('12a') == ids


def test_prompt_without_a_template():
  plain = Tokenizer.from_gguf(byte_metadata())
  assert not plain.has_chat_template
  assert plain.encode_prompt('a') == [0x61]
  assert Tokenizer.from_gguf(byte_metadata(add_bos_token=True)).encode_prompt('a') == [257, 0x61]
  with pytest.raises(ValueError, match='no chat template'):
    plain.encode_chat([{'role': 'user', 'content': 'a'}])


def with_template(template: str) -> Tokenizer:
  return Tokenizer.from_gguf({**byte_metadata(), 'tokenizer.chat_template': template}, eos_ids=(258,))


def test_template_sees_messages_and_special_tokens():
  tokenizer = with_template('{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}')
  assert tokenizer.encode_prompt('c') == [257, 0x63, 258]


def test_template_errors_are_clear():
  refusing = with_template("{{ raise_exception('roles must alternate') }}")
  with pytest.raises(ValueError, match='refuses these messages: roles must alternate'):
    refusing.encode_prompt('a')
  with pytest.raises(ValueError, match="needs 'role' and 'content'; one came with"):
    refusing.encode_chat([{'text': 'a'}])


def test_template_cannot_reach_into_python():
  with pytest.raises(ValueError, match='unsafe'):
    with_template('{{ messages.__class__.__mro__ }}').encode_prompt('a')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [({'model': 'llama'}, "'llama'"), ({'pre': 'unheard-of'}, "'unheard-of'"), ({'merges': None}, 'merges')],
)
def test_other_tokenizers_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Tokenizer.from_gguf(byte_metadata(**changes))


@pytest.mark.parametrize('text', STRINGS)
def test_byte_round_trip_in_pieces(byte_tokenizer, text):
  ids = byte_tokenizer.encode(text)
  assert byte_tokenizer.decode(ids) == text
  for size in (1, 2, 3, 7):
    assert ''.join(in_pieces(byte_tokenizer, ids, iter([size] * 1000))) == text


def test_characters_come_whole_and_at_once(byte_tokenizer):
  ids = list('aé👍'.encode())
  assert in_pieces(byte_tokenizer, ids, iter([1] * 9)) == ['a', '', 'é', '', '', '', '👍', '']


def test_pieces_join_to_the_decoded_text_for_any_bytes(byte_tokenizer):
  """Also where the bytes are no UTF-8, with special tokens between them, and cut short at the end."""
  rng = random.Random(0)
  alphabet = [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x91, 0x8D, 0xFF, 0xED, 0xA0, 256, 258]
  for _ in range(300):
    ids = rng.choices(alphabet, k=rng.randrange(25))
    pieces = in_pieces(byte_tokenizer, ids, iter(lambda: rng.randrange(1, 5), 0))
    assert ''.join(pieces) == byte_tokenizer.decode(ids), ids


def test_only_the_open_end_is_decoded_again(byte_tokenizer, monkeypatch):
  seen = []
  decode = Tokenizer.decode
  monkeypatch.setattr(Tokenizer, 'decode', lambda self, ids: seen.append(len(ids)) or decode(self, ids))
  in_pieces(byte_tokenizer, byte_tokenizer.encode('añ👍' * 100), iter([1] * 1000))
  assert max(seen) == 4  # the longest character


@pytest.mark.real
class TestSmolLM2:
  def test_size_and_ends(self, smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.has_chat_template) == (49152, (2,), True)
    assert [tokenizer.encode(text) for text in ('<|endoftext|>', '<|im_start|>', '<|im_end|>')] == [[0], [1], [2]]

  @pytest.mark.parametrize('text', STRINGS)
  def test_round_trip(self, smollm2, text):
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    assert ''.join(in_pieces(smollm2.tokenizer, ids, iter([1] * 1000))) == text

  def test_digits_are_single_tokens(self, smollm2):
    ids = smollm2.tokenizer.encode('in 2024, 3.14')
    pieces = [smollm2.tokenizer.decode([token]) for token in ids]
    assert pieces == ['in', ' ', '2', '0', '2', '4', ',', ' ', '3', '.', '1', '4']

  def test_common_words_are_single_tokens(self, smollm2):
    assert len(smollm2.tokenizer.encode('The sky is blue because of the air.')) == 9

  def test_chat_starts_with_the_default_system_prompt(self, smollm2):
    expected = (
      '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'
      '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    )
    assert smollm2.tokenizer.encode_prompt('Hi') == smollm2.tokenizer.encode(expected)
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode_prompt('Hi')).startswith('system\nYou are a helpful')

  def test_chat_with_its_own_system_prompt(self, smollm2):
    messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    expected = '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n'
    assert smollm2.tokenizer.encode_chat(messages, add_generation_prompt=False) == smollm2.tokenizer.encode(expected)
