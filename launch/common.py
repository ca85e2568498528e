"""Flags that launchers share: models, policy, sampling."""

from absl import flags

import eagle_jax

FLAGS = flags.FLAGS
SIZES = {
  'num_nodes': 'Tree nodes, root included (dynamic).',
  'max_depth': 'Edges from root to deepest leaf (dynamic, chain).',
  'width': 'Nodes expanded a level (dynamic).',
  'fanout': 'Children a node (dynamic).',
}

flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a shipped name or a folder; empty for none.')
flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of parameters and caches.')
flags.DEFINE_enum('policy', 'auto', ['auto', 'plain', 'chain', 'static', 'dynamic'], 'How the tree is drafted.')
for size, meaning in SIZES.items():
  flags.DEFINE_integer(size, None, meaning, lower_bound=1)
flags.DEFINE_integer('max_new_tokens', 128, 'Tokens: new ones a prompt, at most.', lower_bound=1)
flags.DEFINE_float('temperature', 0.0, 'Of the softmax that tokens are drawn from; 0 is greedy.')
flags.DEFINE_integer('top_k', 0, 'Draw from the k likeliest tokens; 0 keeps all.')
flags.DEFINE_float('top_p', 1.0, 'Draw from the smallest set that holds this probability; in (0, 1].')
flags.DEFINE_integer('seed', 0, 'Fixes the text.')


def models():
  """The target and its drafter, or None where none is wanted."""
  target = eagle_jax.load_target(FLAGS.target, dtype=FLAGS.dtype)
  return target, eagle_jax.load_drafter(FLAGS.drafter, target) if FLAGS.drafter and FLAGS.policy != 'plain' else None


def options():
  """Keywords of `generate` and `stream`."""
  sizes = {name: FLAGS[name].value for name in SIZES if FLAGS[name].value is not None}
  if unused := [name for name in sizes if FLAGS.policy not in SIZES[name]]:
    raise ValueError(f'--policy={FLAGS.policy} takes no {unused}.')
  kinds = {'chain': eagle_jax.Chain, 'static': eagle_jax.StaticTree, 'dynamic': eagle_jax.DynamicTree}
  policy = kinds[FLAGS.policy](**sizes) if FLAGS.policy in kinds else FLAGS.policy
  sampling = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')
  return {name: FLAGS[name].value for name in sampling} | {'policy': policy}
