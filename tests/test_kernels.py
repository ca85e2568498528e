"""Every form of every operation against its reference, on this machine; and which forms a device gets."""

import ast
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from eagle_jax.kernels import (
  argmax,
  attention,
  attention_tpu,
  cpu,
  einsum,
  int4,
  int8,
  layout,
  matmul,
  norm,
  ordering,
  random,
  scan,
  top_k,
  write_kv,
)
from eagle_jax.kernels.tiling import round_up_slots
from eagle_jax.models.layers import CachedAttention

pytestmark = pytest.mark.optimised


@pytest.fixture(autouse=True)
def xla_products(monkeypatch):
  """Which form a CPU gets does not depend on whether the machine has a C++ compiler."""
  monkeypatch.setenv(cpu.VARIABLE, 'xla')


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


class Case(NamedTuple):
  """A case: one operation on some arrays."""

  operation: Callable
  reference: Callable
  arrays: tuple
  forms: set[str] = set()  # devices that have a form of their own for these arrays
  error: float = 0  # of a form, relative to the reference's largest number
  kernels: str = 'xla'  # on CPUs; see `kernels.cpu`


def product(shape: tuple[int, ...], num_columns: int, forms: set[str]) -> Case:
  return Case(matmul.matmul, matmul.reference, (normal(*shape), normal(shape[-1], num_columns)), forms, 2e-6)


def bytes_times_floats(*, num_parts: int, num_columns: int) -> Case:
  value_OI, scale_O = jnp.round(40 * normal(2, 6, 64)).astype(jnp.int8), normal(2, 6)
  arrays = value_OI, scale_O, normal(64, num_columns, seed=1)
  return Case(functools.partial(int8.multiply, num_parts=num_parts), int8.reference, arrays, {'cpu'}, 0.02)


def nibbles_times_floats(*, num_columns: int, forms: set[str], kernels: str = 'xla') -> Case:
  pair_Oi = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 6, 48), np.uint8))
  arrays = pair_Oi, normal(2, 6, 3), normal(2, 6, 3, seed=1), normal(96, num_columns, seed=2)
  return Case(int4.multiply, int4.reference, arrays, forms, 5e-5, kernels)


def normalised(shape: tuple[int, ...], forms: set[str], *, kernels: str = 'xla', dtype: Any = jnp.float32) -> Case:
  run, reference = (functools.partial(form, eps=0.1) for form in (norm.normalise, norm.reference))
  return Case(
    run, reference, (normal(*shape, dtype=dtype), normal(shape[-2], seed=1, dtype=dtype)), forms, 1e-6, kernels
  )


def largest(size: int, count: int, forms: set[str]) -> Case:
  rng = np.random.default_rng(size)
  score_RU = np.stack([
    rng.normal(size=size),
    rng.integers(0, 4, size),  # equal ones: the first count
    np.where(rng.random(size) < 0.005, 0.0, -np.inf),  # fewer than are asked for
  ]).astype(np.float32)  # fmt: skip
  run, reference = (functools.partial(form, count=count) for form in (top_k.top_k, top_k.reference))
  return Case(run, reference, (jnp.asarray(score_RU),), forms)


def written(batch: int, forms: set[str]) -> Case:
  kept, new = ([normal(batch, 2, size, 5, seed=seed) for seed in range(3)] for size in (24, 4))
  start_B = jnp.asarray([20, 0, 7][:batch], jnp.int32)
  return Case(write_kv.write, write_kv.reference, (kept, new, start_B), forms)


def operands(
  *, num_slots, lengths, num_earlier=0, num_queries=4, head_dim=8, oldest=None, has_sinks=False
) -> attention.Operands:
  """Make random operands; entries past the committed ones would win if they were seen."""
  rng = np.random.default_rng(num_slots + num_earlier)
  B, G, J = 2, 2, 3
  mask_BTM = rng.random((B, num_queries, num_earlier + num_queries)) < 0.5
  mask_BTM[:, np.arange(num_queries), num_earlier + np.arange(num_queries)] = True
  kept, new = (
    rng.standard_normal((2, B, G, size, head_dim), np.float32) for size in (num_slots, num_earlier + num_queries)
  )
  for b, length in enumerate(lengths):
    kept[:, b, :, length:] *= 100
  queries = rng.standard_normal((B, G, J, num_queries, head_dim), np.float32)
  length_B, oldest_BT = jnp.asarray(lengths, jnp.int32), None if oldest is None else jnp.asarray(oldest, jnp.int32)
  arrays = map(jnp.asarray, (queries, *new, mask_BTM, *kept))
  sinks_GJ = 3 * jnp.asarray(rng.standard_normal((G, J), np.float32)) if has_sinks else None
  return attention.Operands(*arrays, length_B, oldest_BT, sinks_GJ)


