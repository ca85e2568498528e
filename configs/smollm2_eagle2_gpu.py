"""SmolLM2-135M-Instruct's EAGLE-2 drafter on one large GPU, where generating is cheap: many tokens, several epochs.

    python launch/train.py --config=configs/smollm2_eagle2_gpu.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_gpu

The shipped drafter was made with these sizes in nine minutes on one H200: 200 s of answering (39,000 tokens/s), 270 s
of training (585,000 places/s), by a script that chose them by the clock; this command itself was not run whole.
Expected: held-out top-1 agreement 0.67, chain_tau 2.63. A run folder in memory (/dev/shm) spares 14 GB of features
the way to a disk.
"""

import dataclasses
import runpy
from pathlib import Path

from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

_ON_CPU = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DRAFTER = _ON_CPU['TARGET'], _ON_CPU['DRAFTER']
SHORT = Data(num_shards=6, shard_size=6000, num_rows=1024, num_refill=256, max_new_tokens=256)
DATA = {
  'short': SHORT,
  'long': Data(
    num_shards=1, shard_size=3000, num_rows=512, num_refill=128, min_prompt=129, max_prompt=640, max_new_tokens=256
  ),
  'again': dataclasses.replace(SHORT, num_shards=1, temperatures=(1.0, 0.0, 0.0, 0.7), seed=1),
  'third': dataclasses.replace(SHORT, num_shards=1, temperatures=(0.7, 0.7, 1.0, 1.0), seed=2),
}
RECIPE = Recipe(
  num_steps=4600,
  num_rows=32,
  num_places=1024,
  objective=Objective(num_steps=4, step_decay=0.8, top_k_cross_entropy=1.0),
  learning_rate=2e-3,
  warmup_steps=200,
  prompt_weight=0.3,
  dtype='bfloat16',
  chunk_places=512,
)
NUM_TRACED = 0
