"""Convert between text and token ids: tokenizer, chat template, and incremental detokenizer."""

import dataclasses
import datetime
import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.files import parse_json, read_records

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # GGUF token types
_REPLACEMENT = '\ufffd'  # what decoding puts for bytes that are not, or not yet, UTF-8
_RAW_BYTE = re.compile('<0x[0-9A-F]{2}>')


@dataclasses.dataclass(frozen=True)
class _Splitting:
  """The way a byte-level vocabulary splits a text before its merges."""

  pattern: str | None = None  # of the pieces that merges stay within; None: GPT-2's
  digits_stand_alone: bool = False
  composes: bool = False  # brings the text into Unicode's form C
  ignores_merges: bool = False  # a piece that is a token is that token
  adds_bos: bool = False  # unless the file says otherwise


_PIECES = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_PIECES = (  # a word ends where a capital follows a small letter
  '|'.join((_CASED % ('*', '+'), _CASED % ('+', '*')))
  + r'|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_THREE_DIGITS = _PIECES.replace('DIGITS', r'\p{N}{1,3}')
_SPLITTINGS = {  # by GGUF `tokenizer.ggml.pre`
  'gpt-2': _Splitting(),
  'smollm': _Splitting(digits_stand_alone=True),
  'refact': _Splitting(digits_stand_alone=True),  # Granite
  'dbrx': _Splitting(_THREE_DIGITS),  # OLMo-2
  'smaug-bpe': _Splitting(_THREE_DIGITS),
  'gpt-4o': _Splitting(_CASED_PIECES),  # gpt-oss, Phi-4-mini
  'llama-bpe': _Splitting(_THREE_DIGITS, ignores_merges=True, adds_bos=True),
  'qwen2': _Splitting(_PIECES.replace('DIGITS', r'\p{N}'), composes=True),
}
_GGUF_SPECIAL = {  # names in chat templates -> in GGUF
  'unk_token': 'unknown', 'sep_token': 'seperator', 'pad_token': 'padding', 'cls_token': 'cls', 'mask_token': 'mask',
}  # fmt: skip
_GGUF_NEEDS = {  # by GGUF `tokenizer.ggml.model`
  'gpt2': ('pre', 'tokens', 'merges', 'token_type'),
  'llama': ('tokens', 'scores', 'token_type'),
}


def _import_demo(name: str):
  """Import one of the packages that only text needs; token ids alone never do."""
  import importlib

  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f'Text needs the package {name}. Install it with: pip install "eagle_jax[demo]"') from error


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer: encode and decode text with a `tokenizers.Tokenizer`; build it with `from_gguf` or `from_folder`.

  Special tokens written out in a text are read as those tokens, as transformers does: the chat template needs it.
  """

  backend: Any  # tokenizers.Tokenizer
  eos_ids: tuple[int, ...] = ()  # the first is the one that a chat template writes
  bos_id: int | None = None
  adds_bos: bool = False  # put `bos_id` before a prompt that goes through no template
  chat_template: str | None = None  # Jinja
  named_templates: tuple[str, ...] = ()  # where a model has several and none is called 'default': not chosen among
  special_tokens: tuple[tuple[str, Any], ...] = ()  # by the names that templates use, such as 'unk_token'

  @classmethod
  def from_gguf(
    cls, metadata: Mapping[str, Any], eos_ids: Iterable[int] = (), *, source: str = 'The GGUF file'
  ) -> 'Tokenizer':
    """Build the tokenizer that a GGUF file carries in its metadata.

    Args:
      metadata: of the file.
      eos_ids: tokens that end a text.
      source: names the file in errors.

    Raises:
      ValueError: neither a byte-level nor a SentencePiece BPE, an unknown pre-tokenizer, missing fields, or tokens,
        scores and merges that do not fit together.
    """
    prefix = 'tokenizer.ggml.'
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind = str(fields.get('model'))
    if missing := [prefix + name for name in _GGUF_NEEDS.get(kind, ()) if name not in fields]:
      raise ValueError(f"{source} lacks {missing}, which a tokenizer needs: use the model's folder instead.")
    if kind not in _GGUF_NEEDS or (kind == 'gpt2' and fields['pre'] not in _SPLITTINGS):
      raise ValueError(
        f'{source}: tokenizer {kind!r} with pre-tokenizer {fields.get("pre")!r} is not supported, only llama, and gpt2 '
        f'with {sorted(_SPLITTINGS)}. Load the model from its Hugging Face folder instead.'
      )
    try:
      if kind == 'llama':
        backend, adds_bos = _sentencepiece_bpe(fields), True
      else:
        splitting = _SPLITTINGS[fields['pre']]
        backend, adds_bos = _byte_level_bpe(fields, splitting), splitting.adds_bos
      _add_tokens(backend, fields)
    except Exception as error:  # the tokenizers package raises bare ones
      raise ValueError(
        f"{source}: its tokenizer's fields do not fit together ({type(error).__name__}: {error}). Convert the model "
        'again, or load it from its Hugging Face folder.'
      ) from error
    special = {name: fields.get(f'{field}_token_id') for name, field in _GGUF_SPECIAL.items()}
    template = metadata.get('tokenizer.chat_template')
    return cls(
      backend=backend,
      eos_ids=tuple(eos_ids),
      bos_id=fields.get('bos_token_id'),
      adds_bos=bool(fields.get('add_bos_token', adds_bos)),
      chat_template=template,
      named_templates=() if template else tuple(metadata.get('tokenizer.chat_templates', ())),
      special_tokens=tuple((name, backend.id_to_token(i)) for name, i in special.items() if i is not None),
    )

  @classmethod
  def from_folder(cls, folder: Path, eos_ids: Iterable[int] = ()) -> 'Tokenizer | None':
    """Build the tokenizer of a Hugging Face folder as transformers reads it; None if the folder has none.

    Raises:
      ValueError: transformers cannot read the files, or only in pure Python.
    """
    found = [name for name in ('tokenizer.json', 'tokenizer.model', 'vocab.json') if (folder / name).is_file()]
    if not found:
      return None
    try:
      auto = _import_demo('transformers').AutoTokenizer
      # Left open, transformers would ask on standard input whether to run code that the folder brings.
      read = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
      backend = read.backend_tokenizer
    except Exception as error:  # parsers of the files raise bare ones
      raise ValueError(
        f'{folder}: transformers cannot read the tokenizer in {found} ({type(error).__name__}: {error}). '
        'Fetch it again, tokenizer.json above all, or take these files away and pass token ids instead of text.'
      ) from error
    backend.no_truncation()  # a file may ask for these
    backend.no_padding()
    template, names = read.chat_template, ()
    if isinstance(template, dict):
      names = () if 'default' in template else tuple(sorted(template))
      template = template.get('default')
    return cls(
      backend=backend,
      eos_ids=tuple(dict.fromkeys(i for i in (read.eos_token_id, *eos_ids) if i is not None)),
      bos_id=read.bos_token_id,
      adds_bos=backend.encode('a').ids[:1] == [read.bos_token_id],
      chat_template=template,
      named_templates=names,
      special_tokens=tuple((k, v if isinstance(v, str) else (*v,)) for k, v in read.special_tokens_map.items()),
    )

  @property
  def special_ids(self) -> frozenset[int]:
    """The ids of tokens that decode to no text."""
    return frozenset(number for number, token in self.backend.get_added_tokens_decoder().items() if token.special)

  @property
  def essential_ids(self) -> list[int]:
    """The ids of special tokens and single digits, which every draft vocabulary must contain."""
    digits = [self.backend.token_to_id(digit) for digit in '0123456789']
    return sorted({*self.special_ids, *(number for number in digits if number is not None)})

  @property
  def has_chat_template(self) -> bool:
    return self.chat_template is not None or bool(self.named_templates)

  def encode(self, text: str) -> list[int]:
    """Return the token ids of exactly this text: nothing is added.

    Raises:
      ValueError: the text holds half of a surrogate pair, as an argument in Latin-1 or the JSON "\\ud83d" does.
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f'The text {text[max(0, error.start - 20) : error.start + 20]!a} is not Unicode: {text[error.start]!a} cannot '
        'be encoded. Pass text that was decoded with its own encoding, mostly UTF-8.'
      ) from None
    return self.backend.encode(text, add_special_tokens=False).ids

  def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Render the chat template and encode the result.

    Args:
      messages: dicts with 'role' and 'content', such as `[{'role': 'user', 'content': 'Hi'}]`.
      add_generation_prompt: end with the markup after which the assistant speaks.

    Raises:
      ValueError: the model has no template, a message lacks a field, or the template refuses the messages.
    """
    return self.encode(self.render(messages, add_generation_prompt))

  def encode_prompt(self, text: str) -> list[int]:
    """Encode a user's prompt as the model expects it: as one user message for a chat model, else as plain text."""
    if self.has_chat_template:
      return self.encode_chat([{'role': 'user', 'content': text}])
    ids = self.encode(text)
    return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

  def decode(self, ids: Sequence[int]) -> str:
    """Return the text of these ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
    return self.backend.decode(list(ids), skip_special_tokens=True)

  def is_raw_byte(self, token_id: int) -> bool:
    """Return whether this is a token like <0xE2> of a SentencePiece vocabulary, decoded with its neighbours."""
    token = self.backend.id_to_token(token_id)
    return token is not None and _RAW_BYTE.fullmatch(token) is not None

  def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    """Render the chat template. See `encode_chat`."""
    if self.named_templates:
      raise ValueError(
        f"This model has the chat templates {[*self.named_templates]}, and none is named 'default'. Name one so in the "
        "folder's tokenizer_config.json, or pass token ids."
      )
    if self.chat_template is None:
      raise ValueError('This model has no chat template: encode plain text with encode().')
    for message in messages:
      if not isinstance(message, Mapping) or not {'role', 'content'} <= message.keys():
        raise ValueError(f"A chat message must be a dict with 'role' and 'content', got {message!r:.80}.")
    _import_demo('jinja2')
    ends = {'bos_token': self.token(self.bos_id), 'eos_token': self.token(self.eos_ids[0] if self.eos_ids else None)}
    given = {'messages': messages, 'add_generation_prompt': add_generation_prompt, 'tools': None, 'documents': None}
    try:
      return _template(self.chat_template).render({**ends, **dict(self.special_tokens), **given})
    except Exception as error:  # whatever an expression of the template raises
      raise ValueError(f'The chat template refuses these messages: {type(error).__name__}: {error}') from error

  def turn_end(self) -> int | None:
    """Return the special token that the chat template writes after an answer; None if it writes none there."""
    answer = 'zyxw'
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': answer}]
    try:
      _, found, rest = self.render(messages, False).rpartition(answer)
    except ValueError:
      return None
    first = self.encode(rest.strip())[:1] if found else []
    return first[0] if self.special_ids.issuperset(first) and first else None

  def token(self, token_id: int | None) -> str:
    """Return how a token is written; '' for None and for ids outside the vocabulary."""
    return '' if token_id is None else self.backend.id_to_token(token_id) or ''


@functools.lru_cache(maxsize=8)
def _template(source: str):
  """Compile a Jinja template. Its source comes with the weights, so it is not trusted: the sandbox contains it.

  transformers would render the same, but importing it takes a second, and nothing else of a GGUF file needs it.
  """
  jinja2, sandbox, ext = (_import_demo(name) for name in ('jinja2', 'jinja2.sandbox', 'jinja2.ext'))
  extension: Any = ext.Extension

  class Generation(extension):
    """`{% generation %}`, which marks an answer for those who train on it, and changes nothing of the text."""

    tags = {'generation'}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method('unchanged'), [], [], body).set_lineno(line)

    def unchanged(self, caller):
      return caller()

  extensions = ['jinja2.ext.loopcontrols', Generation]
  environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

  def raise_exception(reason: str):
    raise jinja2.TemplateError(reason)

  # What transformers gives to templates.
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  return environment.from_string(source)


def _byte_level_bpe(fields: Mapping[str, Any], splitting: _Splitting):
  """Build a `tokenizers.Tokenizer` from the vocabulary and merges of a GGUF file."""
  tokenizers = _import_demo('tokenizers')
  vocab = {token: i for i, token in enumerate(fields['tokens'])}
  merges = [tuple(merge.split(' ')) for merge in fields['merges']]
  model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignores_merges)
  backend, split = tokenizers.Tokenizer(model), tokenizers.pre_tokenizers
  steps = [split.Digits(individual_digits=True)] if splitting.digits_stand_alone else []
  if splitting.pattern is not None:
    steps.append(split.Split(tokenizers.Regex(splitting.pattern), behavior='isolated'))
  if splitting.composes:
    backend.normalizer = tokenizers.normalizers.NFC()
  to_bytes = split.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
  backend.pre_tokenizer = split.Sequence([*steps, to_bytes])
  backend.decoder = tokenizers.decoders.ByteLevel()
  return backend


def _sentencepiece_bpe(fields: Mapping[str, Any]):
  """Build a `tokenizers.Tokenizer` like Llama 2's, with spaces as U+2581, from vocabulary and scores of a GGUF file."""
  tokenizers = _import_demo('tokenizers')
  vocab = {token: i for i, token in enumerate(fields['tokens'])}
  model = tokenizers.models.BPE(vocab=vocab, merges=_merges(vocab, fields), fuse_unk=True, byte_fallback=True)
  backend, change, decode = tokenizers.Tokenizer(model), tokenizers.normalizers, tokenizers.decoders
  to_text = [decode.Replace('\u2581', ' '), decode.ByteFallback(), decode.Fuse()]
  from_text = [change.Replace(' ', '\u2581')]
  if fields.get('add_space_prefix', True):
    to_text.append(decode.Strip(content=' ', left=1))
    from_text.insert(0, change.Prepend('\u2581'))
  backend.normalizer, backend.decoder = change.Sequence(from_text), decode.Sequence(to_text)
  return backend


