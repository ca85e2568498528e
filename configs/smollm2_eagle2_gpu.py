"""SmolLM2-135M-Instruct's EAGLE-2 drafter on one large GPU, where generating is cheap: many tokens, several epochs.

    python launch/train.py --config=configs/smollm2_eagle2_gpu.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_gpu

Not run yet: sizes are set for 25 minutes on one H200, of which half is for answers.
"""

import runpy
from pathlib import Path

from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

_ON_CPU = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DRAFTER = _ON_CPU['TARGET'], _ON_CPU['DRAFTER']
DATA = {
  'short': Data(
    num_shards=6, shard_size=6000, num_rows=1024, num_refill=256, max_new_tokens=384, stores_features=False
  ),
  'long': Data(
    num_shards=1, shard_size=4000, num_rows=512, num_refill=128, min_prompt=129, max_prompt=640, stores_features=False
  ),
}
RECIPE = Recipe(
  num_steps=6000,
  num_rows=32,
  num_places=1024,
  objective=Objective(num_steps=3, step_decay=0.8, top_k_cross_entropy=1.0),
  prompt_weight=0.3,
  dtype='bfloat16',
  chunk_places=512,
)
