"""Read and check the configuration files of training runs and their variants. See configs/."""

import dataclasses
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.config import BlockConfig, DrafterConfig, Eagle3Config, EagleTapsConfig, MedusaConfig, TargetConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

_NAMES = ('TARGET', 'DRAFTER', 'DATA', 'RECIPE', 'NUM_TRACED')
DRAFTERS = DrafterConfig, EagleTapsConfig, BlockConfig, Eagle3Config, MedusaConfig  # which can be trained
_KINDS = {kind.__name__: kind for kind in (Data, *DRAFTERS, Objective, Recipe, TargetConfig)}


def read_configuration(
  path: str, variant: str | None = None, *, shapes_alone: bool = False, second_stage: bool = False
) -> dict[str, Any]:
  """Read what a file says of a run, as `run.run` takes it; or, if `shapes_alone`, as `run.dry_run` does.

  Args:
    path: of a Python file.
    variant: the name of one of its VARIANTS, each a dict of the names that it changes.
    shapes_alone: DATA may be left out, and TARGET may be a `TargetConfig`.
    second_stage: set `Recipe.second_stage`, whatever the file says.

  Raises:
    ValueError: the file raises an error; or something is missing, of another type, or has an unknown name or one that
      is no plain folder name.
  """
  config = _execute(path)
  variants = config.get('VARIANTS', {})
  if not isinstance(variants, dict) or not all(isinstance(changes, dict) for changes in variants.values()):
    raise ValueError(f'{path}: VARIANTS is {variants!r:.80}; a dict of dicts is needed.')
  if variant is not None and variant not in variants:
    raise ValueError(f'{path}: Unknown variant {variant!r}; the configuration has {sorted(map(str, variants))}.')
  _require_folder_names(f'{path}: VARIANTS', variants)
  changes = variants[variant] if variant else {}
  if unknown := sorted(map(str, changes.keys() - {*_NAMES})):
    raise ValueError(f'{path}: variant {variant!r} has {unknown}; {", ".join(_NAMES)} may be in one.')
  config = {name: value for name, value in {**config, **changes}.items() if name in _NAMES}
  types: dict[str, tuple[type, ...]] = {'TARGET': (str,), 'DRAFTER': DRAFTERS, 'RECIPE': (Recipe,)}
  if shapes_alone:
    types['TARGET'] = (str, TargetConfig)
  if 'DATA' in config or not shapes_alone:
    types['DATA'] = (dict,)
  if 'NUM_TRACED' in config:
    types['NUM_TRACED'] = (int,)
  for name, allowed in types.items():
    if type(config.get(name)) not in allowed:  # other kinds of drafters are subclasses of those that can be trained
      found = f'a {type(config[name]).__name__}' if name in config else 'missing'
      raise ValueError(f'{path}: {name} is {found}; a {" or ".join(kind.__name__ for kind in allowed)} is needed.')
  if 'DATA' in config:
    require_data(config['DATA'], source=f'{path}: DATA')
  if second_stage:
    config['RECIPE'] = dataclasses.replace(config['RECIPE'], second_stage=True)
  return config


def require_data(data: Mapping[str, Data], source: str = 'DATA') -> None:
  """Raise a ValueError unless each value is a `Data`, all store features or none, and each name is that of a folder."""
  if bad := {name: value for name, value in data.items() if not isinstance(value, Data)}:
    raise ValueError(f'{source} holds {bad!r:.80}; a Data for each name is needed.')
  _require_folder_names(source, data)
  stored = {name: kind.stores_features for name, kind in data.items()}
  if len({*stored.values()}) != 1:
    raise ValueError(
      f'{source}: stores_features is {stored}; one kind of data at least, and one value for all, is needed.'
    )


def _require_folder_names(source: str, names: Mapping[str, Any]) -> None:
  """Raise a ValueError if a name would lead out of the run folder: each becomes a folder in it."""
  for name in names:
    if not isinstance(name, str) or name in ('', '.', '..') or {*'/\\\0'} & {*name}:
      raise ValueError(f'{source} has the name {name!r}; a plain folder name, without slashes, is needed.')


def _execute(path: str) -> dict[str, Any]:
  """Run a configuration file; return its names. An error of the file's is a ValueError that says the line."""
  file = str(Path(path).expanduser())
  if Path(file).is_dir():
    raise ValueError(f'{path} is a folder: give a configuration, such as those in configs/.')
  try:
    return runpy.run_path(file)
  except (OSError, SyntaxError):  # these name the file
    raise
  except Exception as error:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f'{path}, line {lines[-1]}' if lines else path
    kind = _KINDS.get(str(error).partition('.')[0])  # Recipe.__init__() got an unexpected keyword argument 'rows'
    if isinstance(error, TypeError) and kind is not None:
      fields = ', '.join(field.name for field in dataclasses.fields(kind))
      raise ValueError(f'{place}: {error}. The fields of {kind.__name__} are {fields}.') from error
    reason = str(error) if isinstance(error, ValueError) else f'{type(error).__name__}: {error}'
    raise ValueError(f'{place}: {reason}') from error
