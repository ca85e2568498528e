"""Flags that choose the acceptance rule."""

from absl import flags

from eagle_jax.lossy import TypicalAcceptance
from eagle_jax.sampling import GumbelMax

FLAGS = flags.FLAGS
RULES = {rule.name: rule for rule in (GumbelMax, TypicalAcceptance)}
NUMBERS = 'epsilon', 'delta'  # of a rule
flags.DEFINE_enum('chooser', GumbelMax.name, [*RULES], 'Acceptance rule; a lossy one may change a sampled text.')
flags.DEFINE_float('epsilon', None, 'Accept above min(epsilon, delta * exp(-entropy)) (--chooser=lossy-typical).')
flags.DEFINE_float('delta', None, 'See --epsilon (--chooser=lossy-typical).')


def requested():
  """Make the acceptance rule."""
  numbers = {name: FLAGS[name].value for name in NUMBERS if FLAGS[name].value is not None}
  rule = RULES[FLAGS.chooser]
  if numbers and rule is not TypicalAcceptance:
    raise ValueError(f'--chooser={FLAGS.chooser} does not take {[*numbers]}: add --chooser={TypicalAcceptance.name}.')
  return rule(**numbers)
