"""Compiled programs on disk, found without tracing.

JAX's compilation cache is asked with a lowered program, so tracing and lowering come first. Here a file is found by the
arguments; it holds a program of the same sources, versions, settings and machine, or is replaced. For a process that
writes a text and ends: it starts sooner than with JAX's cache, and instead of it, for XLA:CPU cannot write a program a
second time that it has read.

The files are pickles of machine code: whoever can write them can run code. So the folder belongs to its user alone.
"""

import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import stat
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import eagle_jax
from eagle_jax.device import cpu_features, ran_on
from eagle_jax.files import replacing

log = logging.getLogger('eagle_jax')

_FLAGS = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS'


class ProgramFolder:
  """A `decode.program.ProgramStore` in a folder: programs for one device, of this package's networks and policies.

  Changed source files are noticed; functions that the process itself replaced are not.
  """

  def __init__(self, folder: str | os.PathLike):
    """Make the folder, for its user alone, if it is not there.

    Raises:
      ValueError: it belongs to another user, or others can write to it.
    """
    self._folder = Path(folder).expanduser()
    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(self._folder)

  def read(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> Callable | None:
    """Find a program; see `decode.program.ProgramStore`."""
    place = self.place(name, leaves, static, key)
    return place.read() if place else None

  def write(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable, compiled: Any) -> None:
    """Keep a program, if it can be kept; see `decode.program.ProgramStore`."""
    if place := self.place(name, leaves, static, key):
      place.write(compiled)

  def place(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> 'Place | None':
    """Find where a program belongs; None where it is not kept.

    Args:
      name: the function's.
      leaves: its arguments' arrays.
      static: its static arguments.
      key: all that the program depends on; its `repr` says so.
    """
    devices = set().union(*(x.sharding.device_set for x in leaves if getattr(x, 'sharding', None)))
    settings = jax.config.values
    is_in_jax_cache = settings['jax_enable_compilation_cache'] and settings['jax_compilation_cache_dir']
    if is_in_jax_cache or len(devices) != 1 or not all(map(_is_ours, static.values())):
      return None
    (device,) = devices
    path = self._folder / f'{name}-{hashlib.sha256(repr((device.id, key)).encode()).hexdigest()[:32]}'
    flags = [os.environ.get(name) for name in _FLAGS]
    machine = ran_on(), device.client.platform_version, cpu_features()
    return Place(path, repr((source_digest(), machine, sorted(settings.items()), flags)), device)


class Place(NamedTuple):
  """Where a program lies on disk, or will."""

  path: Path
  origin: str  # what else the program depends on
  device: jax.Device

  def read(self) -> Callable | None:
    """Load the program, if it is there and has this origin."""
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
    """Write the program; one that cannot be kept runs all the same."""
    try:
      with replacing(self.path) as temporary:
        temporary.write_bytes(pickle.dumps((self.origin, *serialize(compiled))))
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      log.warning('%s is not kept (%s: %s)', self.path.name, type(error).__name__, error)


def require_private(folder: Path) -> None:
  """Raise a ValueError if somebody else owns the folder or can write to it: what lies in it is executed."""
  if not hasattr(os, 'getuid'):  # Windows has no such modes
    return
  found = folder.stat()
  if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    raise ValueError(
      f'{folder} belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}, and compiled programs in it '
      f'would be executed. Make it yours alone: chmod 700 {folder}, or name another in EAGLE_JAX_CACHE.'
    )


@functools.cache
def source_digest() -> str:
  """Hash the package's source files."""
  paths = sorted(Path(eagle_jax.__file__).parent.rglob('*.py'))
  return hashlib.sha256(b''.join(path.read_bytes() for path in paths)).hexdigest()


def _is_ours(value: Any) -> bool:
  """Do the sources and the `repr` cover all that a static argument does? Of numbers, names, tuples of them, and this
  package's dataclasses they do."""
  if dataclasses.is_dataclass(value):
    fields = (getattr(value, field.name) for field in dataclasses.fields(value))
    return type(value).__module__.startswith('eagle_jax.') and all(map(_is_ours, fields))
  if type(value) is tuple:
    return all(map(_is_ours, value))
  is_dtype = isinstance(value, np.dtype) or isinstance(getattr(value, 'dtype', None), np.dtype)  # jnp.float32 has one
  return is_dtype or isinstance(value, (int, float, str, type(None)))
