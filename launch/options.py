"""Flags that launchers share which decode: models, policy, sampling."""

import common
from absl import flags

import eagle_jax

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
TAKEN_BY = {  # fields of policies
  'num_nodes': ['dynamic'],
  'max_depth': ['dynamic', 'chain'],
  'width': ['dynamic'],
  'fanout': ['dynamic'],
  'lookup': ['dynamic', 'chain'],
}

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


def requested():
  """Keywords of `generate` and `stream`."""
  fields = {name: FLAGS[name].value for name in TAKEN_BY if FLAGS[name].value is not None}
  if unused := [name for name in fields if FLAGS.policy not in TAKEN_BY[name]]:
    raise ValueError(f'--policy={FLAGS.policy} takes no {unused}.')
  kinds = {'chain': eagle_jax.Chain, 'static': eagle_jax.StaticTree, 'dynamic': eagle_jax.DynamicTree}
  policy = kinds[FLAGS.policy](**fields) if FLAGS.policy in kinds else FLAGS.policy
  sampling = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')
  return {name: FLAGS[name].value for name in sampling} | {'policy': policy}
