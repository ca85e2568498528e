"""The compiled kernels of CPUs: their operations, the text that they write, and what serves where there are none."""

import dataclasses
import functools
import itertools
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import store

import tiny
from eagle_jax import cache as kv_cache
from eagle_jax import decode
from eagle_jax.cache import KVCache
from eagle_jax.decode.prefill import run_prefill
from eagle_jax.device import cpu_features
from eagle_jax.files import cache_folder
from eagle_jax.kernels import attention, cpu, int4, int8, matmul, norm
from eagle_jax.models import rounded
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.sharding import make_mesh
from eagle_jax.tree import ancestor_mask
from tiny_programs import copies_in_loop, decode_alike, loop_listing, prefilled_pair

TESTS = Path(__file__).parent
PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44]]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16)


def forget():
  """Forget what was compiled with other kernels, or without."""
  for program in (run_prefill, decode.decode_loop, decode.decode_step):
    program.clear_cache()
  jax.clear_caches()


def use(patch, folder, choice='compiled'):
  patch.setenv('EAGLE_JAX_CACHE', str(folder))
  patch.setenv(cpu.VARIABLE, choice)
  patch.setattr(cpu, '_registered', functools.cache(cpu._registered.__wrapped__))
  forget()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  if not any(os.access(Path(place) / name, os.X_OK) for place in os.get_exec_path() for name in cpu.COMPILERS):
    pytest.skip('no C++ compiler')
  if os.environ.get(cpu.VARIABLE) != 'xla':  # other tests use the kernels too, and XLA knows one library by their name
    return cache_folder()
  return tmp_path_factory.mktemp('cache')


@pytest.fixture(scope='module')
def compiled(folder):
  """The kernels are used."""
  with pytest.MonkeyPatch.context() as patch:
    use(patch, folder)
    assert cpu.library() is not None
    yield
  forget()


def weights(kind, *shape):
  rng = np.random.default_rng(sum(shape))
  if kind == 'float32':
    return jnp.asarray(rng.standard_normal(shape, np.float32))
  extreme = rng.integers(-127, 128, shape, np.int8)
  extreme[..., ::2] = 127 * rng.choice([-1, 1], size=extreme[..., ::2].shape)
  extreme[..., 0, :] = 127  # the largest sums that there are
  return jnp.asarray(extreme)


def columns(width, count):
  return jnp.asarray(np.random.default_rng(width).standard_normal((width, count), np.float32))


# Products.


def multiply(weight_OI, x_IR, scale=1.0):
  if isinstance(weight_OI, int4.Grouped):
    return weight_OI.times(x_IR)
  if weight_OI.dtype == jnp.float32:
    return cpu.multiply(weight_OI, x_IR)
  return cpu.multiply_bytes(weight_OI, jnp.full(weight_OI.shape[:-1], scale, jnp.float32), x_IR)


@jax.jit
def by_count(weight_OI, x_IR):
  """Products with the first columns and with the last ones, of each count, in one program."""
  both = [(x_IR[:, :count], x_IR[:, -count:]) for count in COUNTS]
  return [[multiply(weight_OI, part) for part in pair] for pair in both]


@pytest.mark.parametrize('outputs', [(1,), (23,), (24,), (2, 61)], ids=str)
@pytest.mark.parametrize('width', [1, 15, 64, 576, 1536])
@pytest.mark.parametrize('kind', ['float32', 'int8'])
def test_products(compiled, kind, width, outputs):
  weight_OI, x_IR = weights(kind, *outputs, width), columns(width, COUNTS[-1])
  found = jax.device_get(by_count(weight_OI, x_IR))
  most, _ = found[-1]
  exact = np.tensordot(np.asarray(weight_OI, np.float64), np.asarray(x_IR, np.float64), axes=1)
  error = 1e-5 if kind == 'float32' else 5e-5  # where columns are rounded to 16 bits
  np.testing.assert_allclose(most, exact, rtol=0, atol=error * np.abs(exact).max())
  for count, (first, last) in zip(COUNTS, found, strict=True):  # bit for bit the same, wherever a column stands
    np.testing.assert_array_equal(first, most[..., :count])
    np.testing.assert_array_equal(last, most[..., -count:])


