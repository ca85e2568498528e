"""An EAGLE-3.1 drafter for a target of Qwen3-8B's shape, on a slice of 8 devices: by shape alone.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
      python launch/train.py --config=configs/qwen3_8b_eagle3.py --num_model=4 --dry_run

For a run, set TARGET to 'Qwen/Qwen3-8B' or the folder of its weights, and add DATA with stores_features=False: features
and taps are computed in the step, for stored they would take 32 KB a token. The recipe is llama3_8b_eagle3.py's. The
head's layer is Llama's; with qk_norm=True it has Qwen3's norms of queries and keys.
"""

import runpy
from pathlib import Path

from eagle_jax.config import Eagle3Config, TargetConfig

_SIZES = {
  'vocab_size': 151936, 'width': 4096, 'num_heads': 32, 'num_kv_heads': 8, 'head_dim': 128, 'ffn_width': 12288,
  'norm_eps': 1e-6, 'rope_theta': 1e6,
}  # fmt: skip
TARGET = TargetConfig(**_SIZES, num_layers=36, qk_norm=True, max_context=40960, name='random-qwen3_8b')
DRAFTER = Eagle3Config(
  **_SIZES,
  target_width=TARGET.width,
  draft_vocab_size=32000,
  fc_norm=True,
  norm_output=True,
  name='random-qwen3_8b-eagle3',
)
RECIPE = runpy.run_path(str(Path(__file__).with_name('llama3_8b_eagle3.py')))['RECIPE']
