"""Targets in 8 and 4 bits: another model, decoded just as exactly; the same numbers however they are held."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import decode, hub
from eagle_jax.kernels import int4
from eagle_jax.kernels.int4 import Grouped
from eagle_jax.kernels.int8 import Quantised
from eagle_jax.models import rounded
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.sharding import make_mesh
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors
from tiny_files import HF_CONFIG, hf_folder
from tiny_programs import decode_alike

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44]]
NUM_NEW = 24


@pytest.fixture(params=[False, True], ids=['held as floats', 'held as bytes'])
def is_bytes(request, monkeypatch):
  """Use products of bytes and floats, as accelerators do."""
  hold_packed(monkeypatch, request.param)
  return request.param


def hold_packed(monkeypatch, is_packed):
  for name in ('reads_bytes', 'reads_groups'):
    monkeypatch.setattr(rounded, name, lambda mesh: is_packed)


def matrices(params) -> dict[str, object]:
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, (Quantised, Grouped)))
  return {'/'.join(key.key for key in path): leaf for path, leaf in leaves}


def test_a_matrix_is_rounded_to_half_a_step():
  matrix = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(np.float32)
  matrix[1, 1] = 0
  value, scale = rounded.round_matrix(matrix)
  assert (np.abs(value).max(axis=-1) == np.where(np.arange(6).reshape(2, 3) == 4, 0, 127)).all()
  assert (np.abs(value * scale[..., None] - matrix) <= scale[..., None] / 2 * (1 + 1e-5)).all()


def test_rounding_in_blocks_is_rounding_at_once(monkeypatch):
  matrix = np.random.default_rng(0).standard_normal((7, 30)).astype(np.float32)
  whole = rounded.round_matrix(matrix)
  monkeypatch.setattr(rounded, 'BLOCK', 61)
  for x, y in zip(rounded.round_matrix(matrix), whole, strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_group_is_rounded_to_half_a_step(monkeypatch):
  matrix = np.random.default_rng(0).standard_normal((2, 3, 96)).astype(np.float32)
  matrix[1, 1] = 0.5
  parts = rounded.round_groups(matrix)
  pair, scale, offset = parts
  assert [x.shape for x in parts] == [(2, 3, 48), (2, 3, 3), (2, 3, 3)]
  found = np.asarray(int4.unpack(*map(jnp.asarray, parts)))
  assert (np.abs(found - matrix) <= scale.repeat(32, axis=-1) * 0.5001 + 1e-6).all()
  assert (scale[1, 1] == 0).all()
  again = rounded.round_groups(found)  # what comes from such groups stays what it is
  np.testing.assert_array_equal(again[0], pair)
  np.testing.assert_allclose(int4.unpack(*map(jnp.asarray, again)), found, rtol=0, atol=1e-6)
  monkeypatch.setattr(rounded, 'BLOCK', 200)
  for x, y in zip(rounded.round_groups(matrix), parts, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize(('name', 'kind'), [('int8', Quantised), ('int4', Grouped)])
def test_what_is_rounded(is_bytes, tied, name, kind):
  target = rounded.rounded_target(tiny.target(dataclasses.replace(tiny.TARGET, tied_head=tied)), name)
  assert (target.weights_name, target.dtype, target.config.tied_head) == (name, jnp.float32, False)
  held = matrices(target.params)
  for path, leaf in held.items():
    expected = Quantised if path == 'head/weight' else kind
    assert isinstance(leaf, expected) == (is_bytes and path.endswith('/weight') and not path.startswith('embed'))
  assert 'head/weight' in held


def test_a_matrix_without_whole_groups_is_refused():
  target = tiny.target(dataclasses.replace(tiny.TARGET, ffn_width=48))
  with pytest.raises(ValueError, match='groups of 32 inputs.*down/weight has 48.*int8'):
    rounded.rounded_target(target, 'int4')


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('name', rounded.NAMES)
def test_a_rounded_target_decodes_its_own_text(is_bytes, name, temperature):
  target = rounded.rounded_target(tiny.target(), name)
  how = {'max_new_tokens': NUM_NEW, 'temperature': temperature, 'eos_ids': ()}
  for drafter in (tiny.drafter(), tiny.drafter().first_ids(40).quantised()):
    plain, texts = decode_alike(target, drafter, (Chain(3), DynamicTree(3, 3, 3, 8)), PROMPTS, **how)
    assert texts == [plain, plain]


@pytest.mark.parametrize('name', rounded.NAMES)
@pytest.mark.parametrize('switches', [{}, {'num_experts': 4, 'experts_per_token': 2, 'expert_bias': True}])
def test_both_ways_of_holding_are_one_model(monkeypatch, switches, name):
  logits, config = [], dataclasses.replace(tiny.TARGET, **switches)
  for is_packed in (False, True):
    hold_packed(monkeypatch, is_packed)
    target = rounded.rounded_target(tiny.target(config), name)
    network = target.network
    taps = network.read(target.params, jnp.asarray([PROMPTS[1]]))
    logits.append(network.logits(target.params, taps))
  np.testing.assert_allclose(*logits, atol=1e-4)
  exact = tiny.target(config)
  taps = exact.network.read(exact.params, jnp.asarray([PROMPTS[1]]))
  error = np.abs(logits[0] - exact.network.logits(exact.params, taps)).max()
  assert 1e-4 < error < 0.5  # another model, and a near one


@pytest.mark.parametrize('name', rounded.NAMES)
def test_a_folder_loads_as_it_is_rounded_afterwards(is_bytes, tmp_path, name):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG)
  loaded, after = hub.load_target(path, dtype=name), rounded.rounded_target(hub.load_target(path), name)
  assert loaded.config == after.config
  assert jax.tree.structure(loaded.params) == jax.tree.structure(after.params)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, after.params)


@pytest.mark.parametrize('tensors', [{}, {'lm_head.weight': 'model.embed_tokens.weight'}], ids=['another', 'the same'])
def test_a_tied_folder_s_own_head_is_compared_as_it_is_held(is_bytes, tmp_path, caplog, tensors):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG | {'tie_word_embeddings': True})
  held = dict(read_safetensors(path / 'model.safetensors'))
  write_safetensors(path / 'model.safetensors', held | {name: held[other] for name, other in tensors.items()})
  target = hub.load_target(path, dtype='int8')
  assert not target.config.tied_head
  assert ('lm_head.weight is another' in caplog.text) == (not tensors)


@pytest.mark.parametrize('compute_dtype', ['bfloat16', 'float16'])
def test_activations_may_have_16_bits(is_bytes, tmp_path, compute_dtype):
  target = hub.load_target(hf_folder(tmp_path / 'tiny', HF_CONFIG), dtype='int8', compute_dtype=compute_dtype)
  assert (str(target.dtype), target.weights_name) == (compute_dtype, 'int8')
  out = decode.generate(target, None, [[1, 2]], max_new_tokens=4, eos_ids=())
  assert (len(out.tokens[0]), out.stats['weights']) == (4, 'int8')


def test_a_mesh_splits_bytes_as_it_splits_floats(monkeypatch):
  monkeypatch.setattr(rounded, 'reads_bytes', lambda mesh: True)
  plain = decode.generate(rounded.rounded_target(tiny.target()), None, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=())
  mesh = make_mesh(jax.devices()[:1])
  target = tiny.target()
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  target = dataclasses.replace(target, params=jax.device_put(target.params, place))
  target = rounded.rounded_target(target)
  assert target.params['head']['weight'].value.sharding.mesh == mesh
  assert decode.generate(target, None, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=()).tokens == plain.tokens


@pytest.mark.parametrize(
  ('dtype', 'compute_dtype', 'named'),
  [('int8', 'int8', 'int8'), ('int8', 'int32', 'int32'), ('float32', 'bfloat16', 'bfloat16'), ('int7', None, 'int7')],
)
def test_bad_dtypes(tmp_path, dtype, compute_dtype, named):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG)
  with pytest.raises(ValueError, match=named):
    hub.load_target(path, dtype=dtype, compute_dtype=compute_dtype)
