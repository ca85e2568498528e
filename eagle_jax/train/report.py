"""Report on a training run: rates, metrics of held-out answers, checkpoints, and the best drafter so far."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from eagle_jax.device import flops_per_s
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import trace
from eagle_jax.hub import save_drafter
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.processes import on_main
from eagle_jax.progress import progress_bar
from eagle_jax.sharding import to_host
from eagle_jax.train.checkpoint import Checkpoints, metrics_log
from eagle_jax.train.data import Packed, batches, place
from eagle_jax.train.step import Frozen, Recipe, TrainState, chain_length, evaluate

BEST_BY = 'chain_tau'
TREES = {'tree_tau': DynamicTree(), 'small_tree_tau': DynamicTree(4, 3, 4, 8)}


def evaluate_all(
  params, frozen: Frozen, held_out: Sequence[Example], mesh: Mesh | None, *, network: Any, recipe: Recipe, target
) -> dict[str, float]:
  """Average `step.evaluate` over all examples, weighted by places; add `chain_tau`, the tokens a chain emits a pass.

  `chain_tau` is 1 + the expected accepted tokens of a greedily drafted chain of `step.chain_length`, from every place
  of the text alike.
  """
  total, count = collections.Counter[str](), collections.Counter[str]()
  rows = {'num_rows': recipe.num_rows, 'num_places': recipe.num_places}
  for packed in batches(held_out, **rows, seed=0, num_epochs=1):
    metrics, weight = evaluate(params, frozen, place(packed, mesh), network=network, recipe=recipe, target=target)
    weight = _floats(weight)
    total.update({name: value * weight[name] for name, value in _floats(metrics).items()})
    count.update(weight)
  means = {name: value / max(count[name], 1) for name, value in total.items()}
  return {BEST_BY: 1 + sum(means[f'chain_{step}'] for step in range(chain_length(network.config))), **means}


def traced_taus(target: Target, drafter: Drafter, examples: Sequence[Example]) -> dict[str, float]:
  """Return tau of the trees in `TREES` along recorded answers: of all, of greedy and of sampled ones if there are."""
  metrics = {}
  for name, policy in TREES.items():
    traced = trace(target, drafter, examples, policy=policy)
    metrics[name] = traced.tau
    is_greedy = [example.temperature == 0 for example in examples]
    if any(is_greedy) and not all(is_greedy):
      metrics[f'{name}_greedy'] = traced.part(is_greedy).tau
      metrics[f'{name}_sampled'] = traced.part([not one for one in is_greedy]).tau
  return metrics


def _floats(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
  return {name: float(value) for name, value in jax.device_get(metrics).items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A converter of training states to drafters, which also exports them."""

  config: Any  # of the drafter
  vocabulary: dict[str, jax.Array]  # see `loop.frozen_inputs`
  folder: Path
  provenance: Mapping[str, Any]

  def drafter(self, params: dict[str, Any]) -> Drafter:
    """Return the drafter, with its draft vocabulary if it has one."""
    return Drafter(self.config, params | self.vocabulary)

  def save(self, state: TrainState, metrics: Mapping[str, float]) -> None:
    """Export the drafter in bfloat16, with its metrics in the provenance."""
    provenance = {**self.provenance, 'step': int(state.step), 'held_out': dict(metrics)}
    drafter = self.drafter(to_host(state.params))
    on_main(save_drafter, drafter, self.folder, provenance, dtype='bfloat16')


class Meter:
  """A counter of tokens and time, shown on a progress bar."""

  def __init__(self, recipe: Recipe, flops: float, *, first: int, progress: bool):
    """
    Args:
      recipe: how many steps, and their dtype.
      flops: of a step, on each device.
      first: steps that were done before.
      progress: show a bar.
    """
    self._bar = progress_bar(total=recipe.num_steps, initial=first, desc='steps', unit='step', disable=not progress)
    self._flops, self._peak = flops, flops_per_s(recipe.dtype)
    self._shown: dict[str, str] = {}
    self._start, self._steps, self._places = time.perf_counter(), 0, 0

  def __enter__(self) -> 'Meter':
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()

  def count(self, packed: Packed) -> None:
    """Count one step."""
    self._steps += 1
    self._places += int((packed.sequence >= 0).sum())
    self._bar.update()

  def rates(self) -> dict[str, float]:
    """Return, since the last call, `tok_per_s` and `mfu`, the share of the device's measured matrix-product rate."""
    seconds = time.perf_counter() - self._start
    rates = {'tok_per_s': self._places / seconds, 'mfu': self._steps * self._flops / seconds / self._peak}
    self._start, self._steps, self._places = time.perf_counter(), 0, 0
    self._bar.set_postfix({**self._shown, **{name: f'{value:.3g}' for name, value in rates.items()}})
    return rates

  def show(self, metrics: Mapping[str, float]) -> None:
    """Show held-out metrics beside the bar."""
    names = {'cross_entropy_0': 'loss', 'top1_0': 'top1', BEST_BY: 'chain_tau', 'tree_tau': 'tree_tau'}
    self._shown = {short: f'{metrics[name]:.3f}' for name, short in names.items() if name in metrics}
    self._start = time.perf_counter()


class Reports:
  """A reporter on training states: metrics are logged, each state is a checkpoint, the best becomes the drafter."""

  def __init__(
    self,
    folder: Path,
    first: int,
    meter: Meter,
    measure: Callable[[TrainState], dict[str, float]],
    checkpoints: Checkpoints,
    outcome: Outcome,
  ):
    """
    Args:
      folder: for train.csv and held_out.csv.
      first: step from which on lines are written anew.
      meter: of rates.
      measure: state -> held-out metrics.
      checkpoints: where states are kept.
      outcome: where the best one is exported.
    """
    self._log_train = metrics_log(folder / 'train.csv', first_step=first)
    self._log_held_out = metrics_log(folder / 'held_out.csv', first_step=first)
    self._meter, self._measure, self._checkpoints, self._outcome = meter, measure, checkpoints, outcome

  def report(self, step: int, state: TrainState, train_metrics: Mapping[str, jax.Array]) -> None:
    """Report on the state after a step; raise a ValueError if training diverged."""
    self._log_train(step, {**_floats(train_metrics), **self._meter.rates()})
    self.judge(step, state)

  def judge(self, step: int, state: TrainState) -> None:
    """Log held-out metrics of a state, keep it, and export it if it is the best; raise a ValueError if it diverged."""
    metrics = self._measure(state)
    self._log_held_out(step, metrics)
    self._meter.show(metrics)
    _require_finite(metrics, step, self._outcome.folder)
    if self._checkpoints.save(state, metrics):
      self._outcome.save(state, metrics)


def _require_finite(metrics: Mapping[str, float], step: int, best: Path) -> None:
  """Raise a ValueError if training diverged: its state is neither saved nor exported."""
  if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
    raise ValueError(
      f'Training diverged: after step {step}, {bad} are not finite. The best drafter before is in {best}, if there is '
      'one; begin anew with a lower learning_rate or clip_norm, or in float32.'
    )
