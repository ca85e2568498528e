"""Progress bars with rates, for work that may take more than a few seconds."""

import sys
from typing import Any

from tqdm import tqdm

from eagle_jax.processes import is_main_process

DELAY_S = 5  # work that ends sooner shows no bar

_is_silent = False


def silence(is_silent: bool = True) -> None:
  """Show no bars from now on; False: show them again."""
  global _is_silent
  _is_silent = is_silent


def progress_bar(iterable: Any = None, *, disable: bool = False, **options: Any) -> Any:
  """Wrap an iterable in a progress bar, or make a bar to `update`; the options are tqdm's.

  A bar appears on standard error after `DELAY_S` seconds, in the main process alone, and only if standard error is a
  terminal or a notebook and nobody called `silence`.
  """
  is_watched = sys.stderr.isatty() or 'ipykernel' in sys.modules
  is_shown = is_watched and not _is_silent and is_main_process()
  return tqdm(iterable, disable=disable or not is_shown, delay=DELAY_S, **options)
