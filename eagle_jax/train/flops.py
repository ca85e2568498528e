"""How much arithmetic a training step is."""

from eagle_jax.config import DrafterConfig
from eagle_jax.train.step import Recipe


def step_flops(config: DrafterConfig, recipe: Recipe, *, num_ids: int) -> float:
  """FLOPs that one training step needs: 2 a multiply-add, no recomputation, padding and all.

  The layer counts three times (forward, and its two products backward), attention over half the places likewise; the
  frozen head counts once for the target, and for each step of the drafter once forward and once backward.
  """
  width, ffn = config.width, config.ffn_width
  heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * width
  layer = 2 * width * width + heads + 3 * width * ffn
  attention = config.num_heads * config.head_dim * recipe.num_places
  num_steps = recipe.objective.num_steps
  place = 6 * num_steps * (layer + attention) + 2 * (1 + 2 * num_steps) * num_ids * width
  return float(place * recipe.num_rows * recipe.num_places)
