"""Programs on disk: what is found runs as what was compiled, and nothing else is found."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import store

import tiny
from eagle_jax import decode
from eagle_jax.decode.program import Program, use_store
from eagle_jax.policy.trees import Chain

TESTS = Path(__file__).parent


@pytest.fixture
def folder(tmp_path, no_compilation_cache):
  """Where programs are kept, whatever is set outside."""
  use_store(store.ProgramFolder(tmp_path / 'programs'))
  yield tmp_path / 'programs'
  use_store(None)


def was_found(x, *, factor=2):
  """Return whether a process that starts now finds the program that multiplies; check that it multiplies anyway."""
  traced = []

  def multiply(tree, *, factor):
    traced.append(factor)
    return jax.tree.map(lambda x: factor * x, tree)

  run, seconds = Program(jax.jit(multiply, static_argnames='factor', donate_argnums=0)).compile({'x': x}, factor=factor)
  assert seconds > 0
  donated = jnp.copy(x)
  np.testing.assert_array_equal(run({'x': donated})['x'], factor * x)
  assert donated.is_deleted()
  return not traced


def test_a_program_is_found_by_its_arguments(folder):
  one, two = jnp.ones(3), jnp.ones((2, 3))
  assert [was_found(one), was_found(one)] == [False, True]
  assert [was_found(two), was_found(two)] == [False, True]
  assert [was_found(one, factor=3), was_found(one, factor=3)] == [False, True]
  assert [was_found(one.astype(jnp.int32)), was_found(one)] == [False, True]
  assert len(list(folder.iterdir())) == 4


def changed_sources(monkeypatch):
  monkeypatch.setattr(store, 'source_digest', lambda: 'others')


def changed_setting(monkeypatch):
  values = jax.config.values | {'jax_default_matmul_precision': 'float32'}
  monkeypatch.setattr(type(jax.config), 'values', values)


def changed_flag(monkeypatch):
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--of_no_account')


def changed_machine(monkeypatch):
  monkeypatch.setattr(store, 'cpu_features', lambda: 'flags: fewer')


@pytest.mark.parametrize('change', [changed_sources, changed_setting, changed_flag, changed_machine])
def test_a_program_of_another_origin_is_replaced(folder, change, monkeypatch):
  x = jnp.ones(3)
  was_found(x)
  with monkeypatch.context() as context:
    change(context)
    assert [was_found(x), was_found(x)] == [False, True]
  assert not was_found(x)
  assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize('damage', [lambda data: data[:5000], lambda data: b'text', lambda data: b''])
def test_a_damaged_file_is_replaced(folder, damage, caplog):
  x = jnp.ones(3)
  was_found(x)
  (path,) = folder.iterdir()
  path.write_bytes(damage(path.read_bytes()))
  assert [was_found(x), was_found(x)] == [False, True]
  assert caplog.text.count('holds no usable program') == 1


def test_what_cannot_be_kept_runs(folder, caplog):
  folder.rmdir()
  folder.write_text('a file where the folder should be')
  assert not was_found(jnp.ones(3))
  assert caplog.text.count('is not stored') == 1


def begin(folder):
  """Use the folder as a process does that starts now; return what it reads ahead."""
  programs = store.ProgramFolder(folder)
  use_store(programs)
  programs.read_ahead()
  return programs._ahead


def test_what_was_used_last_is_read_ahead(folder, monkeypatch):
  one, two = jnp.ones(3), jnp.ones((2, 3))
  assert begin(folder) == {}
  assert [was_found(one), was_found(two)] == [False, False]
  ahead = begin(folder)
  assert [future.result() is not None for future in ahead.values()] == [True, True]
  with monkeypatch.context() as context:
    context.setattr(store.Place, 'read', None)
    assert was_found(one)
  assert len(ahead) == 1
  assert was_found(one)  # read again
  ((place, _),) = begin(folder).items()
  assert was_found(two)
  ((other, _),) = begin(folder).items()
  assert other.path != place.path


def test_of_what_is_read_ahead_another_origin_is_not_used(folder, monkeypatch):
  x = jnp.ones(3)
  was_found(x)
  begin(folder)
  changed_sources(monkeypatch)
  assert not was_found(x)


def test_damage_is_noticed_ahead(folder, caplog):
  x = jnp.ones(3)
  was_found(x)
  (path,) = folder.iterdir()
  path.write_bytes(b'text')
  begin(folder)
  assert not was_found(x)
  assert caplog.text.count('holds no usable program') == 1


class LongerChain(Chain):
  """A policy of a user, whose code may change at any time."""


class Named(NamedTuple):
  """An object whose `repr` shows its fields, and not what it does."""

  max_depth: int = 2


def test_what_is_not_kept(folder):
  leaf, programs = jnp.zeros(1), store.ProgramFolder(folder)
  assert programs.place('f', [leaf], {'n': 1}, ()) is not None
  _, spec = decode.build(tiny.target(), tiny.drafter(), policy=LongerChain(3))
  assert programs.place('f', [leaf], {'spec': spec}, ()) is None
  assert programs.place('f', [leaf], {'spec': dataclasses.replace(spec, policy=Chain(3))}, ()) is not None
  assert programs.place('f', [leaf], {'spec': dataclasses.replace(spec, policy=Named())}, ()) is None
  assert programs.place('f', [leaf], {'f': jnp.sum}, ()) is None
  assert programs.place('f', [leaf], {'sizes': (1, 2.0, None, 'all', jnp.float32)}, ()) is not None
  elsewhere = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set={0, 1}))
  assert programs.place('f', [leaf, elsewhere], {}, ()) is None
  jax.config.update('jax_compilation_cache_dir', str(folder))
  assert programs.place('f', [leaf], {'n': 1}, ()) is None


@pytest.mark.parametrize('mode', [0o770, 0o707, 0o720])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
  folder = tmp_path / 'programs'
  folder.mkdir()
  folder.chmod(mode)
  with pytest.raises(ValueError, match=str(folder)):
    store.ProgramFolder(folder)


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'getuid', lambda: 12345)
  with pytest.raises(ValueError, match=str(tmp_path)):
    store.ProgramFolder(tmp_path)


def test_the_folder_is_made_for_its_user_alone(tmp_path):
  store.ProgramFolder(tmp_path / 'programs')
  assert (tmp_path / 'programs').stat().st_mode & 0o777 == 0o700


NAMES = 'run_prefill', 'decode_loop', 'decode_step'
ONE_TEXT = """
import json, logging, sys
import tiny
from eagle_jax import Chain, decode
from eagle_jax.decode.program import use_store
from store import ProgramFolder

