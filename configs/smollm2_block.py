"""SmolLM2-135M-Instruct's block drafter, on two CPU cores, from the shipped EAGLE-2 head.

    python launch/train.py --config=configs/smollm2_block.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_block \
      --initial=smollm2-135m-eagle2

The shards are those of smollm2_eagle2.py. The run was not made; --dry_run was.
"""

import runpy
from pathlib import Path

from eagle_jax.config import BlockConfig
from eagle_jax.train.step import Objective, Recipe

_EAGLE = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DATA = _EAGLE['TARGET'], _EAGLE['DATA']
DRAFTER = BlockConfig(**{**vars(_EAGLE['DRAFTER']), 'name': 'smollm2-135m-block'}, rank=64)
RECIPE = Recipe(
  num_steps=1700,
  objective=Objective(regression=0.0, num_steps=5, top_k_cross_entropy=1.0, length_floor=0.5),
  learning_rate=6e-4,
  prompt_weight=0.3,
)
