"""Scalings of rotary position embedding, as config.json files state them."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle_jax.weights.layouts import Keys


class Rope(NamedTuple):
  """How far heads are turned; the fields of configs in `eagle_jax.config`."""

  theta: float
  slowdown: tuple[float, ...] = ()  # of each pair; () if none turns slower


_NEEDS: dict[str, tuple[str, ...]] = {  # scaling -> its numbers in config.json
  'default': (),
  'mrope': (),  # sections for images; the rows of a text have equal positions, so it is as without
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
}


def read_rope(folder: Path, content: Keys, head_dim: int, default_theta: float) -> Rope:
  """Read base and scaling from either spelling: rope_theta and rope_scaling, or the newer rope_parameters.

  As in transformers: `rope_scaling` counts alone where it is there, `rope_theta` in it comes before the one outside,
  `original_max_position_embeddings` outside before the one in it.

  Raises:
    ValueError: a scaling that is not supported, settings for each type of layer, or a number is missing.
  """
  name = 'rope_scaling' if 'rope_scaling' in content else 'rope_parameters'
  settings = content.nested(name)
  if by_layer := [key for key in settings if key.endswith('_attention')]:
    raise ValueError(f'{folder}: {name} for each of {by_layer} is not supported, only one for all layers.')
  kind = settings.get('rope_type', settings.get('type', 'default'))
  if kind not in _NEEDS:
    raise ValueError(f'{folder}: {name} of RoPE scaling {kind!r} is not supported; one of {sorted(_NEEDS)} is.')
  original = 'original_max_position_embeddings'
  given = {key: settings.get(key) for key in _NEEDS[kind]}
  if original in given:
    given[original] = content.get(original, given[original])
  if missing := [key for key, value in given.items() if value is None]:
    raise ValueError(f'{folder}/config.json lacks {missing} of RoPE scaling {kind!r}: fetch the whole file again.')
  theta = float(settings.get('rope_theta', content.get('rope_theta', default_theta)))
  numbers = [float(value) for value in given.values() if value is not None]
  if kind == 'llama3':
    return Rope(theta, llama3_slowdown(theta, head_dim, *numbers))
  return Rope(theta, (numbers[0],) * (head_dim // 2) if kind == 'linear' else ())


def llama3_slowdown(
  theta: float, head_dim: int, factor: float, low: float, high: float, original_context: float
) -> tuple[float, ...]:
  """Return by how much each pair of a head turns slower in Llama 3.1 and later, which see `factor` times the context.

  A pair that turned at least `high` times within the original context stays as it was, one that turned at most `low`
  times slows down by the factor, and between them the speed goes over linearly in the number of turns.
  """
  frequency_K = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
  num_turns_K = original_context * frequency_K / (2 * math.pi)
  kept_K = np.clip((num_turns_K - low) / (high - low), 0, 1)
  return tuple((1 / (kept_K + (1 - kept_K) / factor)).tolist())
