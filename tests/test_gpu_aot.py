"""Compiled for GPUs that need not be there: every program builds, and leaves the caches where they are.

Needs JAX's CUDA plugin (extra: gpu), and minutes on two cores:

    JAX_PLATFORMS=cpu python -m pytest -m gpu_aot tests/test_gpu_aot.py
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.bench.aot import compiled, described
from eagle_jax.bench.aot.compiled import ShapedPair
from eagle_jax.bench.aot.hlo import bytes_moved, num_kernels
from eagle_jax.bench.timing import EmptyTrees
from eagle_jax.decode.step import decode_loop, decode_step
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.evaluate import random_pairs
from eagle_jax.kernels import attention_gpu
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree
from eagle_jax.sharding import make_mesh

pytestmark = [pytest.mark.gpu_aot, pytest.mark.usefixtures('no_compilation_cache')]

KERNEL = 'custom_call_target="mosaic_gpu'
SMALL = DynamicTree(4, 4, 3, 12, lookup=True)
FAMILIES = {
  'llama': {},
  'window, biases, norms': {'window': 100, 'qkv_bias': True, 'qk_norm': True},
  'experts, sinks': {
    'num_experts': 4,
    'experts_per_token': 2,
    'expert_bias': True,
    'gate_limit': 7.0,
    'has_sinks': True,
  },
}


@pytest.fixture(scope='module')
def devices():
  pytest.importorskip('jax_cuda12_plugin', reason='the CUDA plugin is absent (extra: gpu)')
  return described.devices('h100:4')


def compile_loop(pair: ShapedPair, policy, drafter=None):
  spec = pair.spec(policy, drafter)
  _, state = pair.prefill(spec)
  pair.compile(decode_loop, state, spec)


@functools.cache
def step_listing(device, batch: int) -> str:
  """A step of the tiny pair over a tree, for as many sequences."""
  pair = ShapedPair(*random_pairs.configs('tiny'), make_mesh([device]), num_prompt=64, batch=batch)
  spec = pair.spec(SMALL)
  return pair.compile(decode_step, pair.state(spec), spec).as_text()


@pytest.mark.parametrize('family', FAMILIES)
def test_each_family_compiles(devices, family):
  """The drafter is compiled with the first: of the others it reads the same."""
  target, drafter = random_pairs.configs('tiny')
  target = dataclasses.replace(target, **FAMILIES[family])
  pair = ShapedPair(target, drafter, make_mesh(devices[:1]), num_prompt=64, batch=2)
  compile_loop(pair, SMALL, EmptyTrees() if FAMILIES[family] else None)


@pytest.mark.parametrize(('name', 'dtype'), [('t4', 'float16'), ('a100', 'bfloat16'), ('l4', 'bfloat16')])
def test_older_gpus_compile(devices, name, dtype):
  """They have no kernel for attention of their own, and a T4 no bfloat16."""
  target, drafter = random_pairs.configs('tiny')
  mesh = make_mesh(described.devices(name))
  compile_loop(ShapedPair(target, drafter, mesh, num_prompt=64, dtype=jnp.dtype(dtype)), Chain(2))


@pytest.mark.parametrize(
  ('policy', 'dtype'),
  [(StaticTree(), jnp.float32), (Chain(4, lookup=True), jnp.bfloat16), (DynamicTree(), jnp.bfloat16)],
  ids=['static', 'chain', 'dynamic'],
)
def test_smollm2_compiles(devices, policy, dtype):
  """One layer of it: heads of 64, tied embeddings, a draft vocabulary."""
  target, drafter = random_pairs.configs('smollm2_135m', draft_vocab_size=8192)
  target = dataclasses.replace(target, num_layers=1)
  pair = ShapedPair(target, drafter, make_mesh(devices[:1]), num_prompt=96, dtype=dtype)
  spec = pair.spec(policy)
  state = pair.prefill(spec)[1] if policy == DynamicTree() else pair.state(spec)  # policies share their prefill
  pair.compile(decode_loop, state, spec)


@pytest.mark.parametrize(
  ('B', 'G', 'J', 'T', 'M', 'K', 'S', 'dtype'),
  [
    (1, 8, 4, 60, 60, 128, 1024, 'bfloat16'),
    (2, 3, 3, 10, 40, 64, 192, 'bfloat16'),
    (3, 2, 1, 1, 1, 128, 64, 'float16'),
  ],
)
def test_what_the_kernel_takes_compiles(devices, B, G, J, T, M, K, S, dtype):
  mesh = make_mesh(devices[:1])

  def shape(*lengths, dtype=dtype):
    return jax.ShapeDtypeStruct(lengths, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  q, new, slots = shape(B, G, J, T, K), shape(B, G, M, K), shape(B, G, S, K)
  mask_BTM, length_B = shape(B, T, M, dtype=jnp.bool), shape(B, dtype=jnp.int32)
  with jax.set_mesh(mesh):
    assert attention_gpu.is_supported(q, new, slots)
    run = jax.jit(attention_gpu.attend).lower(q, new, new, mask_BTM, slots, slots, length_B)
    assert KERNEL in run.compile().as_text()


def test_a_target_pass_has_few_kernels_a_layer(devices):
  """One product leaves rows, and so does attention: nothing is transposed between them."""

  def kernels(num_layers):
    target, drafter = random_pairs.configs('llama3_8b', draft_vocab_size=64)
    pair = ShapedPair(dataclasses.replace(target, num_layers=num_layers), drafter, make_mesh(devices[:1]))
    state = pair.state(pair.spec(SMALL))._replace(drafter=())
    hlo = pair.compile(decode_step, state, pair.spec(SMALL, EmptyTrees())).as_text()
    assert hlo.count(KERNEL) == num_layers
    return num_kernels(hlo)

  assert kernels(3) - kernels(2) <= 20


def test_a_mesh_of_gpus_that_shares_rows_and_heads_compiles(devices):
  mesh = make_mesh(devices, num_model=2)
  compile_loop(ShapedPair(*random_pairs.configs('tiny'), mesh, num_prompt=64, batch=8), SMALL)


def test_a_mesh_of_gpus_that_shares_heads_gathers_no_keys(devices):
  """Each of four has the keys of its own head; a device's part of them, joined with new rows, stays its own."""
  changes = {'num_kv_heads': 4, 'width': 320}  # of which no device has as many as there are in a head
  target, drafter = (dataclasses.replace(config, **changes) for config in random_pairs.configs('tiny'))
  pair = ShapedPair(target, drafter, make_mesh(devices, num_model=4))
  _, state = pair.prefill(pair.spec(SMALL))
  hlo = pair.compile(decode_step, state, pair.spec(SMALL)).as_text()
  gathered = re.findall(r'= (.*?) all-gather-start', hlo)
  assert gathered
  assert not [shape for shape in gathered if re.search(rf',{target.head_dim}\]', shape)]


