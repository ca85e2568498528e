"""Flags that launchers share which decode: models, policy, sampling."""

import dataclasses

import common
from absl import flags

from eagle_jax.policy.kinds import KINDS

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
SIZES = 'num_nodes', 'max_depth', 'width', 'fanout', 'lookup'  # flags that are fields of policies


def takers(name: str) -> list[str]:
  """The kinds of policy that have this field."""
  return [kind for kind, form in KINDS.items() if name in {field.name for field in dataclasses.fields(form)}]


def where(name: str) -> str:
  return f'(--policy={" or ".join(takers(name))})'


flags.DEFINE_enum('policy', 'auto', ['auto', *KINDS], 'How the tree is drafted; auto: as measured to be fastest.')
flags.DEFINE_integer('num_nodes', None, f'Tree nodes, root included {where("num_nodes")}.', lower_bound=1)
flags.DEFINE_integer('max_depth', None, f'Edges from root to deepest leaf {where("max_depth")}.', lower_bound=1)
flags.DEFINE_integer('width', None, f'Nodes expanded at each level {where("width")}.', lower_bound=1)
flags.DEFINE_integer('fanout', None, f'Children of each node {where("fanout")}.', lower_bound=1)
flags.DEFINE_bool('lookup', None, f'Also draft what followed an earlier match of the text {where("lookup")}.')
flags.DEFINE_integer('max_new_tokens', 128, 'Tokens: new ones a prompt, at most.', lower_bound=1)
flags.DEFINE_float('temperature', 0.0, 'Of the softmax that tokens are drawn from; 0 is greedy.')
flags.DEFINE_integer('top_k', 0, 'Draw from the k likeliest tokens; 0 keeps all.')
flags.DEFINE_float('top_p', 1.0, 'Draw from the smallest set that holds this probability; in (0, 1].')
flags.DEFINE_integer('seed', 0, 'Fixes the text.')


def requested():
  """Collect the keywords of `generate` and `stream`."""
  fields = {name: FLAGS[name].value for name in SIZES if FLAGS[name].value is not None}
  if unused := [name for name in fields if FLAGS.policy not in takers(name)]:
    raise ValueError(f'--policy={FLAGS.policy} takes no {unused}.')
  policy = KINDS[FLAGS.policy](**fields) if FLAGS.policy in KINDS else FLAGS.policy
  sampling = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')
  return {name: FLAGS[name].value for name in sampling} | {'policy': policy}
