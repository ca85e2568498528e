"""Flags that show the tree of every target pass, and what is done with the trace they ask for."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from eagle_jax import processes, viz

FLAGS = flags.FLAGS
flags.DEFINE_bool('show_tree', False, 'Print the tree of every target pass, and the text at its end.')
flags.DEFINE_string(
  'trace_html', None, 'Write the trees to this file, a page to step through; print the text at its end.'
)


def requested(num_prompts: int) -> bool:
  """Return whether a flag asks for a trace; raise an error if it cannot be recorded, shown or written."""
  if not FLAGS.show_tree and FLAGS.trace_html is None:
    return False
  if FLAGS.show_tree and FLAGS.json:
    raise ValueError('--show_tree prints trees, and --json nothing but JSON: drop one, or take --trace_html=FILE.')
  if FLAGS.batch_size and FLAGS.batch_size < num_prompts:
    raise ValueError(
      f'--show_tree and --trace_html decode all prompts together, got {num_prompts} with --batch_size='
      f'{FLAGS.batch_size}: drop --batch_size, or take fewer prompts.'
    )
  if FLAGS.trace_html is not None:
    _require_writable(Path(FLAGS.trace_html).expanduser())
  return True


def _require_writable(path: Path) -> None:
  """Raise an error now rather than after the text."""
  if path.is_dir():
    raise ValueError(f'--trace_html={path} is a folder: name a file in it.')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
      pass
  except OSError as error:
    raise ValueError(f'--trace_html={path} cannot be written: {error}. Name a file in a folder of yours.') from error


def show(cycles: Sequence, tokenizer) -> None:
  """Print the cycles of one prompt as indented trees, in colours if a terminal reads them."""
  is_coloured = sys.stdout.isatty() and 'NO_COLOR' not in os.environ
  for number, cycle in enumerate(cycles, start=1):
    print(f'pass {number} of {len(cycles)}, nodes: {len(cycle.token)}, new tokens: {cycle.num_emitted}')
    print(viz.tree(cycle, tokenizer).text(is_coloured=is_coloured), end='\n\n')


def write(trace: Sequence, tokenizer, prompts: Sequence[str]) -> None:
  """Write the page, in the main process."""
  processes.on_main(viz.html, trace, FLAGS.trace_html, tokenizer, prompts=prompts)
