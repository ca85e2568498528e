"""Count the FLOPs of a training step."""

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.train.step import Recipe


def step_flops(config: DrafterConfig, recipe: Recipe, *, num_ids: int, reader: TargetConfig | None) -> float:
  """Return the FLOPs of one training step: 2 a multiply-add, padding included, recomputation not.

  The drafter's layer counts three times (forward, and its two products backward), attention over half the places
  likewise; the frozen head counts once for the target, and for each step of the drafter once forward and once backward;
  the layers of a target that computes features in the step count once.

  Args:
    config: of the drafter.
    recipe: its batches and steps.
    num_ids: rows of the head.
    reader: of the target, if it computes the features; None where they are stored.
  """
  num_steps, width = recipe.objective.num_steps, config.width
  layer = 2 * width * width + _layer(config, recipe.num_places)
  place = 6 * num_steps * layer + 2 * (1 + 2 * num_steps) * num_ids * width
  if reader is not None:
    place += 2 * reader.num_layers * _layer(reader, recipe.num_places, num_experts=max(1, reader.experts_per_token))
  return float(place * recipe.num_rows * recipe.num_places)


def _layer(config: DrafterConfig | TargetConfig, num_places: int, *, num_experts: int = 1) -> int:
  """Return the multiply-adds of a layer at one place."""
  heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.width
  attention = config.num_heads * config.head_dim * num_places
  return heads + attention + 3 * config.width * config.ffn_width * num_experts
