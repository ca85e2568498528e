"""Read and write measured costs: `launch/cost.py` writes them and `policy='auto'` looks them up."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.files import cache_folder, parse_json, replacing
from eagle_jax.models.rounded import default_compute_dtype
from eagle_jax.policy.c2t import Classifier
from eagle_jax.policy.calibrated import AcceptanceTable
from eagle_jax.policy.costs import Calibration, Costs, Rate, StepTimes, Timings, Vocabulary

VERSION = 5  # of the stored form
SHIPPED = Path(__file__).parents[1] / 'assets' / 'costs'

log = logging.getLogger('eagle_jax')


def write(costs: Timings, folder: Path | None = None) -> Path:
  """Store a measurement, replacing an older one of the same device, pair, dtypes and batch; return its path.

  `find` looks in the default folder of `Costs`. `Timings` alone, which hold no policies, go to another folder.
  """
  folder = folder or cache_folder() / ('costs' if isinstance(costs, Costs) else 'parts')
  parts = [costs.device, costs.target, costs.drafter, costs.dtype, costs.batch]
  parts += [costs.kernels] if costs.kernels != 'xla' else []
  parts += [costs.compute_dtype] if costs.compute_dtype not in (None, default_compute_dtype()) else []
  name = '_'.join(map(str, parts))
  path = folder / f'{"".join(c if c.isalnum() else "-" for c in name)}.json'
  with replacing(path) as temporary:
    temporary.write_text(json.dumps({'version': VERSION, **dataclasses.asdict(costs)}, indent=1), encoding='utf-8')
  log.info('written to %s', path)
  return path


def read(path: Path) -> Costs | None:
  """Read a stored measurement; return None, with a warning, if it is damaged or of another version."""
  return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache
def _read(path: Path, modified: int) -> Costs | None:
  try:
    fields = parse_json(path.read_bytes(), str(path))
    if not isinstance(fields, dict) or fields.pop('version', None) != VERSION:
      raise ValueError(f'its version is not {VERSION}')
    forms: dict[str, Callable[..., Any]] = {
      'times': StepTimes.of,
      'policies': _rate,
      'modelled': _rate,
      'vocabularies': Vocabulary,
      'calibrations': Calibration.of,
    }
    fields |= {name: tuple(form(**one) for one in fields[name]) for name, form in forms.items()}
    fields.pop('lookup_weights', None)  # that older files hold
    for name, kind in (('classifier', Classifier), ('acceptance_table', AcceptanceTable)):
      if fields.get(name) is not None:
        fields[name] = kind(*fields[name])
    return Costs(**fields)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    log.warning('ignoring %s, which holds no usable costs (%s): measure again with launch/cost.py', path, error)
    return None


def _rate(**fields: Any) -> Rate:
  """Convert from JSON; raise an error unless it is of a policy that a program can be compiled for."""
  rate = Rate(**fields)
  hash(rate.policy)
  return rate


def find(*, device: str, kernels: str, target: str, drafter: str, dtype: str, floats: str, batch: int) -> Costs | None:
  """Find the costs of a device, pair and dtypes at the nearest batch size; see `Costs.at_batch`.

  `dtype` is that of the target's weights, `floats` that of activations. Costs measured on this machine come before
  those shipped with the package, and of each those measured with the same kernels before others; None if there are
  none.
  """
  for folder in (cache_folder() / 'costs', SHIPPED):
    stored = [read(path) for path in sorted(folder.glob('*.json'))]
    asked = device, target, drafter, dtype, floats
    alike = [c for c in stored if c and (c.device, c.target, c.drafter, c.dtype, c.floats) == asked]
    if alike:
      return min(alike, key=lambda costs: (costs.kernels != kernels, abs(np.log(costs.batch / batch))))
  return None
