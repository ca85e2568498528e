"""Text <-> ids. A tokenizer of raw bytes for the corner cases, SmolLM2's own for the facts about it."""

import gzip
import json
import os
import random
import re
import unicodedata

import pytest

pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')
pytest.importorskip('gguf')

import gguf

from eagle_jax.text import Detokenizer, Tokenizer, read_prompts
from tiny_files import byte_letters, byte_metadata

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


def test_essential_ids_are_digits_and_special_tokens():
  assert Tokenizer.from_gguf(byte_metadata()).essential_ids == [*range(ord('0'), ord('9') + 1), 257, 258]


def piece_metadata(**changes) -> dict:
  """GGUF metadata of a SentencePiece vocabulary: three special tokens, 256 bytes, letters, joint pieces with scores."""
  prefix = 'tokenizer.ggml.'
  letters = [chr(code) for code in range(0x21, 0x7F)] + ['\u2581']
  joint = {'\u2581t': -1.0, 'he': -2.0, '\u2581the': -3.0, 'ab': -5.0, 'bc': -4.0, '\u2581\u2581': -6.0}
  fields = {
    'model': 'llama',
    'tokens': ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256)), *letters, *joint],
    'scores': [0.0] * 259 + [-100.0] * len(letters) + [*joint.values()],
    'token_type': [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(joint)),
    'bos_token_id': 1,
    'eos_token_id': 2,
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
  assert byte_tokenizer.backend.get_vocab_size() == 259
  assert byte_tokenizer.encode('cab é') == [0x63, 256, 0x20, 0xC3, 0xA9]
  assert byte_tokenizer.encode('<|bos|>a<|end|>') == [257, 0x61, 258]
  assert byte_tokenizer.decode([257, 0x63, 256, 258]) == 'cab'


@pytest.mark.parametrize(('pre', 'ids'), [('smollm', [0x31, 0x32, 0x61]), ('gpt-2', [256, 0x61])])
def test_digits_stand_alone_where_the_vocabulary_says_so(pre, ids):
  metadata = byte_metadata(pre=pre, tokens=[*byte_letters(), '12', '<|bos|>', '<|end|>'], merges=['1 2'])
  assert Tokenizer.from_gguf(metadata).encode('12a') == ids


@pytest.mark.parametrize(
  ('pre', 'pieces'),
  [
    ('gpt-4o', ['a', 'B', " it's", ' ', '123', '4', '/\n']),
    ('dbrx', ['aB', ' it', "'s", ' ', '123', '4', '/\n']),
    ('smaug-bpe', ['aB', ' it', "'s", ' ', '123', '4', '/\n']),
    ('refact', ['aB', ' it', "'s", ' ', '1', '2', '3', '4', '/', '\n']),
  ],
)
def test_merges_stay_within_the_pieces_of_the_vocabulary(pre, pieces):
  splitter = Tokenizer.from_gguf(byte_metadata(pre=pre)).backend.pre_tokenizer
  found = [piece for piece, _ in splitter.pre_tokenize_str("aB it's 1234/\n")]
  assert [piece.replace('\u0120', ' ').replace('\u010a', '\n') for piece in found] == pieces


def test_pieces_join_by_score():
  """'bc' scores above 'ab'; a space is a letter, and one is put before a text."""
  tokenizer = Tokenizer.from_gguf(piece_metadata())
  tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode('the abc the\u20ac</s>x')]
  euro = ['<0xE2>', '<0x82>', '<0xAC>']
  assert tokens == ['\u2581the', '\u2581', 'a', 'bc', '\u2581the', *euro, '</s>', '\u2581', 'x']
  assert tokenizer.encode_prompt('the')[0] == 1
  assert Tokenizer.from_gguf(piece_metadata(add_bos_token=False)).encode_prompt('the')[0] != 1
  assert Tokenizer.from_gguf(piece_metadata(add_space_prefix=False)).decode(tokenizer.encode('the')) == ' the'


@pytest.mark.parametrize('text', [text for text in STRINGS if '\x00' not in text])
def test_pieces_round_trip(text):
  tokenizer = Tokenizer.from_gguf(piece_metadata())
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  for size in (1, 2, 3, 7):
    assert ''.join(in_pieces(tokenizer, ids, iter([size] * 1000))) == text


