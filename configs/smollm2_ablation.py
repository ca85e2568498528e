"""What each part of the objective is worth, on the shards of configs/smollm2_eagle2.py: same data, same steps.

    for variant in eagle top_k two_steps three_steps reachable leaky attached full_vocabulary no_prompts; do
      python launch/train.py --config=configs/smollm2_ablation.py --variant=$variant --prompts=PROMPTS.jsonl.gz \
        --out=runs/smollm2_eagle2
    done

The held-out metrics of each stand in runs/smollm2_eagle2/VARIANT/held_out.csv.
"""

import dataclasses
import runpy
from pathlib import Path

from eagle_jax.train.step import Objective, Recipe

_FULL = runpy.run_path(str(Path(__file__).with_name('smollm2_eagle2.py')))
TARGET, DRAFTER, DATA = _FULL['TARGET'], _FULL['DRAFTER'], _FULL['DATA']
NUM_TRACED = 64
RECIPE = Recipe(num_steps=400, prompt_weight=0.3)


def _recipe(**objective) -> dict:
  return {'RECIPE': dataclasses.replace(RECIPE, objective=Objective(**objective))}


_STEPS = {'num_steps': 3, 'step_decay': 0.8, 'top_k_cross_entropy': 1.0}
VARIANTS = {
  'eagle': _recipe(),
  'top_k': _recipe(top_k_cross_entropy=1.0),
  'two_steps': _recipe(**{**_STEPS, 'num_steps': 2}),
  'three_steps': _recipe(**_STEPS),
  'reachable': _recipe(**_STEPS, reachable_top=3),
  'leaky': _recipe(**_STEPS, is_leaky=True),
  'attached': _recipe(**_STEPS, is_detached=False),
  'full_vocabulary': {'DRAFTER': dataclasses.replace(DRAFTER, draft_vocab_size=None), **_recipe(**_STEPS)},
  'no_prompts': {'RECIPE': dataclasses.replace(_recipe(**_STEPS)['RECIPE'], prompt_weight=0.0)},
}
