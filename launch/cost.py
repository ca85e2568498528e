"""Measure what a decoding step costs on this device, and which policy is fastest; `--policy=auto` reads it.

python launch/cost.py

Times target passes and drafter passes against what memory and arithmetic allow, traces candidates on questions, decodes
with the best, and stores the result by device, pair, dtype and batch. Or --random_shape=llama3_8b: times alone.
"""

import dataclasses
import functools
import json
from pathlib import Path

import asked
import common
import entry
from absl import flags

from eagle_jax.bench import cost_report, questions
from eagle_jax.bench.plots import plot_costs
from eagle_jax.bench.timing import CONTEXTS, measure_times
from eagle_jax.bench.tune import tune
from eagle_jax.evaluate import random_pairs
from eagle_jax.policy import cost_store
from eagle_jax.progress import progress_bar

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(asked)
flags.DEFINE_enum('random_shape', None, random_pairs.NAMES, 'Time a pair of this shape with random weights instead.')
flags.DEFINE_integer('draft_vocab_size', None, 'Number of ids drafted with --random_shape; default all.', lower_bound=1)
flags.DEFINE_integer('max_new_tokens', 64, 'Maximum number of tokens of an answer.', lower_bound=2)
flags.DEFINE_multi_integer('batch', [1], 'Number of sequences decoded together; may be repeated.', lower_bound=1)
flags.DEFINE_multi_integer('context', [*CONTEXTS], 'Tokens before the timed passes; may be repeated.', lower_bound=1)
flags.DEFINE_string('out', None, 'Folder for results and plots; default the cache folder, which auto reads.')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output, one line for each batch size.')


def main(_):
  how = {'contexts': sorted({*FLAGS.context}), 'progress': progress_bar}
  if FLAGS.draft_vocab_size and not FLAGS.random_shape:
    raise ValueError('--draft_vocab_size needs --random_shape: for a real drafter several sizes are measured.')
  if FLAGS.random_shape:
    measure = functools.partial(measure_times, *common.random_models(FLAGS.random_shape, FLAGS.draft_vocab_size), **how)
  else:
    given = asked.requested()
    target, drafter = common.pair()
    prompts = [questions.tokenizer_of(target).encode_prompt(question.turns[0]) for question in given]
    measure = functools.partial(tune, target, drafter, prompts, max_new_tokens=FLAGS.max_new_tokens, **how)
  for batch in FLAGS.batch:
    measured = measure(batch=batch)
    path = cost_store.write(measured, FLAGS.out and Path(FLAGS.out).expanduser())
    plot_costs(measured, path.with_suffix('.png'))
    print(json.dumps(dataclasses.asdict(measured)) if FLAGS.json else cost_report.table(measured))
    cost_report.warn_if_unsteady(measured)


if __name__ == '__main__':
  entry.run(main)
