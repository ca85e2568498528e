"""Meshes: rules and parameters in-process; sharded decoding equals unsharded, on eight forced CPU devices."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import forked
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.evaluate.random_pairs import random_pair
from eagle_jax.hub import load_target
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.sharding import (
  PARAM_AXES,
  RULES,
  constrain,
  make_mesh,
  mesh_of,
  num_batch_shards,
  partition,
  require_mesh,
  require_whole_share,
  warn_unless_entered,
)

SIZES = {'vocab_size': 16, 'width': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 48}
CASES = [
  f'{policy} {batch} {sampling}'
  for policy in ('chain', 'dynamic')
  for batch in (8, 1)
  for sampling in ('greedy', 'sampled')
] + ['eagle3 8 sampled', 'quantised 8 sampled']
MESHES = ('1x4', '2x4', '8x1')
WHOLE = MESHES[1:]  # on which every case is decoded; on the first, those of the dynamic policy


class FourByTwo:
  """The part of a mesh that `partition` reads."""

  shape = {'data': 4, 'model': 2}


@pytest.mark.parametrize(
  ('axes', 'shape', 'spec'),
  [
    (('heads', 'width'), (64, 32), ('model', None)),
    (('width', 'ffn'), (32, 48), (None, 'model')),
    (('batch', 'kv_heads', None, None), (8, 2, 100, 8), ('data', 'model', None, None)),
    (('batch', 'kv_heads', None, None), (1, 2, 100, 8), (None, 'model', None, None)),  # one row: on every device
    (('batch', 'kv_heads', None, None), (8, 1, 100, 8), ('data', None, None, None)),
    (('kv_heads', None, 'head_dim', 'width'), (2, 4, 8, 32), ('model', None, None, None)),
    (('kv_heads', None, 'head_dim', 'width'), (1, 4, 8, 32), (None, None, 'model', None)),  # too few heads to split
    (('vocab', 'width'), (15, 32), (None, None)),
    ((), (), ()),
  ],
)
def test_partition(axes, shape, spec):
  assert partition(axes, shape, FourByTwo) == PartitionSpec(*spec)


@pytest.mark.parametrize(('batch', 'num_parts'), [(8, 4), (4, 4), (6, 1), (1, 1)])
def test_num_batch_shards_is_1_where_the_mesh_does_not_divide(batch, num_parts):
  assert num_batch_shards(batch, FourByTwo) == num_parts
  assert num_batch_shards(batch, None) == num_batch_shards(batch, jax.sharding.get_abstract_mesh()) == 1


def test_batch_that_the_mesh_does_not_divide_is_refused():
  require_whole_share('num_rows', 8, FourByTwo)
  require_whole_share('num_rows', 3, None)
  with pytest.raises(ValueError, match='num_rows .*multiple of 4.* 6'):
    require_whole_share('num_rows', 6, FourByTwo)


def test_partition_without_the_axis_replicates():
  class DataOnly:
    shape = {'data': 4}

  assert partition(('batch', 'heads'), (8, 8), DataOnly) == PartitionSpec('data', None)


def test_partition_wants_an_axis_a_dimension():
  with pytest.raises(ValueError, match='zip'):
    partition(('batch',), (8, 8), FourByTwo)


def test_make_mesh():
  devices = jax.devices()[:1]
  assert dict(make_mesh(devices).shape) == {'data': 1, 'model': 1}
  with pytest.raises(ValueError, match='num_model.* 1, got 3'):
    make_mesh(devices, num_model=3)
  with pytest.raises(ValueError, match='num_model.* 1, got 0'):
    make_mesh(devices, num_model=0)
  with pytest.raises(ValueError, match="num_model.* 1, got '1'"):
    make_mesh(devices, num_model='1')
  assert make_mesh(np.asarray(devices)) == make_mesh(devices)
  with pytest.raises(ValueError, match='`devices`.*at least one'):
    make_mesh([])


def test_meshes_of_our_axes_are_taken():
  require_mesh(None)
  require_mesh(make_mesh(jax.devices()[:1]))
  require_mesh(Mesh(np.asarray(jax.devices()[:1]), ('model',), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize(
  'mesh',
  [
    [jax.devices()[0]],
    Mesh(np.asarray(jax.devices()[:1]), ('x',), axis_types=(AxisType.Auto,)),
    Mesh(np.asarray(jax.devices()[:1]), ('data',), axis_types=(AxisType.Explicit,)),
  ],
  ids=('a list', 'another name', 'explicit'),
)
def test_other_meshes_are_refused_before_anything_is_read(mesh):
  with pytest.raises(ValueError, match='`mesh` must be a result of make_mesh'):
    load_target('no/such/folder', mesh=mesh)
  with pytest.raises(ValueError, match='`mesh` must be a result of make_mesh'):
    random_pair('tiny', dtype='float32', mesh=mesh)


def test_a_mesh_of_several_devices_must_be_entered():
  mesh = AbstractMesh((2,), ('model',))
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    warn_unless_entered(None)
    warn_unless_entered(make_mesh(jax.devices()[:1]))
    with jax.sharding.use_abstract_mesh(mesh):
      warn_unless_entered(mesh)
  with pytest.warns(UserWarning, match=r'2 devices.*jax.set_mesh\(mesh\)'):
    warn_unless_entered(mesh)


def test_without_a_mesh_nothing_is_constrained():
  x = jnp.zeros((8, 8))
  assert constrain(x, ('batch', 'heads')) is x
  assert mesh_of({'x': x}) is None


ROUTED = {'num_experts': 4, 'experts_per_token': 2, 'expert_bias': True, 'has_sinks': True, 'has_output_norms': True}


@pytest.fixture(scope='module')
def shapes():
  networks = {
    'target': TransformerTarget(TargetConfig(**SIZES, num_layers=2, max_context=64)),
    'biased': TransformerTarget(
      TargetConfig(**SIZES, num_layers=1, max_context=64, qkv_bias=True, qk_norm=True, mlp_bias=True)
    ),
    'routed': TransformerTarget(TargetConfig(**SIZES, num_layers=1, max_context=64, **ROUTED)),
    'drafter': Eagle(DrafterConfig(**SIZES, griffin=True)),
  }
  return {name: jax.eval_shape(network.init_params, jax.random.key(0)) for name, network in networks.items()}


def test_every_parameter_has_its_row_or_is_small(shapes):
  names = {tuple(key.key for key in path[-2:]) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)}
  assert set(PARAM_AXES) <= names
  small = {('fc', 'bias'), ('down', 'bias'), ('router', 'weight'), ('router', 'bias'), ('expert_down', 'bias')}
  norms = 'attn_norm', 'mlp_norm', 'norm', 'x_norm', 'q_norm', 'k_norm', 'attn_out_norm', 'mlp_out_norm'
  small |= {(norm, 'scale') for norm in norms}
  assert names - set(PARAM_AXES) == small
  assert {axis for axes in PARAM_AXES.values() for axis in axes} <= {*RULES, None}


def on_eight_devices(script: str):
  """Return what a script prints as JSON. A process of its own, since the number of devices is fixed when JAX starts."""
  with forked.start(Path(__file__).with_name(script)) as process:
    done = process.completed()
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.fixture(scope='module')
def on_meshes():
  return on_eight_devices('eight_devices.py')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('case', 'mesh'), [(case, mesh) for case in CASES for mesh in MESHES if mesh in WHOLE or case.startswith('dynamic')]
)
def test_sharded_is_unsharded(on_meshes, case, mesh):
  """Tokens, and what was accepted: a drafter gone wrong would change the latter alone.

  A batch of one is the first row of the others; with a chain, it is decoded step by step.
  """
  policy, batch, sampling = case.split()
  unsharded = on_meshes['cases'][f'{policy} 8 {sampling}']['none']
  assert on_meshes['cases'][case][mesh] == [rows[: int(batch)] for rows in unsharded]


@pytest.mark.slow
@pytest.mark.parametrize('mesh', WHOLE)
def test_refilled_rows_are_those_of_one_batch(on_meshes, mesh):
  cases = on_meshes['cases']
  assert cases['refilled 8 sampled'][mesh] == cases['dynamic 8 sampled']['none']


@pytest.mark.slow
def test_rows_are_filled_and_decoded_by_one_program_each(on_meshes):
  assert on_meshes['programs']['2x4'] == [1, 1]  # which divides the rows


@pytest.mark.slow
@pytest.mark.parametrize('mesh', WHOLE)
def test_a_step_leaves_every_array_where_it_took_it(on_meshes, mesh):
  shares, elsewhere, num_programs = on_meshes['moves'][mesh]
  assert not elsewhere
  assert num_programs == 1
  rows = {'2x4': 4, '8x1': 1}[mesh]
  assert {name: shape[0] for name, shape in shares.items()} == {
    '.root': rows, '.text': rows, '.num_tokens': rows, '.num_accepted': rows, '.num_passes': rows,
    '.num_nodes': rows, '.num_levels': rows,
    '.is_done': rows, '.row_id': rows, '.cache.length': rows, '.cache.keys[0]': rows, '.cache.values[0]': rows,
    '.drafter.cache.length': rows, '.drafter.cache.keys[0]': rows, '.drafter.cache.values[0]': rows,
    '.drafter.feature': rows, '.limits.eos': 1,
  }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('family', ['biased', 'grouped', 'routed'])
def test_families_are_sharded_alike(on_meshes, family, mesh):
  """Biases and expert weights are split as the rules say, sums go over all shares: of activations, never of scores."""
  error, longest_sum = on_meshes['families'][mesh][family]
  assert error < 1e-5
  num_rows = 8 * 12 // (1 if mesh == '1x4' else int(mesh[0]))
  assert longest_sum == (0 if mesh == '8x1' else 32 * num_rows)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_the_kernel_of_tpus_runs_on_each_device_alone(on_meshes, mesh):
  error, num_exchanges = on_meshes['kernels'][mesh]
  assert error < 1e-5
  assert num_exchanges == 0


@pytest.mark.slow
def test_drafts_are_accepted_at_all(on_meshes):
  for case in ('chain 8 greedy', 'dynamic 8 greedy', 'dynamic 8 sampled'):
    assert sum(map(sum, on_meshes['cases'][case]['none'][1])) > 0


@pytest.mark.slow
def test_each_device_holds_its_share(on_meshes):
  places = on_meshes['places']['2x4']
  assert places['target/embed/weight'] == [[16, 32], [4, 32]]
  assert places['target/layer_0/attn/qkv/weight'] == [[4, 4, 8, 32], [1, 4, 8, 32]]
  assert places['target/layer_0/mlp/down/weight'] == [[32, 48], [32, 12]]
  assert places['target/norm/scale'] == [[32], [32]]
  assert places['drafter/fc/weight'] == [[32, 64], [8, 64]]
  assert all(whole == shard for whole, shard in on_meshes['places']['8x1'].values())


@pytest.fixture(scope='module')
def trained():
  return on_eight_devices('eight_devices_training.py')


@pytest.mark.slow
@pytest.mark.parametrize('width', [32, 0], ids=['stored', 'computed'])
@pytest.mark.parametrize('mesh', MESHES)
def test_training_on_a_mesh_gives_the_losses_of_one_device(trained, mesh, width):
  (losses, shares, num_compiled), (expected, whole, _) = (
    trained['steps'][f'{name} {width}'] for name in (mesh, 'none')
  )
  assert num_compiled == 1
  assert losses == pytest.approx(expected, rel=1e-4)
  assert len(set(expected)) == 3
  joint = "['layer']['mlp']['gate_up']['weight']"
  assert shares[joint][1] * (1 if mesh == '8x1' else 4) == whole[joint][1]


@pytest.mark.slow
def test_a_run_on_a_mesh_resumes_and_its_size_is_known_beforehand(trained):
  assert trained['runs'][0] == trained['runs'][1]
  assert trained['dry_run']['num_devices'] == 8
  assert trained['dry_run']['total'] >= trained['dry_run']['temporaries'] > 0
