"""Conversations: every form that is read, every reason to refuse one, and tokens and mask by hand on a toy template."""

import collections
import gzip
import json

import pytest

from eagle_jax.train.conversations import (
  Conversation,
  Script,
  SkipExample,
  counting,
  parse,
  read_conversations,
  text_before,
  write_prompts,
)
from tiny_chat import EOS, TOY, Toy, spoken


def line(**fields) -> bytes:
  return json.dumps(fields).encode()


def messages(*pairs) -> list[dict]:
  return [{'role': role, 'content': text} for role, text in pairs]


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    (b'  Why? \n', Conversation(('Why?',))),
    ('\ufeffWärum?'.encode(), Conversation(('Wärum?',))),
    (line(prompt='a', id=3), Conversation(('a',))),
    ('\ufeff{"prompt": "a"}'.encode(), Conversation(('a',))),
    (line(turns=['a', 'b']), Conversation(('a', 'b'))),
    (line(messages=messages(('user', 'a'))), Conversation(('a',))),
    (line(messages=messages(('user', 'a'), ('assistant', 'b'))), Conversation(('a',), ('b',))),
    (
      line(messages=messages(('system', 's'), ('user', 'a'), ('assistant', 'b'), ('user', 'c'))),
      Conversation(('a', 'c'), ('b',), 's'),
    ),
    (line(prompt='p', messages=messages(('user', 'a'), ('assistant', 'b'))), Conversation(('a',), ('b',))),
    (
      line(conversations=[{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]),
      Conversation(('a',), ('b',)),
    ),
    (line(messages=messages(('user', 'a'), ('model', ' b\n'))), Conversation(('a',), (' b\n',))),
    # Columns of another layout, null or empty; a system message that says nothing.
    (line(messages=None, conversations=messages(('user', 'a'))), Conversation(('a',))),
    (line(messages=[], conversations=[], turns=['a']), Conversation(('a',))),
    (line(messages=[], turns=[], prompt='a'), Conversation(('a',))),
    (line(conversations=[{'role': None, 'content': None, 'from': 'human', 'value': 'a'}]), Conversation(('a',))),
    (line(messages=messages(('system', ' '), ('user', 'a'))), Conversation(('a',))),
    (line(messages=messages(('system', None), ('user', 'a'))), Conversation(('a',))),
    (line(conversations=[{'from': 'system', 'value': ''}, {'from': 'human', 'value': 'a'}]), Conversation(('a',))),
  ],
)
def test_accepted_forms(given, expected):
  assert parse(given.decode()) == expected


@pytest.mark.parametrize(
  ('given', 'reason'),
  [
    (b'\xff\xfe', 'malformed line'),
    (b'{"prompt": "a"', 'malformed line'),
    (b'{"prompt": "a"} {"prompt": "b"}', 'malformed line'),
    (b'{"prompt": ' + b'[' * 100_000, 'malformed line'),
    (b'{"prompt": ' + b'9' * 10_000 + b'}', 'malformed line'),
    (line(messages=['a']), 'malformed line'),
    (line(text='a'), 'no prompt, turns, messages or conversations'),
    (line(turns=[]), 'no prompt, turns, messages or conversations'),
    (line(messages='a'), 'no prompt, turns, messages or conversations'),
    (line(prompt=3), 'a message is no text'),
    (line(prompt=None), 'no prompt, turns, messages or conversations'),
    (line(turns=['a', {'content': 'b'}]), 'a message is no text'),
    (line(messages=[{'role': 'user'}]), 'a message is no text'),
    (line(messages=messages(('user', [{'text': 'a'}]))), 'a message is no text'),
    (b'{"prompt": "\\ud800"}', 'a message is no text'),
    (line(prompt=' \n'), 'empty message'),
    (line(messages=messages(('user', 'a'), ('assistant', ''))), 'empty message'),
    (line(messages=messages(('tool', 'a'))), 'unknown role'),
    (line(messages=messages((['user'], 'a'))), 'unknown role'),
    (line(messages=[{'content': 'a'}]), 'unknown role'),
    (line(messages=[]), 'no prompt, turns, messages or conversations'),
    (line(messages=messages(('system', ''))), 'not user and assistant in turn'),
    (line(messages=messages(('system', 's'))), 'not user and assistant in turn'),
    (line(messages=messages(('assistant', 'a'))), 'not user and assistant in turn'),
    (line(messages=messages(('user', 'a'), ('user', 'b'))), 'not user and assistant in turn'),
    (line(messages=messages(('user', 'a'), ('assistant', 'b'), ('assistant', 'c'))), 'not user and assistant in turn'),
    (line(messages=messages(('user', 'a'), ('system', 's'), ('assistant', 'b'))), 'not user and assistant in turn'),
  ],
)
def test_refused_lines(given, reason):
  with pytest.raises(SkipExample) as refused:
    parse(given.decode(errors='surrogateescape'))
  assert str(refused.value) == reason


