"""Files: replaced in one step, JSON and prompts read with errors that name the file, and the cache folder."""

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# How a file begins that is one JSON document. A prompt may begin with a bracket too: "[INST] Why?"
_ONE_DOCUMENT = re.compile(r'\{$|\[\s*(["{\]]|$)')


def cache_folder() -> Path:
  """Return $EAGLE_JAX_CACHE, else $XDG_CACHE_HOME/eagle_jax, else ~/.cache/eagle_jax; a leading `~` is expanded."""
  if own := os.environ.get('EAGLE_JAX_CACHE'):
    return Path(os.path.expanduser(own))
  return Path(os.path.expanduser(os.environ.get('XDG_CACHE_HOME') or '~/.cache')) / 'eagle_jax'


def make_private(folder: Path) -> Path:
  """Make a folder for what is executed, for its user alone, if it is not there, and return it.

  Raises:
    ValueError: it belongs to another user, or others can write to it.
  """
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  found = folder.stat()
  is_safe = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  if hasattr(os, 'getuid') and not (is_safe and found.st_uid == os.getuid()):  # Windows has no such modes
    raise ValueError(
      f'{folder} belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}, and compiled programs in it '
      f'would be executed. Make it yours alone: chmod 700 {folder}, or name another in EAGLE_JAX_CACHE.'
    )
  return folder


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Yield a temporary path beside `path`; the file written there replaces it if the block succeeds."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.parent / f'.{path.name}.{secrets.token_hex(8)}'
  os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less what the umask takes away
  try:
    yield temporary
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Return every name whose value differs, with both values, as text; '' if there is none."""
  names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
  return '; '.join(f'{name} was {then.get(name)!r} and is now {now.get(name)!r}' for name in names)


def as_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return settings as they are read back from JSON, where tuples are lists: what `differences` compares files with."""
  return json.loads(json.dumps(settings))


def parse_json(text: str | bytes, source: str) -> Any:
  """Parse a JSON document; `source` says in an error where it came from.

  Raises:
    ValueError: it is not valid JSON, not UTF-8, or nested too deeply.
  """
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{source} is not valid JSON: {_reason(error)}.') from error


def _reason(error: Exception) -> str:
  return 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
  """Yield (place, record) for each record of a file of prompts, gzipped or not.

  A record is a line, stripped; blank lines are skipped. If the file is one JSON array, a record is an element of it,
  parsed, and a string in it becomes `{'prompt': string}`; one JSON object over several lines is one record. A line
  that is a JSON array of objects comes parsed, as a list. Bytes that are not UTF-8 become lone surrogates, as with
  `errors='surrogateescape'`.

  Raises:
    ValueError: the file looks like a single JSON document but cannot be parsed.
    EOFError, gzip.BadGzipFile, zlib.error: the gzip file is damaged.
  """
  opened: Any = gzip.open if path.suffix == '.gz' else open
  with opened(path, 'rt', encoding='utf-8-sig', errors='surrogateescape') as file:
    lines = enumerate(file, start=1)
    number, first = next(((number, line) for number, line in lines if line.strip()), (1, ''))
    if _ONE_DOCUMENT.match(first.strip()):
      first += file.read()
      elements = _elements(first, path)
      if elements is not None:
        yield from ((f'{path}, element {index}', element) for index, element in enumerate(elements, start=1))
        return
    for at, line in itertools.chain(enumerate(io.StringIO(first), start=number), lines):
      if line.strip():
        yield f'{path}, line {at}', _record(line.strip())


def _elements(text: str, path: Path) -> list[Any] | None:
  """Return the elements of a text that is one JSON array, or [object]; None if only its first line is JSON."""
  text = text.lstrip()
  try:
    document, end = json.JSONDecoder().raw_decode(text)
    if text[end:].strip():
      if '\n' not in text[:end]:
        return None
      raise ValueError('more follows after its end')
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{path} looks like a single JSON document but cannot be parsed: {_reason(error)}. Fix it, or write one JSON '
      'object per line; a prompt that begins with a bracket goes into {"prompt": "..."}.'
    ) from error
  if isinstance(document, dict):
    return [document]
  return [{'prompt': element} if isinstance(element, str) else element for element in document]


def _record(line: str) -> Any:
  if re.match(r'\[\s*\{', line):
    with contextlib.suppress(ValueError, RecursionError):
      return json.loads(line)
  return line
