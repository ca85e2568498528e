"""Flags that choose the models, shared by launchers."""

import jax
from absl import flags

import eagle_jax
from eagle_jax.evaluate import random_pairs
from eagle_jax.sharding import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a name, folder, .gguf file or org/name[@revision].')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a name, a folder, org/name[@revision]; empty: none.')
flags.DEFINE_enum('drafter_kind', None, ['model'], 'model: --drafter names a smaller model of the same tokenizer.')
DTYPES = 'float32', 'bfloat16', 'int8'
flags.DEFINE_enum('dtype', 'float32', [*DTYPES, 'int4'], "The target's dtype; int8 and int4 round its matrices.")
flags.DEFINE_enum(
  'drafter_dtype',
  None,
  DTYPES,
  "The drafter's dtype; default --dtype, but int8 with --policy=auto where that is known to be faster.",
)
flags.DEFINE_integer(
  'num_model',
  None,
  'Number of devices that share one copy of the model; the others split the batch. Default: use one device.',
  lower_bound=1,
)
flags.DEFINE_integer(
  'max_context', None, 'Tokens of prompt and answer; needed beyond the original context of long RoPE.'
)


def mesh():
  """Return a mesh of all devices; None to use one device."""
  if FLAGS.num_model is None and jax.process_count() > 1:
    raise ValueError('--cluster needs --num_model, the number of devices that share one copy of the model.')
  return None if FLAGS.num_model is None else make_mesh(num_model=FLAGS.num_model)


def models():
  """Load the target, and the drafter or None."""
  target = eagle_jax.load_target(FLAGS.target, dtype=FLAGS.dtype, mesh=mesh(), max_context=FLAGS.max_context)
  how = {'dtype': FLAGS.drafter_dtype, 'kind': FLAGS.drafter_kind}
  drafter = eagle_jax.load_drafter(FLAGS.drafter, target, **how) if FLAGS.drafter else None
  return target, drafter


def pair():
  """Load the target and a drafter, which is required."""
  target, drafter = models()
  if drafter is None:
    raise ValueError('A drafter is required here: pass --drafter.')
  return target, drafter


def random_models(shape: str, draft_vocab_size: int | None):
  """Make a pair of a known shape with random weights; see `random_pairs.random_pair`."""
  options = {'dtype': FLAGS.dtype, 'drafter_dtype': FLAGS.drafter_dtype, 'mesh': mesh()}
  return random_pairs.random_pair(shape, draft_vocab_size=draft_vocab_size, **options)
