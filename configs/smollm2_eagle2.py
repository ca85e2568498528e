"""SmolLM2-135M-Instruct's EAGLE-2 drafter, on two CPU cores: short texts first, then long ones among them.

    python launch/train.py --config=configs/smollm2_eagle2.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_eagle2
    python launch/train.py --config=configs/smollm2_eagle2.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_eagle2 \
      --variant=long --initial=runs/smollm2_eagle2/drafter

Expected: held-out top-1 agreement 0.50, chain_tau 1.92, over prompts of all lengths; pooled tau of EAGLE-2's tree on
the six tasks 2.75 greedy; 8.5 MB. Time on two cores: 150 minutes of answering (250 tokens/s for short prompts,
150 for those of up to 320 tokens, 55 for those of up to 1,024), then 50 and 30 for the steps. The drafter shipped first
went this way in stages, as its data grew; today's was made on a GPU, by smollm2_eagle2_gpu.py.
"""

import dataclasses

from eagle_jax.config import DrafterConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

TARGET = 'smollm2-135m-instruct'
DRAFTER = DrafterConfig(
  vocab_size=49152,
  width=576,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  ffn_width=1536,
  norm_eps=1e-5,
  rope_theta=100_000.0,
  fc_bias=False,
  draft_vocab_size=8192,
  name='smollm2-135m-eagle2',
)
DATA = {'short': Data(num_shards=27), 'middle': Data(num_shards=3, min_prompt=129, max_prompt=320)}
RECIPE = Recipe(
  num_steps=1700,
  objective=Objective(num_steps=3, step_decay=0.8, top_k_cross_entropy=1.0),
  prompt_weight=0.3,
)
FAR = Data(num_shards=2, shard_size=160, num_rows=32, num_refill=8, min_prompt=321, max_prompt=1024, max_new_tokens=128)
VARIANTS = {
  'long': {
    'DATA': {**DATA, 'far': FAR},
    'RECIPE': dataclasses.replace(RECIPE, num_steps=900, num_rows=2, num_places=1024, learning_rate=7e-4),
  }
}
