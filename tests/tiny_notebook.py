"""Run first in a notebook's kernel in tests: names load a tiny pair, whose tokens are bytes; folders are read."""

import dataclasses
import functools

import eagle_jax
import quick
import tiny
from eagle_jax.policy import cost_store
from tiny_costs import COSTS
from tiny_traces import BYTES

SIZES = {'vocab_size': 259}
load_drafter = eagle_jax.load_drafter


@functools.cache  # made when asked for: a notebook may choose its devices first
def target():
  return tiny.target(dataclasses.replace(tiny.TARGET, num_layers=1, **SIZES), tokenizer=BYTES)


@functools.cache
def drafter():
  return tiny.drafter(dataclasses.replace(tiny.DRAFTER, **SIZES))


quick.trace_one_form()
eagle_jax.load_target = lambda name, **how: target()
eagle_jax.load_drafter = lambda name, *of, **how: load_drafter(name, *of, **how) if '/' in str(name) else drafter()
cost_store.read = lambda path: COSTS
