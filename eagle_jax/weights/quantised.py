"""Read quantised checkpoints of targets, turning their matrices back into floats, one at a time.

Weights of 8 bits stand beside scales, by which they are multiplied in float32: one for a matrix, for each output, or
for each group or block. Activations stay floats here, whatever an engine does with them.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle_jax.weights.folder import read_json, read_names, read_tensors

log = logging.getLogger('eagle_jax')

_FLOAT8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
_SCALES = 'weight_scale_inv', 'weight_scale'
_ZERO = 'weight_zero_point'
# Scales of activations and caches, which stay floats here.
_UNUSED = (
  '.input_scale', '.output_scale', '.activation_scale', '.k_scale', '.v_scale', '.q_scale',
)  # fmt: skip
_FORMATS = 'float-quantized', 'int-quantized', 'naive-quantized'  # of compressed-tensors, with a number in each byte
# Endings of tensor names that occur only in unsupported checkpoints.
_SIGNS = {
  '.qweight': 'GPTQ or AWQ', '.qzeros': 'GPTQ or AWQ', '.SCB': 'bitsandbytes', '.weight.absmax': 'bitsandbytes',
  '.weight.quant_map': 'bitsandbytes', '.weight_packed': 'compressed-tensors of 4 bits', '.weight_scale_2': 'NVFP4',
}  # fmt: skip
_MX_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of MXFP4's three lower bits; the fourth is the sign


def _refusal(folder: Path, what: str) -> ValueError:
  return ValueError(
    f'{folder}: weights are quantised ({what}). Supported are fp8 and int8 with their scales, mxfp4 of gpt-oss, and '
    'GGUF files. Use the unquantised checkpoint, or a GGUF file of it.'
  )


def require_readable(folder: Path, content: Mapping[str, Any]) -> None:
  """Raise a ValueError if config.json, or a file beside it, names a quantisation that is not supported."""
  settings = content.get('quantization_config') or {}
  if not settings and (beside := folder / 'hf_quant_config.json').is_file():
    settings = {'quant_method': 'modelopt', **(read_json(beside).get('quantization') or {})}
  if content.get('quantization'):
    raise _refusal(folder, f'quantization {content["quantization"]!r}, as of MLX')
  if not isinstance(settings, Mapping):
    raise ValueError(f'quantization_config must be an object, got {settings!r}.')
  if not settings:
    return
  method = settings.get('quant_method')
  bits = f', {settings["bits"]} bits' if 'bits' in settings else ''
  known = {
    'fp8': True,
    'fbgemm_fp8': True,
    'mxfp4': content.get('model_type') == 'gpt_oss',
    'modelopt': settings.get('quant_algo') == 'FP8',
    'compressed-tensors': settings.get('format') in _FORMATS and not settings.get('sparsity_config'),
  }
  if not known.get(str(method)):
    details = ''.join(f', {name} {settings[name]!r}' for name in ('quant_algo', 'format') if name in settings)
    raise _refusal(folder, f'quant_method {method!r}{bits}{details}')


def read_floats(folder: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield (name, array) for every weight of a target's folder, those that were quantised as float32 or bfloat16.

  Raises:
    ValueError: an unsupported quantisation, or a weight without the scale that it needs.
  """
  require_readable(folder, content)
  names = read_names(folder)
  for sign, what in _SIGNS.items():
    if found := next((name for name in sorted(names) if name.endswith(sign)), None):
      raise _refusal(folder, f'{found}: {what}')
  beside = {name for name in names if name.endswith((*_SCALES, _ZERO, '_scales'))}
  scales = dict(read_tensors(folder, beside)) if beside else {}
  if beside:
    log.info('%s: quantised weights, which are turned into floats as they are read', folder)
  used: set[str] = set()

  def floats(named: tuple[str, np.ndarray]) -> tuple[str, np.ndarray] | None:
    name, array = named
    whole = name.removesuffix('_blocks')
    if whole != name and (scale := scales.get(f'{whole}_scales')) is not None:
      used.add(f'{whole}_scales')
      return whole, from_mxfp4(folder, name, array, scale)
    if array.dtype in _FLOAT8 or (array.dtype == np.int8 and name.endswith('.weight')):
      used.update(name.removesuffix('weight') + kind for kind in (*_SCALES, _ZERO))
      return name, _from_bytes(folder, name, array, scales, content)
    return None if name.endswith(_UNUSED) else named

  # Unlike a loop, `map` does not hold on to an array that it has handed out.
  yield from filter(None, map(floats, read_tensors(folder, names - beside)))
  if left := sorted(beside - used):
    raise ValueError(f'{folder}: {left[:3]} are scales of no quantised weight: fetch the whole checkpoint again.')


