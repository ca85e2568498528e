"""What runs first in a notebook's kernel in tests: every name loads a tiny pair, whose tokens are bytes."""

import dataclasses

import eagle_jax
import quick
import tiny
from eagle_jax.policy import cost_store
from tiny_costs import COSTS
from tiny_traces import BYTES

SIZES = {'vocab_size': 259}
TARGET = tiny.target(dataclasses.replace(tiny.TARGET, **SIZES), tokenizer=BYTES)
DRAFTER = tiny.drafter(dataclasses.replace(tiny.DRAFTER, **SIZES))

quick.trace_one_form()
eagle_jax.load_target = lambda name, **how: TARGET
eagle_jax.load_drafter = lambda name, target, **how: DRAFTER
cost_store.read = lambda path: COSTS
