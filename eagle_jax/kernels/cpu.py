"""Products, attention and norms by kernels that the system's C++ compiler makes for the CPU at hand, from `cpu.cc`.

XLA:CPU makes a product of a few columns in tiles, and has none of bytes and floats. Its attention reads every slot of
the cache, and slowly. These kernels read each weight and each committed entry once, as they are stored, and are called
within XLA's programs, on its threads. They are compiled when first needed, into the cache folder. Where that cannot be
done, XLA's own forms serve, and one log line says why.
"""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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

SOURCES = tuple(
  Path(__file__).with_name(name)
  for name in ('cpu.cc', 'cpu_attention.h', 'cpu_matmul.h', 'cpu_norm.h', 'cpu_threads.h')
)
VARIABLE = 'EAGLE_JAX_KERNELS'
CHOICES = 'compiled', 'xla'
COMPILERS = 'g++', 'clang++'
FLAGS = '-std=c++17', '-O3', '-march=native', '-ffp-contract=fast', '-shared', '-fPIC'
OPERATIONS = 'matmul', 'attention', 'norm'
MAX_COLUMNS = 16  # that float32's kernels are faster for
_MAX_SECONDS = 120.0  # for the compiler, which takes eight on an idle machine
_MAX_LINES = 20  # of what it says

log = logging.getLogger('eagle_jax')


def is_usable() -> bool:
  """Return whether kernels may be called in the program that is being traced; compile them when it is first asked.

  Of an array that a mesh splits, each device would gather all.
  """
  return jax.sharding.get_abstract_mesh().size <= 1 and library() is not None


def is_supported(weight_OI: jax.Array, x_IR: jax.Array) -> bool:
  """Return whether a product of this kind of weights, floats or packed ones, takes these operands on this machine."""
  is_few = weight_OI.dtype == x_IR.dtype == jnp.float32 and x_IR.shape[1] <= MAX_COLUMNS
  return (is_few or weight_OI.dtype in (jnp.int8, jnp.uint8)) and is_usable()


@jax.custom_jvp
def multiply(weight_OI: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return W x, [..., R] f32, of floats. How many columns stand together changes no bit of any."""
  return _multiply(weight_OI, _NOTHING, _NOTHING, x_IR)


@multiply.defjvp
def _differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  product = functools.partial(jnp.tensordot, axes=1, precision=precision(jnp.float32))
  (weight_OI, x_IR), (d_weight_OI, d_x_IR) = primals, tangents
  return multiply(weight_OI, x_IR), product(d_weight_OI, x_IR) + product(weight_OI, d_x_IR)


def multiply_bytes(value_OI: jax.Array, scale_O: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return the product with a matrix in 8 bits, [..., R] f32. How many columns stand together changes no bit of any.

  Args:
    value_OI: [..., I] i8.
    scale_O: [...] f32, a factor for each output. It is multiplied in here: of a product and the sum that follows, XLA
      makes one operation or two, by the number of columns.
    x_IR: of any float dtype. Each 1,024 inputs of a column are rounded to 16 bits, with their own scale.
  """
  return _multiply(value_OI, scale_O, _NOTHING, x_IR)


def multiply_groups(pair_Oi: jax.Array, scale_OG: jax.Array, offset_OG: jax.Array, x_IR: jax.Array) -> jax.Array:
  """Return the product with a matrix in 4 bits, [..., R] f32. How many columns stand together changes no bit of any.

  Args:
    pair_Oi, scale_OG, offset_OG: as in `int4.Grouped`.
    x_IR: of any float dtype. It is rounded as in `multiply_bytes`.
  """
  return _multiply(pair_Oi, scale_OG, offset_OG, x_IR)


_NOTHING = np.empty(0, np.float32)


def _multiply(weight_OI: Any, scale: Any, offset: Any, x_IR: jax.Array, digest: str | None = None) -> jax.Array:
  shape = *weight_OI.shape[:-1], x_IR.shape[1]
  return call('matmul', shape, weight_OI, scale, offset, x_IR.astype(jnp.float32), digest=digest)


def call(operation: str, shape: tuple[int, ...], *arrays: Any, digest: str | None = None) -> jax.Array:
  """Call a kernel, whose result is of float32, in the program that is being traced.

  Args:
    operation: 'matmul', 'attention' or 'norm'.
    shape: of the result.
    arrays: as `cpu.cc` takes them.
    digest: of the library; default the one in use.
  """
  name = f'eagle_{operation}_{digest or library()}'
  return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32))(*arrays)


