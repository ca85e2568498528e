"""Compile programs ahead of time, so that compiling and running are timed separately."""

import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax

MAX_PROGRAMS = 16  # kept for one function

log = logging.getLogger('eagle_jax')


class ProgramStore(Protocol):
  """A store that keeps compiled programs between processes. `launch/store` is one on disk."""

  def read(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> Callable | None:
    """Find a program by its function's name, the arrays in its arguments, its static arguments, and a key of all."""
    ...

  def write(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable, compiled: Any) -> None:
    """Store a program, unless that is impossible; never raises."""
    ...


_store: ProgramStore | None = None


def use_store(store: ProgramStore | None) -> None:
  """Look up programs in a store from now on, and write new ones to it; None: use no store."""
  global _store
  _store = store


def _signature(x: Any) -> Hashable:
  return x.shape, x.dtype, getattr(x, 'sharding', None)


class Program:
  """A jitted function, compiled ahead of time once for each signature.

  The most recently used programs are kept. On a CPU each takes several hundred memory maps, of which Linux allows a
  process 65,530, and a compiler that gets none dies of a segmentation fault.
  """

  def __init__(self, jitted: Any):
    self._jitted = jitted
    self._compiled: OrderedDict[Hashable, Callable] = OrderedDict()

  def compile(self, *args: Any, **static: Any) -> tuple[Callable, float]:
    """Compile the function for these arguments, unless it is already compiled.

    Args:
      args: pytrees of arrays, or of `jax.ShapeDtypeStruct`.
      static: the jitted function's static arguments, by name.

    Returns:
      The compiled function, which takes `args` alone, and the seconds that compiling took: 0 if nothing was compiled.
    """
    if jax.config.values['jax_disable_jit']:  # to debug: nothing is compiled then
      return functools.partial(self._jitted, **static), 0.0
    leaves, treedef = jax.tree.flatten(args)
    mesh = jax.sharding.get_abstract_mesh()
    key = (treedef, tuple(map(_signature, leaves)), tuple(sorted(static.items(), key=lambda item: item[0])), mesh)
    if key in self._compiled:
      self._compiled.move_to_end(key)
      return self._compiled[key], 0.0
    name = self._jitted.__name__
    start = time.perf_counter()
    compiled = _store.read(name, leaves, static, key) if _store else None
    if compiled is None:
      log.info('compiling %s ...', name)
      compiled = self._jitted.lower(*args, **static).compile()
      if _store:
        _store.write(name, leaves, static, key, compiled)
    seconds = time.perf_counter() - start
    self._compiled[key] = compiled
    self._forget(len(self._compiled) - MAX_PROGRAMS)
    return compiled, seconds

  def forget(self) -> None:
    """Free all programs, including those that direct calls of the jitted function compiled."""
    self._forget(len(self._compiled))

  def _forget(self, count: int) -> None:
    """Free the `count` least recently used programs, if `count` is positive."""
    if count > 0:
      for _ in range(count):
        self._compiled.popitem(last=False)
      self._jitted.clear_cache()  # JAX keeps what it compiled for as long as the function lives


class Clock:
  """A clock that adds up the seconds of prefill, decoding and compiling, apart from each other."""

  def __init__(self):
    self.seconds = {'prefill_s': 0.0, 'decode_s': 0.0, 'compile_s': 0.0}

  def compile(self, program: Program, *args: Any, **static: Any) -> Callable:
    """Return the program compiled for these arguments, see `Program.compile`."""
    run, seconds = program.compile(*args, **static)
    self.seconds['compile_s'] += seconds
    return run

  @contextlib.contextmanager
  def adds_to(self, name: str) -> Iterator[None]:
    """Add the seconds that a block takes."""
    start = time.perf_counter()
    yield
    self.seconds[name] += time.perf_counter() - start
