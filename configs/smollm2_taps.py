"""SmolLM2-135M-Instruct's EAGLE-2 head with taps of three middle layers, trained on from the shipped head.

    python launch/train.py --config=configs/smollm2_taps.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_taps \
      --initial=smollm2-135m-eagle2

Two CPU cores. Features and taps take 4.6 KB a token in the shards. The run was not taken to its end; README.md says how
far, and what that brought.
"""

import dataclasses
import runpy
from pathlib import Path

from eagle_jax.config import EagleTapsConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

_ON_CPU = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, TAPS = _ON_CPU['TARGET'], (8, 16, 24)
DRAFTER = EagleTapsConfig(**{**vars(_ON_CPU['DRAFTER']), 'name': 'smollm2-135m-eagle2-taps'}, taps=TAPS)
SHORT = Data(
  num_shards=60, shard_size=128, num_rows=32, num_refill=8, temperatures=(0.0, 1.0, 0.7, 0.0, 1.0), seed=42, taps=TAPS
)
LONG = dataclasses.replace(
  SHORT, num_shards=10, shard_size=48, num_rows=24, num_refill=8, min_prompt=129, max_prompt=448, max_new_tokens=128
)
DATA = {'short': SHORT, 'long': LONG}
RECIPE = Recipe(
  num_steps=1500,
  num_rows=4,
  objective=Objective(num_steps=3, step_decay=0.8, top_k_cross_entropy=1.0, perturbed_cross_entropy=0.5),
  learning_rate=3e-4,
  prompt_weight=0.3,
)
NUM_TRACED = 32
