"""Write all cycles of a trace as one self-contained page: SVG and a little script, no network."""

import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.decode.record import Cycle
from eagle_jax.files import replacing
from eagle_jax.text import Detokenizer
from eagle_jax.viz.layout import BASELINE, GAP, HEIGHT, LINE, MARGIN, PADDING, lay_out, require_cycle
from eagle_jax.viz.picture import STYLE
from eagle_jax.viz.words import label, word

TEMPLATE = Path(__file__).with_name('page.html')


def html(
  trace: Sequence[Cycle] | Sequence[Sequence[Cycle]],
  path: str | os.PathLike,
  tokenizer: Any = None,
  *,
  prompts: str | Sequence[str] | None = None,
) -> None:
  """Write a page on which arrow keys and buttons step through the cycles while the text grows.

  Args:
    trace: `Generation.trace`, or the cycles of one prompt.
    path: the file, written whole or not at all.
    tokenizer: `target.tokenizer`; without one, tokens are shown as numbers.
    prompts: shown before the texts: a string for the cycles of one prompt, else one a prompt.

  Raises:
    ValueError: there is no cycle, something else than cycles, or not one prompt a trace.
    OSError: the file cannot be written.

  Example:
    >>> prompts = ['Why is the sky blue?']
    >>> out = eagle_jax.generate(target, drafter, prompts, max_new_tokens=16, trace=True)
    >>> eagle_jax.viz.html(out.trace, 'trees.html', target.tokenizer, prompts=prompts)
  """
  each = _by_prompt(trace)
  shown: list[Any] = [None] * len(each) if prompts is None else [prompts] if isinstance(prompts, str) else [*prompts]
  if len(shown) != len(each):
    raise ValueError(f'`prompts` must hold one text for each of {len(each)} traces, got {len(shown)}.')
  words = _Words(tokenizer)
  texts = [_text(prompt, cycles, words) for prompt, cycles in zip(shown, each, strict=True)]
  geometry = {
    'line': LINE, 'height': HEIGHT, 'gap': GAP, 'margin': MARGIN, 'padding': PADDING, 'baseline': BASELINE,
  }  # fmt: skip
  data = {'geometry': geometry, 'words': words.written, 'texts': texts}
  # In a script only "<" can be markup, so neither </script> nor <!-- can appear.
  written = json.dumps(data, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
  style = STYLE.read_text(encoding='utf-8')
  page = TEMPLATE.read_text(encoding='utf-8').replace('/*TREE*/', style).replace('"DATA"', written)
  try:
    with replacing(Path(path).expanduser()) as temporary:
      temporary.write_text(page, encoding='utf-8')
  except OSError as error:
    raise OSError(f'The page {path} could not be written: {error}. Name a file in a folder of yours.') from error


def _by_prompt(trace: Any) -> list[list[Cycle]]:
  """Bring a trace into the form of `Generation.trace`; raise a ValueError if it has no cycle, or anything else."""
  if not isinstance(trace, Sequence) or isinstance(trace, Cycle):
    raise ValueError(
      f'A trace is needed, got {type(trace).__name__}: pass out.trace, which out = generate(..., trace=True) has.'
    )
  is_of_prompts = all(isinstance(cycles, list | tuple) and not isinstance(cycles, Cycle) for cycles in trace)
  each = [[*cycles] for cycles in trace] if is_of_prompts else [[*trace]]
  for cycle in itertools.chain(*each):
    require_cycle(cycle)
  if not any(each):
    raise ValueError('The trace has no cycle: every text ended at its first token. Raise max_new_tokens.')
  return each


class _Words:
  """The words of a page, each written once."""

  def __init__(self, tokenizer: Any):
    self.tokenizer = tokenizer
    self.written: list[list[str]] = []  # label and word
    self._place: dict[int, int] = {}  # in `written`, by token

  def place(self, token: int) -> int:
    if token not in self._place:
      exact = word(token, self.tokenizer)
      self._place[token] = len(self.written)
      self.written.append([label(exact), exact])
    return self._place[token]


class _Numbers:
  """A detokenizer for when there is no tokenizer: it writes ids as numbers."""

  def push(self, ids: Iterable[int]) -> str:
    return ''.join(f'{number} ' for number in ids)

  def flush(self) -> str:
    return ''


def _text(prompt: str | None, cycles: Sequence[Cycle], words: _Words) -> dict[str, Any]:
  """Collect what is shown of one prompt: `start` is the prefill's token, `said` the drafts and bonus of a cycle."""
  detokenizer: Any = Detokenizer(words.tokenizer) if words.tokenizer else _Numbers()
  start = detokenizer.push(cycles[0].token[:1].tolist()) if cycles else ''
  drawn = [_cycle(cycle, detokenizer, words) for cycle in cycles]
  if drawn:
    drawn[-1]['said'][1] += detokenizer.flush()
  return {'prompt': prompt, 'start': start, 'cycles': drawn}


def _cycle(cycle: Cycle, detokenizer: Any, words: _Words) -> dict[str, Any]:
  place = [words.place(int(token)) for token in (*cycle.token, cycle.bonus)]
  layout = lay_out(cycle, [words.written[at][0] for at in place])
  accepted = cycle.token[cycle.path[1:]].tolist()
  has_bonus = cycle.num_emitted > len(accepted)
  return {
    'word': place,
    'parent': layout.parent,
    'line': layout.line,
    'left': layout.left,
    'width': layout.width,
    'size': layout.size,
    'q': [_rounded(math.exp(log_q)) for log_q in cycle.log_q],
    'p': [_rounded(math.exp(log_p)) for log_p in cycle.log_p],
    'rank': cycle.rank.tolist(),
    'path': cycle.path.tolist(),
    'emitted': cycle.num_emitted,
    'said': [detokenizer.push(accepted[: cycle.num_emitted]), detokenizer.push([cycle.bonus] if has_bonus else [])],
  }


def _rounded(x: float) -> float | None:
  """Round to three digits; None for NaN and infinity, which a target whose numbers overflow gives."""
  return float(f'{x:.3g}') if math.isfinite(x) else None
