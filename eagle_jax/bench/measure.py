"""Decode questions plainly and speculatively in turn, and log each answer as soon as it is complete."""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.bench.questions import Question, tokenizer_of
from eagle_jax.decode.generate import Generation, generate
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.answered import Answered, Timed
from eagle_jax.files import as_stored, differences
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Sampling, perturbed
from eagle_jax.sharding import to_host

NEAR_TIE = 1e-3  # two perturbed logits this close may swap order in kernels of another shape
NEAR_TIE_ROUNDED = 1e-2  # those of a target in 8 or 4 bits, where its layers round activations, too


@dataclasses.dataclass(frozen=True)
class Bench:
  """A benchmark of a pair with fixed options."""

  target: Target
  drafter: Drafter | None
  policy: TreePolicy
  options: Mapping[str, Any]  # keywords of `decode.generate` without temperature
  num_repeats: int = 1  # how often each answer is timed

  def measure(
    self, questions: Sequence[Question], temperature: float, log: Path, settings: Mapping[str, Any]
  ) -> Iterator[Answered]:
    """Answer every turn by plain and by speculative decoding at batch size 1, and yield both.

    The two alternate in going first. A program that was just compiled runs once before it is timed. Later turns follow
    plain decoding's answers. Answers that are already in the log are not decoded again.

    Args:
      questions: of any tasks. Without a chat template only their first turns are asked. A question ends before a turn
        that does not fit the context.
      temperature: for all questions.
      log: JSON Lines: `settings`, then one `Answered` a line, of any temperature.
      settings: everything that the answers depend on; a log with other settings is not continued.

    Raises:
      ValueError: the log has other settings, or the target has no tokenizer.
    """
    tokenizer_of(self.target)  # fail before anything is written
    known = _read_log(log, settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, 'a', encoding='utf-8') as file:
      for question in questions:
        for key, answer in self._ask(question, temperature, known):
          if key not in known:
            file.write(answer.to_line() if file.tell() else json.dumps(settings) + '\n' + answer.to_line())
            file.flush()
          yield answer

  def turns(self, question: Question) -> tuple[str, ...]:
    """Return the turns to ask, if they fit the context: all, or the first without a chat template."""
    return question.turns if tokenizer_of(self.target).has_chat_template else question.turns[:1]

  def _ask(
    self, question: Question, temperature: float, known: Mapping[tuple, Answered]
  ) -> Iterator[tuple[tuple, Answered]]:
    """Yield the answers to every turn, each `num_repeats` times, with their keys in the log."""
    tokenizer, messages = self.target.tokenizer, []
    for turn, text in enumerate(self.turns(question)):
      messages.append({'role': 'user', 'content': text})
      prompt = tokenizer.encode_chat(messages) if tokenizer.has_chat_template else tokenizer.encode_prompt(text)
      if len(prompt) + self.options['max_new_tokens'] > self.target.config.max_context:
        return
      for repeat in range(self.num_repeats):
        key = question.task, question.id, turn, temperature, repeat
        answer = known[key] if key in known else self._answer(key, prompt, question.row_id)
        if answer.prompt != prompt:
          raise ValueError(
            f'The log must answer the current prompt of {key}, got an answer to another one: choose another --out, or '
            'move the log away.'
          )
        yield key, answer
      messages.append({'role': 'assistant', 'content': tokenizer.decode(answer.plain.tokens)})

  def _answer(self, key: tuple, prompt: list[int], row_id: int) -> Answered:
    task, question_id, turn, temperature, repeat = key
    is_plain_first = zlib.crc32(repr(key).encode()) % 2 == 0
    order = ('plain', self.policy) if is_plain_first else (self.policy, 'plain')
    timed = {policy: self._time_answer(prompt, row_id, temperature, policy) for policy in order}
    plain, spec = timed['plain'], timed[self.policy]
    filters = {name: self.options[name] for name in ('top_k', 'top_p', 'seed') if name in self.options}
    sampling = Sampling.of(temperature=temperature, **filters)
    gap = gap_at_divergence(self.target, prompt, plain.tokens, spec.tokens, sampling, row_id)
    return Answered(task, question_id, turn, temperature, repeat, row_id, prompt, plain, spec, gap)

  def _time_answer(self, prompt: list[int], row_id: int, temperature: float, policy: str | TreePolicy) -> Timed:
    options = {**self.options, 'temperature': temperature, 'policy': policy, 'row_ids': [row_id]}
    return Timed.of(generate_warm(self.target, self.drafter, [prompt], **options))


def identity(drafter: Drafter | None) -> dict[str, Any]:
  """Identify a drafter by its number of ids, dtype, bits and a digest of its parameters."""
  if drafter is None:
    return {}
  digest = hashlib.sha256()
  for x in jax.tree.leaves(to_host(drafter.params)):
    digest.update(x.tobytes())
  return {
    'draft_vocab_size': drafter.config.draft_vocab_size,
    'drafter_dtype': str(drafter.dtype),
    'is_quantised': drafter.is_quantised,
    'drafter_sha256': digest.hexdigest(),
  }


def generate_warm(*args: Any, **options: Any) -> Generation:
  """Call `generate`, and again if something was compiled, so that times are those of a warm program."""
  generation = generate(*args, **options)
  return generate(*args, **options) if generation.stats['compile_s'] else generation


def _read_log(path: Path, settings: Mapping[str, Any]) -> dict[tuple, Answered]:
  """Read a log, by task, question, turn, temperature and repeat; remove an incomplete last line."""
  if not path.exists():
    return {}
  text = path.read_bytes()
  os.truncate(path, text.rfind(b'\n') + 1)
  first, *lines = text[: text.rfind(b'\n') + 1].decode().splitlines() or ['']
  if not lines:  # settings without answers: start over
    os.truncate(path, 0)
    return {}
  if wrong := differences(json.loads(first), as_stored(settings)):
    raise ValueError(
      f'The log {path} must be of a run with the same settings: {wrong}. Choose another --out, or move it away.'
    )
  answered = map(Answered.parse, lines)
  return {(a.task, a.question_id, a.turn, a.temperature, a.repeat): a for a in answered}


def num_same(plain: Sequence[int], spec: Sequence[int]) -> int:
  """Count the tokens before the first that differs or that only one text has."""
  pairs = zip(plain, spec, strict=False)
  return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(spec)))


def near_tie(target: Target) -> float:
  """Return the gap below which two texts may differ by rounding."""
  return NEAR_TIE if target.weights_dtype is None else NEAR_TIE_ROUNDED


def gap_at_divergence(
  target: Target, prompt: Sequence[int], plain: Sequence[int], spec: Sequence[int], sampling: Sampling, row_id: int
) -> float | None:
  """Compute the gap between plain decoding's two best perturbed logits where the texts diverge; None if they do not.

  A gap below `near_tie` is explained by rounding; a larger one is a defect.
  """
  if list(plain) == list(spec):
    return None
  context = [*prompt, *plain[: num_same(plain, spec)]]
  network = target.network
  taps = network.read(target.params, jnp.asarray([context]))
  logits_V = network.logits(target.params, taps)[:, 0, -1]
  best, second = jax.lax.top_k(perturbed(logits_V, sampling, row_id, len(context)), 2)[0]
  return float(best - second)
