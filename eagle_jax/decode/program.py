"""Compile apart from running, so that each can be timed and neither is mistaken for the other."""

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax

MAX_PROGRAMS = 16  # that one function keeps

log = logging.getLogger('eagle_jax')


class ProgramStore(Protocol):
  """Keeps compiled programs beyond the process. `launch/store` is one on disk."""

  def read(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable) -> Callable | None:
    """Find a program by its function's name, its arguments' arrays, its static arguments, and a key of them all."""
    ...

  def write(self, name: str, leaves: Sequence[Any], static: dict[str, Any], key: Hashable, compiled: Any) -> None:
    """Keep a program, if it can be kept; never raises for one that cannot."""
    ...


_store: ProgramStore | None = None


def use_store(store: ProgramStore | None) -> None:
  """Look for programs in a store from now on, and keep new ones there; None: in no store."""
  global _store
  _store = store


def _signature(x: Any) -> Hashable:
  return x.shape, x.dtype, getattr(x, 'sharding', None)


class Program:
  """A jitted function, compiled ahead of time once a signature.

  The programs used last are kept. On a CPU each takes several hundred memory maps, of which Linux allows a process
  65,530, and the compiler that gets none dies of a segmentation fault.
  """

  def __init__(self, jitted: Any):
    self._jitted = jitted
    self._compiled: OrderedDict[Hashable, Callable] = OrderedDict()

  def compile(self, *args: Any, **static: Any) -> tuple[Callable, float]:
    """Return what runs `args` (called with `args` alone), and the seconds it took to make: 0 if it was there already.

    Args:
      args: pytrees of arrays, or of `jax.ShapeDtypeStruct`.
      static: the jitted function's static arguments, by name.
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
    """Frees all programs, those too that the jitted function made when it was called directly."""
    self._forget(len(self._compiled))

  def _forget(self, count: int) -> None:
    """Frees the `count` programs unused for longest, if that is any."""
    if count > 0:
      for _ in range(count):
        self._compiled.popitem(last=False)
      self._jitted.clear_cache()  # JAX keeps what it compiled for as long as the function lives
