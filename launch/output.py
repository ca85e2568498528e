"""Prepare a launcher's standard output and error, and write the last line: statistics, or an error."""

import gc
import io
import os
import sys

import jax


def prepare() -> None:
  """Let both streams take any text; exit with one line if standard output is closed."""
  if sys.stderr is None:  # closed: Python would print to standard output instead
    sys.stderr = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115 for as long as the process lives
  if sys.stdout is None:
    sys.stdout = sys.stderr
    fail('standard output is closed: redirect it to a file or to /dev/null.')
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='backslashreplace')  # a terminal's encoding may lack characters of the text


def finish() -> None:
  """Write what is left, and spare Python's end a last look through all objects, which takes most of a second."""
  sys.stdout.flush()
  gc.freeze()


def print_statistics(stats: dict) -> None:
  """Print one line about what was decoded to standard error; see `Generation.stats`."""
  line = (
    '{num_new_tokens} new tokens in {num_target_passes} target passes, tau {tau:.2f}, {tok_per_s:.1f} tokens/s '
    '(prefill {prefill_s:.2f} s, decode {decode_s:.2f} s, compile {compile_s:.1f} s apart), {policy}'
  )
  note = ', {chooser}: the text may differ from plain decoding' if 'lossy' in stats['chooser'] else ''
  print((line + note).format(**stats), file=sys.stderr)


def fail(reason: str, *, is_left_alone: bool = False) -> None:
  """Print the reason in one line, and exit with code 2; one of several processes without waiting for the others.

  Args:
    reason: what went wrong.
    is_left_alone: whether the cause is that another process seems to have ended.
  """
  if is_left_alone:
    reason = f'this process cannot go on, as if another had ended ({reason}): see what the others print.'
  print('error:', '; '.join(map(str.strip, reason.splitlines())), file=sys.stderr, flush=True)
  drop()
  if jax.distributed.is_initialized():
    os._exit(2)
  sys.exit(2)


def drop() -> None:
  """Discard output that cannot be written, since Python would try again at exit, and fail again."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
