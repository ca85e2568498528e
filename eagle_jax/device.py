"""Names of the available devices, and their peak rates: measured, since data sheets are optimistic."""

import functools
import math
import os
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

_TRIES = 5


def device_name(mesh: Mesh | None = None) -> str:
  """Return the device kind, after the sizes of a mesh, before a CPU's number of cores, which its costs depend on."""
  kind = jax.devices()[0].device_kind
  cores = f'-{num_cores()}cores' if is_cpu() else ''
  return 'x'.join([*map(str, mesh.shape.values() if mesh else ()), f'{kind}{cores}'])


def ran_on(mesh: Mesh | None = None) -> dict[str, Any]:
  """Describe the environment of a measurement: `device`, and `versions` of the packages that may affect it."""
  packages = 'eagle_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint'
  return {'device': device_name(mesh), 'versions': {name: package_version(name) for name in packages}}


def package_version(package: str) -> str | None:
  """Return a package's version; None if it is imported from a folder and was not installed."""
  try:
    return version(package)
  except PackageNotFoundError:
    return None


def is_cpu() -> bool:
  """Return whether the CPU is the default backend."""
  return jax.default_backend() == 'cpu'


def num_cores() -> int:
  """Count the cores that this process may use; those of the machine where the system does not say, as on macOS."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def memory_bytes() -> int | None:
  """Return the bytes of memory of all devices together; None if the system does not report them."""
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # all of them share the machine's memory
    names = 'SC_PAGE_SIZE', 'SC_PHYS_PAGES'
    is_known = all(name in getattr(os, 'sysconf_names', {}) for name in names)
    return math.prod(map(os.sysconf, names)) if is_known else None
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  return None if limit is None else limit * len(devices)


def free_memory_bytes() -> int | None:
  """Return the bytes of memory that are free for this process's devices; None if the system does not report them."""
  devices = jax.local_devices()
  if devices[0].platform == 'cpu':
    line = _first_line('/proc/meminfo', 'MemAvailable:')
    return 1024 * int(line.split()[1]) if line else None
  stats = [device.memory_stats() or {} for device in devices]
  if any('bytes_limit' not in each for each in stats):
    return None
  return sum(each['bytes_limit'] - each['bytes_in_use'] for each in stats)


def cpu_features() -> str:
  """Return the CPU's instruction sets, as Linux names them; '' on other systems."""
  return _first_line('/proc/cpuinfo', 'flags', 'Features')


def _first_line(path: str, *beginnings: str) -> str:
  """Return the first line of a file that begins with one of these; '' if there is none, or no such file."""
  try:
    lines = Path(path).read_text(encoding='utf-8').splitlines()
  except OSError:
    return ''
  return next((line for line in lines if line.startswith(beginnings)), '')


def num_free_nodes() -> int:
  """Guess how many nodes a target pass verifies in about the time of one, before arithmetic outweighs reading weights.

  Measured costs replace this guess.
  """
  return 4 if is_cpu() else 256


def precision(dtype: Any) -> jax.lax.Precision:
  """Return the precision of products: full float32 on every backend, without TF32 or bfloat16 passes."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


@functools.cache
def flops_per_s(dtype: str) -> float:
  """Measure one device's FLOPs a second in a large matrix product, a multiply-add being two: the best of a few runs."""
  size = 1024 if is_cpu() else 8192
  product = jax.jit(functools.partial(jnp.matmul, precision=precision(dtype)))
  square = jnp.ones((size, size), dtype)
  return 2 * size**3 / _seconds(product, square, square)


def bytes_per_s() -> float:
  """Measure the bytes a second that one device reads from memory, in a matrix-vector product: the best of a few runs.

  A plain decoding step is bound by this rate.
  """
  height, width = (2**16, 2**11) if is_cpu() else (2**18, 2**12)  # 0.5 and 4 GiB
  matrix, vector = jnp.ones((height, width), jnp.float32), jnp.ones((width, 1), jnp.float32)
  return matrix.nbytes / _seconds(jax.jit(jnp.matmul), matrix, vector)


def _seconds(run: Callable, *args: Any) -> float:
  """Time a few runs after one that compiles, and return the shortest, in seconds."""
  jax.block_until_ready(run(*args))

  def once() -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start

  return min(once() for _ in range(_TRIES))
