"""Turn conversations in files into tokens with a mask of answers; what cannot be used is counted, never fatal."""

import collections
import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.files import parse_json, read_records, replacing
from eagle_jax.text import is_unicode

Message = dict[str, str]  # 'role': system, user or assistant; 'content'

_ROLES = {
  'system': 'system',
  'user': 'user', 'human': 'user',
  'assistant': 'assistant', 'gpt': 'assistant', 'model': 'assistant',
}  # fmt: skip
_SOME_ANSWER: Message = {'role': 'assistant', 'content': 'A'}


class SkipExample(Exception):
  """An example, or the rest of one, cannot be trained on. The text is the reason that is counted."""


@contextlib.contextmanager
def counting(refused: collections.Counter[str]) -> Iterator[None]:
  """Count a `SkipExample` raised inside by its reason, and go on after the block."""
  try:
    yield
  except SkipExample as reason:
    refused[str(reason)] += 1


class Conversation(NamedTuple):
  """Messages of a user and an assistant in turn, the user first."""

  users: tuple[str, ...]  # the user's messages
  answers: tuple[str, ...] = ()  # the assistant's, to the first of them
  system: str | None = None


def read_conversations(path: str | Path, refused: collections.Counter[str]) -> Iterator[Conversation]:
  """Yield the conversations of a file, gzipped or not.

  A record (see `files.read_records`) is a prompt, or a JSON object with `messages` (`role` and `content`),
  `conversations` (`from` and `value`, as ShareGPT has them), `turns` (the user's messages) or `prompt` (a string): the
  first of them that is neither null nor empty.

  Args:
    path: of the file.
    refused: counts the records that cannot be used, by reason.

  Raises:
    ValueError: there is no such file, or it looks like a single JSON document but cannot be parsed.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f'No file of conversations at {path}: pass a file with one prompt or JSON object per line.')
  try:
    for _, record in read_records(path):
      with counting(refused):
        yield parse(record)
  except (EOFError, gzip.BadGzipFile, zlib.error):
    refused['the gzip file is damaged from here on'] += 1


def write_prompts(path: Path, conversations: Iterable[Conversation]) -> None:
  """Write the users' messages as JSON Lines of `turns`; the file is written whole or not at all."""
  with replacing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
    file.writelines(json.dumps({'turns': conversation.users}) + '\n' for conversation in conversations)


def parse(record: Any) -> Conversation:
  """Return the conversation of one record, checked.

  Raises:
    SkipExample: malformed, no text, empty, of unknown roles, or not user and assistant in turn.
  """
  fields = _fields(record)
  for name in ('messages', 'conversations'):
    messages = fields.get(name)
    if isinstance(messages, list) and messages:
      return _in_turn([_role_and_text(message) for message in messages if not _is_empty_system(message)])
  turns = fields.get('turns')
  if isinstance(turns, list) and turns:
    return Conversation(tuple(map(_text, turns)))
  if fields.get('prompt') is not None:
    return Conversation((_text(fields['prompt']),))
  raise SkipExample('no prompt, turns, messages or conversations')


def _fields(record: Any) -> Mapping[str, Any]:
  """Return the fields of a record; those of a line that is no JSON object are its text as `prompt`."""
  if isinstance(record, str):
    text = record.removeprefix('\ufeff').strip()
    try:
      record = parse_json(text, 'a line') if text.startswith('{') else {'prompt': text}
    except ValueError as error:
      raise SkipExample('malformed line') from error
    if not is_unicode(text):
      raise SkipExample('malformed line')
  if not isinstance(record, Mapping):
    raise SkipExample('malformed line')
  return record


def _in_turn(messages: list[tuple[str, str]]) -> Conversation:
  """Return the conversation of (role, text) pairs; a system message may come first."""
  system = None
  if messages and messages[0][0] == 'system':
    (_, system), *messages = messages
  roles = [role for role, _ in messages]
  if not roles or roles != (['user', 'assistant'] * len(roles))[: len(roles)]:
    raise SkipExample('not user and assistant in turn')
  texts = tuple(text for _, text in messages)
  return Conversation(texts[::2], texts[1::2], system)


def _role_and_text(message: Any) -> tuple[str, str]:
  if not isinstance(message, Mapping):
    raise SkipExample('malformed line')
  role = _column(message, 'role', 'from')
  if not isinstance(role, str) or role not in _ROLES:
    raise SkipExample('unknown role')
  return _ROLES[role], _text(_column(message, 'content', 'value'))


def _column(message: Mapping[str, Any], *names: str) -> Any:
  """Return the first of these columns that is not null: tables of two layouts have the columns of both."""
  return next((message[name] for name in names if message.get(name) is not None), None)


