"""How a launcher starts, and how an error reaches its user."""

import logging
import os
import signal
import sys

import jax
from absl import app

import eagle_jax
from eagle_jax.files import cache_folder


def run(main, *, starts_often: bool = False):
  """absl's `app.run`, with a compile cache that lasts, and bad input as one line and exit code 2.

  An interrupt is one line too, and a reader of the output that has gone is none: both with a shell's exit code. One
  that `starts_often` finds its few programs without tracing them.
  """

  def checked(argv):
    log = logging.getLogger('eagle_jax')  # says when something is compiled
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger().setLevel(logging.WARNING)  # what other libraries do step by step is no news
    if starts_often:
      eagle_jax.keep_programs(cache_folder() / 'programs')
    else:
      jax.config.update('jax_compilation_cache_dir', str(cache_folder() / 'xla'))
    try:
      if argv[1:]:
        raise ValueError(f'{argv[1:]} came without a flag: write --name=value, and quotes around a text with spaces.')
      main(argv)
      sys.stdout.flush()
    except BrokenPipeError:  # `head` has read enough
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left once more
      sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, SyntaxError) as error:  # a wrong value, path or configuration
      print('error:', '; '.join(map(str.strip, str(error).splitlines())), file=sys.stderr)
      sys.exit(2)
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      advice = 'fewer rows (--batch_size), fewer tokens, --dtype=bfloat16, or more devices a model (--num_model)'
      print(f'error: memory does not suffice ({str(error).splitlines()[0]}): take {advice}.', file=sys.stderr)
      sys.exit(2)

  app.run(checked)