def attended(forms: set[str], kernels: str = 'xla', **sizes: Any) -> Case:
  return Case(attention.attend, attention.reference, (operands(**sizes),), forms, 1e-5, kernels)


def add_scaled(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  return carry * 2 + x, carry[0] - x


def scanned(num_steps: int, forms: set[str]) -> Case:
  reference = functools.partial(scan.reference, step=add_scaled)
  return Case(functools.partial(scan.scan, add_scaled), reference, (jnp.ones(3), jnp.arange(1.0, 1 + num_steps)), forms)


CASES = {
  'row_major': Case(layout.row_major, layout.reference, (normal(3, 4, 5),), {'cpu'}),
  'random': Case(random.random_bits, random.reference, (jnp.uint32([7, 2**31 + 5]), jnp.uint32([0, 9, 49_151]))),
  'argmax': Case(argmax.argmax, argmax.reference, (jnp.asarray([0.5, -jnp.inf, 2.0, 1.0, 2.0, 2.0]),)),
  'scan, one step': scanned(1, set()),
  'scan, four steps': scanned(4, {'cpu'}),
  'argmax, NaN': Case(argmax.argmax, argmax.reference, (jnp.asarray([0.5, jnp.nan, 2.0]),)),
  'top_k, whole': largest(512, 10, set()),
  'top_k, many': largest(1024, 513, set()),
  'top_k, two parts': largest(513, 10, {'gpu'}),
  'top_k, equal parts': largest(1024, 10, {'gpu'}),
  'top_k, three parts': largest(1500, 512, {'gpu'}),
  'write, one sequence': written(1, set()),
  'write, three sequences': written(3, {'gpu'}),
  'einsum, float32': Case(
    functools.partial(einsum.einsum_float32, 'ij,jk->ik'), functools.partial(einsum.reference, subscripts='ij,jk->ik'),
    (normal(8, 30), normal(30, 3)), {'cpu'}, 1e-6,
  ),
  'einsum, bfloat16': Case(
    functools.partial(einsum.einsum_float32, 'ij,jk->ik'), functools.partial(einsum.reference, subscripts='ij,jk->ik'),
    (normal(8, 30, dtype=jnp.bfloat16), normal(30, 3, dtype=jnp.bfloat16)), {'cpu'}, 1e-6,
  ),
  'wait_for': Case(ordering.wait_for, ordering.reference, (jnp.arange(3), jnp.asarray([True, False, True]))),
  'compute_once': Case(ordering.compute_once, ordering.reference, (normal(4, 2, 3),)),
  'matmul, small, a column': product((300, 256), 1, {'cpu'}),
  'matmul, small, a column, several outputs': product((4, 64, 256), 1, {'cpu'}),
  'matmul, small, columns': product((4, 64, 256), 4, {'gpu'}),
  'matmul, smaller, a column': product((8, 2048), 1, set()),
  'matmul, no whole parts, a column': product((1030, 256), 1, set()),
  'matmul, odd, columns': product((5, 7), 6, {'gpu'}),
  'int8, a column': bytes_times_floats(num_parts=1, num_columns=1),
  'int8, columns': bytes_times_floats(num_parts=1, num_columns=5),
  'int8, two parts': bytes_times_floats(num_parts=2, num_columns=2),
  'matmul, compiled, a column': product((300, 256), 1, {'cpu'})._replace(kernels='compiled'),
  'matmul, compiled, columns': product((4, 61, 250), 16, {'cpu', 'gpu'})._replace(kernels='compiled'),
  'matmul, compiled, many columns': product((4, 64, 256), 17, {'gpu'})._replace(kernels='compiled'),
  'norm': normalised((40, 3), set()),
  'norm, compiled, a column': normalised((3, 40, 1), {'cpu'}, kernels='compiled'),
  'norm, compiled, columns': normalised((37, 64), {'cpu'}, kernels='compiled'),
  'norm, compiled, many columns': normalised((40, 65), set(), kernels='compiled'),
  'norm, compiled, bfloat16': normalised((40, 3), set(), kernels='compiled', dtype=jnp.bfloat16),
  'int8, compiled': bytes_times_floats(num_parts=2, num_columns=20)._replace(kernels='compiled', error=5e-5),
  'int4': nibbles_times_floats(num_columns=3, forms=set()),
  'int4, compiled, a column': nibbles_times_floats(num_columns=1, forms={'cpu'}, kernels='compiled'),
  'int4, compiled, columns': nibbles_times_floats(num_columns=20, forms={'cpu'}, kernels='compiled'),
  'attention, no slots': attended({'gpu'}, num_slots=0, lengths=(0, 0)),
  'attention': attended({'gpu'}, num_slots=9, lengths=(0, 7)),
  'attention, earlier passes': attended({'gpu'}, num_slots=9, lengths=(9, 1), num_earlier=3),
  'attention, a window': attended({'gpu'}, num_slots=9, lengths=(0, 7), oldest=[[-2, 0, 1, 3], [-1, 2, 6, 9]]),
  'attention, sinks': attended({'gpu'}, num_slots=9, lengths=(0, 7), has_sinks=True),
  'attention, whole lanes, sinks': attended({'gpu'}, num_slots=9, lengths=(0, 7), head_dim=128, has_sinks=True),
  'attention, one query': attended(set(), num_slots=9, lengths=(2, 7), num_queries=1),
  'attention, whole lanes': attended({'gpu', 'tpu'}, num_slots=9, lengths=(0, 7), head_dim=128),
  'attention, whole lanes, one query': attended({'tpu'}, num_slots=9, lengths=(9, 1), num_queries=1, head_dim=128),
  # 768 slots in blocks of 256.
  'attention, blocks, one empty': attended({'gpu', 'tpu'}, num_slots=768, lengths=(0, 767), head_dim=128),
  'attention, blocks, a full one': attended(
    {'gpu', 'tpu'}, num_slots=768, lengths=(256, 257), num_earlier=3, head_dim=128
  ),
  'attention, blocks, all full': attended({'gpu', 'tpu'}, num_slots=768, lengths=(512, 768), head_dim=128),
  'attention, compiled': attended({'cpu', 'gpu'}, 'compiled', num_slots=300, lengths=(0, 300), num_earlier=70),
  'attention, compiled, no slots': attended({'cpu', 'gpu'}, 'compiled', num_slots=0, lengths=(0, 0)),
  'attention, compiled, one query': attended(
    {'cpu'}, 'compiled', num_slots=200, lengths=(200, 7), num_queries=1, head_dim=44
  ),
  'attention, compiled, a window, sinks': attended(
    {'cpu', 'gpu'}, 'compiled', num_slots=200, lengths=(0, 150), head_dim=256, has_sinks=True,
    oldest=[[-2, 0, 1, 3], [-1, 2, 140, 150]],
  ),
  'attention, too many queries': attended({'gpu'}, 'compiled', num_slots=9, lengths=(0, 7), num_queries=65),
}  # fmt: skip


@pytest.mark.parametrize('name', CASES)
def test_every_form_is_the_reference(name, monkeypatch):
  case, found = CASES[name], {}
  monkeypatch.setenv(cpu.VARIABLE, case.kernels)
  if case.kernels == 'compiled' and cpu.library() is None:
    pytest.skip('no C++ compiler')
  module = importlib.import_module(getattr(case.reference, 'func', case.reference).__module__)

  def run_all(*arrays: Any, default: Callable, **forms: Callable | None) -> Any:
    found.update({device: jax.jit(form)(*arrays) for device, form in forms.items() if form is not None})
    return jax.jit(default)(*arrays)

  monkeypatch.setattr(module, 'dispatch', run_all, raising=False)  # without one, there is one form for all
  monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
  expected, default = case.reference(*case.arrays), case.operation(*case.arrays)
  assert set(found) == case.forms
  for given in (default, *found.values()):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)
      np.testing.assert_allclose(x, y, rtol=0, atol=case.error * np.abs(y).max() if case.error else 0)


