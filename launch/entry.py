"""Start a launcher, and report errors to its user in one line."""

import logging
import signal
import sys

import jax
import output
from absl import app, flags
from store import programs

from eagle_jax.decode.program import use_store
from eagle_jax.files import cache_folder, make_private
from eagle_jax.progress import silence


def run(main, *, starts_often: bool = False):
  """Run `main` through absl, with a persistent compilation cache; bad input ends in one line and exit code 2.

  An interrupt also ends in one line, and a closed pipe is not an error: both end with a shell's exit code. A launcher
  that `starts_often` stores its compiled programs, and finds them without tracing.
  """

  def checked(argv):
    log = logging.getLogger('eagle_jax')  # says when something is compiled
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger().setLevel(logging.WARNING)  # what other libraries do step by step is no news
    try:
      if starts_often:
        use_store(programs())
      else:
        jax.config.update('jax_compilation_cache_dir', str(make_private(cache_folder() / 'xla')))
      if argv[1:]:
        raise ValueError(f'Every argument must be a flag, got {argv[1:]}: write --name=value, and quote spaces.')
      silence('json' in flags.FLAGS and flags.FLAGS.json)
      main(argv)
      output.finish()
    except BrokenPipeError:  # `head` has read enough
      output.drop()
      sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, SyntaxError) as error:  # a wrong value, path or configuration
      output.fail(str(error), is_left_alone=isinstance(error, TimeoutError) and jax.distributed.is_initialized())
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
      first = str(error).partition('\n')[0]
      if isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' not in first:
        if jax.distributed.is_initialized():
          output.fail(first, is_left_alone=True)
        raise
      advice = 'a smaller --batch_size, fewer tokens, --dtype=bfloat16, or more devices a model (--num_model)'
      output.fail(f'out of memory ({first}): try {advice}.')

  output.prepare()
  app.run(checked)