def test_bad_lines_are_counted_and_passed_over(tmp_path):
  content = b'\n'.join([b'a', b'', b'\xff', b'  ', line(prompt=1), b'{', b'[{"prompt": "c"}]', line(prompt='b')])
  for path, written in ((tmp_path / 'c.jsonl', content), (tmp_path / 'c.jsonl.gz', gzip.compress(content))):
    path.write_bytes(written)
    refused = collections.Counter()
    assert [conversation.users for conversation in read_conversations(path, refused)] == [('a',), ('b',)]
    assert refused == {'malformed line': 3, 'a message is no text': 1}


SHARE_GPT = [
  {'id': 'a_0', 'conversations': [{'from': 'human', 'value': 'Why?'}, {'from': 'gpt', 'value': 'So.'}]},
  {'id': 'a_1', 'conversations': [{'from': 'human', 'value': 'Who?'}]},
  {'id': 'a_2', 'conversations': 'none'},
]


@pytest.mark.parametrize('indent', [None, 2])
def test_a_file_may_be_one_json_array(tmp_path, indent):
  path, refused = tmp_path / 'c.json', collections.Counter()
  path.write_text('\n' + json.dumps(SHARE_GPT, indent=indent))
  found = list(read_conversations(path, refused))
  assert found == [Conversation(('Why?',), ('So.',)), Conversation(('Who?',))]
  assert refused == {'no prompt, turns, messages or conversations': 1}


def test_a_damaged_json_array_is_an_error_that_names_the_file(tmp_path):
  path = tmp_path / 'c.json'
  path.write_text(json.dumps(SHARE_GPT, indent=2)[:-9])
  with pytest.raises(ValueError, match=r'c\.json'):
    list(read_conversations(path, collections.Counter()))