def test_any_pieces_stream_to_the_decoded_text():
  """Spaces are neither lost nor doubled, whatever begins a push; bytes that are no UTF-8 come out alike."""
  tokenizer, rng = Tokenizer.from_gguf(piece_metadata()), random.Random(0)
  tokens = ['\u2581', '\u2581the', 'he', '\u2581\u2581', 'x', '<s>', '<0xE2>', '<0x82>', '<0xAC>', '<0x20>', '<0xFF>']
  alphabet = [tokenizer.backend.token_to_id(token) for token in tokens]
  for _ in range(500):
    ids = rng.choices(alphabet, weights=[3, 3, 3, 3, 3, 1, 2, 2, 2, 1, 1], k=rng.randrange(25))
    pieces = in_pieces(tokenizer, ids, iter(lambda: rng.randrange(1, 5), 0))
    assert ''.join(pieces) == tokenizer.decode(ids), ids
  cut = [tokenizer.backend.token_to_id(token) for token in ('<0xE2>', '<0x82>', '<s>', '<0xAC>')]
  assert ''.join(in_pieces(tokenizer, cut, iter([1] * 4))) == tokenizer.decode(cut) == '\u20ac'


def gguf_file(path, metadata):
  """A GGUF file of a tokenizer alone, as converters write one."""
  writer = gguf.GGUFWriter(path, 'llama')
  lists = {'tokens': writer.add_token_list, 'merges': writer.add_token_merges, 'scores': writer.add_token_scores}
  lists |= {'token_type': writer.add_token_types, 'model': writer.add_tokenizer_model, 'pre': writer.add_tokenizer_pre}
  lists |= {'bos_token_id': writer.add_bos_token_id, 'eos_token_id': writer.add_eos_token_id}
  for name, value in metadata.items():
    lists[name.removeprefix('tokenizer.ggml.')](value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


@pytest.mark.parametrize('metadata', [byte_metadata(pre='qwen2'), byte_metadata(pre='llama-bpe'), piece_metadata()])
def test_gguf_tokenizers_are_those_of_transformers(metadata, tmp_path):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('torch', reason='transformers reads GGUF files with it')
  gguf_file(tmp_path / 'tiny.gguf', metadata)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file='tiny.gguf')
  ours = Tokenizer.from_gguf(metadata)
  for text in STRINGS:
    if 'tokenizer.ggml.scores' in metadata and text.startswith(' '):
      continue  # transformers puts no space before one, llama.cpp does
    composed = unicodedata.normalize('NFC', text)  # which transformers leaves out where a Qwen2 comes as GGUF
    assert ours.encode(composed) == theirs.encode(composed, add_special_tokens=False), text


def test_qwen2_composes():
  transformers = pytest.importorskip('transformers')
  metadata = byte_metadata(pre='qwen2')
  vocab = {token: i for i, token in enumerate(metadata['tokenizer.ggml.tokens'])}
  theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=[('a', 'b')], unk_token=None, eos_token=None, pad_token=None)
  for text in STRINGS:
    assert Tokenizer.from_gguf(metadata).encode(text) == theirs.encode(text)


TEMPLATES = {
  'answers marked': (
    '{% for m in messages %}{% if m.role == "user" %}<|user|>{{ m.content }}{% else %}{% generation %}{{ m.content }}'
    '{% set x = 1 %}{% endgeneration %}{{ x }}{% endif %}{% endfor %}'
  ),
  'other special tokens': '{{ unk_token }}{{ bos_token }}{{ messages[0].content }}{{ pad_token }}{{ mask_token }}',
  'several': {'tool_use': '{{ tools }}', 'default': '{% for m in messages %}{{ m.content }}{% endfor %}'},
  'plain': '{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}',
  'tools, dates and JSON': (
    "{%- if tools is not none %}{{ tools }}{%- endif %}{% if strftime_now is defined %}{{ strftime_now('%Y') }}"
    '{% endif %}{%- for m in messages %}{%- if loop.index > 2 %}{%- break %}{%- endif %}\n{{ m | tojson }}\n'
    '{%- endfor %}{% if add_generation_prompt %}<|bos|>{% endif %}'
  ),
}