def _merges(vocab: Mapping[str, int], fields: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Return the merges, best first: SentencePiece joins the two neighbours whose joint token scores highest."""
  pairs = [
    (-score, (token[:cut], token[cut:]))
    for token, score, kind in zip(fields['tokens'], fields['scores'], fields['token_type'], strict=True)
    for cut in range(1, len(token))
    if kind == _NORMAL and token[:cut] in vocab and token[cut:] in vocab
  ]
  return [pair for _, pair in sorted(pairs, key=lambda scored: scored[0])]


def _add_tokens(backend: Any, fields: Mapping[str, Any]) -> None:
  """Add the tokens that are matched wherever they are written; special ones, which decode to nothing, come first."""
  kinds = list(zip(fields['tokens'], fields['token_type'], strict=True))
  backend.add_special_tokens([_added(token, True) for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)])
  backend.add_tokens([_added(token, False) for token, kind in kinds if kind in (_USER_DEFINED, _UNUSED)])


def _added(token: str, special: bool):
  return _import_demo('tokenizers').AddedToken(token, special=special, normalized=False)


class Detokenizer:
  """Convert token ids to text incrementally, holding back incomplete characters.

  All pushes and the flush, joined, equal `Tokenizer.decode` of all ids. Only ids since the last whole character are
  decoded again, and those of the push before, so the work is linear in the text.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._left_out = tokenizer.special_ids  # so a raw byte before one is still the last
    self._reset()

  def _reset(self) -> None:
    self._before: list[int] = []  # ids that the open ones follow: a vocabulary may drop the space that begins a text
    self._open_ids: list[int] = []  # ids since the last point where the text was whole
    self._num_given = 0  # characters of their text that were handed out

  def push(self, ids: Iterable[int]) -> str:
    """Append ids, and return the text that is now certain."""
    self._open_ids += (number for number in ids if number not in self._left_out)
    if not self._open_ids or self._tokenizer.is_raw_byte(self._open_ids[-1]):
      return ''
    text = self._open_text()
    # More bytes can change the last character only: decoding turns one unfinished character into one U+FFFD.
    certain = text[:-1] if text.endswith(_REPLACEMENT) else text
    fresh = certain[self._num_given :]
    if certain == text:
      self._before = self._open_ids if text else self._before + self._open_ids
      self._open_ids, self._num_given = [], 0
    else:
      self._num_given = len(certain)
    return fresh

  def flush(self) -> str:
    """End the text: return what was held back, and reset."""
    rest = self._open_text()[self._num_given :]
    self._reset()
    return rest

  def _open_text(self) -> str:
    known = self._tokenizer.decode(self._before)
    return self._tokenizer.decode(self._before + self._open_ids)[len(known) :]


class StopDetector:
  """Convert token ids to text incrementally, ending it before the first stop string.

  Ids are examined one by one, so where a text ends does not depend on how they arrive.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
    self._detokenizer = Detokenizer(tokenizer)
    self._stop = stop
    self._held = ''  # may be the beginning of a stop string
    self.text = ''  # without what is held
    self.num_tokens = 0  # up to and with the one that completes a stop string
    self.is_stopped = False

  def push(self, ids: Iterable[int]) -> str:
    """Append ids, and return the text that is now certain; once a stop string is complete, nothing is added."""
    before = len(self.text)
    for token in ids:
      if not self.is_stopped:
        self.num_tokens += 1
        self._examine(self._detokenizer.push([token]), is_last=False)
    return self.text[before:]

  def flush(self) -> str:
    """End the text: return what was held back."""
    return '' if self.is_stopped else self._examine(self._detokenizer.flush(), is_last=True)

  def _examine(self, text: str, *, is_last: bool) -> str:
    text = self._held + text
    found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
    self.is_stopped = bool(found)
    end = min(found, default=len(text) if is_last else len(text) - self._num_open(text))
    self._held = '' if found else text[end:]
    self.text += text[:end]
    return text[:end]

  def _num_open(self, text: str) -> int:
    """Count the last characters of a text that may begin a stop string."""
    return max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def is_unicode(text: str) -> bool:
  """Return whether `text` can be encoded as UTF-8; half of a surrogate pair, as in the JSON "\\ud83d", cannot."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def read_prompts(path: str | Path) -> Iterator[str]:
  """Yield the prompts of a file, gzipped or not: one per line, or JSON Lines or one JSON array with `prompt`.

  Blank lines are skipped.

  Raises:
    ValueError: there is no such file, it is not UTF-8, damaged or without a prompt, or a JSON object in it has no
      `prompt` string; the line is named.
  """
  path = Path(path).expanduser()
  if path.is_dir() or not path.exists():  # a pipe is as good as a file
    raise ValueError(
      f'No file of prompts at {path}: pass a file with one prompt per line, or JSON Lines with "prompt".'
    )
  is_empty = True
  try:
    for place, record in read_records(path):
      is_empty = False
      yield _prompt_of(record, place)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(f'{path} is damaged, or not a gzip file ({error}): compress it again.') from error
  if is_empty:
    raise ValueError(f'{path} contains no prompts: write one per line, or JSON Lines with "prompt".')


def _prompt_of(record: Any, place: str) -> str:
  if isinstance(record, str):
    if not is_unicode(record):
      raise ValueError(f'{place} is not UTF-8: save the file as UTF-8.')
    if not record.startswith('{'):
      return record
    try:
      record = parse_json(record, place)
    except ValueError as error:
      raise ValueError(f'{error} A text that begins with a brace goes into {{"prompt": "..."}}.') from error
  prompt = record.get('prompt') if isinstance(record, Mapping) else None
  if not isinstance(prompt, str):
    raise ValueError(f'{place} has no "prompt" string: give each JSON object one.')
  if not is_unicode(prompt):
    raise ValueError(f'{place}: the prompt {prompt!a:.80} holds half of a surrogate pair: write the whole character.')
  return prompt
