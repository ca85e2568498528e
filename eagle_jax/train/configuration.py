"""Configuration files of training runs: read, with one of their variants, and checked. See configs/."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

_NAMES = ('TARGET', 'DRAFTER', 'DATA', 'RECIPE', 'NUM_TRACED')
_KINDS = {kind.__name__: kind for kind in (Data, DrafterConfig, Objective, Recipe, TargetConfig)}


def read_configuration(path: str, variant: str | None = None, *, shapes_alone: bool = False) -> dict[str, Any]:
  """What a file says of a run, as `run.run` takes it; or, if `shapes_alone`, as `run.dry_run` does.

  Args:
    path: of a Python file.
    variant: one of its VARIANTS: by name, what each has otherwise.
    shapes_alone: DATA may be left out, and TARGET may be a `TargetConfig`.

  Raises:
    ValueError: something is missing, of another type, or bears a name that there is not.
  """
  config = _executed(path)
  variants = config.get('VARIANTS', {})
  if variant is not None and variant not in variants:
    raise ValueError(f'{path}: Unknown variant {variant!r}; the configuration has {sorted(variants)}.')
  changes = variants[variant] if variant else {}
  if unknown := sorted(changes.keys() - {*_NAMES}):
    raise ValueError(f'{path}: variant {variant!r} has {unknown}; {", ".join(_NAMES)} may be in one.')
  config = {name: value for name, value in {**config, **changes}.items() if name in _NAMES}
  types: dict[str, tuple[type, ...]] = {'TARGET': (str,), 'DRAFTER': (DrafterConfig,), 'RECIPE': (Recipe,)}
  if shapes_alone:
    types['TARGET'] = (str, TargetConfig)
  if 'DATA' in config or not shapes_alone:
    types['DATA'] = (dict,)
  for name, allowed in types.items():
    if not isinstance(config.get(name), allowed):
      came = f'a {type(config[name]).__name__}' if name in config else 'missing'
      raise ValueError(f'{path}: {name} is {came}; a {" or ".join(kind.__name__ for kind in allowed)} is needed.')
  return config


def _executed(path: str) -> dict[str, Any]:
  if Path(path).expanduser().is_dir():
    raise ValueError(f'{path} is a folder: give a configuration, such as those in configs/.')
  try:
    return runpy.run_path(str(Path(path).expanduser()))
  except (ValueError, ImportError) as error:
    raise ValueError(f'{path}: {error}') from error
  except TypeError as error:  # Recipe.__init__() got an unexpected keyword argument 'rows'
    kind = _KINDS.get(str(error).partition('.')[0])
    if kind is None:
      raise
    fields = ', '.join(field.name for field in dataclasses.fields(kind))
    raise ValueError(f'{path}: {error}. The fields of {kind.__name__} are {fields}.') from error
