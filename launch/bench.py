"""Compare plain and speculative decoding question by question: acceptance, speed, and whether texts are identical.

python launch/bench.py --tasks=mt_bench,gsm8k --num_questions=10 --out=runs/bench

Called again with the same flags, it resumes where it was stopped.
"""

import json
from pathlib import Path

import common
import entry
import options
from absl import flags

from eagle_jax.bench import questions
from eagle_jax.bench.measure import Bench, identity
from eagle_jax.bench.run import run
from eagle_jax.bench.summary import markdown
from eagle_jax.decode.auto import resolve_policy
from eagle_jax.device import ran_on
from eagle_jax.kernels.cpu import in_use
from eagle_jax.sharding import mesh_of

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(options)
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', None, 'Names of tasks, separated by commas; default all in the folder.')
flags.DEFINE_integer('num_questions', None, 'Maximum number of questions of each task; default all.', lower_bound=1)
flags.DEFINE_integer('num_repeats', 1, 'How often each answer is timed.', lower_bound=1)
flags.DEFINE_list('temperatures', None, 'Several temperatures, each with its own report folder; default --temperature.')
flags.register_validator(
  'temperatures', lambda given: all(x.replace('.', '', 1).isdigit() for x in given or ()), 'numbers >= 0, such as 0,0.7'
)
flags.DEFINE_string('out', 'runs/bench', 'Folder for the log, report.json, .csv and .md, and plots.')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output, one object for each temperature.')


def main(_):
  folder, out, request = Path(FLAGS.questions), Path(FLAGS.out).expanduser(), options.requested()
  tasks = FLAGS.tasks or questions.tasks_in(folder)
  asked = [question for task in tasks for question in questions.read_questions(folder, task, FLAGS.num_questions)]
  target, drafter = common.models()
  policy, drafter, _ = resolve_policy(target, drafter, policy=request.pop('policy'))
  reports = {request.pop('temperature'): out}
  if FLAGS.temperatures:
    reports = {float(each): out / f'temperature_{float(each):g}' for each in FLAGS.temperatures}
  setup = {name: FLAGS[name].value for name in ('target', 'drafter', 'dtype')} | request
  setup |= {'chooser': repr(request['chooser']), 'max_context': target.config.max_context}
  mesh = mesh_of(target.params)
  setup |= {'policy': policy.describe(), **identity(drafter), **ran_on(mesh), 'kernels': in_use(mesh)}
  bench = Bench(target, drafter, policy, request, FLAGS.num_repeats)
  for temperature, into in reports.items():
    summary = run(bench, asked, temperature, out / 'answers.jsonl', into, setup)
    print(json.dumps(summary) if FLAGS.json else markdown(summary))


if __name__ == '__main__':
  entry.run(main)
