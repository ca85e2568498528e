"""An EAGLE-3.1 drafter for a target of Llama-3.1-8B's shape, on a slice of 8 devices: by shape alone.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
      python launch/train.py --config=configs/llama3_8b_eagle3.py --num_model=4 --dry_run

Features and taps are computed in the step: stored, they would take 32 KB a token. The objective is that of EAGLE-3's
trainers, with a norm of each tap and of what a step hands on (arXiv:2605.09992).
"""

from eagle_jax.config import Eagle3Config
from eagle_jax.evaluate import random_pairs
from eagle_jax.train.step import Objective, Recipe

TARGET, _EAGLE2 = random_pairs.configs('llama3_8b', draft_vocab_size=32768)
_SIZES = ('vocab_size', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width', 'rope_theta', 'draft_vocab_size')
DRAFTER = Eagle3Config(
  **{name: getattr(_EAGLE2, name) for name in _SIZES},
  target_width=TARGET.width,
  fc_norm=True,
  norm_output=True,
  name='random-llama3_8b-eagle3',
)
RECIPE = Recipe(
  num_steps=100_000,
  num_rows=16,
  num_places=2048,
  objective=Objective(regression=0.0, num_steps=4, step_decay=0.8, is_detached=False, skips_unknown=True),
  learning_rate=1e-4,
  warmup_steps=2000,
  dtype='bfloat16',
  remat=True,
)
