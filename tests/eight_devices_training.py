"""Run by `test_sharding` in a process of its own: the same training on meshes of eight forced CPU devices.

Prints one JSON object: the losses of every step on each mesh, and each array's share of the parameters.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import quick
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.evaluate.example import Example
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.sharding import make_mesh, param_shardings, use_mesh
from eagle_jax.train import step
from eagle_jax.train.data import batches, place
from eagle_jax.train.loop import begin, frozen_inputs, train
from eagle_jax.train.run import dry_run
from eagle_jax.train.step import Objective, Recipe, train_step

SIZES = {'vocab_size': 16, 'width': 32, 'num_heads': 8, 'num_kv_heads': 4, 'head_dim': 8, 'ffn_width': 48}
TARGET, DRAFTER = TargetConfig(**SIZES, num_layers=1, max_context=128), DrafterConfig(**SIZES, draft_vocab_size=12)
MESHES = {'none': None, '1x4': (4, 4), '2x4': (8, 4), '8x1': (8, 1)}  # data x model: (devices, num_model)
OBJECTIVE = Objective(num_steps=2, top_k=3, top_k_cross_entropy=1.0, reachable_top=3)
RECIPE = Recipe(num_steps=3, num_rows=8, num_places=32, chunk_places=8, warmup_steps=0, objective=OBJECTIVE)


def examples(width: int) -> list[Example]:
  """Random texts, with features of this width: 0 to have them computed."""
  rng = np.random.default_rng(0)
  made = []
  for number in range(20):
    token = rng.integers(0, 16, rng.integers(6, 30)).astype(np.int32)
    feature = rng.normal(size=(len(token) - 1, width)).astype(jnp.bfloat16)
    made.append(Example(number, token, np.arange(len(token)) > 2, feature))
  return made


COMPILED: list[str] = []  # names of functions, as often as they were


def losses_on(mesh, width: int) -> tuple[list[float], dict[str, list[int]], int]:
  """Return the loss of every step, each parameter's share on a device at the end, and the number of compilations."""
  COMPILED.clear()
  params = TransformerTarget(TARGET).init_params(jax.random.key(0))
  target = Target(TARGET, params if mesh is None else jax.device_put(params, param_shardings(params, mesh)))
  data, losses = examples(width), []
  reader = None if width else TransformerTarget(TARGET)
  with use_mesh(mesh):
    frozen = frozen_inputs(target, DRAFTER, data)[0]
    state = begin(Eagle(DRAFTER).init_params(jax.random.key(1)), RECIPE, mesh)
    stream = batches(data, num_rows=8, num_places=32, seed=0)
    for _ in range(RECIPE.num_steps):
      packed = place(next(stream), mesh)
      state, metrics = train_step(state, frozen, packed, network=Eagle(DRAFTER), recipe=RECIPE, target=reader)
      losses.append(float(metrics['loss']))
  leaves = jax.tree_util.tree_leaves_with_path(state.params)
  shares = {jax.tree_util.keystr(path): leaf.sharding.shard_shape(leaf.shape) for path, leaf in leaves}
  return losses, shares, COMPILED.count('jit(train_step)')


def trained_on(mesh, folder: Path) -> list[dict[str, float]]:
  """Return the held-out metrics of a run, and of the same run resumed after its end."""
  params = TransformerTarget(TARGET).init_params(jax.random.key(0))
  target = Target(TARGET, jax.device_put(params, param_shardings(params, mesh)))
  data = examples(32)
  return [train(target, DRAFTER, data[:16], data[16:], RECIPE, folder, report_every=2) for _ in range(2)]


def main() -> None:
  quick.trace_one_form()
  step.NUM_CHAIN = 2  # for a small program
  jax.config.update('jax_num_cpu_devices', 8)
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **about: COMPILED.append(about.get('fun_name')) if 'backend_compile' in event else None
  )
  meshes = {name: sizes and make_mesh(jax.devices()[: sizes[0]], num_model=sizes[1]) for name, sizes in MESHES.items()}
  steps = {f'{name} {width}': losses_on(mesh, width) for name, mesh in meshes.items() for width in (32, 0)}
  with tempfile.TemporaryDirectory() as folder:
    runs = trained_on(meshes['2x4'], Path(folder))
  dry = dry_run({'TARGET': TARGET, 'DRAFTER': DRAFTER, 'RECIPE': RECIPE}, meshes['2x4'])
  json.dump({'steps': steps, 'runs': runs, 'dry_run': dry}, sys.stdout)


if __name__ == '__main__':
  main()
