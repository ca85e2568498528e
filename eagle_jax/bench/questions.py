"""Read benchmark questions: one JSON Lines file a task, in the format of the EAGLE repository and FastChat."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.files import parse_json
from eagle_jax.models.transformer import Target

QUESTIONS = Path(__file__).parents[1] / 'assets' / 'questions'  # openly licensed; see README.md there


class Question(NamedTuple):
  """A question with one or more turns; the model answers each."""

  task: str
  id: str
  turns: tuple[str, ...]

  @property
  def row_id(self) -> int:
    """The key of the noise: distinct for every question of every task, the same in every run."""
    return zlib.crc32(f'{self.task}/{self.id}'.encode()) >> 1


def tokenizer_of(target: Target) -> Any:
  """Return the target's tokenizer; raise a ValueError if it has none, since questions are texts."""
  if target.tokenizer is None:
    raise ValueError(f'Target {target.config.name!r} must have a tokenizer for questions: load one that has.')
  return target.tokenizer


def tasks_in(folder: str | Path) -> list[str]:
  """List the names of a folder's tasks; raise a ValueError if it has none."""
  if tasks := sorted(path.stem for path in Path(folder).expanduser().glob('*.jsonl')):
    return tasks
  raise ValueError(f'No questions in {folder}: pass a folder with at least one TASK.jsonl file.')


def read_questions(folder: str | Path, task: str, num_questions: int | None = None) -> list[Question]:
  """Read the first questions of a task.

  Args:
    folder: contains `TASK.jsonl` with one JSON object a line: `question_id`, and `turns`, a list of strings.
    task: name of the file without its ending.
    num_questions: maximum number of questions; None for all.

  Raises:
    ValueError: the task does not exist or is empty, or a line is not a question; the message names the file and line.
  """
  path = Path(folder).expanduser() / f'{task}.jsonl'
  if not path.is_file():
    raise ValueError(f'No questions at {path}: choose among the tasks in that folder, {tasks_in(folder)}.')
  with open(path, encoding='utf-8') as lines:
    questions = list(_parsed(task, path, lines))
  if not questions:
    raise ValueError(f'{path} is empty: write one question a line.')
  return questions[:num_questions]


def _parsed(task: str, path: Path, lines) -> Iterator[Question]:
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    question = parse_json(line, f'{path}, line {number}')
    try:
      turns, name = question['turns'], str(question['question_id'])
    except (KeyError, TypeError) as error:
      raise ValueError(f'{path}, line {number}: must have `question_id` and `turns`, got {error!r}.') from error
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
      raise ValueError(f'{path}, line {number}: `turns` must be a list of non-empty strings, got {turns!r}.')
    yield Question(task, name, tuple(turns))
