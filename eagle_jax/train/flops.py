"""Count the FLOPs of a training step."""

import math
from typing import Any

import jax

from eagle_jax.config import TargetConfig
from eagle_jax.draft.kinds import kind_of
from eagle_jax.train.step import Recipe


def step_flops(config: Any, recipe: Recipe, *, num_ids: int, reader: TargetConfig | None) -> float:
  """Return the FLOPs of one training step: 2 a multiply-add, padding included, recomputation not.

  The drafter's layers count three times (forward, and its two products backward), attention over half the places
  likewise; the taps' matrix as often, but in the first step alone; of a drafter of one pass, all is in one step. The
  frozen head counts once for the target, and for each step of the drafter once forward and once backward, or twice if
  it learns; the layers of a target that computes features in the step count once.

  Args:
    config: of the drafter.
    recipe: its batches and steps.
    num_ids: rows of the head.
    reader: of the target, if it computes the features; None where they are stored.
  """
  num_steps, width, kind = recipe.objective.num_steps, config.width, kind_of(config)
  network = kind.network(config)
  shapes: dict[str, Any] = jax.eval_shape(network.init_params, jax.random.key(0))
  head = shapes.pop('head', None)
  in_first = [*shapes] if kind.is_one_pass else network.fuses
  fused = sum(_matrices(shapes.pop(name, None)) for name in in_first)
  layers = _matrices(shapes)
  if not kind.is_one_pass:
    layers += network.num_layers * config.num_heads * config.head_dim * recipe.num_places  # over half the places
  scored = num_ids * (config.target_width + (2 if head is None else 3) * num_steps * width)
  place = 6 * (num_steps * layers + fused) + 2 * scored
  if reader is not None:
    place += 2 * reader.num_layers * _layer(reader, recipe.num_places, num_experts=max(1, reader.experts_per_token))
  return float(place * recipe.num_rows * recipe.num_places)


def _matrices(shapes: Any) -> int:
  """Return the numbers in all matrices: the multiply-adds of one column."""
  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  return sum(math.prod(x.shape) for path, x in leaves if path[-1].key == 'weight')  # type: ignore[attr-defined]


def _layer(config: TargetConfig, num_places: int, *, num_experts: int = 1) -> int:
  """Return the multiply-adds of a layer at one place."""
  heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.width
  attention = config.num_heads * config.head_dim * num_places
  return heads + attention + 3 * config.width * config.ffn_width * num_experts
