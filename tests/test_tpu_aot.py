"""Compiled for a TPU that need not be there: every program builds, fits, and reads no more than it must.

Needs libtpu (extra: tpu), minutes on two cores, and prints its numbers with --log-level=INFO -rP:

    JAX_PLATFORMS=cpu python -m pytest -m tpu_aot tests/test_tpu_aot.py
"""

import dataclasses
import logging
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.bench.aot import compiled, described
from eagle_jax.bench.aot.compiled import NO_COPIES_AHEAD, ShapedPair
from eagle_jax.bench.timing import num_bytes
from eagle_jax.decode.step import decode_loop, decode_step
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.evaluate import random_pairs
from eagle_jax.kernels import attention_tpu
from eagle_jax.policy.trees import Chain, DynamicTree, Plain
from eagle_jax.sharding import make_mesh

pytestmark = [pytest.mark.tpu_aot, pytest.mark.usefixtures('no_compilation_cache')]
log = logging.getLogger(__name__)

HBM_GIB = 16  # of one v5e
NUM_LAYERS = 4  # of a large model, to be compiled
KERNEL = 'custom_call_target="tpu_custom_call"'


@pytest.fixture(scope='module')
def devices():
  pytest.importorskip('libtpu', reason='libtpu is absent (extra: tpu)')
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # asks no metadata server what machine this is
  return described.devices('v5e:2x2')


def compile_both(pair: ShapedPair, *, policy: DynamicTree):
  """Compile prefill, and the loop for what it returns; return them by name, and the state between them."""
  spec = pair.spec(policy)
  prefill, state = pair.prefill(spec)
  return {'run_prefill': prefill, 'decode_loop': pair.compile(decode_loop, state, spec)}, state