@pytest.mark.parametrize('outputs', [(1,), (23,), (2, 61)], ids=str)
@pytest.mark.parametrize('width', [32, 576, 1536])
def test_products_of_groups(compiled, width, outputs):
  """Of 1,536 inputs two blocks are rounded, each with its own scale."""
  matrix = int4.Grouped(
    *map(jnp.asarray, rounded.round_groups(np.asarray(weights('float32', *outputs, width)))), jnp.float32
  )
  x_IR = columns(width, COUNTS[-1])
  found = jax.device_get(by_count(matrix, x_IR))
  most, _ = found[-1]
  floats = np.asarray(int4.unpack(matrix.pair, matrix.scale, matrix.offset), np.float64)
  exact = np.tensordot(floats, np.asarray(x_IR, np.float64), axes=1)
  np.testing.assert_allclose(most, exact, rtol=0, atol=5e-5 * np.abs(exact).max())
  for count, (first, last) in zip(COUNTS, found, strict=True):
    np.testing.assert_array_equal(first, most[..., :count])
    np.testing.assert_array_equal(last, most[..., -count:])


def test_bytes_may_meet_any_number_of_columns(compiled):
  weight_OI, x_IR = weights('int8', 30, 70), np.asarray(columns(70, 150))
  few = np.concatenate([multiply(weight_OI, x_IR[:, i : i + 10]) for i in range(0, 150, 10)], axis=1)
  np.testing.assert_array_equal(multiply(weight_OI, x_IR), few)


def test_bytes_are_scaled_after_they_are_added_up(compiled):
  weight_OI, x_IR = weights('int8', 2, 30, 70), columns(70, 3)
  np.testing.assert_array_equal(multiply(weight_OI, x_IR, scale=0.3), np.float32(0.3) * multiply(weight_OI, x_IR))


@pytest.mark.parametrize('width', [576, 14_336])
def test_the_largest_sums_of_bytes(compiled, width):
  sign = np.random.default_rng(width).choice([-1, 1], width)
  weight_OI = np.stack([127 * sign, np.full(width, 127), -127 * sign, np.zeros(width)]).astype(np.int8)
  x_IR = np.stack([32_767 * sign, np.full(width, 32_767), np.zeros(width)], axis=1).astype(np.float32)
  exact = weight_OI.astype(np.float64) @ x_IR
  np.testing.assert_allclose(multiply(jnp.asarray(weight_OI), jnp.asarray(x_IR)), exact, rtol=1e-6, atol=0)


