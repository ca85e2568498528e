"""A tiny pair decodes and is trained: for `test_processes`, by a function on one device, and as two processes of two.

python tests/several_processes.py FOLDER HOST:PORT,NUMBER,INDEX

Writes what it found to a JSON file for each process.
"""

import collections
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import quick
from eagle_jax import decode, processes
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.sharding import is_shared, make_mesh, param_shardings, put
from eagle_jax.train import report, step
from eagle_jax.train.conversations import Conversation
from eagle_jax.train.loop import train
from eagle_jax.train.shards import Data, make_shards, read_shard
from eagle_jax.train.step import Objective, Recipe
from tiny_chat import TOY

SIZES = {'vocab_size': 31, 'width': 16, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 32}
TARGET = TargetConfig(**SIZES, num_layers=1, max_context=128, eos_ids=(0,))
DRAFTER = DrafterConfig(**SIZES, draft_vocab_size=20)
DATA = Data(num_shards=2, shard_size=8, num_rows=4, num_refill=2, max_prompt=32, max_new_tokens=24)
RECIPE = Recipe(num_steps=4, num_rows=2, num_places=64, chunk_places=32, objective=Objective(num_steps=2))
CHAIN, TREE = Chain(2), DynamicTree(width=3, fanout=3, max_depth=2, num_nodes=8, lookup=True)
TREES, NUM_CHAIN = {'tree_tau': Chain(2)}, 2  # small programs for evaluation


def decoded(target: Target, drafter: Drafter) -> dict[str, list]:
  """Return the tokens and accepted counts of a batch, of refilled sequences and of a stream."""
  prompts = np.random.default_rng(0).integers(0, 31, (4, 5)).tolist()
  found, how = {}, {'max_new_tokens': 16, 'temperature': 0.8, 'policy': TREE}
  for name, batch_size in (('batch', None), ('refilled', 2)):
    out = decode.generate(target, drafter, prompts, batch_size=batch_size, **how)
    found[name] = [out.tokens, out.num_accepted]
  first, *chunks = decode.stream(target, drafter.quantised(), prompts[0], max_new_tokens=16, policy=CHAIN)
  tokens = first.tokens + [token for chunk in chunks for token in chunk.tokens]
  return found | {'stream': [tokens, [chunk.num_accepted for chunk in chunks]]}


def trained(target: Target, folder: Path) -> list:
  """Return the text of the shards, and held-out metrics of a run and of the same run started again after its end."""
  conversations = [Conversation((chr(ord('a') + i % 20) * (1 + i % 3),)) for i in range(16)]
  paths = make_shards(
    dataclasses.replace(target, tokenizer=TOY), conversations, folder / 'shards', DATA, collections.Counter()
  )
  examples = [example for path in paths for example in read_shard(path)]
  how = {'report_every': 2, 'num_traced': 2}
  with mock.patch.object(report, 'TREES', TREES), mock.patch.object(step, 'NUM_CHAIN', NUM_CHAIN):
    runs = [train(target, DRAFTER, examples[4:], examples[:4], RECIPE, folder / 'run', **how) for _ in range(2)]
  return [[example.token.tolist() for example in examples], *runs]


def refused(target: Target) -> str:
  """Return the error that a process raises when the prompts of all differ."""
  try:
    decode.generate(target, None, [[1 + jax.process_index()]], max_new_tokens=4)
  except ValueError as error:
    return str(error)
  return ''


def found(folder: Path, mesh: Any) -> dict[str, Any]:
  """Return what decoding and training give on a mesh, or on one device without."""

  def placed(params):
    return params if mesh is None else jax.tree.map(put, params, param_shardings(params, mesh))

  params = TransformerTarget(TARGET).init_params(jax.random.key(0))
  params['embed']['weight'] *= 50
  target = Target(TARGET, placed(params), None)
  drafter = Drafter(DRAFTER, placed(Eagle(DRAFTER).init_params(jax.random.key(1)) | {'ids': np.arange(1, 21)}))
  return {'decoded': decoded(target, drafter), 'trained': trained(target, folder), 'refused': refused(target)}


def main(folder: Path, cluster: str) -> None:
  quick.trace_one_form()
  jax.config.update('jax_num_cpu_devices', 2)
  processes.join(cluster)
  mesh = make_mesh(num_model=2)
  assert is_shared(mesh)
  (folder / f'found_{jax.process_index()}.json').write_text(json.dumps(found(folder, mesh)))


if __name__ == '__main__':
  main(Path(sys.argv[1]), sys.argv[2])
