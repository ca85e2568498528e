"""Standard output and error of a launcher, whatever they lead to."""

import io
import os
import sys


def prepare() -> None:
  """Make both ready for any text; exit with one line if standard output is closed."""
  if sys.stderr is None:  # closed: Python would print to standard output instead
    sys.stderr = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115 for as long as the process lives
  if sys.stdout is None:
    sys.stdout = sys.stderr
    fail('standard output is closed: redirect it to a file or to /dev/null.')
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='backslashreplace')  # a terminal may not know every character of a text


def fail(reason: str) -> None:
  """Print what was wrong in one line, and exit with code 2."""
  print('error:', '; '.join(map(str.strip, reason.splitlines())), file=sys.stderr)
  drop()
  sys.exit(2)


def drop() -> None:
  """Discard what can no longer be written: Python would write it as it ends, and fail again."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
