"""SmolLM2-135M-Instruct's first EAGLE-2 drafter, on two CPU cores.

    python launch/train.py --config=configs/smollm2_eagle2.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_eagle2

Expected: held-out top-1 agreement 0.45, tau 2.3 with the paper's tree on five greedy prompts, 1.64 with a chain of 3;
8.5 MB. Time on two cores: 23 minutes for 165,000 tokens of answers (124 to 166 tokens/s), 15 for the steps.
"""

from eagle_jax.config import DrafterConfig
from eagle_jax.train.features import Data
from eagle_jax.train.step import Recipe

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
DATA = Data(num_shards=20, batch=64, max_prompt=128, max_new_tokens=192, temperatures=(0.0, 1.0, 0.7, 0.0))
RECIPE = Recipe(num_steps=1500)
