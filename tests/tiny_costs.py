"""Costs of a device that was never there, in round numbers."""

import dataclasses

from eagle_jax.policy.c2t import Classifier
from eagle_jax.policy.calibrated import AcceptanceTable
from eagle_jax.policy.costs import Bytes, Calibration, Costs, Rate, StepTimes, Timings, Vocabulary

SHORT = StepTimes(
  num_slots=100, verify_ms={1: 10.0, 2: 11.0, 4: 13.0, 8: 21.0}, root_ms=1.0, draft_ms={1: 2.0, 3: 4.0},
  whole_ms={'chain(max_depth=3)': 18.0}, target_bytes=Bytes(3000, 1000), drafter_bytes=Bytes(400, 0),
)  # fmt: skip
LONG = dataclasses.replace(SHORT, num_slots=300, verify_ms={1: 12.0, 2: 15.0, 4: 21.0, 8: 33.0}, draft_ms={1: 4.0})
COSTS = Costs(
  device='x', target='target', drafter='drafter', dtype='float32', batch=1, times=(SHORT, LONG),
  bytes_per_s=1e6, flops_per_s=2e6,
  policies=(
    Rate('adaptive', {'width': 2, 'fanout': 2, 'max_depth': 3, 'num_nodes': 6, 'smaller': [1, 2]}, 200.0, 2.5),
    Rate('plain', {}, 100.0, 1.0),
  ),
  calibrations=(
    Calibration(0.0, (-3.0, 0.0), (0.1, 0.9), (0.6, 0.5)), Calibration(1.0, (-4.0, -1.0), (0.0, 0.6), (0.4,)),
  ), versions={}, date='2026-01-01',
  modelled=(Rate('chain', {'max_depth': 3}, 111.1, 2.0), Rate('plain', {}, 100.0, 1.0)), num_ids=97,
  is_quantised=False,
  vocabularies=(Vocabulary(64, True, 0.75, 2.0, 17.0),),
  # log-odds 1 + log_q - entropy / 10 + depth / 2: a likely child is worth more than its parent
  classifier=Classifier([[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [-1.0, -0.1, 0.5], 1.0),
  # by depth 1 and deeper, and by entropy below and above 1 nat: the less sure and the deeper, the less is accepted
  acceptance_table=AcceptanceTable(
    [-4.0, -1.0, 0.0], [1.0], [[[-3.0, -0.5, 0.0], [-5.0, -2.0, -1.0]], [[-4.0, -1.0, -0.5], [-9.0, -6.0, -4.0]]],
  ),
)  # fmt: skip

TIMINGS = Timings(**{field.name: getattr(COSTS, field.name) for field in dataclasses.fields(Timings)})
