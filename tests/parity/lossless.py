"""Compare every kind of policy and drafter with plain decoding on questions, to the token, alone and in batches.

python tests/parity/lossless.py --dtype=int8 --num_tokens=3000   # extra: demo

Plain decoding has the same batches, since a prompt is read together with the others of its batch. Drafters without
weights of their own for the target begin as the shipped one. Prompts are those of the most frequent bucket of lengths,
so that each kind compiles few programs. Trees are small, so that on a CPU the nodes of a batch fit the C++ kernels,
whose passes agree to the last bit: there no text may part at all.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags
from tqdm import tqdm

import eagle_jax
from eagle_jax.bench import questions
from eagle_jax.bench.measure import gap_at_divergence
from eagle_jax.config import BlockConfig, EagleTapsConfig
from eagle_jax.decode.auto import find_costs
from eagle_jax.decode.buckets import bucket
from eagle_jax.models import rounded
from eagle_jax.policy.kinds import KINDS
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree, TreePolicy
from eagle_jax.sampling import Sampling
from eagle_jax.train.run import first_weights

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'Target: a known name, a .gguf file or a Hugging Face folder.')
flags.DEFINE_enum('dtype', 'float32', ['float32', *rounded.NAMES], "The target's dtype.")
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', 'EAGLE-2 drafter: a shipped name or a folder.')
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', None, 'Names of tasks, separated by commas; default all in the folder.')
flags.DEFINE_integer('num_tokens', 3000, 'Least number of tokens at each temperature and batch size.', lower_bound=2)
flags.DEFINE_integer('max_new_tokens', 128, 'Maximum number of tokens of an answer.', lower_bound=2)
flags.DEFINE_multi_integer('batch', [1, 4], 'Batch size; may be repeated.', lower_bound=1)

TEMPERATURES = 0.0, 1.0
TREE = {'width': 4, 'fanout': 4, 'max_depth': 4, 'num_nodes': 12}
PATHS = (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)


def policies(has_costs: bool) -> Iterator[TreePolicy]:
  """Yield one policy of every registered kind but the plain one, and the two forms of lookup."""
  yield from (Chain(4), Chain(4, True), DynamicTree(**TREE, lookup=True), DynamicTree(**TREE, lookup='route'))
  yield from (StaticTree(PATHS), DynamicTree(**TREE))
  for form in KINDS.values():
    fields = {field.name for field in dataclasses.fields(form)}
    if {*TREE} <= fields and form is not DynamicTree and (has_costs or not form.needs_costs):
      smaller = {'smaller': (1, 4)} if 'smaller' in fields else {}
      yield form(**TREE, **smaller)


def pairs(target: eagle_jax.Target) -> Iterator[tuple[Any, TreePolicy]]:
  """Yield drafters and policies: the given drafter with all policies, other kinds with a tree."""
  drafter = eagle_jax.load_drafter(FLAGS.drafter, target)
  for policy in policies(find_costs(target, drafter) is not None):
    yield drafter, policy
  for name in ('ngram', 'suffix'):
    yield eagle_jax.load_drafter(name, target), DynamicTree(**TREE)
  sizes = vars(drafter.config)
  taps = target.config.num_layers // 2, target.config.num_layers - 3
  for config in (EagleTapsConfig(**sizes, taps=taps), BlockConfig(**sizes, rank=64)):
    yield first_weights(FLAGS.drafter, target, config), DynamicTree(**TREE)


def answer(target: eagle_jax.Target, drafter: Any, prompts: Sequence[Any], *, batch: int, **options: Any) -> Any:
  """Answer prompts, `batch` at a time: return texts, and tokens a target pass. Plain ones end with `--num_tokens`."""
  texts, num_passes = [], 0
  for start in range(0, len(prompts), batch):
    ids = range(start, min(start + batch, len(prompts)))
    out = eagle_jax.generate(target, drafter, prompts[start : start + batch], row_ids=ids, **options)
    texts += out.tokens
    num_passes += sum(map(len, out.num_accepted))
    if drafter is None and sum(map(len, texts)) >= FLAGS.num_tokens:
      break
  return texts, (sum(map(len, texts)) - len(texts)) / max(num_passes, 1)


def main(_: Sequence[str]) -> None:
  target = eagle_jax.load_target(FLAGS.target, dtype=FLAGS.dtype)
  tasks = FLAGS.tasks or questions.tasks_in(FLAGS.questions)
  asked = [questions.read_questions(FLAGS.questions, task) for task in tasks]
  in_turns = [one for several in itertools.zip_longest(*asked) for one in several if one is not None]
  encoded = [target.tokenizer.encode_prompt(question.turns[0]) for question in in_turns]
  sizes = [bucket(len(prompt)) for prompt in encoded]
  prompts = [prompt for prompt, size in zip(encoded, sizes, strict=True) if size == statistics.mode(sizes)]
  settings, expected = [*itertools.product(TEMPERATURES, FLAGS.batch)], {}
  for temperature, batch in settings:
    how = {'temperature': temperature, 'max_new_tokens': FLAGS.max_new_tokens, 'batch': batch}
    texts = expected[temperature, batch] = answer(target, None, prompts, **how)[0]
    says = f'{len(texts)} texts, {sum(map(len, texts))} tokens'
    print(f'plain, temperature {temperature:g}, batch {batch}: {says}', flush=True)
  for drafter, policy in tqdm([*pairs(target)], desc='kinds'):
    for temperature, batch in settings:
      texts, sampling = expected[temperature, batch], Sampling.of(temperature=temperature)
      how = {'temperature': temperature, 'max_new_tokens': FLAGS.max_new_tokens, 'policy': policy, 'batch': batch}
      found, tau = answer(target, drafter, prompts[: len(texts)], **how, costs=find_costs(target, drafter))
      parted = [
        round(gap_at_divergence(target, prompts[number], *pair, sampling, number) or 0, 6)
        for number, pair in enumerate(zip(texts, found, strict=True))
        if pair[0] != pair[1]
      ]
      says = f'{len(parted)} of {len(texts)} texts part' + (f', at gaps of {parted}' if parted else '')
      name = f'{drafter.config.name}, {policy.describe()}, temperature {temperature:g}, batch {batch}'
      print(f'{name}: tau {tau:.2f}, {says}', flush=True)


if __name__ == '__main__':
  app.run(main)
