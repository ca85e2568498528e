"""Measured costs on disk: what `launch/cost.py` writes and `policy='auto'` finds."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.files import cache_folder, parse_json, replacing
from eagle_jax.policy.costs import Calibration, Costs, Parts, Rate, Times, Vocabulary

VERSION = 5  # of the stored form
SHIPPED = Path(__file__).parents[1] / 'assets' / 'costs'

log = logging.getLogger('eagle_jax')


def write(costs: Parts, folder: Path | None = None) -> Path:
  """Stores a measurement in place of an older one of the same device, pair, dtype and batch.

  `find` looks in the default folder of `Costs`; `Parts` alone, which say nothing of a gain, have another.
  """
  folder = folder or cache_folder() / ('costs' if isinstance(costs, Costs) else 'parts')
  name = f'{costs.device}_{costs.target}_{costs.drafter}_{costs.dtype}_{costs.batch}'
  path = folder / f'{"".join(c if c.isalnum() else "-" for c in name)}.json'
  with replacing(path) as temporary:
    temporary.write_text(json.dumps({'version': VERSION, **dataclasses.asdict(costs)}, indent=1), encoding='utf-8')
  log.info('written to %s', path)
  return path


def read(path: Path) -> Costs | None:
  """A stored measurement; None, with a warning, if it is of another version or damaged."""
  return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache
def _read(path: Path, modified: int) -> Costs | None:
  try:
    fields = parse_json(path.read_bytes(), str(path))
    if fields.pop('version') != VERSION:
      raise ValueError(f'not version {VERSION}')
    forms: dict[str, Callable[..., Any]] = {
      'times': Times.of,
      'policies': Rate,
      'modelled': Rate,
      'vocabularies': Vocabulary,
      'calibrations': Calibration.of,
    }
    fields |= {name: tuple(form(**one) for one in fields[name]) for name, form in forms.items()}
    if fields.get('lookup_weights') is not None:
      fields['lookup_weights'] = tuple(fields['lookup_weights'])
    return Costs(**fields)
  except (ValueError, KeyError, TypeError) as error:
    log.warning('%s holds no costs (%s): measure anew with launch/cost.py', path, error)
    return None


def find(*, device: str, target: str, drafter: str, dtype: str, batch: int) -> Costs | None:
  """What was measured here for the pair, at the nearest batch (see `Costs.at_batch`); else what is shipped for such a
  device; else None."""
  for folder in (cache_folder() / 'costs', SHIPPED):
    stored = [read(path) for path in sorted(folder.glob('*.json'))]
    alike = [c for c in stored if c and (c.device, c.target, c.drafter, c.dtype) == (device, target, drafter, dtype)]
    if alike:
      return min(alike, key=lambda costs: abs(np.log(costs.batch / batch)))
  return None
