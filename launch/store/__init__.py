"""Store compiled programs on disk, and find them without tracing.

JAX's compilation cache is keyed by the lowered program, so it needs tracing and lowering first. Here a file is found by
the arguments; if its sources, versions, settings or machine differ, it is replaced. A process that writes one text and
ends starts sooner this way than with JAX's cache. The two exclude each other, since XLA:CPU cannot serialize a program
that it has loaded.

The files are pickles of machine code: whoever can write them can run code. So the folder belongs to its user alone.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import eagle_jax
from eagle_jax.device import cpu_features, ran_on
from eagle_jax.files import cache_folder, make_private, replacing
from eagle_jax.kernels import cpu

log = logging.getLogger('eagle_jax')

_FLAGS = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS'


class ProgramFolder:
  """A `decode.program.ProgramStore` in a folder, for programs on one device with this package's networks and policies.

  Changed source files are noticed; functions that were replaced within the process are not.
  """

  def __init__(self, folder: str | os.PathLike):
    """Create the folder, accessible to its user alone, unless it exists.

    Raises:
      ValueError: it belongs to another user, or others can write to it.
    """
    self._folder = make_private(Path(folder).expanduser())
    self._begun_ns = time.time_ns()  # the time of the files that are used from now on
    self._ahead: dict[Place, Future[Callable | None]] = {}

  def read_ahead(self) -> None:
    """Begin to read the programs that were used last, beside whatever comes next.

    Most of it is done without Python's lock. If they are not the ones that will be used, it was in vain.
    """
    if _is_left_to_jax():
      return
    stats: dict[Path, os.stat_result] = {}
    with contextlib.suppress(OSError):  # what cannot be read ahead is read later, or compiled
      stats |= {path: path.stat() for path in self._folder.glob('[!.]*')}  # no file that is being written
    newest = max((stat.st_mtime_ns for stat in stats.values()), default=0)
    paths = [path for path, stat in stats.items() if stat.st_mtime_ns == newest]
    threads, device = ThreadPoolExecutor(1), jax.devices()[0]
    origin = _origin(device)
    for path in sorted(paths, key=lambda path: stats[path].st_size):  # small ones come first in decoding
      place = Place(path, origin, device)
      self._ahead[place] = threads.submit(place.read)

  def read(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> Callable | None:
    """Find a program; see `decode.program.ProgramStore`."""
    if (place := self.place(name, leaves, static, key)) is None:
      return None
    program = self._ahead.pop(place).result() if place in self._ahead else place.read()
    if program:
      place.used(self._begun_ns)
    return program

  def write(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable, compiled: Any) -> None:
    """Store a program, unless that is impossible; see `decode.program.ProgramStore`."""
    if (place := self.place(name, leaves, static, key)) and place.write(compiled):
      place.used(self._begun_ns)

  def place(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> 'Place | None':
    """Find the file for a program; None if the program is not stored.

    Args:
      name: of the function.
      leaves: the arrays in its arguments.
      static: its static arguments.
      key: everything that the program depends on, distinguished by its `repr`.
    """
    devices = set().union(*(x.sharding.device_set for x in leaves if getattr(x, 'sharding', None)))
    if _is_left_to_jax() or len(devices) != 1 or not all(map(_is_ours, static.values())):
      return None
    (device,) = devices
    path = self._folder / f'{name}-{hashlib.sha256(repr((device.id, key)).encode()).hexdigest()[:32]}'
    return Place(path, _origin(device), device)


@functools.cache
def programs() -> ProgramFolder:
  """Open the folder of this user's programs."""
  return ProgramFolder(cache_folder() / 'programs')


class Place(NamedTuple):
  """The file of one program."""

  path: Path
  origin: str  # identifies sources, versions, settings and machine that the program was compiled with
  device: jax.Device

  def read(self) -> Callable | None:
    """Load the program, if the file exists and has this origin."""
    try:
      origin, program, in_tree, out_tree = pickle.loads(self.path.read_bytes())
      if origin != self.origin:
        return None
      log.info('reading %s ...', self.path.name.partition('-')[0])
      return deserialize_and_load(program, in_tree, out_tree, execution_devices=[self.device])
    except FileNotFoundError:
      return None
    except Exception as error:  # noqa: BLE001 whatever is wrong with a file, its program can be compiled again
      log.warning('ignoring %s, which holds no usable program (%s: %s)', self.path, type(error).__name__, error)
      return None

  def write(self, compiled: Any) -> bool:
    """Write the program; if that is impossible, log a warning and return False: it can run without being stored."""
    try:
      with replacing(self.path) as temporary:
        temporary.write_bytes(pickle.dumps((self.origin, *serialize(compiled))))
      return True
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      log.warning('%s is not stored (%s: %s)', self.path.name, type(error).__name__, error)
      return False

  def used(self, at_ns: int) -> None:
    """Give the file a time, if that is possible; see `ProgramFolder.read_ahead`."""
    with contextlib.suppress(OSError):
      os.utime(self.path, ns=(at_ns, at_ns))


def _is_left_to_jax() -> bool:
  """Return whether JAX's own cache is in use."""
  settings = jax.config.values
  return bool(settings['jax_enable_compilation_cache'] and settings['jax_compilation_cache_dir'])


def _origin(device: jax.Device) -> str:
  flags = [os.environ.get(name) for name in _FLAGS]
  kernels = cpu.library()  # which a program that calls them can be read with only if XLA knows them
  machine = ran_on(), device.client.platform_version, cpu_features(), kernels
  return repr((source_digest(), machine, sorted(jax.config.values.items()), flags))


@functools.cache
def source_digest() -> str:
  """Hash the package's source files."""
  paths = sorted(Path(eagle_jax.__file__).parent.rglob('*.py'))
  return hashlib.sha256(b''.join(path.read_bytes() for path in paths)).hexdigest()


def _is_ours(value: Any) -> bool:
  """Return whether the sources and the `repr` determine this static argument.

  They do for numbers, names, tuples of them, and this package's dataclasses.
  """
  if dataclasses.is_dataclass(value):
    fields = (getattr(value, field.name) for field in dataclasses.fields(value))
    return type(value).__module__.startswith('eagle_jax.') and all(map(_is_ours, fields))
  if type(value) is tuple:
    return all(map(_is_ours, value))
  is_dtype = isinstance(value, np.dtype) or isinstance(getattr(value, 'dtype', None), np.dtype)  # jnp.float32 has one
  return is_dtype or isinstance(value, (int, float, str, type(None)))
