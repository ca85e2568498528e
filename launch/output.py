"""Prepare a launcher's standard output and error, and end it with one line on an error."""

import io
import os
import sys


def prepare() -> None:
  """Let both streams take any text; exit with one line if standard output is closed."""
  if sys.stderr is None:  # closed: Python would print to standard output instead
    sys.stderr = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115 for as long as the process lives
  if sys.stdout is None:
    sys.stdout = sys.stderr
    fail('standard output is closed: redirect it to a file or to /dev/null.')
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='backslashreplace')  # a terminal's encoding may lack characters of the text


def fail(reason: str) -> None:
  """Print the reason in one line, and exit with code 2."""
  print('error:', '; '.join(map(str.strip, reason.splitlines())), file=sys.stderr)
  drop()
  sys.exit(2)


def drop() -> None:
  """Discard output that cannot be written, since Python would try again at exit, and fail again."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
