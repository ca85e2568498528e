"""What taps, a larger head and parts of the objective are worth, trained on from the shipped head on the same answers.

Beside them, from the same answers in twice the steps, a block drafter and Medusa's heads.

    for variant in eagle2 taps second_layer griffin five_steps noise lk length block; do
      python launch/train.py --config=configs/smollm2_taps_ablation.py --variant=$variant --prompts=PROMPTS.jsonl.gz \
        --out=runs/smollm2_taps --initial=smollm2-135m-eagle2 --report_every=75
    done

The shards are the first ones of configs/smollm2_taps.py. The held-out metrics of each stand in
runs/smollm2_taps/VARIANT/held_out.csv: taus of 60 and 8 nodes, over greedy and sampled answers. `second_stage` begins
with --initial=runs/smollm2_taps/taps/drafter, `medusa` without --initial. Two CPU cores.
"""

import dataclasses
import runpy
from pathlib import Path

from eagle_jax.train.step import Objective

_FULL = runpy.run_path(str(Path(__file__).with_name('smollm2_taps.py')))
TARGET, DRAFTER = _FULL['TARGET'], _FULL['DRAFTER']
DATA = {
  name: dataclasses.replace(_FULL['DATA'][name], num_shards=count) for name, count in (('short', 12), ('long', 2))
}
RECIPE = dataclasses.replace(_FULL['RECIPE'], num_steps=75, warmup_steps=5, learning_rate=1e-4)
NUM_TRACED = 64


def _recipe(**objective) -> dict:
  shipped = {'num_steps': 3, 'step_decay': 0.8, 'top_k_cross_entropy': 1.0}
  return {'RECIPE': dataclasses.replace(RECIPE, objective=Objective(**{**shipped, **objective}))}


def _one_pass(file: str) -> dict:
  run = runpy.run_path(str(Path(__file__).with_name(file)))
  recipe = dataclasses.replace(run['RECIPE'], num_steps=150, warmup_steps=10, num_rows=4)
  return {'DRAFTER': run['DRAFTER'], 'RECIPE': recipe}


VARIANTS = {
  'eagle2': {'DRAFTER': runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))['DRAFTER'], **_recipe()},
  'taps': _recipe(),
  'second_layer': {'DRAFTER': dataclasses.replace(DRAFTER, num_layers=2), **_recipe()},
  'griffin': {'DRAFTER': dataclasses.replace(DRAFTER, griffin=True), **_recipe()},
  'five_steps': _recipe(num_steps=5),
  'noise': _recipe(perturbed_cross_entropy=0.5),  # the verifier's decision under its own noise
  'lk': _recipe(cross_entropy=0.0, top_k_cross_entropy=0.0, lk_hybrid=1.0),
  'length': _recipe(length_floor=0.5),  # D-PACE
  'second_stage': {'RECIPE': dataclasses.replace(_recipe()['RECIPE'], second_stage=True)},  # of taps
  'block': _one_pass('smollm2_block.py'),
  'medusa': _one_pass('smollm2_medusa.py'),
}
