"""How a launcher starts, and how an error reaches its user."""

import logging
import sys

import jax
from absl import app

import eagle_jax
from eagle_jax.weights.fetch import cache_folder


def run(main, *, starts_often: bool = False):
  """absl's `app.run`, with a compile cache that lasts, and bad input as one line and exit code 2.

  One that `starts_often` finds its few programs without tracing them.
  """

  def checked(argv):
    log = logging.getLogger('eagle_jax')  # says when something is compiled
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger('jax').setLevel(logging.WARNING)  # which backends it looked for is no news
    if starts_often:
      eagle_jax.keep_programs(cache_folder() / 'programs')
    else:
      jax.config.update('jax_compilation_cache_dir', str(cache_folder() / 'xla'))
    try:
      if argv[1:]:
        raise ValueError(f'{argv[1:]} came without a flag: write --name=value, and quotes around a text with spaces.')
      main(argv)
    except (ValueError, OSError, SyntaxError) as error:  # a wrong value, path or configuration
      print(f'error: {error}', file=sys.stderr)
      sys.exit(2)

  app.run(checked)