@pytest.mark.parametrize(
  'damage',
  [
    lambda x: x[: len(x) // 2],
    lambda x: x[: len(x) // 2] + b'\xff' * 40 + x[len(x) // 2 + 40 :],
    lambda x: b'no gzip' + x,
  ],
)
def test_a_damaged_gzip_file_gives_what_it_can(tmp_path, damage):
  path = tmp_path / 'c.gz'
  path.write_bytes(damage(gzip.compress(b'\n'.join(str(i**5).encode() for i in range(10_000)))))
  refused = collections.Counter()
  assert len(list(read_conversations(path, refused))) < 10_000
  assert refused['the gzip file is damaged from here on'] == 1


def test_a_missing_file_is_an_error(tmp_path):
  with pytest.raises(ValueError, match='No file of conversations at .*nowhere'):
    list(read_conversations(tmp_path / 'nowhere', collections.Counter()))


def test_written_prompts_are_read_again(tmp_path):
  conversations = [Conversation(('a\nb', 'é👍')), Conversation(('{',))]
  write_prompts(tmp_path / 'new' / 'c.jsonl', conversations)
  assert list(read_conversations(tmp_path / 'new' / 'c.jsonl', collections.Counter())) == conversations


def test_two_turns_by_hand():
  script = Script.of(TOY, Conversation(('hi', 'bye'), system='be'))
  assert spoken(script) == ('Sbe.\nUhi.\nA', '           ')
  script = script.answered(TOY.encode('yes.'))
  assert spoken(script) == ('Sbe.\nUhi.\nAyes.', '           ^^^^')
  script = script.next_turn(TOY, EOS, max_prompt=23)
  assert spoken(script) == ('Sbe.\nUhi.\nAyes.\nUbye.\nA', '           ^^^^        ')
  assert script.later == ()


class Growing(Toy):
  """A template that ends every turn with one more new line than the turn before it."""

  def render(self, messages, add_generation_prompt):
    turns = [f'{m["role"][0].upper()}{m["content"]}.' + '\n' * number for number, m in enumerate(messages)]
    return ''.join(turns) + ('A' if add_generation_prompt else '')


def test_a_third_turn_follows_the_second():
  script = Script.of(Growing(), Conversation(('a', 'b', 'c')))
  for answer in 'xy':
    script = script.answered(TOY.encode(answer + '.')).next_turn(Growing(), EOS, max_prompt=99)
  assert spoken(script) == ('Ua.Ax.\nUb.\n\nAy.\n\n\nUc.\n\n\n\nA', '    ^^       ^^           ')


def test_an_answer_keeps_its_own_eos():
  script = Script.of(TOY, Conversation(('a', 'b'))).answered(TOY.encode('xq'))
  following = script.next_turn(TOY, (0, TOY.encode('q')[0]), max_prompt=99)
  assert spoken(following)[0] == 'Ua.\nAxq\nUb.\nA'


class NoEnd(Toy):
  """Ends answers with a new line alone."""

  def render(self, messages, add_generation_prompt):
    turns = [f'{message["role"][0].upper()}{message["content"]}\n' for message in messages]
    return ''.join(turns) + ('A' if add_generation_prompt else '')


def test_a_template_without_eos_adds_what_it_has():
  script = Script.of(NoEnd(), Conversation(('a', 'b'))).answered(TOY.encode('x.'))
  assert spoken(script.next_turn(NoEnd(), EOS, max_prompt=99)) == ('Ua\nAx.\nUb\nA', '    ^^     ')


class Forgetful(Toy):
  """Leaves out answers that are not the last message."""

  def render(self, messages, add_generation_prompt):
    kept = [m for m in messages if m['role'] == 'user' or m is messages[-1]]
    return super().render(kept, add_generation_prompt)


@pytest.mark.parametrize(
  ('tokenizer', 'users', 'answer', 'max_prompt', 'reason'),
  [
    (TOY, ['a', 'b'], 'x', 99, 'ended early: an answer was cut short'),
    (TOY, ['a', 'b'], 'x.', 12, 'ended early: a later prompt is too long'),
    (TOY, ['a', 'x x'], 'x.', 99, 'the toy refuses blanks'),
    (Forgetful(), ['a', 'b'], 'x.', 99, 'the chat template rewrites earlier turns'),
  ],
)
def test_refused_later_turns(tokenizer, users, answer, max_prompt, reason):
  script = Script.of(tokenizer, Conversation(tuple(users))).answered(TOY.encode(answer))
  with pytest.raises(SkipExample) as refused:
    script.next_turn(tokenizer, EOS, max_prompt=max_prompt)
  assert str(refused.value) == reason


def test_given_answers_end_as_the_template_ends_them():
  script = Script.of(TOY, Conversation(('a',)))
  assert script.answer_tokens(TOY, 'yes', EOS) == TOY.encode('yes.')


@pytest.mark.parametrize(
  ('tokenizer', 'answer', 'reason'),
  [
    (TOY, 'ye.s', 'an answer holds an EOS'),
    (NoEnd(), 'yes', 'the chat template does not end an answer with an EOS'),
    (Toy(has_chat_template=False), 'yes', 'an answer to be used as it is, and no chat template'),
  ],
)
def test_refused_given_answers(tokenizer, answer, reason):
  script = Script.of(tokenizer, Conversation(('a',)))
  with pytest.raises(SkipExample) as refused:
    script.answer_tokens(tokenizer, answer, EOS)
  assert str(refused.value) == reason


def test_without_a_template_a_prompt_is_plain_text():
  plain = Toy(has_chat_template=False)
  assert spoken(Script.of(plain, Conversation(('hi',)))) == ('hi', '  ')
  for more in (Conversation(('hi', 'bye')), Conversation(('hi',), system='be')):
    with pytest.raises(SkipExample, match='more than a prompt, and no chat template'):
      Script.of(plain, more)


def test_text_before_the_next_message():
  said = messages(('user', 'hi'), ('assistant', 'A'))
  assert [text_before(TOY, said[:count]) for count in range(3)] == ['U', 'Uhi.\nA', 'Uhi.\nAA.\nU']


def test_only_refusals_are_counted():
  refused = collections.Counter()
  with counting(refused):
    raise SkipExample('why')
  with pytest.raises(KeyError), counting(refused):
    raise KeyError
  assert refused == {'why': 1}