@pytest.fixture(params=TEMPLATES)
def folder_and_theirs(request, byte_tokenizer, tmp_path):
  """A folder that transformers saved a tokenizer to, and that tokenizer."""
  transformers = pytest.importorskip('transformers')
  backend = byte_tokenizer.backend
  backend.enable_truncation(3)
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token='<|bos|>',
    eos_token='<|end|>',
    unk_token='<|bos|>',
    pad_token='<|end|>',
    chat_template=TEMPLATES[request.param],
  )
  theirs.save_pretrained(tmp_path)
  return tmp_path, theirs


def test_the_tokenizer_of_a_folder_is_that_of_transformers(folder_and_theirs):
  folder, theirs = folder_and_theirs
  ours = Tokenizer.from_folder(folder, (99, 258))
  assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (257, (258, 99), False)
  for text in STRINGS:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([257, *ids, 258]) == theirs.decode([257, *ids, 258], skip_special_tokens=True) == text
  messages = [{'role': role, 'content': f'caf\u00e9 <{role}>'} for role in ('user', 'assistant', 'user')]
  for ends_open in (True, False):
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=ends_open)
    assert ours.render(messages, ends_open) == rendered
    assert ours.encode_chat(messages, ends_open) == theirs.encode(rendered, add_special_tokens=False)


def test_a_folder_whose_tokenizer_puts_a_first_token(byte_tokenizer, tmp_path):
  transformers = pytest.importorskip('transformers')
  tokenizers = pytest.importorskip('tokenizers')
  backend = byte_tokenizer.backend
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|bos|> $A', special_tokens=[('<|bos|>', 257)]
  )
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token='<|bos|>')
  theirs.save_pretrained(tmp_path)
  ours = Tokenizer.from_folder(tmp_path)
  assert ours.encode_prompt('ab') == theirs.encode('ab') == [257, 256]
  assert ours.encode('ab') == [256]


def test_the_folder_of_a_llama_2(tmp_path):
  """Its class joins pieces, puts a space before a text, and drops it when it decodes."""
  transformers = pytest.importorskip('transformers')
  pieces = Tokenizer.from_gguf(piece_metadata())
  model = json.loads(pieces.backend.to_str())['model']
  merges = [tuple(pair) for pair in model['merges']]
  transformers.LlamaTokenizer(vocab=model['vocab'], merges=merges).save_pretrained(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'llama'}))
  ours, theirs = Tokenizer.from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in STRINGS:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.encode_prompt(text) == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ''.join(in_pieces(ours, ids, iter([1] * 1000))) == ours.decode(ids)


def test_a_byte_level_tokenizer_labelled_as_llama_s_keeps_its_blanks(byte_tokenizer, tmp_path):
  """As DeepSeek-R1-Distill-Llama's is; some releases of transformers put SentencePiece's normalizer into it."""
  transformers = pytest.importorskip('transformers')
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend, bos_token='<|bos|>')
  theirs.save_pretrained(tmp_path)
  path = tmp_path / 'tokenizer_config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), 'tokenizer_class': 'LlamaTokenizerFast'}))
  text = 'hello world, how are\nyou'
  assert Tokenizer.from_folder(tmp_path).encode(text) == list(text.encode())


def test_named_templates_without_a_default_are_listed(byte_tokenizer, tmp_path):
  transformers = pytest.importorskip('transformers')
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend, bos_token='<|bos|>')
  theirs.chat_template = {'tool_use': 'a', 'rag': 'b'}
  theirs.save_pretrained(tmp_path)
  ours = Tokenizer.from_folder(tmp_path)
  assert ours.has_chat_template
  assert ours.encode('ab') == [256]
  with pytest.raises(ValueError, match=r"\['rag', 'tool_use'\]"):
    ours.encode_prompt('a')


def test_folders_without_a_tokenizer_or_with_a_broken_one(tmp_path):
  assert Tokenizer.from_folder(tmp_path) is None
  (tmp_path / 'tokenizer.json').write_text('{"model": ')
  with pytest.raises(ValueError, match=r"cannot read the tokenizer in \['tokenizer.json'\]"):
    Tokenizer.from_folder(tmp_path)


