"""A whole training run of a tiny random pair, to be killed: answers in shards, steps, checkpoints.

python tests/tiny_training.py --out=FOLDER
"""

import argparse
import collections
from pathlib import Path

import jax

import quick
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.train import step
from eagle_jax.train.conversations import Conversation
from eagle_jax.train.loop import train
from eagle_jax.train.shards import Data, make_shards, read_shard
from eagle_jax.train.step import Objective, Recipe
from tiny_chat import TOY

SIZES = {'vocab_size': 31, 'width': 16, 'num_heads': 2, 'num_kv_heads': 1, 'head_dim': 8, 'ffn_width': 32}
DATA = Data(
  num_shards=6, shard_size=8, num_rows=4, num_refill=2, max_prompt=32, max_new_tokens=24, temperatures=(1.0, 0.0)
)
RECIPE = Recipe(num_steps=40, num_rows=2, num_places=64, chunk_places=32, objective=Objective(num_steps=2))


def main() -> None:
  quick.trace_one_form()
  step.NUM_CHAIN = 2  # for evaluation, which is traced anew by every process
  parser = argparse.ArgumentParser()
  parser.add_argument('--out', type=Path, required=True)
  out = parser.parse_args().out
  config = TargetConfig(**SIZES, num_layers=1, max_context=128, eos_ids=(0,))
  params = TransformerTarget(config).init_params(jax.random.key(0))
  params['embed']['weight'] *= 50
  target, refused = Target(config, params, TOY), collections.Counter[str]()
  conversations = [Conversation((chr(ord('a') + i % 20) * (1 + i % 3),)) for i in range(48)]
  shards = [read_shard(path) for path in make_shards(target, conversations, out / 'shards', DATA, refused)]
  examples = [example for shard in shards for example in shard]
  train(target, DrafterConfig(**SIZES), examples[8:], examples[:8], RECIPE, out, report_every=2)


if __name__ == '__main__':
  main()
