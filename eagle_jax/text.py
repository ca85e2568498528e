"""Text <-> token ids: a byte-level BPE tokenizer, its chat template, and an incremental detokenizer."""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3  # GGUF token types
_REPLACEMENT = '\ufffd'  # what decoding puts for bytes that are not, or not yet, UTF-8

# GGUF `tokenizer.ggml.pre` -> does every digit stand alone before the byte-level split?
_DIGITS_STAND_ALONE = {'gpt-2': False, 'smollm': True}


def _import_demo(name: str):
  """Imports one of the packages that only text needs; token ids alone never do."""
  import importlib

  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f'Text needs the package {name}. Install it with: pip install "eagle_jax[demo]"') from error


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Encodes and decodes with a `tokenizers.Tokenizer`; build it with `from_gguf`.

  Special tokens written out in a text are read as those tokens, as transformers does: the chat template needs it.
  """

  backend: Any  # tokenizers.Tokenizer
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  adds_bos: bool = False  # put `bos_id` before a prompt that goes through no template
  chat_template: str | None = None  # Jinja

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any], eos_ids: Iterable[int] = ()) -> 'Tokenizer':
    """Builds the tokenizer a GGUF file carries in its metadata.

    Raises:
      ValueError: not a byte-level BPE, an unknown way of splitting, or missing fields.
    """
    prefix = 'tokenizer.ggml.'
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if missing := [prefix + name for name in ('model', 'pre', 'tokens', 'merges', 'token_type') if name not in fields]:
      raise ValueError(f'The GGUF metadata lacks {missing}, which a tokenizer needs. Pass token ids instead of text.')
    if fields['model'] != 'gpt2' or fields['pre'] not in _DIGITS_STAND_ALONE:
      raise ValueError(
        f'GGUF tokenizer {fields["model"]!r} with pre-tokenizer {fields["pre"]!r} is not supported, only gpt2 with '
        f'{sorted(_DIGITS_STAND_ALONE)}. Pass token ids instead of text.'
      )
    return cls(
      backend=_byte_level_bpe(fields),
      eos_ids=tuple(eos_ids),
      bos_id=fields.get('bos_token_id'),
      adds_bos=bool(fields.get('add_bos_token', False)),
      chat_template=metadata.get('tokenizer.chat_template'),
    )

  @property
  def vocab_size(self) -> int:
    return self.backend.get_vocab_size()

  @property
  def has_chat_template(self) -> bool:
    return self.chat_template is not None

  def encode(self, text: str) -> list[int]:
    """Token ids of exactly this text: nothing is added."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Renders the chat template and encodes the whole.

    Args:
      messages: dicts with 'role' and 'content', such as `[{'role': 'user', 'content': 'Hi'}]`.
      add_generation_prompt: end with the markup after which the assistant speaks.

    Raises:
      ValueError: the model has no template, a message lacks a field, or the template refuses the messages.
    """
    return self.encode(self.render(messages, add_generation_prompt))

  def encode_prompt(self, text: str) -> list[int]:
    """A user's prompt as the model expects it: one user message for a chat model, else the plain text."""
    if self.has_chat_template:
      return self.encode_chat([{'role': 'user', 'content': text}])
    ids = self.encode(text)
    return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

  def decode(self, ids: Sequence[int]) -> str:
    """The text of these ids without special tokens; bytes that are not UTF-8 come out as U+FFFD."""
    return self.backend.decode(list(ids), skip_special_tokens=True)

  def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    """The chat template's text of these messages. See `encode_chat`."""
    if self.chat_template is None:
      raise ValueError('This model has no chat template: encode plain text with encode().')
    for message in messages:
      if not {'role', 'content'} <= message.keys():
        raise ValueError(f"A chat message needs 'role' and 'content'; one came with {sorted(message)}.")
    jinja2, sandbox = _import_demo('jinja2'), _import_demo('jinja2.sandbox')
    # The template comes with the weights, so it is untrusted: the sandbox keeps it from reaching into Python.
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(reason: str):
      raise jinja2.TemplateError(reason)

    environment.globals['raise_exception'] = raise_exception
    try:
      return environment.from_string(self.chat_template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=self._token(self.bos_id),
        eos_token=self._token(self.eos_ids[0] if self.eos_ids else None),
      )
    except jinja2.TemplateError as error:
      raise ValueError(f'The chat template refuses these messages: {error}') from error

  def _token(self, token_id: int | None) -> str:
    return '' if token_id is None else self.backend.id_to_token(token_id)


def _byte_level_bpe(fields: Mapping[str, Any]):
  """tokenizers.Tokenizer from the vocabulary, merges and token types of a GGUF file."""
  tokenizers = _import_demo('tokenizers')
  vocab = {token: i for i, token in enumerate(fields['tokens'])}
  merges = [tuple(merge.split(' ')) for merge in fields['merges']]
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
  split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  if _DIGITS_STAND_ALONE[fields['pre']]:
    split = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), split])
  backend.pre_tokenizer = split
  backend.decoder = tokenizers.decoders.ByteLevel()
  kinds = list(zip(fields['tokens'], fields['token_type'], strict=True))
  backend.add_special_tokens([_added(token, True) for token, kind in kinds if kind == _CONTROL_TOKEN])
  backend.add_tokens([_added(token, False) for token, kind in kinds if kind not in (_NORMAL_TOKEN, _CONTROL_TOKEN)])
  return backend


def _added(token: str, special: bool):
  return _import_demo('tokenizers').AddedToken(token, special=special, normalized=False)


class Detokenizer:
  """Turns a growing list of ids into text, holding back characters whose last bytes have not come yet.

  All pushes and the flush, joined, equal `Tokenizer.decode` of all ids. Only ids since the last whole character are
  decoded again, so the work is linear in the text.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._open_ids: list[int] = []  # ids since the last point where the text was whole
    self._num_given = 0  # characters of their text that were handed out

  def push(self, ids: Iterable[int]) -> str:
    """Takes the next ids and returns the text that is now certain."""
    self._open_ids += ids
    text = self._tokenizer.decode(self._open_ids)
    # More bytes can change the last character only: decoding turns one unfinished character into one U+FFFD.
    certain = text[:-1] if text.endswith(_REPLACEMENT) else text
    fresh = certain[self._num_given :]
    if certain == text:
      self._open_ids, self._num_given = [], 0
    else:
      self._num_given = len(certain)
    return fresh

  def flush(self) -> str:
    """Ends the text: returns what was held back. The detokenizer is then as new."""
    rest = self._tokenizer.decode(self._open_ids)[self._num_given :]
    self._open_ids, self._num_given = [], 0
    return rest


def read_prompts(path: str | Path) -> Iterator[str]:
  """Prompts of a text file, gzipped or not: one a line, or JSON Lines with `prompt`. Empty lines are passed over.

  Raises:
    ValueError: no readable file, or a line of JSON without a `prompt` string; the message names the line.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f'No file of prompts at {path}: give one with a prompt a line, or JSON Lines with "prompt".')
  with gzip.open(path, 'rt', encoding='utf-8') if path.suffix == '.gz' else open(path, encoding='utf-8') as lines:
    for number, line in enumerate(lines, start=1):
      if line.startswith('{'):
        yield _prompt_of(line, f'{path}, line {number}')
      elif line.strip():
        yield line.strip()


def _prompt_of(line: str, where: str) -> str:
  try:
    prompt = json.loads(line).get('prompt')
  except json.JSONDecodeError as error:
    raise ValueError(f'{where} is no JSON: {error}. Mend the line.') from error
  if not isinstance(prompt, str):
    raise ValueError(f'{where} has no "prompt" string: add one.')
  return prompt
