"""Flags that give the prompts."""

from absl import flags

from eagle_jax.text import read_prompts

FLAGS = flags.FLAGS
flags.DEFINE_string('prompt', None, 'The prompt.')
flags.DEFINE_string('batch_file', None, 'File with one prompt a line, or JSON Lines with `prompt`.')
flags.DEFINE_integer('batch_size', None, 'Number of prompts decoded together; default all.', lower_bound=1)


def requested() -> list[str]:
  """Return the prompts."""
  if (FLAGS.prompt is None) == (FLAGS.batch_file is None) or (FLAGS.batch_size and FLAGS.prompt is not None):
    raise ValueError('Pass either --prompt or --batch_file; --batch_size goes with --batch_file only.')
  return [FLAGS.prompt] if FLAGS.batch_file is None else list(read_prompts(FLAGS.batch_file))
