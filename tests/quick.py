"""Make the suite's many small programs cheap to trace and to compile.

Imported by `conftest.py` and by the scripts that tests run in processes of their own, before JAX reads its flags.
"""

import gc
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import jax

# Programs that compile in half the time and run slower. Workers use the cores already: a program that is split for
# several threads only takes more memory maps. XLA dies of a flag that it does not know, so they are those of a release;
# with another one there are none. XLA_FLAGS that are set, if only to nothing, stand instead.
COMMON = (
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1'
)
BY_RELEASE = {'0.10': f'{COMMON} --xla_cpu_use_fusion_emitters=false', '0.12': COMMON}
FLAGS = BY_RELEASE.get('.'.join(importlib.metadata.version('jaxlib').split('.')[:2]))
if FLAGS is not None:
  os.environ.setdefault('XLA_FLAGS', FLAGS)

# XLA's own products, which every machine has. Set to nothing, the kernels that users with a C++ compiler have.
os.environ.setdefault('EAGLE_JAX_KERNELS', 'xla')

# Tracing makes many objects that stay. By its own thresholds, Python's collector spends a fifth of the suite's time on
# looking through them again.
gc.set_threshold(100_000, 20, 50)


def cpu_form(*arrays: Any, default: Callable | None = None, **forms: Callable) -> Any:
  """Replace `jax.lax.platform_dependent` in a process that compiles for CPUs alone.

  Only the form is traced that JAX would keep of all when the program is lowered, in half the time.
  """
  return forms.get('cpu', default)(*arrays)


def trace_one_form() -> None:
  """Trace one form in a script that runs on CPUs; with flags other than those above, all forms are traced."""
  if os.environ.get('XLA_FLAGS') == FLAGS:
    jax.lax.platform_dependent = cpu_form