def test_code_that_a_folder_brings_is_never_run(byte_tokenizer, tmp_path, monkeypatch):
  pytest.importorskip('transformers')
  byte_tokenizer.backend.save(str(tmp_path / 'tokenizer.json'))
  own = {'tokenizer_class': 'Own', 'auto_map': {'AutoTokenizer': ['own.Own', 'own.Own']}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(own))
  (tmp_path / 'own.py').write_text(f'open({str(tmp_path / "was_run")!r}, "w").close()\nclass Own: ...\n')
  monkeypatch.setattr('builtins.input', lambda *_: 'y')  # to the question whether to run it
  with pytest.raises(ValueError, match='cannot read the tokenizer'):
    Tokenizer.from_folder(tmp_path)
  assert not (tmp_path / 'was_run').exists()


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
  with pytest.raises(ValueError, match='roles must alternate'):
    refusing.encode_prompt('a')
  with pytest.raises(ValueError, match="'role' and 'content', got {'text': 'a'}"):
    refusing.encode_chat([{'text': 'a'}])


@pytest.mark.parametrize(
  ('template', 'content', 'value'),
  [
    ('{{ messages[0].content + 1 }}', 'a', 'TypeError'),
    ('{% for m in messages %}{{ m.content + eos_token }}{% endfor %}', None, 'TypeError'),
    ('{{ 1 // 0 }}', 'a', 'ZeroDivisionError'),
    ('{{ messages[0].content.encode("x") }}', 'a', 'LookupError'),
    ('{% if %}', 'a', 'TemplateSyntaxError'),
  ],
)
def test_what_a_template_raises_is_a_value_error(template, content, value):
  with pytest.raises(ValueError, match=value):
    with_template(template).render([{'role': 'user', 'content': content}], True)


def test_a_template_of_a_gguf_file_sees_its_special_tokens():
  metadata = byte_metadata(unknown_token_id=256, padding_token_id=258)
  metadata['tokenizer.chat_template'] = '{{ unk_token }}{{ bos_token }}{{ messages[0].content }}{{ pad_token }}'
  assert Tokenizer.from_gguf(metadata).encode_prompt('c') == [256, 257, 0x63, 258]


@pytest.mark.parametrize('text', ['ok \ud83d bad', 'caf\udce9 au lait'])
@pytest.mark.parametrize('template', [None, '{{ messages[0].content }}'])
def test_text_that_is_not_unicode_is_named(text, template):
  tokenizer = Tokenizer.from_gguf({**byte_metadata(), 'tokenizer.chat_template': template})
  for encode in (tokenizer.encode, tokenizer.encode_prompt):
    with pytest.raises(ValueError, match=re.escape(ascii(text))):
      encode(text)


@pytest.mark.parametrize(
  ('template', 'end'),
  [
    ('{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}', 258),
    ('{% for m in messages %} {{ m.content }} {{ bos_token }}{% endfor %}', 257),
    ('{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}', None),
    ('{{ messages[0].content }}', None),
    ('{{ raise_exception("no answers") }}', None),
  ],
)
def test_what_a_template_ends_an_answer_with(template, end):
  assert with_template(template).turn_end() == end
  assert Tokenizer.from_gguf(byte_metadata()).turn_end() is None


def test_template_cannot_reach_into_python():
  with pytest.raises(ValueError, match='unsafe'):
    with_template('{{ messages.__class__.__mro__ }}').encode_prompt('a')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model': 'bert'}, "'bert'"),
    ({'pre': 'unheard-of'}, "'unheard-of'"),
    ({'merges': None}, 'merges'),
    ({'model': 'llama'}, 'scores'),
    ({'merges': ['a b'], 'tokens': [*byte_letters(), 'x', '<|bos|>', '<|end|>']}, 'tiny.gguf'),
    ({'merges': ['ab']}, 'tiny.gguf'),
    ({'merges': ['a b c']}, 'tiny.gguf'),
    ({'merges': [3]}, 'tiny.gguf'),
    ({'token_type': [1]}, 'tiny.gguf'),
    ({'tokens': [3, 4], 'token_type': [1, 1]}, 'tiny.gguf'),
  ],
)
def test_other_tokenizers_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Tokenizer.from_gguf(byte_metadata(**changes), source='tiny.gguf')


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
  assert max(seen) == 2 + 4  # the longest character, and what stands before it


