"""Strict JAX for all tests, and the real model for those that want it."""

import gc
import importlib.metadata
import os

import jax
import pytest

# Most of the suite's time is the compiler's: so it makes slower programs, in half the time. XLA_FLAGS that are set, if
# only to nothing, stand instead. XLA dies of a flag that it does not know, and these are of certain releases.
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false')

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')


@pytest.fixture(autouse=True, scope='module')
def forget_programs():
  """Frees each module's compiled programs: some thousands of them exhaust the memory maps of a process (Linux allows
  65,530), and the compiler then dies of a segmentation fault."""
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope='session')
def smollm2():
  """The real SmolLM2-135M-Instruct in float32. EAGLE_JAX_REQUIRE_MODEL=1 turns a skip into a failure."""
  from eagle_jax import hub

  try:
    return hub.load_target('smollm2-135m-instruct')
  except ValueError as error:
    if os.environ.get('EAGLE_JAX_REQUIRE_MODEL') == '1':
      raise
    pytest.skip(f'the real model is not to be had: {error}')
