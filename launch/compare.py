"""Compare drafters and tree policies of a pair at equal nodes and at equal cost, along the target's own answers.

python launch/compare.py --tasks=mt_bench,gsm8k --num_questions=4 --max_new_tokens=64

Every policy is replayed from trees that the drafter grows once at each place of the answers, so tau does not depend on
the load of the machine. Rates are modelled from what launch/cost.py measured. Sixty questions took two busy cores more
than an hour (2026-11-29).
"""

import json
from pathlib import Path

import asked
import common
import entry
from absl import flags
from tqdm import tqdm

from eagle_jax.bench import compare
from eagle_jax.bench.comparison import table
from eagle_jax.bench.plots import plot_comparison
from eagle_jax.hub import load_drafter

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(asked)
flags.DEFINE_integer('max_new_tokens', 128, 'Maximum number of tokens of an answer.', lower_bound=2)
flags.DEFINE_multi_float('temperature', [0.0, 1.0], 'Temperature of the answers; may be repeated.', lower_bound=0.0)
flags.DEFINE_multi_integer('num_nodes', [*compare.NUM_NODES], 'Tree size to compare; may be repeated.', lower_bound=2)
flags.DEFINE_bool('ngram', True, 'Also compare the drafters without weights, which copy from the text.')
flags.DEFINE_integer('num_decoded', 0, 'Number of best policies to decode with at each temperature.', lower_bound=0)
flags.DEFINE_string('out', 'runs/compare', 'Folder for plots.')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output.')


def main(_):
  given = asked.requested()
  target, drafter = common.pair()
  others = {'ngram', 'suffix'} - {FLAGS.drafter} if FLAGS.ngram else ()
  drafters = [drafter, *(load_drafter(name, target) for name in sorted(others))]
  how = {'max_new_tokens': FLAGS.max_new_tokens, 'progress': tqdm}
  rows = compare.compare(target, drafters, given, FLAGS.temperature, num_nodes=FLAGS.num_nodes, **how)
  if FLAGS.num_decoded:
    rows += compare.decode_best(target, drafters, given, rows, num_best=FLAGS.num_decoded, **how)
  plot_comparison(rows, Path(FLAGS.out).expanduser())
  print(json.dumps({'rows': [row.to_json() for row in rows]}) if FLAGS.json else table(rows))


if __name__ == '__main__':
  entry.run(main)
