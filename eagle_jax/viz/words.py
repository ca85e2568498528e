"""Write tokens for people: exactly, with everything visible, and short enough for a node."""

import unicodedata
from typing import Any

_REPLACEMENT = '\ufffd'
_MAX_LABEL = 18  # letters


def word(token_id: int, tokenizer: Any = None) -> str:
  """Return the text of one token as it stands inside a text; its number without a tokenizer.

  A token that decodes to no text, or to a part of a character, goes by its name in the vocabulary.
  """
  if tokenizer is None:
    return str(token_id)
  alone = tokenizer.decode([token_id])
  text = tokenizer.decode([token_id] * 2)[len(alone) :]  # a vocabulary may drop the space that begins a text
  is_whole = text and _REPLACEMENT not in text and not tokenizer.is_raw_byte(token_id)
  return visible(text if is_whole else tokenizer.token(token_id))


def visible(text: str) -> str:
  """Write characters that show nothing, or that would rearrange what stands around them, as escapes."""
  return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in text)


def label(word: str) -> str:
  """Cut a word to what a node has room for; spaces around it are left out."""
  short = word.strip(' ') or '␣' * min(len(word), 3) or '∅'
  return short if len(short) <= _MAX_LABEL else short[: _MAX_LABEL - 1] + '…'


def num_cells(text: str) -> int:
  """Count the cells that a text takes in letters of one width."""
  wide = sum(unicodedata.east_asian_width(c) in 'WF' for c in text)
  return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)
