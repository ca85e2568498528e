"""Compiled programs on disk, found without tracing.

JAX's compilation cache is asked with a lowered program, so tracing and lowering come first. Here a file is found by the
arguments; it holds a program of the same sources, versions, settings and machine, or is replaced.
"""

import dataclasses
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from eagle_jax.device import cpu_features, ran_on
from eagle_jax.files import replacing

log = logging.getLogger('eagle_jax')

_PACKAGE = Path(__file__).parents[1]
_SOURCES = hashlib.sha256(b''.join(path.read_bytes() for path in sorted(_PACKAGE.rglob('*.py')))).hexdigest()
_FLAGS = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS'

_folder: Path | None = None


def keep_programs(folder: str | os.PathLike | None) -> None:
  """From now on `decode.generate` and `decode.stream` look for their programs in a folder, and keep new ones there.

  For a process that writes a text and ends: it starts sooner than with JAX's compilation cache, and instead of it, for
  XLA:CPU cannot write a program a second time that it has read. Changed source files are noticed, functions that the
  process itself replaced are not. Kept are programs for one device, of this package's networks, drafters and policies.

  Args:
    folder: one that only its user can write to, for the files hold machine code; made if need be. None ends it.
  """
  global _folder
  _folder = None if folder is None else Path(folder).expanduser()


class Place(NamedTuple):
  """Where a program lies on disk, or will."""

  path: Path
  origin: str  # what else the program depends on
  device: jax.Device

  def read(self) -> Callable | None:
    """The program, if it lies there and has this origin."""
    try:
      origin, program, in_tree, out_tree = pickle.loads(self.path.read_bytes())
      if origin != self.origin:
        return None
      log.info('reading %s ...', self.path.name.partition('-')[0])
      return deserialize_and_load(program, in_tree, out_tree, execution_devices=[self.device])
    except FileNotFoundError:
      return None
    except Exception as error:  # noqa: BLE001 whatever may be wrong with a file, its program can be compiled
      log.warning('%s holds no program (%s: %s)', self.path, type(error).__name__, error)
      return None

  def write(self, compiled: Any) -> None:
    """Puts a program there; one that cannot be kept runs all the same."""
    try:
      with replacing(self.path) as temporary:
        temporary.write_bytes(pickle.dumps((self.origin, *serialize(compiled))))
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      log.warning('%s is not kept (%s: %s)', self.path.name, type(error).__name__, error)


def place(name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> Place | None:
  """Where the program of a function belongs; None where it is not kept.

  Args:
    name: the function's.
    leaves: its arguments' arrays.
    static: its static arguments.
    key: what the arguments make of it; its `repr` says all of it.
  """
  devices = set().union(*(x.sharding.device_set for x in leaves if getattr(x, 'sharding', None)))
  settings = jax.config.values
  is_in_jax_cache = settings['jax_enable_compilation_cache'] and settings['jax_compilation_cache_dir']
  if _folder is None or is_in_jax_cache or len(devices) != 1 or not all(map(_is_ours, static.values())):
    return None
  (device,) = devices
  path = _folder / f'{name}-{hashlib.sha256(repr((device.id, key)).encode()).hexdigest()[:32]}'
  flags = [os.environ.get(name) for name in _FLAGS]
  machine = ran_on(), device.client.platform_version, cpu_features()
  return Place(path, repr((_SOURCES, machine, sorted(settings.items()), flags)), device)


def _is_ours(value: Any) -> bool:
  """Whether `_SOURCES` and its `repr` cover all that a static argument does: of numbers, names, tuples of them, and
  this package's dataclasses."""
  if dataclasses.is_dataclass(value):
    fields = (getattr(value, field.name) for field in dataclasses.fields(value))
    return type(value).__module__.startswith('eagle_jax.') and all(map(_is_ours, fields))
  if type(value) is tuple:
    return all(map(_is_ours, value))
  is_dtype = isinstance(value, np.dtype) or isinstance(getattr(value, 'dtype', None), np.dtype)  # jnp.float32 has one
  return is_dtype or isinstance(value, (int, float, str, type(None)))