logging.basicConfig(level=logging.INFO)
use_store(ProgramFolder(sys.argv[1]))
pair, found = (tiny.target(), tiny.drafter()), []
for temperature in map(float, sys.argv[2:]):
  how = {'policy': Chain(3, lookup=True), 'max_new_tokens': 40, 'temperature': temperature}
  out, stream = decode.generate(*pair, [[1, 2, 3]], **how), decode.stream(*pair, [1, 2, 3], **how)
  found.append([out.tokens, [[token for chunk in stream for token in chunk.tokens]], stream.stats['tau']])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_finds_what_another_compiled(tmp_path):
  """Draft, target pass and commit, with a donated state; without the flags of this suite, for XLA:CPU cannot write
  unoptimised sorts."""

  def run(*temperatures):
    environment = os.environ | {
      'XLA_FLAGS': '',
      'JAX_PLATFORMS': 'cpu',
      'JAX_COMPILATION_CACHE_DIR': '',
      'PYTHONPATH': f'{TESTS}:{TESTS.parent / "launch"}',
    }
    command = [sys.executable, '-c', ONE_TEXT, str(tmp_path), *map(str, temperatures)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    return json.loads(done.stdout), done.stderr

  ((tokens, streamed, tau),), log = run(0)
  assert [log.count(f'{verb} {name}') for verb in ('compiling', 'reading') for name in NAMES] == [1, 1, 1, 0, 0, 0]
  assert tokens == streamed == decode.generate(tiny.target(), None, [[1, 2, 3]], max_new_tokens=40).tokens
  ((sampled, streamed, _), found), log = run(1, 0)
  assert [log.count(f'{verb} {name}') for verb in ('compiling', 'reading') for name in NAMES] == [0, 0, 0, 1, 1, 1]
  assert 'compiling' not in log
  assert found == [tokens, tokens, tau]
  assert sampled == streamed
  assert sampled == decode.generate(tiny.target(), None, [[1, 2, 3]], max_new_tokens=40, temperature=1.0).tokens
