"""Flags that choose the models, shared by launchers."""

import jax
from absl import flags

import eagle_jax
from eagle_jax.evaluate import random_pairs
from eagle_jax.sharding import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a shipped name or a folder; empty for none.')
flags.DEFINE_enum(
  'dtype',
  'float32',
  ['float32', 'bfloat16', 'int8'],
  'Of parameters; int8 rounds matrices to 8 bits as they are read.',
)
flags.DEFINE_enum(
  'drafter_dtype',
  None,
  ['float32', 'bfloat16', 'int8'],
  'Of the drafter; default --dtype. With --policy=auto int8 where it was measured faster.',
)
flags.DEFINE_integer(
  'num_model',
  None,
  'Devices that share one copy of the matrices; what others there are split the batch. Default: one device does all.',
  lower_bound=1,
)


def mesh():
  """Return a mesh of all devices; None to use one device."""
  if FLAGS.num_model is None and jax.process_count() > 1:
    raise ValueError('Processes of a cluster share a model: say with --num_model how many devices hold one copy.')
  return None if FLAGS.num_model is None else make_mesh(num_model=FLAGS.num_model)


def models():
  """Load the target, and the drafter or None."""
  target = eagle_jax.load_target(FLAGS.target, dtype=FLAGS.dtype, mesh=mesh())
  drafter = eagle_jax.load_drafter(FLAGS.drafter, target, dtype=FLAGS.drafter_dtype) if FLAGS.drafter else None
  return target, drafter


def pair():
  """Load the target and a drafter, which is required."""
  target, drafter = models()
  if drafter is None:
    raise ValueError('A drafter is required here: pass --drafter.')
  return target, drafter


def random_models(shape: str, draft_vocab_size: int | None):
  """Make a pair of a known shape with random weights; see `random_pairs.random_pair`."""
  how = {'dtype': FLAGS.dtype, 'drafter_dtype': FLAGS.drafter_dtype, 'mesh': mesh()}
  return random_pairs.random_pair(shape, draft_vocab_size=draft_vocab_size, **how)