def library() -> str | None:
  """Return the digest of the kernels' library, which XLA then knows; None if XLA's own forms are to serve.

  Raises:
    ValueError: the environment variable names neither.
  """
  choice = os.environ.get(VARIABLE) or CHOICES[0]
  if choice not in CHOICES:
    raise ValueError(f'{VARIABLE} must be {" or ".join(map(repr, CHOICES))}, got {choice!r}.')
  return _registered() if choice == 'compiled' and jax.default_backend() == 'cpu' else None


def in_use(mesh: Mesh | None) -> str:
  """Return which of `CHOICES` multiplies on a mesh, or on the default device without one."""
  return CHOICES[num_devices(mesh) > 1 or library() is None]


@functools.cache
def _registered() -> str | None:
  """Register the kernels; compile them if they are not in the cache folder, and check them once."""
  try:
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    digest = _digest(compiler)
    path = make_private(cache_folder() / 'kernels') / f'eagle_{digest}.so'
    if not path.exists():
      _compile(compiler, path)
    _register(digest, path)
    if not (checked := path.with_suffix('.checked')).exists():
      _check(digest, path)
      with contextlib.suppress(OSError):  # a folder that is not written to: checked again next time
        checked.touch()
    return digest
  except StopIteration:
    reason = f'no C++ compiler is installed ({" or ".join(COMPILERS)})'
  except (OSError, ValueError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
    reason = str(error)
  log.warning("CPU kernels are not used, XLA's own forms are: %s", reason)
  return None


def _digest(compiler: str) -> str:
  """Hash all that the machine code depends on."""
  says = subprocess.run([compiler, '--version'], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=True)
  machine = platform.machine(), platform.processor(), cpu_features()
  origin = [path.read_text(encoding='utf-8') for path in SOURCES], says.stdout, FLAGS, machine, version('jaxlib')
  return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
  """Write the library. It appears in one step, so that several processes may do this at once.

  Raises:
    RuntimeError: the compiler fails, or takes too long.
  """
  log.info('compiling CPU kernels ...')
  with replacing(path) as temporary, tempfile.TemporaryFile() as output:
    command = [compiler, *FLAGS, '-isystem', jax.ffi.include_dir(), str(SOURCES[0]), '-o', str(temporary)]
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


def _register(digest: str, path: Path) -> None:
  """Make the library's kernels known to XLA; OSError or AttributeError if it is no such library."""
  import ctypes  # here, for most processes need no library

  found = ctypes.CDLL(str(path))
  for operation in OPERATIONS:
    kernel = jax.ffi.pycapsule(getattr(found, f'eagle_{operation}'))
    jax.ffi.register_ffi_target(f'eagle_{operation}_{digest}', kernel, platform='cpu')


def _check(digest: str, path: Path) -> None:
  """Compare what the kernels compute with NumPy; RuntimeError if an operation is wrong."""
  with jax.ensure_compile_time_eval():  # not a part of the program that is being traced
    for what in (*_wrong_products(digest), *_wrong_attention(digest), *_wrong_norms(digest)):
      raise RuntimeError(f'{path} {what} wrongly; delete it, or report this')


def _run(function: Callable, *arrays: Any) -> Any:
  return jax.device_get(jax.jit(function).lower(*arrays).compile()(*arrays))


def _wrong_products(digest: str) -> Iterator[str]:
  """Say which products differ from NumPy's, or depend on the number of columns."""
  rng = np.random.default_rng(0)
  shape = 50, 2_123  # more than two of the blocks that share a scale, and no whole number of vectors
  scale_O, float_OI = rng.standard_normal(shape[0], np.float32), rng.standard_normal(shape, np.float32)
  code_OI, pair_Oi = rng.integers(-127, 128, shape, np.int8), rng.integers(0, 256, (shape[0], 1_072), np.uint8)
  scale_OG, offset_OG = rng.standard_normal((2, shape[0], 67), np.float32)
  number_OG32 = np.concatenate([x.reshape(shape[0], 67, 16) for x in (pair_Oi & 15, pair_Oi >> 4)], axis=2)
  grouped_OI = (number_OG32 * scale_OG[..., None].astype(np.float64) + offset_OG[..., None]).reshape(shape[0], -1)
  weights = (float_OI, _NOTHING, _NOTHING), (code_OI, scale_O, _NOTHING), (pair_Oi, scale_OG, offset_OG)
  exact = float_OI, code_OI * scale_O[:, None].astype(np.float64), grouped_OI
  x_IR, counts = rng.standard_normal((2_144, 70), np.float32), (1, 2, 3, 4, 8, 11, 70)

  def products(weights: Any, x_IR: jax.Array) -> Any:
    found = []
    for weight_OI, scale, offset in weights:
      width = weight_OI.shape[-1] * (2 if weight_OI.dtype == np.uint8 else 1)
      found.append([_multiply(weight_OI, scale, offset, x_IR[:width, :count], digest) for count in counts])
    return found

  for (weight_OI, *_), exact_OI, by_count in zip(weights, exact, _run(products, weights, x_IR), strict=True):
    exact_OR = exact_OI @ x_IR[: exact_OI.shape[1]].astype(np.float64)
    for count, y_OR in zip(counts, by_count, strict=True):
      is_near = np.abs(y_OR - exact_OR[:, :count]).max() < 1e-4 * np.abs(exact_OR).max()
      if not is_near or (y_OR != by_count[-1][:, :count]).any():
        yield f'multiplies {weight_OI.dtype} by {count} columns'


def _wrong_attention(digest: str) -> Iterator[str]:
  """Say so if attention differs from NumPy's; see `kernels.attention.Operands`."""
  rng = np.random.default_rng(0)
  B, G, J, T, M, S, K = 2, 1, 2, 3, 5, 320, 44
  shapes = (B, G, J, T, K), (B, G, M, K), (B, G, M, K), (B, G, S, K), (B, G, S, K)
  queries, new_keys, new_values, keys, values = (rng.standard_normal(shape, np.float32) for shape in shapes)
  mask_BTM, sinks_GJ = np.tri(T, M, 2, dtype=bool)[None].repeat(B, axis=0), np.ones((G, J), np.float32)
  length_B, oldest_BT = np.asarray([70, 300], np.int32), np.asarray([[0, 9, 0], [-2, 0, 200]], np.int32)
  arrays = queries, new_keys, new_values, mask_BTM, keys, values, length_B, oldest_BT, sinks_GJ
  found = _run(functools.partial(call, 'attention', queries.shape, digest=digest), *arrays)

  slot_S = np.arange(S)
  slots_BTS = (slot_S < length_B[:, None, None]) & (slot_S >= oldest_BT[..., None])
  sees_BTN = np.concatenate([slots_BTS, mask_BTM], axis=2)[:, None, None]
  keys_BGNK, values_BGNK = np.concatenate([keys, new_keys], axis=2), np.concatenate([values, new_values], axis=2)
  weight_BGJTN = np.exp(np.einsum('bgjtk,bgnk->bgjtn', queries, keys_BGNK, dtype=np.float64) / K**0.5) * sees_BTN
  total_BGJT1 = weight_BGJTN.sum(-1, keepdims=True) + np.exp(sinks_GJ)[..., None, None]
  exact = np.einsum('bgjtn,bgnk->bgjtk', weight_BGJTN / total_BGJT1, values_BGNK)
  if not np.abs(found - exact).max() < 1e-5:
    yield 'attends'


def _wrong_norms(digest: str) -> Iterator[str]:
  """Say so if norms differ from NumPy's, or depend on the number of columns."""
  rng = np.random.default_rng(0)
  x_HDR, scale_D, eps, counts = (
    rng.standard_normal((2, 37, 64), np.float32),
    np.arange(37, dtype=np.float32),
    0.25,
    (1, 3, 8),
  )

  def norms(x_HDR: jax.Array, scale_D: jax.Array) -> Any:
    shapes = [x_HDR[..., :count] for count in (*counts, 64)]
    return [call('norm', x.shape, x, scale_D, jnp.float32(eps), digest=digest) for x in shapes]

  *by_count, whole = _run(norms, x_HDR, scale_D)
  exact = x_HDR / np.sqrt(np.square(x_HDR, dtype=np.float64).mean(axis=1, keepdims=True) + eps) * scale_D[:, None]
  is_near = np.abs(whole - exact).max() < 1e-4
  if not is_near or any((y != whole[..., :count]).any() for count, y in zip(counts, by_count, strict=True)):
    yield 'normalises'
