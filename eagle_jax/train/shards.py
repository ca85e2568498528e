"""Write training examples in shards, each a file that depends on the settings and its number alone.

So an interrupted run resumes where it stopped, and ends with exactly the files of an undisturbed one.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle_jax.decode.batching import Request
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import features
from eagle_jax.models.transformer import Target
from eagle_jax.processes import write_once
from eagle_jax.train.answers import Answerer, require_room, synthesize
from eagle_jax.train.conversations import (
  Conversation,
  Script,
  SkipExample,
  counting,
  read_conversations,
  write_prompts,
)
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors

_TRIES = 4  # of self-synthesis, for each conversation that is needed


@dataclasses.dataclass(frozen=True)
class Data:
  """The text to train on: how much, who writes it, and how."""

  num_shards: int
  shard_size: int = 512  # conversations
  num_rows: int = 64  # answers decoded together
  num_refill: int = 16  # finished answers whose places are refilled together
  min_prompt: int = 1  # tokens of the first prompt; shorter ones are passed over, and left to another `Data`
  max_prompt: int = 128  # tokens; longer first prompts are passed over, longer later ones end the conversation
  max_new_tokens: int = 192  # an answer; it is cut there, and the conversation ends
  temperatures: tuple[float, ...] = (0.0, 1.0, 0.7, 0.0)  # by conversation, in turn
  seed: int = 0
  answers: str = 'target'  # 'target': the target answers anew; 'given': as they stand in the conversations
  stores_features: bool = True  # False: small shards; features are computed when they are needed
  # Layers whose inputs are stored beside the features; None: those that the drafter taps. Drafters of fewer taps may
  # train on the same shards.
  taps: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    counts = ('num_shards', 'shard_size', 'num_rows', 'num_refill', 'min_prompt', 'max_prompt', 'max_new_tokens')
    if bad := {name: getattr(self, name) for name in counts if getattr(self, name) < 1}:
      raise ValueError(f'Data: these must be at least 1: {bad}.')
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'Data: seed is {self.seed}; a number from 0 to 2**31 - 1 is needed.')
    if self.min_prompt > self.max_prompt:
      raise ValueError(f'Data: min_prompt {self.min_prompt} is above max_prompt {self.max_prompt}: no prompt would do.')
    if not self.temperatures or not all(0 <= temperature < math.inf for temperature in self.temperatures):
      raise ValueError(f'Data: temperatures is {self.temperatures}; finite numbers >= 0 are needed, one at least.')
    if self.answers not in ('target', 'given'):
      raise ValueError(
        f"Data: answers is {self.answers!r}; 'target' (the target answers) or 'given' (as in the file) is needed."
      )


def write_shard(path: Path, examples: Sequence[Example]) -> None:
  """Pack examples end to end into one safetensors file, written whole or not at all."""
  tensors = {
    'id': np.asarray([example.id for example in examples], np.int64),
    'num_tokens': np.asarray([len(example.token) for example in examples], np.int64),
    'token': np.concatenate([example.token for example in examples]),
    'is_answer': np.concatenate([example.is_answer for example in examples]),
    'feature': np.concatenate([example.feature for example in examples]),
    'temperature': np.asarray([example.temperature for example in examples], np.float32),
    'seed': np.asarray([example.seed for example in examples], np.int32),
  }
  write_safetensors(path, tensors)


def read_shard(path: Path) -> list[Example]:
  """Read the examples of one shard.

  Raises:
    ValueError: the file is damaged.
  """
  shard: dict[str, Any] = dict(read_safetensors(path))
  ends = np.cumsum(shard['num_tokens'])
  by_token = (np.split(shard[name], ends[:-1]) for name in ('token', 'is_answer'))
  feature = np.split(shard['feature'], (ends - np.arange(1, len(ends) + 1))[:-1])
  temperature, seed = shard['temperature'].tolist(), shard['seed'].tolist()
  return [Example(*fields) for fields in zip(shard['id'].tolist(), *by_token, feature, temperature, seed, strict=True)]


def shard_path(folder: Path, number: int) -> Path:
  """Return where a shard of this number lies, or will."""
  return folder / f'shard_{number:04d}.safetensors'


def make_shards(
  target: Target, conversations: Iterable[Conversation], folder: Path, data: Data, refused: collections.Counter[str]
) -> Iterator[Path]:
  """Write the shards that are missing, and yield the path of each in turn.

  Args:
    target: answers, or reads the given answers; needs a tokenizer.
    conversations: where the target answers, answers in them are left out, and given anew.
    folder: where shards go.
    data: settings.
    refused: counts the conversations that cannot be used, or end early, by reason; what ended early in a shard that
      is there already is not counted again.

  Raises:
    ValueError: there are too few conversations, or the target cannot do what `data` asks for.
  """
  answerer = _answerer(target, data)
  complete: Callable[[list[tuple[int, Script]]], list[Example]]
  if data.answers == 'given':
    complete = functools.partial(_as_given, target, data)
  else:
    complete = functools.partial(_converse, answerer, data, refused)
  scripts = _scripts(target, conversations, data, refused)
  for number in range(data.num_shards):
    chosen = list(itertools.islice(scripts, data.shard_size))
    if len(chosen) < data.shard_size:
      raise ValueError(
        f'The conversations suffice for {number} shards of {data.shard_size}, and {data.num_shards} were asked for. '
        f'Left out: {dict(refused)}. Add conversations or ask for fewer shards.'
      )
    path = shard_path(folder, number)
    write_once(path, functools.partial(complete, chosen), write_shard)
    yield path


def make_conversations(
  target: Target,
  folder: Path,
  data: Data,
  refused: collections.Counter[str],
  *,
  num_turns: int = 1,
  temperature: float = 1.0,
) -> Iterator[Conversation]:
  """Yield conversations for `make_shards` that the target makes up, where there is no file of them. See `synthesize`.

  They are kept in `folder`, those of `data.shard_size` tries a file, so that an interrupted run loses no more. A file
  is written when its conversations are asked for; they end after four times as many tries as `data` asks for.

  Raises:
    ValueError: the target cannot do what `data` asks for, or has no chat template, or the temperature is not above 0.
  """
  require_answerable(target, data, makes_prompts=True)
  answerer = _answerer(target, dataclasses.replace(data, stores_features=False))
  if not 0 < temperature < math.inf:
    raise ValueError(f'The temperature of self-synthesis is {temperature}; a finite number above 0 is needed.')
  for part in range(_TRIES * data.num_shards):
    path = folder / f'prompts_{part:04d}.jsonl'
    numbers = range(part * data.shard_size, (part + 1) * data.shard_size)
    make = functools.partial(synthesize, answerer, numbers, refused, num_turns=num_turns, temperature=temperature)
    write_once(path, make, write_prompts)
    yield from read_conversations(path, refused)


def require_answerable(target: Target, data: Data, *, makes_prompts: bool = False) -> None:
  """Raise a ValueError if the target cannot answer as `data` says, or make the prompts, too, if it is to."""
  if target.tokenizer is None:
    raise ValueError('Conversations need a tokenizer, and this target has none: load one that brings its own.')
  if makes_prompts and not target.tokenizer.has_chat_template:
    raise ValueError('Self-synthesis needs a chat template, and this target has none: give a file of conversations.')
  require_room(
    target.config,
    num_rows=data.num_rows,
    num_refill=data.num_refill,
    max_prompt=data.max_prompt,
    max_new_tokens=data.max_new_tokens,
  )


def _answerer(target: Target, data: Data) -> Answerer:
  """Make the answerer that `data` describes."""
  require_answerable(target, data)
  return Answerer(
    target,
    num_rows=data.num_rows,
    num_refill=data.num_refill,
    max_prompt=data.max_prompt,
    max_new_tokens=data.max_new_tokens,
    seed=data.seed,
    records_features=data.stores_features,
    taps=data.taps or (),
  )


def _scripts(
  target: Target, conversations: Iterable[Conversation], data: Data, refused: collections.Counter[str]
) -> Iterator[tuple[int, Script]]:
  """Yield the conversations whose first prompt has a wanted length, numbered in their order, as scripts."""
  for number, conversation in enumerate(conversations):
    with counting(refused):
      script = Script.of(target.tokenizer, conversation)
      if len(script.token) < data.min_prompt:
        raise SkipExample('the first prompt is too short')
      if len(script.token) > data.max_prompt:
        raise SkipExample('the first prompt is too long')
      if data.answers == 'given':
        script = _follow(script, conversation.answers, target, data, refused)
      yield number, script


def _follow(
  script: Script, answers: Sequence[str], target: Target, data: Data, refused: collections.Counter[str]
) -> Script:
  """Return the conversation with its given answers, up to the last one that can be used.

  Raises:
    SkipExample: none can.
  """
  tokenizer, eos_ids = target.tokenizer, target.config.eos_ids
  if not answers:
    raise SkipExample('no answers')
  first, *rest = answers
  script = script.answered(script.answer_tokens(tokenizer, first, eos_ids)[: data.max_new_tokens])
  with counting(refused):
    for text in rest:
      prompt = script.next_turn(tokenizer, eos_ids, max_prompt=data.max_prompt)
      script = prompt.answered(prompt.answer_tokens(tokenizer, text, eos_ids)[: data.max_new_tokens])
  return script


def _as_given(target: Target, data: Data, scripts: Sequence[tuple[int, Script]]) -> list[Example]:
  """Return examples with the features of one target pass over each conversation."""
  seen = [script.token[:-1] for _, script in scripts]
  if data.stores_features:
    all_features = features(target, seen, data.taps or ())
  else:
    all_features = [np.zeros((len(token), 0), jnp.bfloat16) for token in seen]
  return [_example(number, script, feature) for (number, script), feature in zip(scripts, all_features, strict=True)]


def _converse(
  answerer: Answerer, data: Data, refused: collections.Counter[str], scripts: Sequence[tuple[int, Script]]
) -> list[Example]:
  """Answer every turn: the first ones of all conversations together, then all second ones, and so on."""
  target = answerer.target
  open_scripts, finished = dict(scripts), {}
  while open_scripts:
    temperatures = {number: data.temperatures[number % len(data.temperatures)] for number in open_scripts}
    requests = [Request(number, script.token, temperatures[number]) for number, script in open_scripts.items()]
    asked, open_scripts = open_scripts, {}
    for answer in answerer.answer(requests):
      number = answer.request.id
      script = asked[number].answered(answer.token.tolist())
      example = _example(number, script, answer.feature)
      finished[number] = example._replace(temperature=temperatures[number], seed=data.seed)
      if script.later:
        with counting(refused):
          following = script.next_turn(target.tokenizer, target.config.eos_ids, max_prompt=data.max_prompt)
          open_scripts[number] = following
  return [finished[number] for number, _ in scripts]


def _example(number: int, script: Script, feature: np.ndarray) -> Example:
  return Example(number, np.asarray(script.token, np.int32), np.asarray(script.is_answer), feature)