def bytes_on_one(tree) -> int:
  """Of these arrays, on one device."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def assert_fits(programs, *, more_arguments: int = 0, times_temporaries: int = 1):
  for name, program in programs.items():
    memory = program.memory_analysis()
    arguments = (memory.argument_size_in_bytes + more_arguments) / 2**30
    temporaries = times_temporaries * memory.temp_size_in_bytes / 2**30
    log.info('%s: %.2f GiB of arguments, %.2f of temporaries a device', name, arguments, temporaries)
    assert 0 < arguments + temporaries < HBM_GIB, f'{name} needs {arguments + temporaries:.1f} GiB a device'


def test_a_tiny_pair_with_a_draft_vocabulary_compiles_for_one_device(devices):
  pair = ShapedPair(*random_pairs.configs('tiny', draft_vocab_size=16), make_mesh(devices[:1]))
  assert_fits(compile_both(pair, policy=DynamicTree(lookup=True))[0])


def test_a_batch_with_one_new_row_each_compiles(devices):
  """Plain decoding, and a chain whose drafter runs one row after the root."""
  pair = ShapedPair(*random_pairs.configs('tiny'), make_mesh(devices[:1]), num_prompt=64, batch=8)
  state = pair.state(pair.spec(Chain(2)))
  assert pair.compile(decode_step, state, pair.spec(Chain(2))).as_text().count(KERNEL) == 2 + 2
  plain = pair.compile(decode_step, state._replace(drafter=()), pair.spec(Plain(), NoDrafter()))
  assert plain.as_text().count(KERNEL) == 2


@pytest.mark.parametrize('policy', [Plain(), DynamicTree(4, 4, 3, 12)])
def test_a_batch_is_committed_in_place(devices, policy):
  """The caches lie as the kernel reads them, and a row of all layers is taken from the new ones at once."""
  target, drafter = random_pairs.configs('tiny')
  target = dataclasses.replace(target, num_layers=12, num_kv_heads=4)
  pair = ShapedPair(target, drafter, make_mesh(devices, num_model=2), num_prompt=64, batch=16)
  spec = pair.spec(policy, NoDrafter() if isinstance(policy, Plain) else None)
  state = pair.state(spec)
  hlo = pair.compile(decode_loop, state, spec).as_text()
  slots = f'bf16[8,2,{state.num_slots},{target.head_dim}]'
  assert slots in hlo
  assert not re.findall(rf'= {re.escape(slots)}\S* copy\(.*', hlo)  # ahead, into fast memory, they may be
  sliced = re.findall(r'= bf16\[1,2,\d+,128\]\S* dynamic-slice\(', hlo)
  assert len(sliced) < target.num_layers, 'a slice of each layer, for each row'


@pytest.mark.parametrize(
  ('B', 'G', 'J', 'T', 'M', 'K', 'S', 'dtype'),
  [
    (8, 2, 2, 1, 1, 128, 192, 'bfloat16'),
    (1, 8, 4, 10, 60, 128, 1536, 'bfloat16'),
    (1, 2, 7, 60, 60, 256, 3072, 'bfloat16'),
    (1, 3, 3, 8, 8, 128, 24, 'float32'),
    (1, 8, 8, 128, 128, 128, 1536, 'float32'),  # as many queries as it takes
    (1, 8, 4, 256, 256, 128, 640, 'bfloat16'),
  ],
)
def test_what_the_kernel_takes_compiles(devices, B, G, J, T, M, K, S, dtype):
  def shape(*lengths, dtype=dtype):
    return jax.ShapeDtypeStruct(lengths, dtype, sharding=jax.sharding.SingleDeviceSharding(devices[0]))

  q, new, slots = shape(B, G, J, T, K), shape(B, G, M, K), shape(B, G, S, K)
  assert attention_tpu.is_supported(q, new, slots)
  run = jax.jit(attention_tpu.attend)
  mask_BTM, length_B = shape(B, T, M, dtype=jnp.bool), shape(B, dtype=jnp.int32)
  assert KERNEL in run.lower(q, new, new, mask_BTM, slots, slots, length_B).compile().as_text()


def test_what_the_compiler_says_of_a_tiny_pair_grows_with_the_tree(devices):
  pair = ShapedPair(*random_pairs.configs('tiny'), make_mesh(devices[:1]), num_prompt=64)
  found = compiled.steps(pair, sizes=(16, 60))
  flops = [found[name].flops for name in ('plain step', 'target pass, 16 nodes', 'target pass, 60 nodes')]
  assert 0 < flops[0] < flops[1] < flops[2] < found['whole cycle, 60 nodes'].flops
  assert 0 < found['plain step'].cycles < found['whole cycle, 60 nodes'].cycles
  assert compiled.table(found).count('\n') == 2 + 4


def test_a_quantised_drafter_is_read_in_bytes(devices):
  target, drafter = random_pairs.configs('llama3_8b', draft_vocab_size=8192)
  target = dataclasses.replace(target, num_layers=1)
  pair = ShapedPair(target, drafter, make_mesh(devices, num_model=4), num_prompt=64)
  spec = pair.spec(DynamicTree(max_depth=3))
  state = pair.state(spec)  # the same for both

  def read(pair):
    step = pair.compile(decode_step, state, spec, NO_COPIES_AHEAD)
    return step.cost_analysis()['bytes accessed'], pair.bytes_needed(state, num_drafts=3)

  (accessed, needed), (less_accessed, less_needed) = map(read, (pair, dataclasses.replace(pair, is_quantised=True)))
  assert needed - less_needed > 3e8 / 4
  assert accessed - less_accessed > 0.9 * (needed - less_needed)


def test_llama_8b_compiles_for_four_devices_and_reads_little_more_than_it_must(devices):
  """A few of its layers, which only repeat, are compiled; all of them must fit."""
  target, drafter = random_pairs.configs('llama3_8b')
  num_more = target.num_layers - NUM_LAYERS
  target = dataclasses.replace(target, num_layers=NUM_LAYERS)
  pair = ShapedPair(target, drafter, make_mesh(devices, num_model=len(devices)))
  programs, state = compile_both(pair, policy=DynamicTree())
  programs['decode_step'] = pair.compile(decode_step, state, pair.spec(DynamicTree()), NO_COPIES_AHEAD)
  params = pair.params()
  layer = params.target['layer_0'], state.cache.keys[0], state.cache.values[0]
  more = num_more * bytes_on_one(layer)
  assert_fits(programs, more_arguments=more, times_temporaries=1 + num_more // NUM_LAYERS)
  num_drafts = DynamicTree().max_depth  # the accepted path and all levels but the root's children
  assert programs['decode_step'].as_text().count(KERNEL) == NUM_LAYERS + num_drafts
  needed = pair.bytes_needed(state, num_drafts=num_drafts)
  # Of a kernel, what it declares; copies made for it are counted.
  accessed = programs['decode_step'].cost_analysis()['bytes accessed']
  ratio = accessed / needed
  once = num_bytes([params.target, params.drafter['fc'], params.drafter['layer'], state.cache, state.drafter.cache])
  log.info('step: %.2f GB a device; over what it must read: %.3f', accessed / 1e9, ratio)
  log.info('step: over weights and cache once: %.3f', accessed * len(devices) / once)
  assert ratio < 1.15, f'{accessed / 1e9:.2f} GB a device, {ratio:.2f} times what a step must read'
