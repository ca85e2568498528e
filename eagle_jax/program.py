"""Compiling apart from running, so that neither is mistaken for the other."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

log = logging.getLogger('eagle_jax')


def _signature(x: Any) -> Hashable:
  return x.shape, x.dtype, getattr(x, 'sharding', None)


class Program:
  """A jitted function, compiled ahead of time once a signature."""

  def __init__(self, jitted: Any):
    self._jitted = jitted
    self._compiled: dict[Hashable, Callable] = {}

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
      return self._compiled[key], 0.0
    log.info('compiling %s ...', self._jitted.__name__)
    start = time.perf_counter()
    self._compiled[key] = self._jitted.lower(*args, **static).compile()
    return self._compiled[key], time.perf_counter() - start
