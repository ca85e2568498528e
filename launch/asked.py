"""Flags that choose the questions, shared by launchers that measure on the target's answers."""

from absl import flags

from eagle_jax.bench import questions

FLAGS = flags.FLAGS
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', ['mt_bench', 'humaneval', 'gsm8k', 'qa'], 'Names of tasks, separated by commas.')
flags.DEFINE_integer('num_questions', 4, 'Maximum number of questions of each task.', lower_bound=1)


def requested() -> list[questions.Question]:
  """Read the questions."""
  return [q for task in FLAGS.tasks for q in questions.read_questions(FLAGS.questions, task, FLAGS.num_questions)]