@pytest.mark.real
class TestSmolLM2:
  def test_size_and_ends(self, smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.eos_ids, tokenizer.has_chat_template) == ((2,), True)
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


def prompts_file(folder, content: bytes, name='prompts.txt'):
  path = folder / name
  path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
  return path


@pytest.mark.parametrize('name', ['prompts.txt', 'prompts.jsonl.gz'])
def test_prompts_are_lines_or_json_lines(tmp_path, name):
  content = 'Why? \r\n\n {"prompt": "né\\n"}\nWho?'
  for encoding in ('utf-8', 'utf-8-sig'):
    path = prompts_file(tmp_path, content.encode(encoding), name)
    assert list(read_prompts(path)) == ['Why?', 'né\n', 'Who?']


def test_prompts_come_through_a_pipe():
  read_end, write_end = os.pipe()
  os.write(write_end, b'Why?\n')
  os.close(write_end)
  assert list(read_prompts(f'/dev/fd/{read_end}')) == ['Why?']
  os.close(read_end)


@pytest.mark.parametrize('harm', [lambda x: x[:-9], lambda x: x[:20] + b'no' + x[22:], lambda x: b'no' + x])
def test_a_damaged_gzip_file_of_prompts(tmp_path, harm):
  path = prompts_file(tmp_path, b'Why? Who? What?', 'prompts.txt.gz')
  path.write_bytes(harm(path.read_bytes()))
  with pytest.raises(ValueError, match='prompts.txt.gz is damaged'):
    list(read_prompts(path))


@pytest.mark.parametrize('name', ['prompts.json', 'prompts.json.gz'])
@pytest.mark.parametrize(
  ('content', 'prompts'),
  [
    ('[{"prompt": "one"}]', ['one']),
    ('\n[\n  {"prompt": "[one"},\n  {"prompt": "two"}\n]\n', ['[one', 'two']),
    ('["one", "{two"]', ['one', '{two']),
    ('{\n  "prompt": "one"\n}', ['one']),
    ('[INST] Why?\n[INST] Who?', ['[INST] Why?', '[INST] Who?']),
    ('[1, 2] is what?\n["a"] sorted?', ['[1, 2] is what?', '["a"] sorted?']),
    ('["a"] sorted?\n\n{"prompt": "one"}', ['["a"] sorted?', 'one']),
    ('[]\nWhy?', ['[]', 'Why?']),
  ],
)
def test_a_file_of_prompts_may_be_one_json_array(tmp_path, name, content, prompts):
  assert list(read_prompts(prompts_file(tmp_path, content.encode(), name))) == prompts


@pytest.mark.parametrize(
  ('content', 'value'),
  [
    (b'', 'prompts.txt'),
    (b' \n\n', 'prompts.txt'),
    (b'[]', 'prompts.txt'),
    (b'Who?\n\xff\xfe abc', 'prompts.txt, line 2.*UTF-8'),
    (b'Why?\n{a set}', 'prompts.txt, line 2'),
    (b'{"text": "Why?"}', 'line 1 '),
    (b'{"prompt": ' + b'[' * 100_000, 'prompts.txt, line 1.*deeply'),
    (b'[{"prompt": ' + b'[' * 100_000, 'prompts.txt.*deeply'),
    (b'[{"prompt": "one"}, {"text": "two"}]', 'prompts.txt, element 2'),
    (b'[\n{"prompt": "one"},\n3]', 'prompts.txt, element 2'),
    (b'[{"prompt": "one"}, {"prom', 'prompts.txt'),
    (b'[\n  {"prompt": "one"}', 'prompts.txt'),
    (b'{\n"prompt": "one"\n}\n{\n"prompt": "two"\n}', 'prompts.txt'),
    (b'Why?\n[{"role": "user", "content": "a"}]', 'prompts.txt, line 2'),
    (b'Why?\n{"prompt": "ok \\ud83d bad"}', 'prompts.txt, line 2'),
  ],
)
def test_bad_files_of_prompts(tmp_path, content, value):
  with pytest.raises(ValueError, match=value):
    list(read_prompts(prompts_file(tmp_path, content)))
  with pytest.raises(ValueError, match='No file of prompts at'):
    list(read_prompts(tmp_path))