@pytest.mark.parametrize(
  ('name', 'module', 'form'),
  [
    ('top_k, two parts', top_k, 'top_k_of_parts'),
    ('write, three sequences', write_kv, 'write_at_once'),
    ('matmul, odd, columns', matmul, 'multiply_from_left'),
    ('attention', attention, 'attend_joined'),
  ],
)
def test_a_wrong_form_is_found(name, module, form, monkeypatch):
  """The wrong form reads its first array backwards."""
  right = getattr(module, form)
  monkeypatch.setattr(module, form, lambda x, *rest, **how: right(jax.tree.map(jnp.flip, x), *rest, **how))
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    test_every_form_is_the_reference(name, monkeypatch)


def operations() -> dict[str, list[str]]:
  """By module of kernels/ that chooses between forms, or has a reference: its functions in their order."""
  found = {}
  for path in Path(attention.__file__).parent.glob('*.py'):
    functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    if 'reference' in functions or ('dispatch(' in path.read_text() and path.stem != 'dispatch'):
      found[f'eagle_jax.kernels.{path.stem}'] = functions
  return found


def test_every_operation_has_a_reference_and_a_case():
  found = operations()
  assert {functions[0] for functions in found.values()} == {'reference'}
  references = [getattr(case.reference, 'func', case.reference) for case in CASES.values()]
  assert {reference.__module__ for reference in references} == set(found)


