"""Products by kernels that the system's C++ compiler makes for the CPU at hand, from `cpu.cc`.

XLA:CPU makes a product of a few columns in tiles, and has none of bytes and floats. These kernels read each weight
once, as it is stored, and are called within XLA's programs, on its threads. They are compiled when first needed, into
the cache folder. Where that cannot be done, XLA's own forms serve, and one log line says why.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.device import cpu_features, precision
from eagle_jax.files import cache_folder, make_private, replacing
from eagle_jax.sharding import num_devices

SOURCE = Path(__file__).with_suffix('.cc')
VARIABLE = 'EAGLE_JAX_KERNELS'
CHOICES = 'compiled', 'xla'
COMPILERS = 'g++', 'clang++'
FLAGS = '-std=c++17', '-O3', '-march=native', '-ffp-contract=fast', '-shared', '-fPIC'
MAX_COLUMNS = 16  # that float32's kernels are faster for
_MAX_SECONDS = 120.0  # for the compiler, which takes five on an idle machine
_MAX_LINES = 20  # of what it says

log = logging.getLogger('eagle_jax')


def is_supported(weight_OI: jax.Array, x_IR: jax.Array) -> bool:
  """Return whether `multiply` takes these operands on this machine; compile the kernels when it first does.

  Of weights that a mesh splits, each device would gather all.
  """
  is_few = weight_OI.dtype == x_IR.dtype == jnp.float32 and x_IR.shape[1] <= MAX_COLUMNS
  is_whole = jax.sharding.get_abstract_mesh().size <= 1
  return (is_few or weight_OI.dtype == jnp.int8) and is_whole and ffi_name() is not None


def multiply(weight_OI: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return W x, [..., R] f32. How many columns stand together changes no bit of any.

  Args:
    weight_OI: [..., I], float32 or int8. With int8 each 1,024 inputs of a column are rounded to 16 bits, in a unit of
      their own.
    x_IR: of any float dtype.
  """
  return _call(weight_OI, x_IR) if weight_OI.dtype == jnp.int8 else _multiply_floats(weight_OI, x_IR)


@jax.custom_jvp
def _multiply_floats(weight_OI: jax.Array, x_IR: jax.Array) -> jax.Array:
  return _call(weight_OI, x_IR)


@_multiply_floats.defjvp
def _differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  product = functools.partial(jnp.tensordot, axes=1, precision=precision(jnp.float32))
  (weight_OI, x_IR), (d_weight_OI, d_x_IR) = primals, tangents
  return _multiply_floats(weight_OI, x_IR), product(d_weight_OI, x_IR) + product(weight_OI, d_x_IR)


def _call(weight_OI: jax.Array, x_IR: jax.Array, name: str | None = None) -> jax.Array:
  result = jax.ShapeDtypeStruct((*weight_OI.shape[:-1], x_IR.shape[1]), jnp.float32)
  return jax.ffi.ffi_call(name or str(ffi_name()), result)(weight_OI, x_IR.astype(jnp.float32))


def ffi_name() -> str | None:
  """Return the name that programs call the kernels by, which XLA then knows; None if XLA's own forms are to serve.

  Raises:
    ValueError: the environment variable names neither.
  """
  choice = os.environ.get(VARIABLE) or CHOICES[0]
  if choice not in CHOICES:
    raise ValueError(f'{VARIABLE} is {choice!r}; {" or ".join(map(repr, CHOICES))} is needed.')
  return _registered() if choice == 'compiled' and jax.default_backend() == 'cpu' else None


def in_use(mesh: Mesh | None) -> str:
  """Return which of `CHOICES` multiplies on a mesh, or on the default device without one."""
  return CHOICES[num_devices(mesh) > 1 or ffi_name() is None]


@functools.cache
def _registered() -> str | None:
  """Compile the kernels if they are not in the cache folder, and register and check them."""
  try:
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    name = f'eagle_matmul_{_digest(compiler)}'
    path = make_private(cache_folder() / 'kernels') / f'{name}.so'
    if not path.exists():
      _compile(compiler, path)
    _register(name, path)
    return name
  except StopIteration:
    reason = f'no C++ compiler is installed ({" or ".join(COMPILERS)})'
  except (OSError, ValueError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
    reason = str(error)
  log.warning("CPU kernels are not used, XLA's own products are: %s", reason)
  return None


def _digest(compiler: str) -> str:
  """Hash all that the machine code depends on."""
  says = subprocess.run([compiler, '--version'], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=True)
  machine = platform.machine(), platform.processor(), cpu_features()
  origin = SOURCE.read_text(encoding='utf-8'), says.stdout, FLAGS, machine, version('jaxlib')
  return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
  """Write the library. It appears in one step, so that several processes may do this at once.

  Raises:
    RuntimeError: the compiler fails, or takes too long.
  """
  log.info('compiling CPU kernels ...')
  with replacing(path) as temporary, tempfile.TemporaryFile() as output:
    command = [compiler, *FLAGS, '-isystem', jax.ffi.include_dir(), str(SOURCE), '-o', str(temporary)]
    # In a session of its own, for it starts processes that have to end with it.
    process = subprocess.Popen(
      command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
      code = process.wait(_MAX_SECONDS)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
      raise RuntimeError(f'{compiler} took more than {_MAX_SECONDS:g} seconds') from None
    if code:
      output.seek(0)
      lines = output.read().decode(errors='replace').splitlines()[:_MAX_LINES]
      raise RuntimeError('\n'.join([f'{compiler} failed with exit status {code}', *lines]))


def _register(name: str, path: Path) -> None:
  """Make the library's kernels known to XLA, and compare their products with NumPy's.

  Raises:
    OSError, AttributeError: it is no such library.
    RuntimeError: a product is wrong.
  """
  import ctypes  # here, for most processes need no library

  library = ctypes.CDLL(str(path))
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.eagle_matmul), platform='cpu')
  rng = np.random.default_rng(0)
  shape = 50, 2_123  # more than two of the blocks that share a unit, and no whole number of vectors
  weights = rng.standard_normal(shape, np.float32), rng.integers(-127, 128, shape, np.int8)
  x_IR, counts = rng.standard_normal((shape[1], 70), np.float32), (1, 2, 3, 4, 8, 11, 70)

  def products(weights: Any, x_IR: jax.Array) -> Any:
    return [[_call(weight_OI, x_IR[:, :count], name) for count in counts] for weight_OI in weights]

  with jax.ensure_compile_time_eval():  # not a part of the program that is being traced
    found = jax.device_get(jax.jit(products).lower(weights, x_IR).compile()(weights, x_IR))
  for weight_OI, by_count in zip(weights, found, strict=True):
    exact_OR = weight_OI.astype(np.float64) @ x_IR
    for count, y_OR in zip(counts, by_count, strict=True):
      is_near = np.abs(y_OR - exact_OR[:, :count]).max() < 1e-4 * np.abs(exact_OR).max()
      if not is_near or (y_OR != by_count[-1][:, :count]).any():
        raise RuntimeError(f'{path} multiplies {weight_OI.dtype} by {count} columns wrongly; delete it, or report this')
