"""Flags for decoding, shared by launchers: models, policy, sampling."""

import dataclasses

import acceptance
import common
import switches
from absl import flags

from eagle_jax.policy.kinds import KINDS

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(acceptance)
NUMBERS = [name for form in KINDS.values() for name in getattr(form, 'tunable', ())]
FIELDS = 'num_nodes', 'smaller', 'max_depth', 'width', 'fanout', 'lookup', *NUMBERS  # flags that are fields of policies


def takers(name: str) -> list[str]:
  """List the kinds of policy that have this field."""
  return [kind for kind, form in KINDS.items() if name in {field.name for field in dataclasses.fields(form)}]


def where(name: str) -> str:
  return f'(--policy={" or ".join(takers(name))})'


flags.DEFINE_enum('policy', 'auto', ['auto', *KINDS], 'Tree policy; auto takes the fastest measured one.')
flags.DEFINE_integer('num_nodes', None, f'Number of tree nodes, root included {where("num_nodes")}.', lower_bound=1)
flags.DEFINE_multi_integer('smaller', None, f'A smaller size to verify; may be repeated {where("smaller")}.')
flags.DEFINE_integer('max_depth', None, f'Edges from root to deepest leaf {where("max_depth")}.', lower_bound=1)
flags.DEFINE_integer('width', None, f'Number of nodes expanded at each level {where("width")}.', lower_bound=1)
flags.DEFINE_integer('fanout', None, f'Number of children of each node {where("fanout")}.', lower_bound=1)
switches.DEFINE_switch('lookup', 'route', f'Draft what followed earlier matches; =route: long ones {where("lookup")}.')
flags.adopt_module_key_flags(switches)
flags.DEFINE_float('least_log_mass', None, f'Least log-probability of a level to draft on {where("least_log_mass")}.')
flags.DEFINE_float('scale', None, f'c of sqrt(c * entropy), a bound on the share rejected; 1 / nats {where("scale")}.')
flags.DEFINE_float('most_rejected', None, f'Largest sqrt(scale * entropy) to draft on {where("most_rejected")}.')
flags.DEFINE_float('least_mass', None, f'Least p * (1 - sqrt(scale * entropy)) of a level {where("least_mass")}.')
flags.DEFINE_float('steepness', None, f'How fast siblings become fewer, 1 / nats {where("steepness")}.')
flags.DEFINE_float('least_accepted', None, f'Least probability of acceptance {where("least_accepted")}.')
flags.DEFINE_float('mean_nodes', None, f'Nodes for each sequence of a batch, shared by all {where("mean_nodes")}.')
flags.DEFINE_multi_float('confidences', None, f'Upper end of a bin of confidence {where("confidences")}.')
flags.DEFINE_multi_integer('siblings', None, f'Siblings in a bin of confidence {where("siblings")}.')
flags.DEFINE_integer('max_new_tokens', 128, 'Maximum number of new tokens for each prompt.', lower_bound=1)
flags.DEFINE_float('temperature', 0.0, 'Sampling temperature; 0 is greedy.')
flags.DEFINE_integer('top_k', 0, 'Sample from the k likeliest tokens; 0 keeps all.')
flags.DEFINE_float('top_p', 1.0, 'Sample from the smallest set of tokens with this total probability; in (0, 1].')
flags.DEFINE_integer('seed', 0, 'Seed that determines the text.')


def requested():
  """Collect the keywords of `generate` and `stream`."""
  fields = {name: FLAGS[name].value for name in FIELDS if FLAGS[name].value is not None}
  if unused := [name for name in fields if FLAGS.policy not in takers(name)]:
    raise ValueError(f'--policy={FLAGS.policy} does not take {unused}: leave them out, or choose a policy that does.')
  policy = KINDS[FLAGS.policy](**fields) if FLAGS.policy in KINDS else FLAGS.policy
  sampling = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')
  return {name: FLAGS[name].value for name in sampling} | {'policy': policy, 'chooser': acceptance.requested()}
