"""Set up all tests: strict JAX, programs that compile fast and are shared, and the real model."""

import collections
import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import quick

MAX_MAPS = 12_000
NUM_FILES = 20  # listed by --durations
HEAVY = (
  'test_sharding', 'test_cost', 'test_decode', 'test_oracle', 'test_train', 'test_continuous', 'test_processes',
  'test_launch', 'test_notebooks', 'test_families', 'test_real', 'test_store', 'test_replay',
)  # fmt: skip
SMOKE = (  # beginnings of tests' names
  'tests/test_acceptance.py', 'tests/test_weights.py', 'tests/test_text.py', 'tests/test_tree_reference.py',
  'tests/test_conversations.py',
  'tests/test_decode.py::test_generate_matches_plain_decoding',
  'tests/test_decode.py::test_stream_matches_generate',
)  # fmt: skip

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')


def pytest_configure(config):
  """Share compiled programs among workers and processes that tests start, through a folder deleted at the end."""
  if not hasattr(config, 'workerinput') and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    folder = tempfile.mkdtemp(prefix='eagle_jax_programs_')
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    use_cache(folder)
  if hasattr(config.option, 'loadscopereorder'):
    config.option.loadscopereorder = False  # else xdist begins with the files of most tests


def pytest_collection_modifyitems(items):
  """Mark the smoke tests, and put files that take longest first: no worker is left with one of them at the end."""
  for item in items:
    if item.nodeid.startswith(SMOKE) and not any(item.iter_markers('slow')):
      item.add_marker('smoke')
  items.sort(key=lambda item: HEAVY.index(item.path.stem) if item.path.stem in HEAVY else len(HEAVY))


def pytest_terminal_summary(terminalreporter):
  """With --durations, also print the seconds of the files that take longest, summed over workers."""
  if not terminalreporter.config.option.durations:
    return
  seconds = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      seconds[getattr(report, 'nodeid', '').split('::')[0]] += getattr(report, 'duration', 0)
  terminalreporter.section('slowest files')
  for name, total in seconds.most_common(NUM_FILES):
    terminalreporter.write_line(f'{total:7.1f}s {name}')


def use_cache(folder):
  """Keep every compiled program in a folder, whatever its size: of this process and of those that it starts."""
  settings = {
    'jax_compilation_cache_dir': folder,
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  for name, value in settings.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


@pytest.fixture(scope='module')
def no_compilation_cache():
  """Switch the cache off, for tests of what is compiled again or cannot be read back."""
  before = jax.config.values['jax_compilation_cache_dir']
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_compilation_cache_dir', before)
  compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope='module')
def one_form(request):
  """Trace only an operation's form for CPUs. With the users' flags all forms are traced, as for described devices."""
  markers = {mark.name for mark in request.node.iter_markers()}
  is_quick = os.environ.get('XLA_FLAGS') == quick.FLAGS and jax.default_backend() == 'cpu'
  with pytest.MonkeyPatch.context() as patch:
    if is_quick and not markers & {'optimised', 'tpu_aot', 'gpu_aot'}:
      patch.setattr(jax.lax, 'platform_dependent', quick.cpu_form)
    yield


@pytest.fixture(autouse=True, scope='module')
def forget_programs():
  """Free compiled programs between modules once there are many: some thousands of them exhaust the memory maps of a
  process (Linux allows 65,530), and the compiler then dies of a segmentation fault."""
  yield
  maps = Path('/proc/self/maps')
  if not maps.exists() or len(maps.read_text().splitlines()) > MAX_MAPS:
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
