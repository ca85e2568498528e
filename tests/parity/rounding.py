"""Compare a target in 8 or 4 bits with the same in float32 on questions: logits, greedy choices, perplexity, and tau.

python tests/parity/rounding.py --num_questions=5   # extra: demo

Both targets read the answers that float32 writes greedily. Then each writes its own, plainly and with the drafter,
which was trained on float32's features.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import eagle_jax
from eagle_jax.bench import questions
from eagle_jax.bench.measure import gap_at_divergence
from eagle_jax.decode.generate import Generation
from eagle_jax.models import rounded
from eagle_jax.models.transformer import Target
from eagle_jax.sampling import Sampling

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_enum('dtype', 'int8', rounded.NAMES, "The target's dtype that is compared with float32.")
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'Drafter: a shipped name or a folder.')
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', None, 'Names of tasks, separated by commas; default all in the folder.')
flags.DEFINE_integer('num_questions', 5, 'Maximum number of questions of each task.', lower_bound=1)
flags.DEFINE_integer('max_new_tokens', 128, 'Maximum number of tokens of an answer.', lower_bound=2)

TEMPERATURES = 0.0, 1.0
POLICY = eagle_jax.DynamicTree(4, 4, 5, 16)


def answer_logits(target: Target, tokens: Sequence[int], num_new: int) -> np.ndarray:
  """Return [num_new, V] f32, the logits that chose the last `num_new` tokens."""
  taps = target.network.read(target.params, jnp.asarray([tokens]))
  logits_VL = target.network.logits(target.params, taps)[:, 0]
  return np.asarray(logits_VL[:, -num_new - 1 : -1]).T


def tau(generated: Sequence[Generation]) -> float:
  """Return tokens a target pass, over all generations."""
  num_new = sum(one.stats['num_new_tokens'] - 1 for one in generated)
  return num_new / sum(one.stats['num_target_passes'] for one in generated)


def main(_: Sequence[str]) -> None:
  targets = {dtype: eagle_jax.load_target(FLAGS.target, dtype=dtype) for dtype in ('float32', FLAGS.dtype)}
  exact, _ = targets.values()
  drafters = {dtype: eagle_jax.load_drafter(FLAGS.drafter, target) for dtype, target in targets.items()}
  tasks = FLAGS.tasks or questions.tasks_in(FLAGS.questions)
  asked = [one for task in tasks for one in questions.read_questions(FLAGS.questions, task, FLAGS.num_questions)]
  prompts = [exact.tokenizer.encode_prompt(question.turns[0]) for question in asked]
  errors, same, nats = [], [], {dtype: [] for dtype in targets}
  for prompt in tqdm(prompts, desc='reading'):
    tokens = eagle_jax.generate(exact, drafters['float32'], [prompt], max_new_tokens=FLAGS.max_new_tokens).tokens[0]
    logits = {dtype: answer_logits(one, [*prompt, *tokens], len(tokens)) for dtype, one in targets.items()}
    ours, of_floats = logits[FLAGS.dtype], logits['float32']
    errors.append(np.abs(ours - of_floats).max() / np.abs(of_floats).max())
    same += (ours.argmax(axis=1) == of_floats.argmax(axis=1)).tolist()
    for dtype, logits_NV in logits.items():
      log_p_NV = jax.nn.log_softmax(logits_NV)
      nats[dtype] += (-np.asarray(log_p_NV)[np.arange(len(tokens)), tokens]).tolist()
  print(f'{len(prompts)} answers, {len(same)} tokens')
  print(f'logits: largest error {np.max(errors):.4f} of the largest logit, median over answers {np.median(errors):.4f}')
  print(f'same greedy token: {np.mean(same):.4f}')
  print('perplexity of the answers:', {dtype: round(float(np.exp(np.mean(each))), 4) for dtype, each in nats.items()})
  for temperature, dtype in itertools.product(TEMPERATURES, targets):
    found, gaps, sampling = [], [], Sampling.of(temperature=temperature)
    for number, prompt in enumerate(tqdm(prompts, desc=f'{dtype}, temperature {temperature:g}')):
      options = {'max_new_tokens': FLAGS.max_new_tokens, 'temperature': temperature, 'row_ids': [number]}
      plain = eagle_jax.generate(targets[dtype], None, [prompt], **options)
      found.append(eagle_jax.generate(targets[dtype], drafters[dtype], [prompt], policy=POLICY, **options))
      texts = plain.tokens[0], found[-1].tokens[0]
      gaps.append(gap_at_divergence(targets[dtype], prompt, *texts, sampling, number))
    parted = [round(gap, 6) for gap in gaps if gap is not None]
    says = f'{len(parted)} of {len(prompts)} texts part from plain decoding, at gaps of {parted}'
    print(f'{dtype}, temperature {temperature:g}: tau {tau(found):.3f}, {says}')


if __name__ == '__main__':
  app.run(main)
