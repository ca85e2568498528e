"""Compiling apart from running, so that neither is mistaken for the other."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from eagle_jax.decode import stored

MAX_PROGRAMS = 16  # that one function keeps

log = logging.getLogger('eagle_jax')


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
    """What runs `args` (called with `args` alone), and the seconds it took to make: 0 if it was there already.

    Args:
      args: pytrees of arrays, or of `jax.ShapeDtypeStruct`.
      static: the jitted function's static arguments, by name.
    """
    leaves, treedef = jax.tree.flatten(args)
    mesh = jax.sharding.get_abstract_mesh()
    key = (treedef, tuple(map(_signature, leaves)), tuple(sorted(static.items(), key=lambda item: item[0])), mesh)
    if key in self._compiled:
      self._compiled.move_to_end(key)
      return self._compiled[key], 0.0
    name = self._jitted.__name__
    start = time.perf_counter()
    place = stored.place(name, leaves, static, key)
    compiled = place.read() if place else None
    if compiled is None:
      log.info('compiling %s ...', name)
      compiled = self._jitted.lower(*args, **static).compile()
      if place:
        place.write(compiled)
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
