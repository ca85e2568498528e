"""What the devices at hand are called, and what they can do at best: measured, since data sheets are optimistic."""

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
  """Kind of device; before it the sizes of a mesh; after it a CPU's number of cores, which decides what rows cost."""
  kind = jax.devices()[0].device_kind
  cores = f'-{num_cores()}cores' if is_cpu() else ''
  return 'x'.join([*map(str, mesh.shape.values() if mesh else ()), f'{kind}{cores}'])


def ran_on(mesh: Mesh | None = None) -> dict[str, Any]:
  """What a number was measured with: `device`, and `versions` of the packages that it may hang on."""
  packages = 'eagle_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint'
  return {'device': device_name(mesh), 'versions': {name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
  """None of what is imported from a folder, and was not installed."""
  try:
    return version(package)
  except PackageNotFoundError:
    return None


def is_cpu() -> bool:
  """Whether programs run on CPUs unless they say otherwise."""
  return jax.default_backend() == 'cpu'


def num_cores() -> int:
  """That this process may use; of the whole machine where the system does not say, as on macOS."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def memory_bytes() -> int | None:
  """Return the bytes of memory of all devices together; None where the system does not say."""
  devices = jax.devices()
  if devices[0].platform == 'cpu':  # all of them share the machine's
    names = 'SC_PAGE_SIZE', 'SC_PHYS_PAGES'
    is_known = all(name in getattr(os, 'sysconf_names', {}) for name in names)
    return math.prod(map(os.sysconf, names)) if is_known else None
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  return None if limit is None else limit * len(devices)


def cpu_features() -> str:
  """The instruction sets of the CPU, as Linux names them; '' elsewhere."""
  try:
    lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
  except OSError:
    return ''
  return next((line for line in lines if line.startswith(('flags', 'Features'))), '')


def num_free_nodes() -> int:
  """Guess how many tree nodes a target pass verifies in about the time of one: until arithmetic takes as long as
  reading the weights. Measured costs replace this guess."""
  return 4 if is_cpu() else 256


def precision(dtype: Any) -> jax.lax.Precision:
  """Of products: float32 is the truth, in full on every backend, no TF32 and no bf16 passes."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


@functools.cache
def flops_per_s(dtype: str) -> float:
  """FLOPs a second of one device in a large matrix product, a multiply-add being two: the best of a few."""
  size = 1024 if is_cpu() else 8192
  product = jax.jit(functools.partial(jnp.matmul, precision=precision(dtype)))
  square = jnp.ones((size, size), dtype)
  return 2 * size**3 / _seconds(product, square, square)


def bytes_per_s() -> float:
  """Bytes a second that one device reads from memory, in a product of a large matrix and a vector: the best of a few. A
  plain decoding step is little else."""
  rows, columns = (2**16, 2**11) if is_cpu() else (2**18, 2**12)  # 0.5 and 4 GiB
  matrix, vector = jnp.ones((rows, columns), jnp.float32), jnp.ones((columns, 1), jnp.float32)
  return matrix.nbytes / _seconds(jax.jit(jnp.matmul), matrix, vector)


def _seconds(run: Callable, *args: Any) -> float:
  """The least of a few runs, the first, which compiles, apart."""
  jax.block_until_ready(run(*args))

  def once() -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start

  return min(once() for _ in range(_TRIES))
