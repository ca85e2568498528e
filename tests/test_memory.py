"""Loading takes little host memory beyond the parameters themselves."""

import json
import logging
import math
import subprocess
import sys

import numpy as np
import pytest

from eagle_jax.config import TargetConfig
from eagle_jax.weights.naming import hf_table
from eagle_jax.weights.safetensors import write_safetensors

log = logging.getLogger(__name__)

# Two gigabytes in float32.
CONFIG = TargetConfig(
  vocab_size=32_000, width=1536, num_layers=16, num_heads=12, num_kv_heads=12, head_dim=128, ffn_width=4096,
  max_context=2048, tied_head=True,
)  # fmt: skip
CONTENT = {
  'model_type': 'llama', 'vocab_size': 32_000, 'hidden_size': 1536, 'num_hidden_layers': 16, 'num_attention_heads': 12,
  'intermediate_size': 4096, 'max_position_embeddings': 2048, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': True,
}  # fmt: skip
PEAK = """
import resource, sys
import jax
from eagle_jax import hub
jax.numpy.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
target = hub.load_target(sys.argv[1])
size = sum(x.nbytes for x in jax.tree.leaves(target.params))
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) - size, size)
"""


@pytest.mark.slow
def test_loading_takes_no_more_than_two_of_the_largest_tensors(tmp_path):
  table = hf_table(CONFIG)
  shapes = {name: entry.shape for name, entry in table.entries.items() if name not in table.optional}
  names = list(shapes)
  shards = {'a.safetensors': names[: len(names) // 2], 'b.safetensors': names[len(names) // 2 :]}
  for shard, held in shards.items():
    write_safetensors(tmp_path / shard, {name: np.ones(shapes[name], np.float32) for name in held})
  weight_map = {name: shard for shard, held in shards.items() for name in held}
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  (tmp_path / 'config.json').write_text(json.dumps(CONTENT))
  run = subprocess.run([sys.executable, '-c', PEAK, str(tmp_path)], capture_output=True, text=True, timeout=600)
  assert run.returncode == 0, run.stderr
  beyond, size = map(int, run.stdout.split())
  assert size == 4 * sum(map(math.prod, shapes.values())) > 2e9
  largest = 4 * max(map(math.prod, shapes.values()))
  log.info('%.0f MB beyond %.0f; the largest tensor has %.0f', beyond / 1e6, size / 1e6, largest / 1e6)
  assert beyond < 2 * largest  # a shard has five of them
