"""Ablate the parts of the objective, on the first shards of configs/smollm2_eagle2.py: same data, same steps.

    for variant in eagle top_k three_steps reachable leaky full_vocabulary; do
      python launch/train.py --config=configs/smollm2_ablation.py --variant=$variant --prompts=PROMPTS.jsonl.gz \
        --out=runs/smollm2_eagle2 --report_every=120
    done

The held-out metrics of each stand in runs/smollm2_eagle2/VARIANT/held_out.csv, tree_tau over 64 answers. Half an hour
on two cores.
"""

import dataclasses
import runpy
from pathlib import Path

from eagle_jax.train.step import Objective, Recipe

_FULL = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DRAFTER = _FULL['TARGET'], _FULL['DRAFTER']
DATA = {'short': dataclasses.replace(_FULL['DATA']['short'], num_shards=8)}
NUM_TRACED = 64
RECIPE = Recipe(num_steps=120, num_rows=2, prompt_weight=0.3)


def _recipe(**objective) -> dict:
  return {'RECIPE': dataclasses.replace(RECIPE, objective=Objective(**objective))}


_TOP_K = {'top_k_cross_entropy': 1.0}
_STEPS = {**_TOP_K, 'num_steps': 3, 'step_decay': 0.8}
VARIANTS = {
  'eagle': _recipe(),  # EAGLE's two losses
  'top_k': _recipe(**_TOP_K),  # and HASS's top-K distillation
  'three_steps': _recipe(**_STEPS),  # and two steps more, on the drafter's own features
  'reachable': _recipe(**_STEPS, reachable_top=3),  # and GRIFFIN's mask
  'leaky': _recipe(**_STEPS, is_leaky=True),  # three steps with the mask that released trainers use
  'full_vocabulary': {'DRAFTER': dataclasses.replace(DRAFTER, draft_vocab_size=None), **_recipe(**_TOP_K)},  # of top_k
}
