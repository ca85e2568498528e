"""Measures what a cycle costs on this device and which policy is fastest for a pair; `--policy=auto` reads it.

python launch/cost.py

Times target passes over 1 to 64 nodes and drafter passes of 1 to 10 rows, traces the candidates on questions, and
decodes with the most promising. The result is stored, in the cache folder, by device, pair, dtype, batch and context.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import common
import entry
from absl import flags
from tqdm import tqdm

from eagle_jax import cost
from eagle_jax.bench import questions
from eagle_jax.bench.tune import tune

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder of TASK.jsonl files, what the gain is measured on.')
flags.DEFINE_list('tasks', ['mt_bench', 'humaneval', 'gsm8k', 'qa'], 'Names of tasks, separated by commas.')
flags.DEFINE_integer('num_questions', 4, 'Of each task, at most.', lower_bound=1)
flags.DEFINE_integer('batch', 1, 'Rows decoded together.', lower_bound=1)
flags.DEFINE_integer('context', 64, 'Tokens before the passes that are timed.', lower_bound=1)
flags.DEFINE_string('out', None, 'Folder of the result; default the cache folder, where auto looks.')
flags.DEFINE_bool('json', False, 'Print JSON and nothing else to standard output.')


def main(_):
  asked = [q for task in FLAGS.tasks for q in questions.read_questions(FLAGS.questions, task, FLAGS.num_questions)]
  target, drafter = common.models()
  if drafter is None:
    raise ValueError('Costs are those of a pair: name a --drafter.')
  costs = tune(
    target,
    drafter,
    [target.tokenizer.encode_prompt(question.turns[0]) for question in asked],
    batch=FLAGS.batch,
    num_prompt=FLAGS.context,
    max_new_tokens=FLAGS.max_new_tokens,
    progress=functools.partial(tqdm, file=sys.stderr),
  )
  path = cost.write(costs, FLAGS.out and Path(FLAGS.out))
  print(json.dumps(dataclasses.asdict(costs)) if FLAGS.json else cost.table(costs))
  print(f'written to {path}', file=sys.stderr)


if __name__ == '__main__':
  entry.run(main)
