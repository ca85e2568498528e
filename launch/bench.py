"""Plain against speculative decoding, question by question: acceptance, speed, and whether the texts are the same.

python launch/bench.py --tasks=mt_bench,gsm8k --num_questions=10 --out=runs/bench

Goes on where it was stopped, if called again with the same flags.
"""

import json
from importlib.metadata import version
from pathlib import Path

import common
import entry
import options
from absl import flags
from tqdm import tqdm

from eagle_jax import DynamicTree, decode
from eagle_jax.bench import questions
from eagle_jax.bench.calibration import calibrate
from eagle_jax.bench.measure import Bench
from eagle_jax.bench.plots import plot
from eagle_jax.bench.summary import markdown, report, write
from eagle_jax.device import device_name

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(options)
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder of TASK.jsonl files.')
flags.DEFINE_list('tasks', None, 'Names of tasks, separated by commas; default all in the folder.')
flags.DEFINE_integer('num_questions', None, 'Of each task, at most; default all.', lower_bound=1)
flags.DEFINE_integer('num_repeats', 1, 'Times that each answer is timed.', lower_bound=1)
flags.DEFINE_string('out', 'runs/bench', 'Folder of the log, report.json, .csv and .md, and plots.')
flags.DEFINE_bool('json', False, 'Print JSON and nothing else to standard output.')


def main(_):
  folder, out, how = Path(FLAGS.questions), Path(FLAGS.out), options.requested()
  tasks = FLAGS.tasks or sorted(path.stem for path in folder.glob('*.jsonl'))
  asked = [question for task in tasks for question in questions.read_questions(folder, task, FLAGS.num_questions)]
  target, drafter = common.models()
  policy, drafter, _ = decode.settle(target, drafter, policy=how.pop('policy'))
  temperature = how.pop('temperature')
  setup = {name: FLAGS[name].value for name in ('target', 'drafter', 'dtype')} | how
  setup |= {'policy': policy.describe(), 'device': device_name()}
  setup |= {'draft_vocab_size': drafter.config.draft_vocab_size if drafter else None}
  setup |= {'versions': {name: version(name) for name in ('eagle_jax', 'jax', 'jaxlib', 'flax')}}
  bench = Bench(target, drafter, policy, how, FLAGS.num_repeats)
  answers = list(tqdm(bench.measure(asked, [temperature], out / 'answers.jsonl', setup), desc='answers'))
  summary = {**report(answers, policy), **setup, 'temperature': temperature}
  is_drafted = policy.num_nodes > 1 and any(len(answer.plain.tokens) > 1 for answer in answers)
  if drafter is not None and is_drafted and not drafter.has_own_head:  # of EAGLE-3 no traces are recorded
    summary['calibration'] = calibrate(target, drafter, answers, policy=DynamicTree(), seed=FLAGS.seed)
  write(summary, out)
  plot(summary, out)
  print(json.dumps(summary) if FLAGS.json else markdown(summary))


if __name__ == '__main__':
  entry.run(main)
