"""The files of a training run: a lock on its folder, settings, checkpoints, and metrics as CSV."""

import contextlib
import csv
import gc
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from eagle_jax.files import as_stored, differences, parse_json, replacing
from eagle_jax.processes import is_main_process, on_main, true_everywhere, write_once
from eagle_jax.train.step import TrainState

fcntl: Any
try:
  import fcntl
except ImportError:  # Windows
  fcntl = None

log = logging.getLogger('eagle_jax')


def settle_settings(path: Path, settings: Mapping[str, Any]) -> None:
  """Write the settings that a folder is made with, or check that they are those it was begun with.

  Raises:
    ValueError: it was begun with others, or its file of settings is damaged.
  """
  write_once(path, lambda: settings, _write_json)
  begun = parse_json(path.read_bytes(), str(path))
  if not isinstance(begun, dict):
    raise ValueError(f'{path} holds {begun!r:.80}; a JSON object of settings is needed. Choose another --out.')
  if wrong := differences(begun, as_stored(settings)):
    raise ValueError(
      f'{path.parent} holds a run with other settings: {wrong}. Rerun with the original settings, or choose another '
      '--out.'
    )


def _write_json(path: Path, content: Any) -> None:
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(content), encoding='utf-8')


_OWN_LOCKS: set[Path] = set()


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
  """Hold a run folder for this process (of several, for the main one); it may enter again.

  The lock is the kernel's, on a file that names the holder, so that of a process that died is free. Without `fcntl`, as
  on Windows, there is none.

  Raises:
    ValueError: another process holds it.
  """
  path = folder.absolute() / '.lock'
  if path in _OWN_LOCKS:
    yield
    return
  with contextlib.ExitStack() as held:
    holder = _lock(path, held) if is_main_process() else ''
    if not true_everywhere(not holder):
      raise ValueError(
        f'{folder} is in use by {holder or "another run"}: wait for it, stop it, or choose another --out.'
      )
    _OWN_LOCKS.add(path)
    held.callback(_OWN_LOCKS.discard, path)
    yield


def _lock(path: Path, held: contextlib.ExitStack) -> str:
  """Lock a file until `held` is closed; return '', or who holds it already."""
  if fcntl is None:
    return ''
  path.parent.mkdir(parents=True, exist_ok=True)
  file = held.enter_context(open(path, 'a+', encoding='utf-8'))  # noqa: SIM115  closed with `held`
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    return file.read().strip() or 'another process'
  except OSError as error:  # file systems of clusters may have none
    log.warning('%s cannot be locked (%s): let no other run use this folder', path, error)
  file.truncate(0)
  file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
  file.flush()
  return ''


