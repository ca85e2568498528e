"""What a training run leaves in its folder as it goes: settings, checkpoints, metrics as CSV and for TensorBoard."""

import contextlib
import csv
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from eagle_jax.files import differences, replacing
from eagle_jax.processes import is_main_process, write_once
from eagle_jax.train.step import TrainState

log = logging.getLogger('eagle_jax')


def settle_settings(path: Path, settings: Mapping[str, Any]) -> None:
  """Writes the settings that a folder is made with, or finds them there.

  Raises:
    ValueError: it was begun with others.
  """
  write_once(path, lambda: settings, _write_json)
  if wrong := differences(json.loads(path.read_text(encoding='utf-8')), settings):
    raise ValueError(
      f'{path.parent} was begun otherwise: {wrong}. Go on with what it was begun with, or choose another --out.'
    )


def _write_json(path: Path, content: Any) -> None:
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(content), encoding='utf-8')


class Checkpoints:
  """The last checkpoints of a run, and the best by one of its metrics; written in the background, whole or not at all.

  A `TrainState` is all there is to resume from: its step number decides the batch and the noise that come next.
  """

  def __init__(self, folder: Path, *, best_by: str):
    """
    Args:
      folder: of the checkpoints; made if missing. What a killed run left half-written there is removed.
      best_by: the metric to keep the best by; larger is better.
    """

    self._best_by = best_by
    best = BestN(get_metric_fn=self._score, n=1)
    options = ocp.CheckpointManagerOptions(
      best_fn=self._score, preservation_policy=AnyPreservationPolicy([LatestN(2), best]), cleanup_tmp_directories=True
    )
    self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

  def _score(self, metrics: Mapping[str, float]) -> float:
    return metrics[self._best_by]

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *_) -> None:
    self._manager.wait_until_finished()
    self._manager.close()

  @property
  def is_empty(self) -> bool:
    return self._manager.latest_step() is None

  def save(self, state: TrainState, metrics: Mapping[str, float]) -> bool:
    """Starts to write the state, which may be donated as soon as this returns. Is it the best so far?"""
    step, best = int(state.step), self._manager.best_step()
    own = jax.tree.map(jnp.copy, state)  # what is written must outlive the donation
    self._manager.save(step, args=ocp.args.StandardSave(own), metrics=dict(metrics))
    return best is None or self._score(metrics) > self._score(self._manager.metrics(best))

  def restore(self, like: TrainState) -> TrainState:
    """The last state, placed as `like` is.

    Raises:
      ValueError: it is of another drafter or optimizer.
    """
    return self._restore(self._manager.latest_step(), like)

  def restore_best(self, like: TrainState) -> tuple[TrainState, dict[str, float]]:
    """The best state, placed as `like` is, and its metrics."""
    self._manager.wait_until_finished()
    best = self._manager.best_step()
    return self._restore(best, like), self._manager.metrics(best)

  def _restore(self, step: int | None, like: TrainState) -> TrainState:
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      return self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'Checkpoint {step} in {self._manager.directory} is of another drafter or optimizer, or of '
        f'another version of the code: {error}. Resume with what the run began with, or choose another --out.'
      ) from error


@contextlib.contextmanager
def metrics_log(path: Path, *, first_step: int) -> Iterator:
  """Yields a function that appends one row of metrics: (step, {name: value}).

  Rows of `first_step` and later, which a killed run left behind its last checkpoint, are dropped. TensorBoard gets the
  same numbers beside the file where tensorboardX is installed. Of several processes, the main one writes.

  Args:
    path: of the CSV file, which is written anew with each row; a row has no value where others have a name more.
    first_step: the step that will be logged next, at the earliest.
  """
  if not is_main_process():
    yield lambda step, metrics: None
    return
  rows: list[dict[str, Any]] = []
  if path.exists():
    with open(path, newline='', encoding='utf-8') as file:
      rows = [row for row in csv.DictReader(file) if int(row['step']) < first_step]
  _write_csv(path, rows)
  with contextlib.closing(_board(path.with_suffix(''), first_step)) as board:

    def append(step: int, metrics: Mapping[str, float]) -> None:
      rows.append({'step': step, **metrics})
      _write_csv(path, rows)
      for name, value in metrics.items():
        board.add_scalar(name, value, step)

    yield append


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
  columns = dict.fromkeys(name for row in rows for name in row)
  with replacing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, [*columns])
    writer.writeheader()
    writer.writerows(rows)


class _NoBoard:
  def add_scalar(self, *_) -> None:
    pass

  def close(self) -> None:
    pass


def _board(folder: Path, first_step: int):
  try:
    from tensorboardX import SummaryWriter
  except ImportError:
    log.info('no tensorboardX: metrics go to CSV alone')
    return _NoBoard()
  return SummaryWriter(str(folder), purge_step=first_step)