def test_a_commit_is_few_kernels_whatever_the_batch(devices):
  many, few = (num_kernels(step_listing(devices[0], batch)) for batch in (32, 4))
  assert many < few + 28  # row by row each further one would be six


@pytest.mark.parametrize('is_plain', [True, False])
def test_no_pass_copies_the_keys(devices, is_plain):
  """Into another layout, that is: behind the slots stand the new rows, in an array of its own."""
  pair = ShapedPair(*random_pairs.configs('tiny'), make_mesh(devices[:1]), num_prompt=64, batch=4)
  state = pair.state(pair.spec(SMALL))
  hlo = step_listing(devices[0], 4)
  if is_plain:
    hlo = pair.compile(decode_step, state._replace(drafter=()), pair.spec(Plain(), NoDrafter())).as_text()
  batch, heads, slots, width = state.cache.keys[0].shape
  assert f'bf16[{batch},{heads},{slots},{width}]' in hlo
  assert not re.findall(rf'= bf16\[{batch},{heads},{width},{slots}\]\S* \w', hlo)


def test_a_step_asks_the_host_how_to_draw_alone(devices):
  """No loop asks for its end, and of the branches greedy decoding comes to one."""
  hlo = step_listing(devices[0], 4)
  assert all('known_trip_count' in line for line in hlo.splitlines() if ' while(' in line)
  assert hlo.count(' conditional(') <= 4  # if sampled; in it, if filtered; in that, by k and by p


def test_a_quantised_drafter_is_read_in_bytes(devices):
  """Products take them as they are: no kernel makes floats of them first."""
  target, drafter = random_pairs.configs('llama3_8b', draft_vocab_size=8192)
  target = dataclasses.replace(target, num_layers=1)
  pair = ShapedPair(target, drafter, make_mesh(devices[:1]), num_prompt=64)

  def read(pair):
    policy = DynamicTree(max_depth=3)
    state = pair.state(pair.spec(policy))
    moved = bytes_moved(pair.compile(decode_step, state, pair.spec(policy)).as_text())
    return moved, pair.bytes_needed(state, num_drafts=3)

  (moved, needed), (less_moved, less_needed) = map(read, (pair, dataclasses.replace(pair, is_quantised=True)))
  assert needed - less_needed > 3e8
  assert moved - less_moved > 0.9 * (needed - less_needed)


def test_what_the_compiler_says_of_a_tiny_pair_grows_with_the_tree(devices):
  pair = ShapedPair(*random_pairs.configs('tiny'), make_mesh(devices[:1]), num_prompt=64)
  found = compiled.steps(pair, sizes=(16, 60))
  plain, *passes = (found[name] for name in ('plain step', 'target pass, 16 nodes', 'target pass, 60 nodes'))
  cycle = found['whole cycle, 60 nodes']
  assert 0 < plain.bytes_moved < passes[0].bytes_moved < passes[1].bytes_moved < cycle.bytes_moved
  assert 0 < plain.num_kernels < passes[1].num_kernels < cycle.num_kernels
  assert compiled.table(found).count('\n') == 2 + 4
