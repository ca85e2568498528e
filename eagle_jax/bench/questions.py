"""Benchmark questions: one JSON Lines file a task, as the EAGLE repository and FastChat keep them."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.files import parse_json
from eagle_jax.models.transformer import Target

QUESTIONS = Path(__file__).parents[1] / 'assets' / 'questions'  # openly licensed; see README.md there


class Question(NamedTuple):
  """What is asked, turn by turn; the model answers in between."""

  task: str
  id: str
  turns: tuple[str, ...]

  @property
  def row_id(self) -> int:
    """Keys the noise: another one for every question of every task, the same in every run."""
    return zlib.crc32(f'{self.task}/{self.id}'.encode()) >> 1


def tokenizer_of(target: Target) -> Any:
  """The target's tokenizer; ValueError if it has none, for questions are texts."""
  if target.tokenizer is None:
    raise ValueError(f'Questions are texts, and target {target.config.name!r} has no tokenizer: load one that has.')
  return target.tokenizer


def tasks_in(folder: str | Path) -> list[str]:
  """Names of a folder's tasks; ValueError if it has none."""
  if tasks := sorted(path.stem for path in Path(folder).expanduser().glob('*.jsonl')):
    return tasks
  raise ValueError(f'No questions in {folder}: needed is a folder with a TASK.jsonl file or more.')


def read_questions(folder: str | Path, task: str, num_questions: int | None = None) -> list[Question]:
  """The first questions of a task.

  Args:
    folder: holds `TASK.jsonl`, lines with `question_id` and `turns`, a list of strings.
    task: name of the file, without its ending.
    num_questions: at most so many; None for all.

  Raises:
    ValueError: no such task, a line that holds no question, or no line at all; the message names it.
  """
  path = Path(folder).expanduser() / f'{task}.jsonl'
  if not path.is_file():
    raise ValueError(f'No questions at {path}. The tasks in that folder are {tasks_in(folder)}: choose among them.')
  with open(path, encoding='utf-8') as lines:
    questions = list(_parsed(task, path, lines))
  if not questions:
    raise ValueError(f'{path} is empty: give it a question a line.')
  return questions[:num_questions]


def _parsed(task: str, path: Path, lines) -> Iterator[Question]:
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    question = parse_json(line, f'{path}, line {number}')
    try:
      turns, name = question['turns'], str(question['question_id'])
    except (KeyError, TypeError) as error:
      raise ValueError(f'{path}, line {number}: {error!r}. Needed is JSON with `question_id` and `turns`.') from error
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
      raise ValueError(f'{path}, line {number}: `turns` is {turns!r}; a list of non-empty strings is needed.')
    yield Question(task, name, tuple(turns))
