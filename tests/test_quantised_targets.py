"""Quantised checkpoints of targets: turned into floats by their formulas, or refused by name."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from eagle_jax import hub
from eagle_jax.weights import quantised
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors
from tiny_files import HF_CONFIG, TINY, hf_folder

FP8 = {'quant_method': 'fp8', 'activation_scheme': 'dynamic'}
COMPRESSED = {'quant_method': 'compressed-tensors', 'format': 'int-quantized', 'config_groups': {'group_0': {}}}


def bytes_of(rng, shape, dtype):
  return rng.integers(-127, 128, shape).astype(dtype)


def by_blocks(rng, shape):
  """Blocks of 12 x 20, the last of each direction cut."""
  return rng.uniform(0.5, 2, (-(-shape[0] // 12), -(-shape[1] // 20))).astype(np.float32)


def meeting(scale, shape, *, block=None):
  """Find the scale of each number, one at a time."""
  rows, columns = block or (shape[0] // scale.shape[0], shape[1] // scale.shape[1])
  return np.array([[scale[i // rows, j // columns] for j in range(shape[1])] for i in range(shape[0])])


# quantization_config, dtype, name of the scale, shape of a weight -> scale, block
SCHEMES = {
  'fp8, blocks': (
    FP8 | {'weight_block_size': [12, 20]}, ml_dtypes.float8_e4m3fn, 'weight_scale_inv', by_blocks, (12, 20)
  ),
  'fp8, a matrix': (
    FP8, ml_dtypes.float8_e4m3fn, 'weight_scale', lambda rng, shape: rng.uniform(0.5, 2, (1, 1)).astype('f4'), None
  ),
  'fp8, outputs': (
    {'quant_method': 'fbgemm_fp8'}, ml_dtypes.float8_e4m3fn, 'weight_scale',
    lambda rng, shape: rng.uniform(0.5, 2, (shape[0], 1)).astype(ml_dtypes.bfloat16), None,
  ),
  'fp8, powers of two in bytes': (
    FP8 | {'weight_block_size': [16, 16]}, ml_dtypes.float8_e4m3fn, 'weight_scale_inv',
    lambda rng, shape: (2.0 ** rng.integers(-7, 3, (shape[0] // 16, shape[1] // 16))).astype(ml_dtypes.float8_e8m0fnu),
    (16, 16),
  ),
  'fp8, powers of two in bytes of no type': (
    FP8 | {'weight_block_size': [16, 16]}, ml_dtypes.float8_e4m3fn, 'weight_scale_inv',
    lambda rng, shape: rng.integers(120, 130, (shape[0] // 16, shape[1] // 16)).astype(np.uint8), (16, 16),
  ),
  'int8, outputs': (
    COMPRESSED, np.int8, 'weight_scale', lambda rng, shape: rng.uniform(0.5, 2, (shape[0], 1)).astype('f4'), None
  ),
  'int8, groups': (
    COMPRESSED, np.int8, 'weight_scale', lambda rng, shape: rng.uniform(0.5, 2, (shape[0], 4)).astype('f4'), None
  ),
}  # fmt: skip


def quantised_folder(path, scheme, *, has_zero=False):
  """A folder whose projections are bytes, and the floats that they stand for."""
  settings, dtype, kind, scale_of, block = scheme
  hf_folder(path, HF_CONFIG | {'quantization_config': settings})
  rng, stored, floats = np.random.default_rng(0), {}, {}
  for name, array in read_safetensors(path / 'model.safetensors'):
    if not name.endswith('_proj.weight'):
      stored[name] = floats[name] = array
      continue
    module, shape = name.removesuffix('weight'), array.shape
    stored[name], scale = bytes_of(rng, shape, dtype), scale_of(rng, shape)
    stored |= {module + kind: scale, module + 'input_scale': np.ones(1, np.float32)}
    scale = 2.0 ** (scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale
    value = stored[name].astype(np.float64)
    if has_zero:
      stored[module + 'weight_zero_point'] = zero = rng.integers(-9, 9, scale.shape).astype(np.int8)
      value -= meeting(zero.astype(np.float64), shape, block=block)
    floats[name] = (value * meeting(scale.astype(np.float64), shape, block=block)).astype(np.float32)
  write_safetensors(path / 'model.safetensors', stored)
  return floats


@pytest.mark.parametrize('has_zero', [False, True])
@pytest.mark.parametrize('name', SCHEMES)
def test_weights_are_floats_again(tmp_path, name, has_zero):
  floats = quantised_folder(tmp_path / 'quantised', SCHEMES[name], has_zero=has_zero)
  path = hf_folder(tmp_path / 'floats', HF_CONFIG)
  write_safetensors(path / 'model.safetensors', floats)
  found, expected = hub.load_target(tmp_path / 'quantised'), hub.load_target(path)
  assert dataclasses.replace(found.config, name='tiny') == TINY
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found.params, expected.params)


def test_settings_of_model_optimizer_stand_in_a_file_of_their_own(tmp_path):
  path = tmp_path / 'tiny'
  quantised_folder(path, SCHEMES['fp8, a matrix'])
  (path / 'config.json').write_text(json.dumps(HF_CONFIG))
  beside = path / 'hf_quant_config.json'
  beside.write_text(json.dumps({'quantization': {'quant_algo': 'FP8'}}))
  assert hub.load_target(path).config == TINY
  beside.write_text(json.dumps({'quantization': {'quant_algo': 'NVFP4'}}))
  with pytest.raises(ValueError, match="'modelopt', quant_algo 'NVFP4'"):
    hub.load_target(path)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda tensors: tensors.pop('model.layers.1.mlp.up_proj.weight_scale'), 'layers.1.mlp.up_proj.weight .* no scale'),
    (
      lambda tensors: tensors.update({'model.layers.1.mlp.up_proj.weight_scale': np.ones((3, 5), np.float32)}),
      r'up_proj.weight of shape \[64, 32\] .* \[3, 5\]',
    ),
    (
      lambda tensors: tensors.update({'model.norm.weight_scale': np.ones(1, np.float32)}),
      r"\['model.norm.weight_scale'\] are scales of no",
    ),
    (
      lambda tensors: tensors.update({'model.layers.0.mlp.up_proj.weight_packed': np.ones((2, 2), np.int32)}),
      'weight_packed: compressed-tensors of 4 bits',
    ),
    (
      lambda tensors: tensors.update({'model.layers.0.mlp.up_proj.qweight': np.ones((2, 2), np.int32)}),
      'qweight: GPTQ or AWQ',
    ),
    (
      lambda tensors: tensors.update({'model.layers.0.mlp.up_proj.SCB': np.ones(2, np.float32)}), 'SCB: bitsandbytes'
    ),
  ],
)  # fmt: skip
def test_tensors_that_do_not_go_together(tmp_path, change, message):
  path = tmp_path / 'tiny'
  quantised_folder(path, SCHEMES['int8, outputs'])
  tensors = dict(read_safetensors(path / 'model.safetensors'))
  change(tensors)
  write_safetensors(path / 'model.safetensors', tensors)
  with pytest.raises(ValueError, match=message):
    hub.load_target(path)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'quantization_config': {'quant_method': 'gptq', 'bits': 4}}, "'gptq', 4 bits.* Use the unquantised checkpoint"),
    ({'quantization_config': {'quant_method': 'awq', 'bits': 4}}, "'awq', 4 bits"),
    ({'quantization_config': {'quant_method': 'bitsandbytes', 'load_in_8bit': True}}, "'bitsandbytes'"),
    ({'quantization_config': {'quant_method': 'mxfp4'}}, "'mxfp4'"),  # of gpt-oss alone
    ({'quantization_config': COMPRESSED | {'format': 'pack-quantized'}}, "'compressed-tensors', format 'pack-quan"),
    ({'quantization': {'group_size': 64, 'bits': 4}}, 'MLX'),
    ({'vision_config': {}, 'model_type': 'llava'}, "'llava' takes images"),
    ({'architectures': ['BertForMaskedLM'], 'model_type': 'bert'}, "BertForMaskedLM'.* end in 'ForCausalLM'"),
    ({'architectures': ['LlamaForSequenceClassification']}, 'LlamaForSequenceClassification'),
  ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, settings, message):
  path = hf_folder(tmp_path / 'tiny', HF_CONFIG | settings)
  for read in (hub.load_target, hub.read_target_config):
    with pytest.raises(ValueError, match=message):
      read(path)


def test_an_adapter_is_refused_by_name(tmp_path):
  (tmp_path / 'adapter_config.json').write_text(json.dumps({'base_model_name_or_path': 'org/base'}))
  with pytest.raises(ValueError, match="adapter .* of 'org/base': merge"):
    hub.load_target(tmp_path)


def test_mxfp4_by_hand(tmp_path):
  """Two numbers in each byte, the lower bits first; the byte beside a block is the power of two plus 127."""
  block = np.zeros((1, 2, 1, 16), np.uint8)
  block[0, 0, 0, :2] = 0x21, 0xFB  # 0.5, 1; -1.5, -6
  block[0, 1, 0, 15] = 0x70  # 0, 6
  found = quantised.from_mxfp4(tmp_path, 'x_blocks', block, np.uint8([[[128], [126]]]))
  assert (found.shape, found.dtype) == ((1, 32, 2), ml_dtypes.bfloat16)
  expected = np.zeros((32, 2))
  expected[:4, 0], expected[31, 1] = (1, 2, -3, -12), 3
  np.testing.assert_array_equal(found[0], expected)
  with pytest.raises(ValueError, match=r'x_blocks of shape \[1, 2, 1, 16\]'):
    quantised.from_mxfp4(tmp_path, 'x_blocks', block, np.uint8([[[128]]]))
