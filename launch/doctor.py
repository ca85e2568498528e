"""Examine a drafter: is the text exact, is acceptance what a trained head's is, and is it worth its cost here?

python launch/doctor.py

Decodes three prompts plainly and speculatively, tries known mistakes of reading a head along recorded text, times three
policies. Exit code 1 if something is wrong: each finding names its cause and what to try.
"""

import dataclasses
import json
import sys

import common
import entry
from absl import flags

from eagle_jax.bench import questions
from eagle_jax.bench.doctor import Plan, describe, examine

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', ['mt_bench', 'gsm8k', 'qa'], 'Names of tasks, separated by commas.')
flags.DEFINE_integer('num_questions', 8, 'Maximum number of questions of each task; three are decoded.', lower_bound=1)
flags.DEFINE_integer('max_new_tokens', Plan.max_new_tokens, 'Maximum number of new tokens of an answer.', lower_bound=2)
flags.DEFINE_bool('speed', True, 'Also time a plain step and three policies.')
flags.DEFINE_bool('json', False, 'Print the report as JSON.')


def main(_):
  asked = [q for task in FLAGS.tasks for q in questions.read_questions(FLAGS.questions, task, FLAGS.num_questions)]
  target, drafter = common.pair()
  questions.tokenizer_of(target)
  plan = Plan(max_new_tokens=FLAGS.max_new_tokens)
  plan = plan if FLAGS.speed else dataclasses.replace(plan, policies=())
  report = examine(target, drafter, [question.turns[0] for question in asked], plan=plan)
  print(json.dumps(report) if FLAGS.json else describe(report))
  if not report['ok']:
    sys.stdout.flush()
    sys.exit(1)


if __name__ == '__main__':
  entry.run(main)