def _is_empty_system(message: Any) -> bool:
  """Return whether this is a system message that says nothing, as exports write where there was none."""
  if not isinstance(message, Mapping) or _column(message, 'role', 'from') != 'system':
    return False
  text = _column(message, 'content', 'value')
  return text is None or (isinstance(text, str) and not text.strip())


def _text(value: Any) -> str:
  if not isinstance(value, str) or not is_unicode(value):
    raise SkipExample('a message is no text')
  if not value.strip():
    raise SkipExample('empty message')
  return value


def user(text: str) -> Message:
  """Return a message of the user."""
  return {'role': 'user', 'content': text}


def text_before(tokenizer: Any, messages: Sequence[Message]) -> str:
  """Return the chat template's text up to where the next message begins, of whoever did not write the last one.

  Raises:
    SkipExample: the template does not take the messages.
  """
  if messages and messages[-1]['role'] == 'user':
    return _render(tokenizer, messages, True)
  # Two messages are rendered alike up to where they differ: from their first letter on.
  return os.path.commonprefix([_render(tokenizer, [*messages, user(text)], False) for text in 'AB'])


class Script(NamedTuple):
  """A conversation so far, as tokens; it ends where the assistant is to answer, or has answered."""

  token: list[int]
  is_answer: list[bool]  # by token: the assistant's own, the EOS included
  messages: list[Message]  # up to the newest prompt; `_SOME_ANSWER` in the answers' places
  later: tuple[str, ...]  # what the user will say

  @classmethod
  def of(cls, tokenizer: Any, conversation: Conversation) -> 'Script':
    """Return the conversation up to its first answer.

    Raises:
      SkipExample: the chat template does not take the messages, or there is none, and more than a prompt.
    """
    first, *later = conversation.users
    if tokenizer.has_chat_template:
      system = [] if conversation.system is None else [{'role': 'system', 'content': conversation.system}]
      messages = [*system, user(first)]
      token = tokenizer.encode(_render(tokenizer, messages, True))
    elif conversation.system is None and not later:
      messages, token = [user(first)], tokenizer.encode_prompt(first)
    else:
      raise SkipExample('more than a prompt, and no chat template')
    return cls(token, [False] * len(token), messages, tuple(later))

  def answered(self, token: list[int]) -> 'Script':
    """Return the script with an answer's tokens appended."""
    return self._replace(token=self.token + token, is_answer=self.is_answer + [True] * len(token))

  def answer_tokens(self, tokenizer: Any, text: str, eos_ids: Sequence[int]) -> list[int]:
    """Return the tokens that the target would generate for this answer: the text's, then the template's end of turn.

    Raises:
      SkipExample: there is no chat template, it ends answers otherwise than the target does, or the text holds an EOS.
    """
    if not tokenizer.has_chat_template:
      raise SkipExample('an answer to be used as it is, and no chat template')
    token, end = tokenizer.encode(text), self._after_answer(tokenizer)[:1]
    if not set(end) & set(eos_ids):
      raise SkipExample('the chat template does not end an answer with an EOS')
    if set(token) & set(eos_ids):
      raise SkipExample('an answer holds an EOS')
    return token + end

  def next_turn(self, tokenizer: Any, eos_ids: Sequence[int], *, max_prompt: int) -> 'Script':
    """Return the script with the user's next message appended after an answer.

    The answer keeps its own tokens: only what the chat template puts between two answers is encoded.

    Raises:
      SkipExample: the answer was cut short, the whole becomes longer than `max_prompt` tokens, or the template does not
        take the messages or renders a turn differently once another follows it.
    """
    if self.token[-1] not in eos_ids:
      raise SkipExample('ended early: an answer was cut short')
    said, *later = self.later
    between = self._after_answer(tokenizer, user(said))
    if set(between[:1]) & set(eos_ids):  # the answer has brought its own
      between = between[1:]
    if len(self.token) + len(between) > max_prompt:
      raise SkipExample('ended early: a later prompt is too long')
    messages = [*self.messages, _SOME_ANSWER, user(said)]
    return Script(self.token + between, self.is_answer + [False] * len(between), messages, tuple(later))

  def _after_answer(self, tokenizer: Any, *following: Message) -> list[int]:
    """Return the tokens that the template puts after an answer: its end of turn, then the messages that follow."""
    before = _render(tokenizer, self.messages, True) + _SOME_ANSWER['content']
    text = _render(tokenizer, [*self.messages, _SOME_ANSWER, *following], bool(following))
    if not text.startswith(before):
      raise SkipExample('the chat template rewrites earlier turns')
    return tokenizer.encode(text.removeprefix(before))


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool) -> str:
  try:
    return tokenizer.render(messages, add_generation_prompt)
  except ValueError as error:
    raise SkipExample(str(error)) from error