def test_columns_of_bytes_are_rounded_block_by_block(compiled):
  x_IR = columns(3000, 2).at[7].set(1e6)  # would round all others to 0
  found = multiply(weights('int8', 5, 3000).at[:, 7].set(0), x_IR)
  exact = np.asarray(weights('int8', 5, 3000).at[:, :1024].set(0), np.float64) @ np.asarray(x_IR, np.float64)
  near = multiply(weights('int8', 5, 3000).at[:, :1024].set(0), x_IR)
  assert np.isfinite(found).all()
  np.testing.assert_allclose(near, exact, rtol=0, atol=5e-5 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize(('needed', 'machine'), [
  ('', '-march=x86-64'),
  (' avx2 ', '-march=haswell -mtune=znver3'),  # GCC's tuning for AMD rounds some sums of products once, others twice
  (' avx512bw ', '-march=skylake-avx512'),
])  # fmt: skip
def test_forms_for_other_machines(folder, tmp_path, monkeypatch, needed, machine):
  if platform.machine() != 'x86_64' or needed not in cpu_features() + ' ':
    pytest.skip(f'this machine does not run code for {machine}')
  monkeypatch.setattr(cpu, 'FLAGS', ' '.join(cpu.FLAGS).replace('-march=native', machine).split())
  use(monkeypatch, tmp_path)
  assert cpu.library() is not None
  for kind, width in itertools.product(('float32', 'int8'), (576, 1536)):
    test_products(None, kind, width, (25,))
  test_products_of_groups(None, 1536, (25,))
  test_attention_reads_no_slot_past_the_text(None)


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('kind', ['float32', 'int8'])
def test_what_is_no_number_stays_in_its_column(compiled, kind, value):
  x_IR = columns(64, 3).at[5, 1].set(value)
  found = multiply(weights(kind, 40, 64), x_IR)
  assert np.isfinite(found).all(axis=0).tolist() == [True, False, True]
  assert not np.isfinite(found[:, 1]).any()


def calls(function, *arrays, operation='matmul') -> bool:
  return f'eagle_{operation}' in jax.jit(function).lower(*arrays).as_text()


def test_what_they_serve(compiled):
  w, b, scale = weights('float32', 24, 64), weights('int8', 24, 64), jnp.ones(24)
  x, many = columns(64, 16), columns(64, 17)
  half = x.astype(jnp.bfloat16)
  assert calls(matmul.matmul, w, x)
  assert calls(matmul.matmul_float32, w, x)
  assert not calls(matmul.matmul, w, many)
  assert not calls(matmul.matmul_float32, w, many)
  assert not calls(matmul.matmul, w.astype(jnp.bfloat16), half)
  assert calls(int8.multiply, b, scale, half)
  assert calls(int8.multiply, b, scale, many)
  with jax.set_mesh(make_mesh(jax.devices()[:1])):
    assert calls(matmul.matmul, w, x)
  attends = functools.partial(calls, attention.attend, operation='attention')
  given = attended(8, 4)
  assert attends(given)
  assert not attends(given._replace(keys=given.keys.astype(jnp.bfloat16), queries=given.queries.astype(jnp.bfloat16)))
  assert not attends(attended(8, 4, num_queries=65))
  normalises = functools.partial(calls, functools.partial(norm.normalise, eps=1e-5), operation='norm')
  assert normalises(columns(64, 64), jnp.ones(64))
  assert not normalises(columns(64, 65), jnp.ones(64))
  assert not normalises(half, jnp.ones(64, jnp.bfloat16))


def test_a_mesh_gathers_no_weights(compiled):
  w, x = weights('float32', 24, 64), columns(64, 4)
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ('model',))):
    assert not cpu.is_supported(w, x)


