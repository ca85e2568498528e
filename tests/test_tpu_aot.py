"""Compiled for a TPU that need not be there: every program builds, fits, and reads no more than it must.

Needs libtpu (extra: tpu), minutes on two cores, and prints its numbers with --log-level=INFO -rP:

    JAX_PLATFORMS=cpu python -m pytest -m tpu_aot tests/test_tpu_aot.py
"""

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.policy import DynamicTree
from eagle_jax.loop import decode_loop, decode_step
from eagle_jax.prefill import prepare, run_prefill
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import make_mesh, param_sharding, param_shardings
from eagle_jax.state import Params, Spec
from eagle_jax.target.transformer import TransformerTarget

pytestmark = pytest.mark.tpu_aot
log = logging.getLogger(__name__)

HBM_GIB = 16  # of one v5e
TINY = {'vocab_size': 512, 'width': 256, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 64, 'ffn_width': 512}
LLAMA_8B = {
  'vocab_size': 128256, 'width': 4096, 'num_heads': 32, 'num_kv_heads': 8, 'head_dim': 128, 'ffn_width': 14336,
  'rope_theta': 500_000.0,
}  # fmt: skip
# The compiler copies weights into fast memory ahead of their use, and `cost_analysis` counts such a byte three times:
# read, written, read again. Without these copies 'bytes accessed' is what crosses the main memory's bus.
NO_COPIES_AHEAD = {'xla_msa_enable': 'false'}


@pytest.fixture(scope='module')
def devices():
  pytest.importorskip('libtpu', reason='libtpu is absent (extra: tpu)')
  from jax.experimental import topologies

  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # asks no metadata server what machine this is
  return topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2').devices


class Pair:
  """A target and a drafter as shapes on a mesh, and what the three programs take."""

  def __init__(self, devices, sizes, *, num_layers):
    self.mesh = make_mesh(devices, num_model=len(devices))
    network = TransformerTarget(TargetConfig(**sizes, num_layers=num_layers, max_context=8192), jnp.bfloat16)
    eagle = Eagle(DrafterConfig(**sizes, fc_bias=False), jnp.bfloat16)
    target, drafter = self.placed_params(network), self.placed_params(eagle)
    ids = jax.ShapeDtypeStruct(
      (sizes['vocab_size'],), jnp.int32, sharding=param_sharding(['ids'], (sizes['vocab_size'],), self.mesh)
    )
    drafter = {**drafter, 'embed': target['embed']['weight'], 'head': target['head']['weight'], 'ids': ids}
    self.params, self.spec = Params(target, drafter), Spec(network, eagle, DynamicTree())
    self.prefill_arguments, self.prefill_static = prepare(
      self.params,
      np.zeros((1, 1024), np.int32),
      np.ones(1, np.int32),
      spec=self.spec,
      max_new_tokens=128,
      sampling=Sampling.of(),
      row_ids=None,
      eos_ids=(1,),
    )

  def placed_params(self, network):
    shapes = jax.eval_shape(network.init_params, jax.random.key(0))
    return placed(shapes, param_shardings(shapes, self.mesh))

  def compile_all(self):
    """The programs by name, each compiled for what the one before it returns."""
    with jax.set_mesh(self.mesh):
      lowered = run_prefill.lower(*self.prefill_arguments, **self.prefill_static)
      prefill = lowered.compile()
      self.state = placed(lowered.out_info, prefill.output_shardings)
      step = decode_step.lower(self.params, self.state, spec=self.spec).compile(NO_COPIES_AHEAD)
      loop = decode_loop.lower(self.params, self.state, spec=self.spec).compile()
    return {'run_prefill': prefill, 'decode_step': step, 'decode_loop': loop}

  def bytes_of_a_step(self):
    """What one step must read, over all devices: of each pass, the weights and the cache it attends to, once.

    Of an embedding a pass looks up a few rows; they are not counted. The drafter runs `max_depth` times (once less to
    grow, once to absorb) and reads the head as often, a layer of the cache too.
    """
    target, drafter, passes = self.params.target, self.params.drafter, self.spec.policy.max_depth
    target_pass = num_bytes(target) - num_bytes(target['embed']) + num_bytes(self.state.cache)
    drafter_pass = num_bytes([drafter['fc'], drafter['layer'], drafter['head'], self.state.drafter.cache])
    return target_pass + passes * drafter_pass


def placed(shapes, shardings):
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def num_bytes(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assert_fits(programs):
  for name, program in programs.items():
    memory = program.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes / 2**30, memory.temp_size_in_bytes / 2**30
    log.info('%s: %.2f GiB of arguments, %.2f of temporaries a device', name, arguments, temporaries)
    assert 0 < arguments + temporaries < HBM_GIB, f'{name} needs {arguments + temporaries:.1f} GiB a device'


def test_a_tiny_pair_compiles_for_one_device(devices):
  programs = Pair(devices[:1], TINY, num_layers=2).compile_all()
  assert_fits(programs)


def test_llama_8b_compiles_for_four_devices_and_reads_little_more_than_it_must(devices):
  pair = Pair(devices, LLAMA_8B, num_layers=32)
  programs = pair.compile_all()
  assert_fits(programs)
  accessed = programs['decode_step'].cost_analysis()['bytes accessed']  # of one device
  ratio = accessed * len(devices) / pair.bytes_of_a_step()
  own = {name: pair.params.drafter[name] for name in ('fc', 'layer')}
  once = num_bytes([pair.params.target, own, pair.state.cache, pair.state.drafter.cache])
  log.info('step: %.2f GB a device; over what it must read: %.3f', accessed / 1e9, ratio)
  log.info('step: over weights and cache once: %.3f', accessed * len(devices) / once)
  assert ratio < 1.3, f'{accessed / 1e9:.2f} GB a device, {ratio:.2f} times what a step must read'
