"""Flags that give the prompts, and the strings that end their texts."""

from absl import flags

from eagle_jax.text import read_prompts

FLAGS = flags.FLAGS
flags.DEFINE_string('prompt', None, 'The prompt.')
flags.DEFINE_string('system', None, 'System prompt, for a target with a chat template.')
flags.DEFINE_multi_string('stop', [], 'End the text before this string; may be repeated.')
flags.DEFINE_string('batch_file', None, 'File with one prompt per line, or JSON Lines with `prompt`.')
flags.DEFINE_integer('batch_size', None, 'Number of prompts decoded together; default all.', lower_bound=1)


def requested() -> list[str]:
  """Return the prompts."""
  if (FLAGS.prompt is None) == (FLAGS.batch_file is None) or (FLAGS.batch_size and FLAGS.prompt is not None):
    raise ValueError('Pass either --prompt or --batch_file; --batch_size goes with --batch_file only.')
  return [FLAGS.prompt] if FLAGS.batch_file is None else list(read_prompts(FLAGS.batch_file))


def with_system(prompts: list[str]) -> list:
  """Make each prompt a conversation that begins with the system prompt, if there is one."""
  if FLAGS.system is None:
    return prompts
  system = {'role': 'system', 'content': FLAGS.system}
  return [[system, {'role': 'user', 'content': prompt}] for prompt in prompts]
