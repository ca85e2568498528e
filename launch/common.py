"""Flags that launchers share: which models."""

from absl import flags

import eagle_jax

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a shipped name or a folder; empty for none.')
flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of parameters and caches.')


def models():
  """The target and its drafter, or None where none is wanted."""
  target = eagle_jax.load_target(FLAGS.target, dtype=FLAGS.dtype)
  return target, eagle_jax.load_drafter(FLAGS.drafter, target) if FLAGS.drafter else None