def test_gradients(compiled):
  w, x = weights('float32', 24, 64), columns(64, 4)

  def gradients(product):
    return jax.jit(jax.grad(lambda w, x: (product(w, x) ** 2).sum(), argnums=(0, 1)))(w, x)

  for found, expected in zip(gradients(cpu.multiply), gradients(matmul.reference), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_gradients_of_norms(compiled):
  given = columns(64, 4), columns(64, 1)[:, 0]

  def gradients(form):
    return jax.jit(jax.grad(lambda x, scale: (form(x, scale, eps=0.1) ** 3).sum(), argnums=(0, 1)))(*given)

  for found, expected in zip(gradients(norm.normalise), gradients(norm.reference), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Attention.


def attended(num_slots, length, num_queries=3, heads=2):
  """Operands of attention behind this many committed entries; what is not committed is NaN."""
  rng = np.random.default_rng(num_queries)
  sizes = {'queries': (1, 2, heads, num_queries, 8)} | dict.fromkeys(('new_keys', 'new_values'), (1, 2, num_queries, 8))
  sizes |= dict.fromkeys(('keys', 'values'), (1, 2, num_slots, 8))
  arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
  for name in ('keys', 'values'):
    arrays[name][:, :, length:] = np.nan
  mask = np.tri(num_queries, dtype=bool)[None]
  return attention.Operands(**jax.tree.map(jnp.asarray, arrays), mask=jnp.asarray(mask), length=jnp.asarray([length]))


def test_attention_reads_no_slot_past_the_text(compiled):
  given = attended(500, 200)
  whole = given._replace(keys=given.keys[:, :, :200], values=given.values[:, :, :200])
  np.testing.assert_allclose(attention.attend(given), attention.reference(whole), rtol=0, atol=1e-5)


def test_attention_of_a_query_hangs_on_no_other(compiled):
  given = attended(150, 140, num_queries=5)
  alone = given._replace(queries=given.queries[:, :, :, 3:4], mask=given.mask[:, 3:4])
  np.testing.assert_array_equal(attention.attend(alone)[:, :, :, 0], attention.attend(given)[:, :, :, 3])


def test_attention_of_a_query_that_sees_nothing_is_finite(compiled):
  given = attended(10, 0)
  assert not attention.attend(given._replace(mask=given.mask & False)).any()


def test_attention_to_what_is_no_number(compiled):
  given = attended(10, 4)
  found = attention.attend(given._replace(queries=given.queries.at[0, 1, 0, 2, 5].set(jnp.nan)))
  is_nan = np.isnan(found).all(axis=-1)
  assert is_nan.sum() == 1
  assert is_nan[0, 1, 0, 2]


def test_gradients_of_attention(compiled):
  given = attended(9, 9)
  floats = {name: x for name, x in given._asdict().items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}

  def gradients(attend):
    return jax.jit(jax.grad(lambda floats: (attend(given._replace(**floats)) ** 2).sum()))(floats)

  found, expected = gradients(attention.attend), gradients(attention.reference)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


# Decoding.

FAMILIES = {
  'llama': {},
  'int8': {},
  'int4': {},
  'qwen': {'qk_norm': True, 'qkv_bias': True},
  'windows, sinks': {'window': 50, 'has_sinks': True},
  'norms of results': {'qk_norm': True, 'joint_qk_norm': True, 'has_output_norms': True},
}
WIDE = dataclasses.replace(tiny.TARGET, width=96, head_dim=24, ffn_width=160)
TREE = [-1, 0, 0, 1, 2, 1, 4, 6, 3, 7, 9, 9, 10]  # parents


@pytest.mark.optimised
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('length', [0, 120])  # short of a block of entries, and of a part of them
def test_a_node_gets_the_bits_of_plain_decoding(compiled, family, length):
  target = tiny.target(dataclasses.replace(WIDE, **FAMILIES[family]))
  target = rounded.rounded_target(target, family) if family in rounded.NAMES else target
  network, params, rng = target.network, target.params, np.random.default_rng(length)
  text = rng.integers(0, WIDE.vocab_size, 17)
  entries = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), network.init_cache(1, 150)._asdict())
  cache = KVCache(**entries | {'length': jnp.asarray([length], jnp.int32)})

  @jax.jit
  def read(token_T, mask_TT, cache):
    position_BT = cache.length[:, None] + mask_TT.sum(axis=1)[None] - 1
    taps, entries = network.forward(params, token_T[None], position_BT, mask_TT[None], cache)
    return network.logits(params, taps)[:, 0], entries

  plain, after = [], cache
  for token in text:
    logits_VT, new = read(token[None], np.ones((1, 1), bool), after)
    plain.append(logits_VT[:, 0])
    after = kv_cache.append(after, new, jnp.asarray([1]))
  for count in (2, 3, 4, 8, 16):
    logits_VT, _ = read(text[:count], np.tri(count, dtype=bool), cache)
    np.testing.assert_array_equal(logits_VT.T, plain[:count])
  node, path = len(TREE) - 1, []
  while node >= 0:
    path, node = [node, *path], TREE[node]
  token_T = rng.integers(0, WIDE.vocab_size, len(TREE))
  token_T[path] = text[: len(path)]
  logits_VT, _ = read(token_T, ancestor_mask(jnp.asarray(TREE), max_depth=len(path)), cache)
  np.testing.assert_array_equal(logits_VT[:, path].T, plain[: len(path)])


