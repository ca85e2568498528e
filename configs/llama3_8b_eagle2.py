"""An EAGLE-2 drafter for a target of Llama-3.1-8B's shape, on a slice of 8 devices: by shape alone.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
      python launch/train.py --config=configs/llama3_8b_eagle2.py --num_model=4 --dry_run

Prints the bytes a device that the training step takes, and allocates none of them. Features are computed in the step:
stored, they would take 8 KB a token.
"""

from eagle_jax.evaluate import random_pairs
from eagle_jax.train.step import Objective, Recipe

TARGET, DRAFTER = random_pairs.configs('llama3_8b', draft_vocab_size=32768)
RECIPE = Recipe(
  num_steps=100_000,
  num_rows=16,
  num_places=2048,
  objective=Objective(num_steps=3, step_decay=0.8, top_k_cross_entropy=1.0),
  learning_rate=1e-4,
  warmup_steps=2000,
  dtype='bfloat16',
  remat=True,
)
