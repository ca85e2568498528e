"""A drafter in 8 bits: its products, and the text, which does not know of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_twin
from eagle_jax import decode, hub
from eagle_jax.config import Eagle3Config
from eagle_jax.decode import auto
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.kernels.int8 import Quantised, multiply_bytes, round_to_int8
from eagle_jax.kernels.int8 import reference as multiply
from eagle_jax.policy import cost_store
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.train.loop import train
from tiny_costs import COSTS
from tiny_twin import NUM_NEW, PROMPTS

TREE = DynamicTree(3, 3, 3, 8)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_a_matrix_becomes_the_nearest():
  matrix_OI = normal(3, 5, 32) * np.logspace(-6, 6, 5, dtype=np.float32)[:, None]
  matrix_OI[0, 0] = 0
  found = round_to_int8(jnp.asarray(matrix_OI))
  assert (found.value.dtype, found.scale.dtype, found.dtype) == (jnp.int8, jnp.float32, jnp.float32)
  assert found.shape == matrix_OI.shape
  error_OI = np.abs(np.asarray(found.scale)[..., None] * np.asarray(found.value, np.float32) - matrix_OI)
  assert (error_OI <= 0.501 * np.abs(matrix_OI).max(-1, keepdims=True) / 127).all()


@pytest.mark.parametrize('num_columns', [1, 2, 5])
@pytest.mark.parametrize('rows', [(6,), (2, 3)])
def test_both_products_are_those_of_the_matrix(rows, num_columns):
  matrix = round_to_int8(jnp.asarray(normal(*rows, 64)))
  x_IR = jnp.asarray(normal(64, num_columns, seed=1))
  exact = np.tensordot(np.asarray(matrix.value, np.float32), x_IR, axes=1)
  exact *= np.asarray(matrix.scale)[..., None]
  np.testing.assert_allclose(multiply(matrix.value, matrix.scale, x_IR), exact, rtol=1e-4, atol=1e-5)
  found = multiply_bytes(matrix.value, matrix.scale, x_IR, num_parts=1)
  assert found.shape == (*rows, num_columns)
  assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()
  np.testing.assert_allclose(matrix.times(x_IR), found, rtol=1e-6)


def test_columns_of_zeros_and_of_nan_stay_what_they_are():
  x_IR = jnp.asarray(np.stack([np.zeros(8), np.full(8, np.nan), np.ones(8)], axis=1), jnp.float32)
  zero, nan, one = multiply_bytes(jnp.ones((4, 8), jnp.int8), jnp.ones(4), x_IR, num_parts=1).T
  assert (zero == 0).all()
  assert np.isnan(nan).all()
  np.testing.assert_allclose(one, 8, rtol=1e-6)


@pytest.mark.parametrize(('num_parts', 'error'), [(2, (0, 0.02)), (1, (0.2, 10))])
def test_what_stands_beside_larger_numbers_counts(num_parts, error):
  """An embedding beside a feature that is a hundred times larger, with weights that are as much smaller."""
  weight_OI = jnp.asarray(np.concatenate([normal(16, 32), 1e-2 * normal(16, 32, seed=1)], axis=1))
  x_IR = jnp.asarray(np.concatenate([normal(32, 3, seed=2), 100 * normal(32, 3, seed=3)]))
  matrix = round_to_int8(weight_OI)
  alone = matrix.value.at[:, 32:].set(0), matrix.scale  # what the embedding gives
  exact = multiply(*alone, x_IR)
  found = multiply_bytes(*alone, x_IR, num_parts=num_parts)
  assert error[0] <= float(jnp.abs(found - exact).max() / jnp.abs(exact).max()) < error[1]


def eagle3():
  fields = {name: getattr(tiny.DRAFTER, name) for name in ('vocab_size', 'width', 'num_heads', 'num_kv_heads')}
  config = Eagle3Config(**fields, head_dim=tiny.DRAFTER.head_dim, ffn_width=48, target_width=32, taps=(0, 0, 0))
  own = {'head': {'weight': jnp.asarray(normal(config.vocab_size, config.width))}}
  return Drafter(config, Eagle3(config).init_params(jax.random.key(0)) | own | {'ids': jnp.arange(config.vocab_size)})


@pytest.mark.slow
@pytest.mark.parametrize('kind', [tiny.drafter, lambda: tiny.drafter().first_ids(40), eagle3])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(kind, temperature):
  target, drafter = tiny.target(), kind().quantised()
  how = {'max_new_tokens': 12, 'temperature': temperature, 'seed': 3}
  prompts = [[1, 2, 3], [7, 8]]
  plain = decode.generate(target, None, prompts, **how)
  for policy in (TREE, Chain(2, lookup=True)):
    assert decode.generate(target, drafter, prompts, policy=policy, **how).tokens == plain.tokens


def test_all_that_a_draft_pass_multiplies_is_in_bytes():
  params, spec = decode.build(tiny.target(), tiny.drafter().quantised(), policy=TREE)
  floats = {
    jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(params.drafter)
    if x.ndim > 1 and x.dtype != jnp.int8 and 'scale' not in jax.tree_util.keystr(path)
  }  # fmt: skip
  assert floats == {"['embed']"}
  assert params.drafter['fc']['weight'].num_parts == 2
  assert eagle3().quantised().params['fc']['weight'].num_parts == 3
  assert spec.drafter.dtype == jnp.float32
  once = tiny.drafter().quantised()
  assert once.quantised() is once


@pytest.mark.parametrize('policy', [Chain(4), DynamicTree(4, 4, 5, 16)], ids=lambda p: p.describe())
def test_it_accepts_about_as_much(policy):
  one_layer = tiny_twin.target()
  drafter = tiny_twin.drafter_of(one_layer, noise=0.1)
  passes = [
    decode.generate(one_layer, each, PROMPTS, max_new_tokens=NUM_NEW, policy=policy).stats['num_target_passes']
    for each in (drafter, drafter.quantised())
  ]
  assert passes[1] < 1.1 * passes[0]


def test_it_is_loaded_so_and_kept_only_as_it_was(tmp_path):
  target, drafter = tiny.target(), tiny.drafter()
  hub.save_drafter(drafter, tmp_path / 'saved')
  small = hub.load_drafter(tmp_path / 'saved', target, dtype='int8')
  assert not drafter.is_quantised
  assert small.is_quantised
  assert isinstance(small.params['layer']['mlp']['down']['weight'], Quantised)
  with pytest.raises(ValueError, match=f'{small.config.name}.*quantised'):
    hub.save_drafter(small, tmp_path / 'again')
  with pytest.raises(ValueError, match='quantised'):
    hub.export_drafter(small, tmp_path / 'again', target, layout='safeailab')
  with pytest.raises(ValueError, match='quantised'):
    train(target, small.config, [], [], None, tmp_path / 'run', initial=small)
  assert not (tmp_path / 'again').exists()
  with pytest.raises(ValueError, match="'float16' or 'int8', got 'int4'"):
    hub.load_drafter(tmp_path / 'saved', target, dtype='int4')


@pytest.mark.parametrize('is_quantised', [False, True])
def test_auto_takes_it_where_it_was_measured_faster(tmp_path, monkeypatch, is_quantised):
  monkeypatch.setenv('EAGLE_JAX_CACHE', str(tmp_path))
  monkeypatch.setattr(auto, 'device_name', lambda mesh: 'x')
  cost_store.write(dataclasses.replace(COSTS, is_quantised=is_quantised))
  params, _ = decode.build(tiny.target(), tiny.drafter())
  assert isinstance(params.drafter['head'], Quantised) == is_quantised
