"""Scalings of rotary position embedding, as config.json files state them."""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.weights.layouts import Keys

log = logging.getLogger('eagle_jax')


class Rope(NamedTuple):
  """The rotation of heads; the fields of configs in `eagle_jax.config`."""

  theta: float
  slowdown: tuple[float, ...] = ()  # of each pair; () if none turns slower
  factor: float = 1.0  # of cosines and sines
  words: tuple[tuple[str, Any], ...] = ()  # what `rope_scaling` says, complete; () without scaling


HEAD_KINDS = 'default', 'mrope', 'linear', 'llama3', 'yarn'  # those that depend on no length
_ORIGINAL = 'original_max_position_embeddings'
_ALIASES = {'su': 'longrope'}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The RoPE settings of a config.json, in either spelling: rope_theta and rope_scaling, or the newer rope_parameters.

  As in transformers: `rope_scaling` counts alone where it is there, `rope_theta` in it comes before the one outside,
  `original_max_position_embeddings` outside before the one in it.
  """

  folder: Path
  kind: str
  keys: Keys  # of the scaling
  theta: float
  rotary_dim: int  # how many numbers of a head are turned
  context: int | None  # max_position_embeddings
  original: int | None  # the context before scaling; None if nothing says it

  @classmethod
  def read(
    cls, folder: Path, content: Keys, head_dim: int, *, theta: float, kinds: Collection[str],
    is_partial: bool = False,
  ) -> 'Settings':  # fmt: skip
    """Read the settings.

    Args:
      folder: for messages.
      content: of config.json.
      head_dim: K.
      theta: what an absent base means.
      kinds: scalings that are supported.
      is_partial: whether RoPE may turn a part of each head.

    Raises:
      ValueError: a scaling that is not supported, or settings for each type of layer.
    """
    name = 'rope_scaling' if 'rope_scaling' in content else 'rope_parameters'
    keys = content.nested(name)
    if by_layer := [key for key in keys if key.endswith('_attention')]:
      raise ValueError(f'{folder}: {name} for each of {by_layer} is not supported, only one for all layers.')
    written = keys.get('rope_type', keys.get('type', 'default'))
    kind = _ALIASES.get(written, written)
    if kind == 'yarn' and 'longrope' in kinds and 'yarn' not in kinds:  # an old label of Phi-3's
      kind = 'longrope'
    if kind not in kinds:
      raise ValueError(f'{folder}: {name} of RoPE scaling {kind!r} is not supported; one of {sorted(kinds)} is.')
    keys.get('type')
    given = content.get(_ORIGINAL, keys.get(_ORIGINAL))
    share = 1.0
    if is_partial:
      share = float(keys.get('partial_rotary_factor', content.get('partial_rotary_factor', 1.0)))
    rotary_dim = int(head_dim * share)
    base = float(keys.get('rope_theta', content.get('rope_theta', theta)))
    return cls(folder, kind, keys, base, rotary_dim, content.get('max_position_embeddings'), given)

  def number(self, name: str) -> float:
    """Return a number of the scaling; ValueError where there is none."""
    if (value := self.keys.get(name)) is None:
      raise ValueError(self._lacks(repr(name)))
    return float(value)

  def _lacks(self, names: str) -> str:
    return f'{self.folder}/config.json lacks {names} of RoPE scaling {self.kind!r}: fetch the whole file again.'

  def contexts(self) -> tuple[int, int]:
    """Return how many tokens a text may have unless more are asked for, and how many may be asked for.

    Linear scaling and YaRN see the scaled context, which some files state, and others not. Frequencies of `dynamic` and
    `longrope` depend on the length of the text: those for the original context change nothing else.
    """
    context = int(self.context or 0)
    if self.kind == 'linear' or (self.kind == 'yarn' and self.original in (None, context)):
      context = int(context * self._growth())
    if self.kind == 'dynamic':
      return context, int(context * self.number('factor'))
    if self.kind == 'longrope':
      return min(context, int(self._original())), context
    return context, context

  def rope(self, max_context: int | None = None) -> Rope:
    """Return the frequencies, as those of a text of so many tokens; ValueError if a number is missing."""
    return _KINDS[self.kind](self, max_context)

  def _original(self) -> float:
    if (original := self.original or self.context) is None:
      raise ValueError(self._lacks(repr(_ORIGINAL)))
    return original

  def _growth(self) -> float:
    """Compute by how much the context grows."""
    if (factor := self.keys.get('factor')) is not None:
      return float(factor)
    if not (self.context and self.original):
      raise ValueError(self._lacks(f"'factor' or {_ORIGINAL!r}"))
    return self.context / self.original


def chosen_context(source: Path, usual: int, most: int, asked: int | None) -> int:
  """Return how many tokens texts may have: as many as were asked for, else the usual number.

  Raises:
    ValueError: more than the model can see were asked for, or none.
  """
  if asked is not None and not (isinstance(asked, int) and 0 < asked <= most):
    raise ValueError(f'{source}: max_context must be an integer between 1 and {most}, got {asked!r}.')
  if asked is None and most > usual:
    log.info(
      '%s: RoPE as for texts of up to %d tokens; for longer ones, up to %d, ask for a max_context', source, usual, most
    )
  return usual if asked is None else asked


def read_rope(folder: Path, content: Keys, head_dim: int, default_theta: float) -> Rope:
  """Read base and scaling of a draft head; see `Settings.read`."""
  return Settings.read(folder, content, head_dim, theta=default_theta, kinds=HEAD_KINDS).rope()


def _default(given: Settings, max_context: int | None) -> Rope:
  return Rope(given.theta)


def _linear(given: Settings, max_context: int | None) -> Rope:
  factor = given.number('factor')
  return Rope(given.theta, (factor,) * (given.rotary_dim // 2), words=(('rope_type', 'linear'), ('factor', factor)))


def _dynamic(given: Settings, max_context: int | None) -> Rope:
  """Enlarge the base, so that the slowest pair turns as far in the longer text as it did in the original context."""
  factor, context = given.number('factor'), given.context
  if context is None:
    raise ValueError(given._lacks("'max_position_embeddings'"))
  length = max(max_context or 0, context)
  d = given.rotary_dim
  return Rope(given.theta * (factor * length / context - (factor - 1)) ** (d / (d - 2)))


def _longrope(given: Settings, max_context: int | None) -> Rope:
  """LongRoPE (arXiv:2402.13753): two lists of slowdowns, for texts in the original context, and for longer ones."""
  original, growth = given._original(), given._growth()
  lists: dict[str, tuple[float, ...]] = {}
  for name in ('short_factor', 'long_factor'):
    if len(values := given.keys.get(name, ())) != given.rotary_dim // 2:
      raise ValueError(
        f"{given.folder}/config.json: {name} of RoPE scaling 'longrope' must hold {given.rotary_dim // 2} numbers, got "
        f'{len(values)}.'
      )
    lists[name] = tuple(map(float, values))
  usual = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))
  factor = float(given.keys.get('attention_factor', usual))
  return Rope(given.theta, lists['long_factor' if (max_context or 0) > original else 'short_factor'], factor)


def _llama3(given: Settings, max_context: int | None) -> Rope:
  names = 'factor', 'low_freq_factor', 'high_freq_factor'
  numbers = {name: given.keys.get(name) for name in names} | {_ORIGINAL: given.original}
  if missing := [name for name, value in numbers.items() if value is None]:
    raise ValueError(given._lacks(str(missing)))
  values = [float(value) for value in numbers.values() if value is not None]
  words = ('rope_type', 'llama3'), *zip(numbers, values, strict=True)
  return Rope(given.theta, llama3_slowdown(given.theta, given.rotary_dim, *values), words=words)


def _yarn(given: Settings, max_context: int | None) -> Rope:
  """YaRN (arXiv:2309.00071): pairs that turn often keep their speed, those that turn seldom slow down by the factor."""
  growth, original, d = given._growth(), given._original(), given.rotary_dim

  def pair_that_turns(times: float) -> float:
    """Compute the index, a real number, of the pair that turns this many times within the original context."""
    return d * math.log(original / (2 * math.pi * times)) / (2 * math.log(given.theta))

  fast, slow = float(given.keys.get('beta_fast', 32)), float(given.keys.get('beta_slow', 1))
  first, last = pair_that_turns(fast), pair_that_turns(slow)
  if is_truncated := given.keys.flag('truncate', True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, d - 1)
  slow_P = np.clip((np.arange(d // 2) - first) / (last - first or 0.001), 0, 1)
  slowdown = tuple((1 / (slow_P / growth + 1 - slow_P)).tolist())
  words: dict[str, Any] = {
    'rope_type': 'yarn', 'factor': float(growth), _ORIGINAL: float(original), 'beta_fast': fast, 'beta_slow': slow,
    'truncate': is_truncated,
  }  # fmt: skip
  if (of_tables := float(_yarn_factor(given.folder, given.keys, growth))) != _enlargement(growth):
    words['attention_factor'] = of_tables
  return Rope(given.theta, slowdown, of_tables, (*words.items(),))


def _enlargement(growth: float, scale: float = 1.0) -> float:
  """Compute by how much YaRN enlarges cosines and sines if the context grows by a factor."""
  return 1.0 if growth <= 1 else 0.1 * scale * math.log(growth) + 1


def _yarn_factor(folder: Path, keys: Keys, growth: float) -> float:
  scale, of_all = keys.get('mscale', 0), keys.get('mscale_all_dim', 0)
  if 'attention_factor' in keys:
    return keys['attention_factor']
  if scale and of_all:
    return _enlargement(growth, scale) / _enlargement(growth, of_all)
  if scale not in (0, 1) or of_all:
    raise ValueError(
      f'{folder}: mscale {scale} and mscale_all_dim {of_all} must go together: engines disagree on one alone.'
    )
  return _enlargement(growth)


def llama3_slowdown(
  theta: float, rotary_dim: int, factor: float, low: float, high: float, original_context: float
) -> tuple[float, ...]:
  """Compute how much slower each pair of a head turns in Llama 3.1 and later, for `factor` times the context.

  A pair that turned at least `high` times within the original context stays as it was, one that turned at most `low`
  times slows down by the factor, and between them the speed goes over linearly in the number of turns.
  """
  frequency_P = theta ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
  num_turns_P = original_context * frequency_P / (2 * math.pi)
  kept_P = np.clip((num_turns_P - low) / (high - low), 0, 1)
  return tuple((1 / (kept_P + (1 - kept_P) / factor)).tolist())


# Scaling -> (its settings, the tokens that texts may have) -> frequencies.
_KINDS: dict[str, Callable[[Settings, int | None], Rope]] = {
  'default': _default,
  'mrope': _default,  # sections for images; the positions of a text are equal in all of them
  'linear': _linear,
  'dynamic': _dynamic,
  'longrope': _longrope,
  'llama3': _llama3,
  'yarn': _yarn,
}