@pytest.mark.parametrize('name', [None, *rounded.NAMES])
@pytest.mark.parametrize('is_quantised', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_trees_write_the_text_of_plain_decoding(compiled, name, is_quantised, temperature):
  target, drafter = tiny.target(), tiny.drafter()
  target = rounded.rounded_target(target, name) if name else target
  drafter = drafter.quantised() if is_quantised else drafter
  how = {'max_new_tokens': 24, 'temperature': temperature, 'seed': 3, 'eos_ids': ()}
  plain, texts = decode_alike(target, drafter, (Chain(3), DynamicTree(3, 3, 3, 8)), PROMPTS, **how)
  assert texts == [plain, plain]


@pytest.mark.parametrize(('name', 'kind'), [('int8', int8.Quantised), ('int4', int4.Grouped)])
def test_a_rounded_target_is_held_so(compiled, name, kind):
  params = rounded.rounded_target(tiny.target(), name).params
  assert isinstance(params['layer_1']['attn']['qkv']['weight'], kind)
  assert isinstance(params['head']['weight'], int8.Quantised)


@pytest.mark.optimised
@pytest.mark.parametrize('batch', [1, 5])
@pytest.mark.parametrize('policy', [Chain(3), DynamicTree(3, 3, 3, 8)], ids=lambda p: p.describe())
def test_the_loop_copies_no_cache(compiled, policy, batch):
  params, spec, state = prefilled_pair(tiny.target(), tiny.drafter(), policy, batch=batch)
  shape = 'f32[' + ','.join(map(str, state.cache.keys[0].shape)) + ']'
  hlo = loop_listing(params, state, spec)
  assert 'custom_call_target="eagle_matmul' in hlo
  assert 'custom_call_target="eagle_attention' in hlo
  assert copies_in_loop(hlo, shape) == []


# Where they cannot be made.


def serves_xla(caplog, *words) -> bool:
  """Return whether products are right without the kernels, and one log line says why."""
  assert cpu.library() is None
  w, x = weights('float32', 24, 64), columns(64, 4)
  assert not calls(matmul.matmul, w, x)
  np.testing.assert_allclose(jax.jit(matmul.matmul)(w, x), matmul.reference(w, x), rtol=1e-4, atol=1e-4)
  (record,) = [record for record in caplog.records if 'CPU kernels' in record.message and record.levelname == 'WARNING']
  return all(word in record.message for word in words) and len(record.message.splitlines()) <= 22


def a_compiler(folder, script):
  """A folder for PATH, whose g++ says a version and then does this."""
  folder.mkdir()
  compiler = folder / 'g++'
  compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\n{script}\n')
  compiler.chmod(0o755)
  return f'{folder}:/usr/bin:/bin'


def test_without_a_compiler(tmp_path, monkeypatch, caplog):
  monkeypatch.setenv('PATH', '')
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, 'g++', 'clang++')


def test_a_compiler_that_fails(tmp_path, monkeypatch, caplog):
  script = 'for i in $(seq 100); do echo "cpu.cc:$i: error" >&2; done; exit 3'
  monkeypatch.setenv('PATH', a_compiler(tmp_path / 'bin', script))
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, 'status 3', 'cpu.cc:1: error', 'cpu.cc:20: error')
  assert list((tmp_path / 'kernels').iterdir()) == []


def test_a_compiler_that_hangs_and_its_children(tmp_path, monkeypatch, caplog):
  monkeypatch.setenv('PATH', a_compiler(tmp_path / 'bin', f'echo $$ > {tmp_path}/pid; sleep 1000 & sleep 1000'))
  monkeypatch.setattr(cpu, '_MAX_SECONDS', 1.0)
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, '1 seconds')
  assert list((tmp_path / 'kernels').iterdir()) == []
  found = subprocess.run(['ps', '-o', 'stat=', '-g', (tmp_path / 'pid').read_text().strip()], capture_output=True)
  assert [state for state in found.stdout.split() if not state.startswith(b'Z')] == []


def test_a_compiler_that_writes_no_library(tmp_path, monkeypatch, caplog):
  script = 'while [ "$1" != -o ]; do shift; done; echo text > "$2"'
  monkeypatch.setenv('PATH', a_compiler(tmp_path / 'bin', script))
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, '.so')


@pytest.mark.slow
@pytest.mark.parametrize(('right', 'wrong', 'what'), [
  ('A::Add(', 'if (kColumns != 3) A::Add(', 'multiplies float32 by 3 columns'),
  ('sum == 0 ? 0 :', 'sum == 0 || a.width > 40 ? 0 :', 'attends'),
  ('of_column / width', 'of_column / columns', 'normalises'),
])  # fmt: skip
def test_kernels_that_compute_wrongly(folder, tmp_path, monkeypatch, caplog, right, wrong, what):
  text = [path.read_text(encoding='utf-8') for path in cpu.SOURCES]
  assert sum(right in each for each in text) == 1
  changed = [tmp_path / path.name for path in cpu.SOURCES]
  for path, each in zip(changed, text, strict=True):
    path.write_text(each.replace(right, wrong))
  monkeypatch.setattr(cpu, 'SOURCES', tuple(changed))
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, what)


