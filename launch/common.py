"""Flags that launchers share: models, policy, sampling."""

from absl import flags

import eagle_jax

FLAGS = flags.FLAGS
TAKEN_BY = {  # fields of policies
  'num_nodes': ['dynamic'],
  'max_depth': ['dynamic', 'chain'],
  'width': ['dynamic'],
  'fanout': ['dynamic'],
  'lookup': ['dynamic', 'chain'],
}

flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a shipped name or a folder; empty for none.')
flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of parameters and caches.')
flags.DEFINE_enum('policy', 'auto', ['auto', 'plain', 'chain', 'static', 'dynamic'], 'How the tree is drafted.')
flags.DEFINE_integer('num_nodes', None, 'Tree nodes, root included (dynamic).', lower_bound=1)
flags.DEFINE_integer('max_depth', None, 'Edges from root to deepest leaf (dynamic, chain).', lower_bound=1)
flags.DEFINE_integer('width', None, 'Nodes expanded a level (dynamic).', lower_bound=1)
flags.DEFINE_integer('fanout', None, 'Children a node (dynamic).', lower_bound=1)
flags.DEFINE_bool('lookup', None, 'Also draft what followed an earlier match of the text (dynamic, chain; auto does).')
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
  fields = {name: FLAGS[name].value for name in TAKEN_BY if FLAGS[name].value is not None}
  if unused := [name for name in fields if FLAGS.policy not in TAKEN_BY[name]]:
    raise ValueError(f'--policy={FLAGS.policy} takes no {unused}.')
  kinds = {'chain': eagle_jax.Chain, 'static': eagle_jax.StaticTree, 'dynamic': eagle_jax.DynamicTree}
  policy = kinds[FLAGS.policy](**fields) if FLAGS.policy in kinds else FLAGS.policy
  sampling = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')
  return {name: FLAGS[name].value for name in sampling} | {'policy': policy}
