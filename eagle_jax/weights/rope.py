"""Scalings of rotary position embedding, as config.json files state them."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.weights.layouts import Keys


class Rope(NamedTuple):
  """How far heads are turned; the fields of configs in `eagle_jax.config`."""

  theta: float
  slowdown: tuple[float, ...] = ()  # of each pair; () if none turns slower
  factor: float = 1.0  # of cosines and sines
  words: tuple[tuple[str, Any], ...] = ()  # what `rope_scaling` says, complete; () without scaling


_NEEDS: dict[str, tuple[str, ...]] = {  # scaling -> its numbers in config.json
  'default': (),
  'mrope': (),  # sections for images; the rows of a text have equal positions, so it is as without
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
  'yarn': (),
}


_ORIGINAL = 'original_max_position_embeddings'


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
  given = {key: settings.get(key) for key in _NEEDS[kind]}
  if _ORIGINAL in given:
    given[_ORIGINAL] = content.get(_ORIGINAL, given[_ORIGINAL])
  if missing := [key for key, value in given.items() if value is None]:
    raise ValueError(f'{folder}/config.json lacks {missing} of RoPE scaling {kind!r}: fetch the whole file again.')
  theta = float(settings.get('rope_theta', content.get('rope_theta', default_theta)))
  numbers = [float(value) for value in given.values() if value is not None]
  words = ('rope_type', kind), *zip(given, numbers, strict=True)
  if kind == 'yarn':
    return _yarn(folder, content, settings, head_dim, theta)
  if kind == 'llama3':
    return Rope(theta, llama3_slowdown(theta, head_dim, *numbers), words=words)
  if kind == 'linear':
    return Rope(theta, (numbers[0],) * (head_dim // 2), words=words)
  return Rope(theta)


def _yarn(folder: Path, content: Keys, settings: Keys, head_dim: int, theta: float) -> Rope:
  """YaRN (arXiv:2309.00071): pairs that turn often keep their speed, those that turn seldom slow down by the factor."""
  context, stated = content.get('max_position_embeddings'), content.get(_ORIGINAL, settings.get(_ORIGINAL))
  original, factor = stated or context, settings.get('factor', context / stated if context and stated else None)
  if original is None or factor is None:
    raise ValueError(f"{folder}/config.json lacks 'factor' or {_ORIGINAL!r} of RoPE scaling 'yarn': fetch it again.")

  def pair_that_turns(times: float) -> float:
    """Which pair turns so many times within the original context, were pairs numbers."""
    return head_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

  fast, slow = float(settings.get('beta_fast', 32)), float(settings.get('beta_slow', 1))
  first, last = pair_that_turns(fast), pair_that_turns(slow)
  if is_truncated := settings.flag('truncate', True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, head_dim - 1)
  slow_K = np.clip((np.arange(head_dim // 2) - first) / (last - first or 0.001), 0, 1)
  slowdown = tuple((1 / (slow_K / factor + 1 - slow_K)).tolist())
  words: dict[str, Any] = {
    'rope_type': 'yarn', 'factor': float(factor), _ORIGINAL: float(original), 'beta_fast': fast, 'beta_slow': slow,
    'truncate': is_truncated,
  }  # fmt: skip
  if (of_tables := float(_yarn_factor(folder, settings, factor))) != _growth(factor):
    words['attention_factor'] = of_tables
  return Rope(theta, slowdown, of_tables, (*words.items(),))


def _growth(factor: float, scale: float = 1.0) -> float:
  """By how much YaRN enlarges cosines and sines where the context grows by a factor."""
  return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


def _yarn_factor(folder: Path, settings: Keys, factor: float) -> float:
  scale, of_all = settings.get('mscale', 0), settings.get('mscale_all_dim', 0)
  if 'attention_factor' in settings:
    return settings['attention_factor']
  if scale and of_all:
    return _growth(factor, scale) / _growth(factor, of_all)
  if scale not in (0, 1) or of_all:
    raise ValueError(
      f'{folder}: of mscale {scale} and mscale_all_dim {of_all}, engines take one alone to mean different things.'
    )
  return _growth(factor)


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