# Attention against NumPy, and the sizes that its kernels take.


@pytest.mark.parametrize('num_slots', [0, 9])
@pytest.mark.parametrize('num_earlier', [0, 3])
@pytest.mark.parametrize('is_windowed', [False, True])
@pytest.mark.parametrize('is_in_blocks', [False, True])
def test_attention_sees_the_committed_entries_and_those_of_the_mask(
  num_slots, num_earlier, is_windowed, is_in_blocks, monkeypatch
):
  oldest_BT = [[-2, 0, 1, 3], [-1, 2, 6, 9]] if is_windowed else None
  lengths = [min(0, num_slots), min(7, num_slots)]
  given = operands(num_slots=num_slots, lengths=lengths, num_earlier=num_earlier, oldest=oldest_BT)
  earlier, new = ([x[:, :, part] for x in given[1:3]] for part in (slice(num_earlier), slice(num_earlier, None)))
  if is_in_blocks:
    monkeypatch.setattr(attention, 'MAX_QUERIES', 3)
  attend = CachedAttention(
    given.keys, given.values, given.length, given.mask, (earlier if num_earlier else None), given.oldest
  )
  out, memory = attend(given.queries, *new)
  np.testing.assert_array_equal(memory, given[1:3])
  q, k, v, mask_BTM, keys, values = map(np.asarray, given[:6])
  for b, g, j, t in np.ndindex(out.shape[:-1]):
    start = max(oldest_BT[b][t], 0) if is_windowed else 0
    seen = [
      np.concatenate([kept[b, g, start : lengths[b]], new[b, g][mask_BTM[b, t]]])
      for kept, new in ((keys, k), (values, v))
    ]
    weight = np.exp(seen[0] @ q[b, g, j, t] / np.sqrt(q.shape[-1]))
    np.testing.assert_allclose(out[b, g, j, t], weight @ seen[1] / weight.sum(), rtol=2e-5, atol=1e-6)


def test_caches_of_any_size_lie_in_blocks_that_the_kernel_of_tpus_reads():
  for wanted in range(1, 3000):
    num_slots = round_up_slots(wanted)
    block = attention_tpu._block(16 * 4, num_slots)
    assert wanted <= num_slots < wanted + 128
    assert num_slots == block or block % 128 == 0


def test_what_the_kernel_of_tpus_leaves():
  def is_supported(*, num_slots=8, num_queries=8, num_new=8, head_dim=128, dtype=jnp.bfloat16):
    shapes = (1, 1, 8, num_queries, head_dim), (1, 1, num_new, head_dim), (1, 1, num_slots, head_dim)
    return attention_tpu.is_supported(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))

  assert is_supported()
  assert is_supported(num_slots=1536)
  assert is_supported(num_queries=128, dtype=jnp.float32)
  assert is_supported(num_queries=128, num_new=256)
  assert not is_supported(num_slots=0)
  assert not is_supported(num_slots=1000)
  assert not is_supported(num_queries=129, dtype=jnp.float32)
  assert not is_supported(num_queries=128, num_new=257)
  assert not is_supported(head_dim=64)
  assert not is_supported(dtype=jnp.float16)