class Checkpoints:
  """The newest checkpoints of a run, and the best by one metric; written in the background, each whole or not at all.

  A run resumes from its `TrainState` alone: the step number decides the batch and the noise that come next.
  """

  def __init__(self, folder: Path, *, best_by: str):
    """
    Args:
      folder: of the checkpoints; made if missing. What a killed run left half-written there is removed, and
        checkpoints whose metrics cannot be read are moved to `damaged` beside it.
      best_by: the metric to keep the best by; larger is better.

    Raises:
      ValueError: the metrics of no checkpoint can be read.
    """
    self._best_by, self._folder = best_by, folder.absolute()
    on_main(_set_aside_without_metrics, self._folder)
    best = BestN(get_metric_fn=self._score, n=1)
    options = ocp.CheckpointManagerOptions(
      best_fn=self._score, preservation_policy=AnyPreservationPolicy([LatestN(2), best]), cleanup_tmp_directories=True
    )
    try:
      self._manager = ocp.CheckpointManager(
        self._folder, item_handlers=ocp.StandardCheckpointHandler(), options=options
      )
    except ValueError as error:
      raise ValueError(_none_is_whole(self._folder, error)) from error

  def _score(self, metrics: Mapping[str, float]) -> float:
    return metrics[self._best_by]

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_) -> None:
    if kind is not None and issubclass(kind, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
      return  # another process may have ended, and writing waits for all of them
    with self._writing():
      self._manager.wait_until_finished()
    self._manager.close()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Make what fails when a checkpoint is written an OSError that says so."""
    try:
      yield
    except Exception as error:
      raise OSError(
        f'A checkpoint in {self._folder} could not be written: {error}. Free some space '
        'and start the run again: it goes on from the newest whole checkpoint.'
      ) from error

  @property
  def is_empty(self) -> bool:
    """Whether no step was taken; the first weights, step 0, may be there."""
    return not self._manager.latest_step()

  def save(self, state: TrainState, metrics: Mapping[str, float]) -> bool:
    """Start to write the state, which may be donated as soon as this returns; return whether it is the best so far."""
    step, own = int(state.step), jax.tree.map(jnp.copy, state)  # what is written must outlive the donation
    if step in self._manager.all_steps():  # first weights of a run that took no step: these may be others
      self._manager.delete(step)
    best = self._manager.best_step()
    with self._writing():
      self._manager.save(step, args=ocp.args.StandardSave(own), metrics=dict(metrics))
    return best is None or self._score(metrics) > self._score(self._manager.metrics(best))

  def restore(self, like: TrainState) -> TrainState:
    """Return the newest state that is whole, placed as `like` is; damaged newer ones are moved to `damaged`.

    Raises:
      ValueError: it is of another drafter or optimizer, or none is whole.
    """
    damaged: list[str] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      state = self._restore(step, like)
      if state is not None:
        for name in damaged:
          on_main(_set_aside, self._folder / name)
        self._manager.reload()
        return state
      damaged.append(str(step))
    raise ValueError(_none_is_whole(self._folder, 'see the warnings above'))

  def restore_best(self, like: TrainState) -> tuple[TrainState | None, dict[str, float]]:
    """Return the best state, placed as `like` is, or None if it is damaged; and its metrics."""
    with self._writing():
      self._manager.wait_until_finished()
    best: Any = self._manager.best_step()
    return self._restore(best, like), self._manager.metrics(best)

  def _restore(self, step: int, like: TrainState) -> TrainState | None:
    """Return the state of a step; None, with a warning, if it is damaged."""
    folder, state = self._folder / str(step), None
    try:
      found = self._manager.item_metadata(step)
    except ValueError:  # of the JSON parser
      found = None
    if found is None:
      log.warning('checkpoint %s is damaged: its metadata cannot be read', folder)
    elif wrong := differences(_shapes(found), _shapes(like)):
      raise ValueError(
        f'{folder} is of another drafter or optimizer, or of another version of the code: {wrong}. Resume with what '
        'the run began with, or choose another --out.'
      )
    else:
      try:
        with _quiet_threads():
          state = self._manager.restore(step, args=ocp.args.StandardRestore(_targets(like)))
      except (jax.errors.JaxRuntimeError, MemoryError, PermissionError):  # these say nothing of the files
        raise
      except Exception as error:  # noqa: BLE001  TensorStore raises bare ones
        log.warning('checkpoint %s is damaged: %.150s', folder, str(error).partition('\n')[0])
    return state if true_everywhere(state is not None) else None


def _targets(like: TrainState) -> Any:
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, like)


def _shapes(tree: Any) -> dict[str, Any]:
  """Return shape and dtype by dotted name, of arrays or of what describes them on disk."""
  leaves = jax.tree_util.tree_leaves_with_path(getattr(tree, 'tree', tree))
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): f'{jnp.dtype(x.dtype).name}{[*x.shape]}'
    for path, x in leaves
  }


def _none_is_whole(folder: Path, reason: object) -> str:
  return f'No usable checkpoint in {folder} ({reason}): restore one from a backup, or delete the folder to start over.'


def _set_aside_without_metrics(folder: Path) -> None:
  """Move checkpoints whose metrics cannot be read to `damaged`, unless that would be all of them."""
  steps = [path for path in folder.glob('*') if path.name.isdigit()]
  damaged: list[Path] = []
  for path in steps:
    file = path / 'metrics' / 'metrics'
    try:
      parse_json(file.read_bytes(), str(file))
    except (ValueError, FileNotFoundError) as error:
      log.warning('checkpoint %s is damaged: %s', path, error)
      damaged.append(path)
  if len(damaged) < len(steps):
    for path in damaged:
      _set_aside(path)


def _set_aside(checkpoint: Path) -> None:
  damaged = checkpoint.parents[1] / 'damaged'
  damaged.mkdir(exist_ok=True)
  names = (f'{checkpoint.name}_{number}' for number in itertools.count())
  place = damaged / next(name for name in names if not (damaged / name).exists())
  checkpoint.rename(place)
  log.warning('moved it to %s; the run goes on from the newest whole checkpoint', place)


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
  """Silence what readers of a damaged checkpoint print besides the error that they raise."""
  hooks, asyncio_log = (sys.unraisablehook, sys.excepthook), logging.getLogger('asyncio')
  was_disabled = asyncio_log.disabled
  sys.unraisablehook = lambda _: None
  sys.excepthook = lambda *_: None
  asyncio_log.disabled = True
  try:
    yield
  finally:
    gc.collect()  # coroutines that were not awaited complain when they are freed
    sys.unraisablehook, sys.excepthook = hooks
    asyncio_log.disabled = was_disabled


def metrics_log(path: Path, *, first_step: int) -> Callable[[int, Mapping[str, float]], None]:
  """Return a function that appends metrics to a CSV file: (step, {name: value}). Only the main process writes.

  Lines of `first_step` and later, which a killed run left behind its last checkpoint, are dropped.

  Args:
    path: of the file, which is written anew each time: the newest metrics may bring new columns.
    first_step: the step that will be logged next, at the earliest.
  """
  if not is_main_process():
    return lambda step, metrics: None
  lines: list[Mapping[str, Any]] = []
  if path.exists():
    with open(path, newline='', encoding='utf-8') as file:
      lines = [line for line in csv.DictReader(file) if int(line['step']) < first_step]
  _write_csv(path, lines)

  def append(step: int, metrics: Mapping[str, float]) -> None:
    lines.append({'step': step, **metrics})
    _write_csv(path, lines)

  return append


def _write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  columns = dict.fromkeys(name for line in lines for name in line)
  with replacing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, [*columns])
    writer.writeheader()
    writer.writerows(lines)
