"""SmolLM2-135M-Instruct's Medusa heads, on two CPU cores: one block each, before the target's own head.

    python launch/train.py --config=configs/smollm2_medusa.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_medusa

The shards are those of smollm2_eagle2.py. The run was not made; --dry_run was.
"""

import runpy
from pathlib import Path

from eagle_jax.config import MedusaConfig
from eagle_jax.train.step import Objective, Recipe

_EAGLE = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DATA = _EAGLE['TARGET'], _EAGLE['DATA']
DRAFTER = MedusaConfig(
  vocab_size=49152,
  width=576,
  max_depth=4,
  draft_vocab_size=8192,
  name='smollm2-135m-medusa',
)
RECIPE = Recipe(
  num_steps=1700,
  objective=Objective(regression=0.0, num_steps=4, step_decay=0.8),
  prompt_weight=0.3,
  feature_noise=0.0,
)