def test_kernels_are_checked_once(folder, monkeypatch):
  use(monkeypatch, folder)
  digest = cpu.library()
  monkeypatch.setattr(cpu, '_wrong_products', lambda _: ['multiplies'])
  use(monkeypatch, folder)
  assert cpu.library() == digest
  (folder / 'kernels' / f'eagle_{digest}.checked').unlink()
  use(monkeypatch, folder)
  assert cpu.library() is None


def test_a_folder_that_others_can_write_to(tmp_path, monkeypatch, caplog):
  (tmp_path / 'kernels').mkdir()
  (tmp_path / 'kernels').chmod(0o777)
  use(monkeypatch, tmp_path)
  assert serves_xla(caplog, str(tmp_path / 'kernels'))
  assert list((tmp_path / 'kernels').iterdir()) == []


def test_the_compiler_is_left_alone_if_xla_is_asked_for(tmp_path, monkeypatch):
  use(monkeypatch, tmp_path, 'xla')
  assert cpu.library() is None
  assert not (tmp_path / 'kernels').exists()


def test_a_choice_that_is_none(tmp_path, monkeypatch):
  use(monkeypatch, tmp_path, 'fast')
  with pytest.raises(ValueError, match="must be 'compiled' or 'xla', got 'fast'"):
    cpu.library()


# Processes and programs.

ONE = """
import sys, jax, numpy as np
from eagle_jax.kernels import cpu, matmul
w, x = np.ones((24, 64), np.float32), np.ones((64, 4), np.float32)
assert (jax.jit(matmul.matmul)(w, x) == 64).all()
print(cpu.library())
"""


@pytest.mark.slow
def test_two_processes_compile_at_once(folder, tmp_path):
  environment = os.environ | {'EAGLE_JAX_CACHE': str(tmp_path), cpu.VARIABLE: 'compiled', 'JAX_PLATFORMS': 'cpu'}
  environment['PYTHONPATH'] = str(TESTS.parent)
  started = [subprocess.Popen([sys.executable, '-c', ONE], env=environment, stdout=subprocess.PIPE) for _ in range(2)]
  names = {process.communicate(timeout=300)[0].decode().strip() for process in started}
  assert len(names) == 1
  library, mark = sorted((tmp_path / 'kernels').iterdir(), key=lambda path: path.suffix, reverse=True)
  assert mark == library.with_suffix('.checked')
  assert {library.stem.removeprefix('eagle_')} == names
  assert stat.S_IMODE((tmp_path / 'kernels').stat().st_mode) == 0o700


def test_stored_programs_belong_to_their_kernels(compiled, tmp_path, monkeypatch, no_compilation_cache):
  programs, leaf = store.ProgramFolder(tmp_path / 'programs'), jnp.zeros(1)
  with_kernels = programs.place('f', [leaf], {}, ())
  assert cpu.library() in with_kernels.origin
  monkeypatch.setattr(cpu, 'library', lambda: None)
  assert programs.place('f', [leaf], {}, ()) == with_kernels._replace(origin=programs.place('f', [leaf], {}, ()).origin)
  assert programs.place('f', [leaf], {}, ()).origin != with_kernels.origin


STORED = """
import sys, jax, numpy as np
from eagle_jax.decode.program import Program, use_store
from eagle_jax.kernels.matmul import matmul
from store import ProgramFolder
use_store(ProgramFolder(sys.argv[1]))
w, x = jax.numpy.ones((24, 64)), jax.numpy.ones((64, 4))
traced = []

def product(w, x):
  traced.append(1)
  return matmul(w, x)

run, _ = Program(jax.jit(product)).compile(w, x)
assert (run(w, x) == 64).all()
print(len(traced))
"""


def test_a_stored_program_finds_its_kernels(folder, tmp_path):
  environment = os.environ | {'EAGLE_JAX_CACHE': str(folder), cpu.VARIABLE: 'compiled', 'JAX_PLATFORMS': 'cpu'}
  environment |= {'PYTHONPATH': f'{TESTS.parent}:{TESTS.parent / "launch"}', 'JAX_COMPILATION_CACHE_DIR': ''}

  def run():
    command = [sys.executable, '-c', STORED, str(tmp_path / 'programs')]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)

  assert [run().stdout.strip() for _ in range(2)] == ['1', '0']
