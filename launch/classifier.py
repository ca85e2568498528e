"""Fit what `--policy=c2t` and `--policy=calibrated` read, and add it to the stored costs of this device and pair.

python launch/classifier.py

Answers questions, grows a tree at each place of the answers, and learns which nodes were right, as a classifier and as
a table: a few minutes on two cores. The costs are those that launch/cost.py measured, or those shipped. After a change
of the drafter fit both again.
"""

from pathlib import Path

import asked
import common
import entry
from absl import flags

from eagle_jax.bench import compare
from eagle_jax.policy import cost_store
from eagle_jax.progress import progress_bar

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(asked)
flags.DEFINE_integer('max_new_tokens', 64, 'Maximum number of tokens of an answer.', lower_bound=2)
flags.DEFINE_multi_float('temperature', [0.0, 1.0], 'Temperature of the answers; may be repeated.', lower_bound=0.0)
flags.DEFINE_string('out', None, 'Folder for the costs; default the cache folder, where they are looked up.')


def main(_):
  given = asked.requested()
  how = {'max_new_tokens': FLAGS.max_new_tokens, 'progress': progress_bar}
  costs = compare.fit_acceptance(*common.pair(), given, FLAGS.temperature, **how)
  print(cost_store.write(costs, FLAGS.out and Path(FLAGS.out).expanduser()))


if __name__ == '__main__':
  entry.run(main)