def _from_bytes(
  folder: Path, name: str, weight_OI: np.ndarray, scales: Mapping[str, np.ndarray], content: Mapping[str, Any]
) -> np.ndarray:
  """Return (weight - zero point) * scale, f32."""
  module = name.removesuffix('weight')
  scale = next((scales[module + kind] for kind in _SCALES if module + kind in scales), None)
  if scale is None or weight_OI.ndim != 2:
    raise ValueError(
      f'{folder}: {name} is stored as {weight_OI.dtype}, and no scale was found for it: use the unquantised checkpoint.'
    )
  value_OI, blocks = weight_OI.astype(np.float32), _block_sizes(content)
  if (zero := scales.get(module + _ZERO)) is not None:
    value_OI -= _spread(folder, name, zero.astype(np.float32), weight_OI.shape, blocks)
  if scale.dtype == np.uint8:  # exponents
    scale = scale.view(ml_dtypes.float8_e8m0fnu)
  value_OI *= _spread(folder, name, scale.astype(np.float32), weight_OI.shape, blocks)
  return value_OI


def _block_sizes(content: Mapping[str, Any]) -> tuple[int, int] | None:
  """Return how many outputs and inputs share a scale, if config.json says so."""
  settings = content.get('quantization_config') or {}
  if sizes := settings.get('weight_block_size'):
    return int(sizes[0]), int(sizes[1])
  groups = (settings.get('config_groups') or {}).values()
  structures = [(group.get('weights') or {}).get('block_structure') for group in groups]
  found = {(int(sizes[0]), int(sizes[1])) for sizes in structures if isinstance(sizes, list)}
  return found.pop() if len(found) == 1 else None


def _spread(
  folder: Path, name: str, scale: np.ndarray, shape: tuple[int, ...], blocks: tuple[int, int] | None
) -> np.ndarray:
  """Broadcast the scales of a matrix, of outputs or of blocks (the last may be cut) to the numbers that they scale."""
  if scale.size == 1:
    return scale.reshape(1, 1)
  if scale.shape in ((shape[0],), (shape[0], 1)):
    return scale.reshape(-1, 1)
  whole = scale.ndim == 2 and all(size % count == 0 for size, count in zip(shape, scale.shape, strict=True))
  if blocks is None and whole:
    blocks = shape[0] // scale.shape[0], shape[1] // scale.shape[1]
  if (
    scale.ndim != 2
    or blocks is None
    or tuple(-(-size // b) for size, b in zip(shape, blocks, strict=True)) != scale.shape
  ):
    raise ValueError(
      f'{folder}: {name} of shape {list(shape)} does not fit scales of shape {list(scale.shape)} for blocks of '
      f'{blocks}.'
    )
  of_outputs = np.repeat(scale, blocks[0], axis=0)[: shape[0]]
  return np.repeat(of_outputs, blocks[1], axis=1)[:, : shape[1]]


def from_mxfp4(folder: Path, name: str, block_EOGB: np.ndarray, exponent_EOG: np.ndarray) -> np.ndarray:
  """Return a matrix of each expert, [E, in, out] bf16, which holds MXFP4's numbers exactly.

  Args:
    folder, name: for messages.
    block_EOGB: u8, two numbers in each byte, the first in the lower bits; 32 in a block.
    exponent_EOG: u8, the power of two of each block, plus 127.

  Raises:
    ValueError: the shapes or types do not go together.
  """
  if block_EOGB.dtype != np.uint8 or exponent_EOG.dtype != np.uint8 or block_EOGB.shape[:3] != exponent_EOG.shape:
    raise ValueError(
      f'{folder}: {name} of shape {list(block_EOGB.shape)} does not fit scales of shape {list(exponent_EOG.shape)}.'
    )
  values = np.concatenate([_MX_VALUES, -_MX_VALUES])
  E, out = block_EOGB.shape[:2]
  matrix_EOI = np.empty((E, out, block_EOGB[0, 0].size * 2), jnp.bfloat16)
  for expert, (block_OGB, exponent_OG) in enumerate(zip(block_EOGB, exponent_EOG, strict=True)):  # bounds the memory
    pair_OGB2 = values[np.stack([block_OGB & 15, block_OGB >> 4], axis=-1)]
    scaled = np.ldexp(pair_OGB2, (exponent_OG.astype(np.int32) - 127)[..., None, None])
    matrix_EOI[expert] = scaled.reshape(out, -1)
  return matrix_EOI.swapaxes(1, 2)
