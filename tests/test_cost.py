"""Stored costs: the models fitted to them, how they are found, and what `policy='auto'` chooses from them."""

import collections
import dataclasses
import functools
import itertools
import json
import logging
import threading
import types

import jax
import numpy as np
import pytest

import tiny
from eagle_jax import decode, device, hub
from eagle_jax.bench import cost_report, timing, tune
from eagle_jax.bench.plots import plot_costs
from eagle_jax.decode import auto
from eagle_jax.decode.program import Program
from eagle_jax.draft.model import as_drafter
from eagle_jax.evaluate import random_pairs
from eagle_jax.evaluate.calibration import answer_plainly, make_examples
from eagle_jax.evaluate.trace import Nodes, Traced, trace
from eagle_jax.policy import cost_store
from eagle_jax.policy import costs as cost
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.costs import Bytes, Rate, Vocabulary, interpolate, scale_times
from eagle_jax.policy.kinds import KINDS, kind_of
from eagle_jax.policy.trees import Chain, DynamicTree, Plain
from eagle_jax.sharding import make_mesh
from tiny_costs import COSTS, LONG, SHORT, TIMINGS


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty cache folder, and a device called as in COSTS."""
  monkeypatch.setenv('EAGLE_JAX_CACHE', str(tmp_path))
  monkeypatch.setattr(auto, 'device_name', lambda mesh: 'x')
  return tmp_path


def test_step_ms_sums_interpolated_parts():
  assert SHORT.step_ms(Plain()) == 10
  assert SHORT.step_ms(Chain(1)) == 11 + 1
  assert SHORT.step_ms(Chain(3)) == 13 + 1 + 2 * 2
  assert SHORT.step_ms(DynamicTree(2, 2, 3, 6)) == 17 + 1 + 2 * 3
  assert interpolate({1: 10.0, 2: 11.0, 4: 13.0}, 6) == 15
  assert interpolate({1: 7.0}, 6) == 7


def test_scale_times_adds_nodes_and_one_cache_per_sequence():
  near, far = scale_times(COSTS.times, 2)
  measured = 1, 2, 4, 8
  assert [near.verify_ms[n] for n in measured] == pytest.approx([9 + 2, 9 + 4, 15 + 8, 27 + 12])
  assert [far.verify_ms[n] for n in measured] == pytest.approx([9 + 6, 9 + 12, 15 + 24, 27 + 36])
  assert (near.draft_ms, far.draft_ms) == ({1: pytest.approx(1 + 2)}, {1: pytest.approx(1 + 6)})
  assert near.root_ms == pytest.approx(1.5)
  assert near.target_bytes == Bytes(3000, 2000)
  (alone,) = scale_times([SHORT], 2)
  assert [alone.verify_ms[n] for n in measured] == [11, 13, 21, 37]


def test_scale_times_reads_three_nodes_of_four_sequences_as_twelve_nodes():
  """Interpolating between 8 and 16 nodes would give 25.5."""
  verify_ms = {1: 10.0, 2: 20.0, 4: 20.0, 8: 21.0, 12: 30.0, 16: 30.0}
  (batch,) = scale_times([dataclasses.replace(SHORT, verify_ms=verify_ms)], 4)
  assert batch.step_ms(Chain(2)) - batch.root_ms - batch.draft_ms[1] == pytest.approx(30)


def test_slowest_share_falls_with_batch_size():
  shares = [cost.slowest_share(batch) for batch in (1, 2, 8, 64, 10**6)]
  assert shares == sorted(shares, reverse=True)
  assert shares[0] == 1
  assert shares[1] == pytest.approx(1 - 0.35 * 0.56, abs=0.02)  # E[max of 2] = 1 / sqrt(pi)
  assert shares[-1] == 0


def test_at_batch_prefers_plain_where_trees_do_not_pay():
  assert COSTS.at_batch(1) is COSTS
  pair = COSTS.at_batch(2)
  assert [one.kind for one in pair.policies] == ['plain', 'chain', 'adaptive']
  plain, chain, _ = (one.tok_per_s for one in pair.policies)
  assert plain == pytest.approx(100 * 2 * 10 / 11)
  assert chain == pytest.approx(plain * (1 + cost.slowest_share(2)) * 11 / (23 + 1.5 + 2 * 3))
  assert (pair.batch, pair.speedup, pair.num_ids) == (2, 1, COSTS.num_ids)


@pytest.mark.parametrize(('tau', 'best'), [(1.5, 'chain'), (1.06, 'plain')])
def test_at_batch_drafts_where_verifying_more_nodes_is_free(tau, best):
  free = dataclasses.replace(SHORT, verify_ms=dict.fromkeys((1, 2, 4, 8), 10.0), root_ms=0.0, draft_ms={1: 0.0})
  costs = dataclasses.replace(COSTS, times=(free,), policies=(Rate('plain', {}, 100.0, 1.0),))
  costs = dataclasses.replace(costs, modelled=(Rate('chain', {'max_depth': 3}, 1.0, tau), *costs.policies))
  assert costs.at_batch(4).policies[0].kind == best


@pytest.mark.parametrize(
  ('num_free', 'batch', 'policy'),
  [
    (4, 1, Chain(3, lookup=True)),
    (4, 2, Chain(1, lookup=True)),
    (4, 3, Plain()),
    (256, 1, DynamicTree(lookup=True)),
    (256, 4, DynamicTree(lookup=True)),
    (256, 16, DynamicTree(num_nodes=16, lookup=True)),
    (256, 64, Chain(3, lookup=True)),
    (256, 128, Chain(1, lookup=True)),
    (256, 1000, Plain()),
  ],
)
def test_guessed_policy_shrinks_with_batch_size(num_free, batch, policy):
  assert auto.guessed_policy(batch, num_free=num_free) == policy


def cost_model(policy=COSTS.policies[0].policy, *, num_slots=100, temperature=0.0):
  return COSTS.tables(policy).at(num_slots=num_slots, temperature=temperature)


def test_cost_model_holds_the_policys_sizes_and_widths():
  found = cost_model()
  np.testing.assert_allclose([found.level_tokens, found.node_tokens], 2)  # the best policy's speedup
  np.testing.assert_allclose(found.costs.plain_ms, 10)
  np.testing.assert_allclose(found.costs.verify_ms, [10, 11, 17])
  np.testing.assert_allclose(found.costs.draft_ms, [1, 3, 3])  # of the root's children, then of a level of width 2
  np.testing.assert_allclose(found.acceptance.growth, [0.6, 0.5, 0.5])
  np.testing.assert_allclose(found.acceptance.values(np.asarray([-3, -1.5, 0, -np.inf])), [0.1, 0.5, 0.9, 0], atol=1e-6)


def test_cost_model_interpolates_and_extrapolates_over_cache_size():
  np.testing.assert_allclose(cost_model(num_slots=300).costs.verify_ms, [12, 15, 27])
  np.testing.assert_allclose(cost_model(num_slots=300).costs.draft_ms, [1, 4, 4])
  np.testing.assert_allclose(cost_model(num_slots=150).costs.plain_ms, 10.5)
  np.testing.assert_allclose(cost_model(num_slots=500).costs.verify_ms, [14, 19, 37], rtol=1e-6)
  np.testing.assert_allclose(cost_model(num_slots=16).costs.verify_ms, [10, 11, 17])
  np.testing.assert_allclose(cost_model(num_slots=300).acceptance.growth, cost_model().acceptance.growth)


def test_cost_model_interpolates_and_clamps_over_temperature():
  log_q = np.asarray([-4, -2.5, -1, 0])
  np.testing.assert_allclose(cost_model(temperature=1.0).acceptance.values(log_q), [0, 0.3, 0.6, 0.6], atol=1e-6)
  np.testing.assert_allclose(cost_model(temperature=1.0).acceptance.growth, [0.4, 0.4, 0.4])
  np.testing.assert_allclose(cost_model(temperature=1.5).acceptance.growth, [0.4, 0.4, 0.4])
  np.testing.assert_allclose(
    cost_model(temperature=0.25).acceptance.values(log_q)[-1], 0.75 * 0.9 + 0.25 * 0.6, atol=1e-6
  )
  np.testing.assert_allclose(cost_model(temperature=0.25).costs.verify_ms, cost_model().costs.verify_ms)


def test_thresholds_replace_the_best_speedup():
  found = cost_model(dataclasses.replace(COSTS.policies[0].policy, thresholds=(3, 2)))
  np.testing.assert_allclose([found.level_tokens, found.node_tokens], [3, 2])
  with pytest.raises(ValueError, match=r'thresholds.*\(1\.0,\)'):
    Adaptive(2, 2, 3, 6, thresholds=(1,))


def find(batch=1, **changes):
  names = {'device': 'x', 'kernels': 'xla', 'target': 'target', 'drafter': 'drafter'}
  dtypes = {'dtype': 'float32', 'floats': 'float32'}
  return cost_store.find(**names | dtypes | changes, batch=batch)


def test_stored_costs_are_found_by_device_kernels_pair_dtype_and_nearest_batch(here):
  assert find() is None
  path = cost_store.write(COSTS)
  assert cost_store.read(path) == COSTS
  cost_store.write(dataclasses.replace(COSTS, batch=16))
  assert find(kernels='compiled', batch=16).batch == 16
  cost_store.write(compiled := dataclasses.replace(COSTS, kernels='compiled'))
  assert find(batch=3).batch == 1
  assert find(batch=6).batch == 16
  assert find(kernels='compiled', batch=16) == compiled
  assert find(drafter='other') is None
  assert find(device='2x2xx') is None
  assert len(list((here / 'costs').iterdir())) == 3


def test_costs_of_other_activations_are_kept_apart(here):
  for compute_dtype in ('float32', 'bfloat16'):
    cost_store.write(dataclasses.replace(COSTS, dtype='int8', compute_dtype=compute_dtype))
  assert find(dtype='int8', floats='bfloat16').compute_dtype == 'bfloat16'
  assert find(dtype='int8', floats='float32').compute_dtype == 'float32'
  assert find(dtype='int8', floats='float16') is None
  names = [path.name for path in (here / 'costs').iterdir()]
  assert sorted(names) == ['x-target-drafter-int8-1-bfloat16.json', 'x-target-drafter-int8-1.json']


def test_every_kind_of_policy_is_read_back_from_a_cost_file(here):
  """In JSON tuples are lists, which no policy may keep: it must be hashable."""
  policies = [form() for form in KINDS.values()]
  rates = tuple(Rate.of(policy, tok_per_s=1.0, tau=1.0) for policy in policies)
  found = cost_store.read(cost_store.write(dataclasses.replace(COSTS, policies=rates)))
  assert {one.policy: one.kind for one in found.policies} == {policy: kind_of(policy) for policy in policies}


def test_table_shows_passes_policies_and_vocabularies():
  text = cost_report.table(COSTS)
  assert '| target pass, 8 nodes | 21.00 | 2.10 | 2.62 |' in text
  assert '| with 300 slots |' in text
  assert '| target pass, 8 nodes | 33.00 | 2.75 | 4.12 |' in text
  assert '| 2.50 | 200.0 |' in text
  assert '| 64 | 8 | 75.0% | 2.00 | 17.00 |' in text


def test_find_unsteady_reports_larger_sizes_that_took_less_time(caplog):
  """Compared with the slowest smaller size, since neighbours may both have been timed on a busy machine."""
  assert cost_report.find_unsteady(SHORT) == []
  verify_ms = {1: 20.0, 2: 19.1, 16: 60.0, 24: 89.0, 32: 83.0, 48: 84.0, 64: 120.0}
  uneven = dataclasses.replace(SHORT, verify_ms=verify_ms, draft_ms={4: 1.3, 1: 1.27, 2: 0.52})
  assert cost_report.find_unsteady(uneven) == [('verify_ms', 24, 32), ('verify_ms', 24, 48), ('draft_ms', 1, 2)]
  cost_report.warn_if_unsteady(dataclasses.replace(TIMINGS, times=(LONG, uneven)))
  assert [record.levelname for record in caplog.records] == ['WARNING'] * 3
  assert 'with 100 slots a target pass over 24 nodes took 89.00 ms, but a target pass over 32 nodes took 83.00' in (
    caplog.text
  )
  assert 'a level of width 1 took 1.27 ms, but a level of width 2 took 0.52 ms' in caplog.text


@pytest.mark.parametrize('path', sorted(cost_store.SHIPPED.glob('*.json')), ids=lambda path: path.stem)
def test_shipped_costs_are_steady(path):
  assert [cost_report.find_unsteady(times) for times in cost_store.read(path).times] == [[], []]


@pytest.mark.parametrize('path', sorted(cost_store.SHIPPED.glob('*.json')), ids=lambda path: path.stem)
def test_shipped_tables_of_acceptance_keep_siblings_in_order(path):
  """A file that has a classifier has a table, too."""
  costs = cost_store.read(path)
  assert (costs.acceptance_table is None) == (costs.classifier is None)
  for numbers in costs.acceptance_table or ():
    assert (np.diff(numbers) > 0).all()
  if costs.acceptance_table is not None:
    assert np.max(costs.acceptance_table.log_accepted) <= 0 == costs.acceptance_table.log_p[-1]


def test_costs_are_plotted(tmp_path):
  plot_costs(COSTS, tmp_path / 'all.png')
  assert {path.name for path in tmp_path.iterdir()} == {'all.png', 'all_speedup.png', 'all_vocabulary.png'}
  plot_costs(TIMINGS, tmp_path / 'parts.png')
  assert (tmp_path / 'parts.png').read_bytes().startswith(b'\x89PNG')
  assert not (tmp_path / 'parts_speedup.png').exists()


def test_path_values_resolve_likely_nodes():
  """Most nodes of a tree are almost never accepted; the few likely ones must not share one mean with them."""
  rng = np.random.default_rng(0)
  log_q = np.log(rng.random(20_000) ** 8).astype(np.float32)
  is_accepted = rng.random(20_000) < np.exp(log_q)
  nothing = np.zeros(20_000, np.int32)
  nodes = Nodes(log_q, log_q, nothing, nothing, is_accepted, is_accepted)
  found = tune.path_values(nodes, Traced([[1, 0]], [4], Chain(1)), temperature=0.0)
  assert len(found.value) == tune.NUM_KNOTS
  assert found.value[-1] > 0.9
  np.testing.assert_allclose(found.value, np.exp(found.log_q), atol=0.08)


def test_timings_without_policies_are_stored_in_another_folder(here):
  assert cost_store.write(TIMINGS).parent != cost_store.write(COSTS).parent
  assert '| whole step, chain(max_depth=3) | 18.00 | 1.80 | |' in cost_report.table(TIMINGS)


def test_measured_device_rates_are_work_over_the_least_time(monkeypatch):
  monkeypatch.setattr(device, '_TRIES', 3)
  monkeypatch.setattr(device.jax, 'default_backend', lambda: 'cpu')
  for rate, work in ((lambda: device.flops_per_s.__wrapped__('float32'), 2 * 1024**3), (device.bytes_per_s, 4 * 2**27)):
    clock = types.SimpleNamespace(perf_counter=iter([0, 4, 10, 10.5, 20, 22]).__next__)  # tries of 4, 0.5 and 2 seconds
    monkeypatch.setattr(device, 'time', clock)
    assert rate() == work / 0.5


@pytest.mark.slow
def test_random_pair_decodes_and_shares_its_first_ids():
  target, drafter = random_pairs.random_pair('tiny', dtype='bfloat16', draft_vocab_size=100)
  assert {str(x.dtype) for x in jax.tree.leaves((target.params, drafter.params))} == {'bfloat16', 'int32'}
  out = decode.generate(target, drafter, [[1, 2, 3]], max_new_tokens=4, policy=Chain(1))
  assert len(out.tokens[0]) == 4
  _, whole = random_pairs.random_pair('tiny', dtype='bfloat16')
  assert jax.tree.all(jax.tree.map(np.array_equal, drafter.params, whole.first_ids(100).params))
  assert (drafter.config.num_ids, drafter.config.name) == (100, f'{whole.config.name}-100')


def test_floor_ms_is_memory_for_few_nodes_and_arithmetic_for_many():
  num_bytes = Bytes(3000, 1000)
  assert COSTS.floor_ms(num_bytes, 1) == 4
  assert COSTS.floor_ms(num_bytes, 8) == pytest.approx(2 * 1000 * 8 / 2e6 * 1000)
  # The weights are read once for three sequences; the cache is that of all three already.
  assert dataclasses.replace(COSTS, batch=3).floor_ms(num_bytes, 8) == pytest.approx(
    2 * (3 * 750 + 250) * 8 / 2e6 * 1000
  )


@pytest.mark.parametrize(
  'damage',
  [
    '{', '[]', '{"version": 0}', 'null', {'times': None}, {'times': [{'verify_ms': [1]}]},
    {'policies': [{'kind': 'mine', 'sizes': {}, 'tok_per_s': 1.0, 'tau': 1.0}]},
    {'modelled': [{'kind': 'chain', 'sizes': {'max_depth': 0}, 'tok_per_s': 1.0, 'tau': 1.0}]},
  ],
  ids=str,
)  # fmt: skip
def test_damaged_cost_file_is_ignored_with_a_warning(here, damage, caplog):
  path = cost_store.write(COSTS)
  path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
  with caplog.at_level(logging.WARNING, 'eagle_jax'):
    assert find() is None
  assert f'ignoring {path}' in caplog.text


@pytest.mark.parametrize('kernels', ['compiled', 'xla'])
def test_auto_guesses_a_head_in_8_bits_where_kernels_multiply_bytes(here, monkeypatch, kernels):
  monkeypatch.setattr(auto, 'in_use', lambda mesh: kernels)
  target, drafter = tiny.target(), tiny.drafter()
  assert auto.resolve_policy(target, drafter, policy='auto').drafter.is_quantised == (kernels == 'compiled')
  assert not auto.resolve_policy(target, drafter, policy=Chain(2)).drafter.is_quantised
  ngram = hub.load_drafter('ngram', target)
  assert auto.resolve_policy(target, ngram, policy='auto').drafter == ngram


def test_auto_takes_the_fastest_stored_policy(here, caplog):
  target, drafter = tiny.target(), tiny.drafter()
  with caplog.at_level(logging.INFO, 'eagle_jax'):
    assert decode.build(target, drafter)[1].policy == Chain(3, lookup=True)
    assert 'a guess' in caplog.text
    cost_store.write(COSTS)
    params, spec = decode.build(target, drafter)
    assert decode.build(target, drafter, batch=2)[1].policy == Plain()
  assert spec.policy == Adaptive(2, 2, 3, 6, smaller=(1, 2))
  np.testing.assert_allclose(params.policy.level_tokens, 2)
  assert '200.0 tokens/s when measured' in caplog.text
  assert 'modelled for a batch of 2 from one of 1' in caplog.text
  cost_store.write(dataclasses.replace(COSTS, policies=COSTS.policies[::-1]))  # plain decoding is the best of them
  assert decode.build(target, drafter)[1].policy == Plain()


@pytest.mark.parametrize(('tok_per_s', 'work'), [(1e-6, (6, 3)), (1e9, (1, 1))])
def test_adaptive_policy_drafts_and_verifies_what_its_threshold_allows(here, tok_per_s, work):
  fastest = dataclasses.replace(COSTS.policies[0], tok_per_s=tok_per_s)
  costs = dataclasses.replace(COSTS, batch=2, policies=(fastest, COSTS.policies[1]))
  out = decode.generate(tiny.target(), tiny.drafter(), [[1, 2, 3], [4]], max_new_tokens=9, costs=costs)
  assert (out.stats['nodes_per_pass'], out.stats['levels_per_pass']) == work


@pytest.mark.slow
def test_trace_of_adaptive_policy_matches_decoding(here):
  target, drafter, policy = tiny.target(), tiny.drafter(), COSTS.policies[0].policy
  cost_store.write(COSTS)
  prompts = [[1, 2, 3], [4]]
  answers = make_examples(target, drafter, answer_plainly(target, prompts, max_new_tokens=9, temperature=0.0))
  decoded = [decode.generate(target, drafter, [prompt], max_new_tokens=9, policy=policy) for prompt in prompts]
  traced = trace(target, drafter, answers, policy=policy, num_rows=1)
  assert traced.num_accepted == [out.num_accepted[0] for out in decoded]


def test_build_refuses_adaptive_policy_without_costs(here):
  with pytest.raises(ValueError, match='adaptive.*run launch/cost.py'):
    decode.build(tiny.target(), tiny.drafter(), policy=Adaptive(2, 2, 3, 6))


def test_largest_of_equally_fast_draft_vocabularies_is_taken():
  def tried(num_ids: int, is_quantised: bool, tau: float) -> Vocabulary:
    return Vocabulary(num_ids, is_quantised, 0.5, tau, cycle_ms=10.0)

  few, more, more_in_bytes, all_ids = (
    tried(8, True, 2.0), tried(16, False, 1.97), tried(16, True, 1.98), tried(32, True, 1.95)
  )  # fmt: skip
  assert tune.largest_of_the_fastest([all_ids, more, more_in_bytes, few]) == more_in_bytes
  assert tune.largest_of_the_fastest([all_ids, few]) == few


@pytest.mark.parametrize(('tau', 'traced'), [(1.1, []), (3.0, [Chain(1), Chain(2)])])
def test_policies_that_would_be_slow_with_the_widest_trees_tau_are_not_traced(monkeypatch, tau, traced):
  taus, tried = {Chain(1): 1.8, Chain(2): 2.6, DynamicTree(2, 2, 2, 5): 2.9}, []

  def trace_one(target, drafter, answers, *, policy):
    tried.append(policy)
    return Traced([[1]], [taus[policy] + 1], policy)  # one pass of one answer, whose first token prefill emits

  monkeypatch.setattr(tune, 'trace', trace_one)
  widest = Traced([[1]], [tau + 1], DynamicTree(4, 4, 5, 64))
  found = tune.model_rates(None, None, [], [*taus], widest=widest, timings=COSTS, progress=lambda x, **_: x)
  assert tried == traced
  assert {rate.policy for rate in found} == {Plain(), widest.policy, *traced}
  assert found[0].tok_per_s == max(rate.tok_per_s for rate in found)


@pytest.mark.slow
def test_tuning_decodes_prompts_of_all_sizes_with_few_programs(monkeypatch):
  """Each program runs once before it is timed; tau and rates are those of `generate`."""
  target, drafter = tiny.target(), tiny.drafter()
  prompts = [[1, 2, 3], [6] * 270, [4] * 40, [*range(20)], [5]]
  policies = Plain(), Chain(2, lookup=True)
  made, loops = collections.Counter(), collections.Counter()

  class Counted(Program):
    def compile(self, *args, **static):
      run, seconds = super().compile(*args, **static)
      made[self._jitted.__name__] += seconds > 0
      is_loop = self._jitted is decode.decode_loop
      return (functools.partial(self.looped, run, static['spec']) if is_loop else run), seconds

    def looped(self, run, spec, *args):
      loops[spec.policy] += 1
      return run(*args)

  monkeypatch.setattr(tune, 'Program', Counted)
  monkeypatch.setattr(tune, 'time', types.SimpleNamespace(perf_counter=itertools.count().__next__))  # a loop a second
  how = {'max_new_tokens': 9, 'costs': COSTS}
  rates = tune.measure_rates(target, drafter, prompts, policies, batch=1, progress=lambda x, **_: x, **how)
  assert made == {'run_prefill': 2 * 2, 'decode_loop': 2 * 2}  # plain decoding has no drafter's cache to fill
  assert loops == dict.fromkeys(policies, len(prompts) + 2)
  stats = decode.generate(target, drafter, prompts, policy=policies[1], **how).stats
  for one in rates:
    assert one.tok_per_s == stats['num_new_tokens'] / len(prompts)
    assert one.tau == (1 if one.policy == Plain() else stats['tau'])
  assert stats['tau'] > 1


def test_loops_compile_in_parallel_for_the_mesh(monkeypatch):
  """A thread does not inherit the mesh of the one that starts it."""
  monkeypatch.setattr(timing, 'num_cores', lambda: 2)
  assert timing.num_compilers() == 2
  mesh, meshes, together = make_mesh(jax.devices()[:1]), [], threading.Barrier(2, timeout=60)

  class Loop:
    def lower(self, params, state, *, spec):
      meshes.append(jax.sharding.get_abstract_mesh())
      together.wait()
      return types.SimpleNamespace(compile=lambda: (params, state, spec))

  monkeypatch.setattr(timing, 'decode_loop', Loop())
  forms, bars = {name: (f'params {name}', f'spec {name}') for name in 'abcd'}, []
  first = {name: f'state {name}' for name in forms}

  def progress(each, **how):
    bars.append(how)
    return each

  runs = timing.compile_loops(forms, first, mesh=mesh, progress=progress)
  assert runs == {name: (f'params {name}', f'state {name}', f'spec {name}') for name in forms}
  assert meshes == [mesh.abstract_mesh] * 4
  assert bars == [{'desc': 'compiling', 'total': 4}]


@pytest.mark.slow
@pytest.mark.parametrize('num_compilers', [1, 3])
def test_step_times_of_several_specs_are_finite(monkeypatch, num_compilers):
  monkeypatch.setattr(timing, 'num_compilers', lambda: num_compilers)
  target, drafter = tiny.target(), tiny.drafter()
  forms = {name: decode.build(target, drafter, policy=name) for name in (Plain(), Chain(1), Chain(2))}
  ms = timing.time_steps(target, forms, batch=2, num_prompt=8, progress=lambda x, **_: x)
  assert [*ms] == [*forms]
  assert all(0 < one < float('inf') for one in ms.values())


@pytest.fixture
def little_tuning(here, monkeypatch):
  parts = {'ALL_PARTS': timing.Parts((1, 2, 4), (1,), (Chain(1),)), 'FEW_PARTS': timing.Parts((1, 2), (1,), ())}
  for name, value in (parts | {'NUM_ROUNDS': 1, 'NUM_STEPS': 4, 'DEPTHS': (2, 3)}).items():
    monkeypatch.setattr(timing, name, value)
  small = {'VOCABULARY_ROUNDS': 1, 'NUM_TIMED': 1, 'NUM_HALVINGS': 1, 'DEEP': (2, 3, 5)}
  small |= {'adaptive_candidates': lambda costs, find=tune.adaptive_candidates: find(costs)[-1:]}
  for name, value in small.items():
    monkeypatch.setattr(tune, name, value)
  monkeypatch.setattr(tune, 'CANDIDATES', (Chain(1), DynamicTree(2, 2, 2, 4)))
  monkeypatch.setattr(timing, 'bytes_per_s', lambda: 1e9)


@pytest.mark.slow  # compiles some twenty programs
@pytest.mark.usefixtures('little_tuning')
def test_tune_measures_a_pair_for_auto(monkeypatch):
  target, drafter = tiny.target(), tiny.drafter()
  costs = tune.tune(target, drafter, [[1, 2, 3], [4, 5]], contexts=(8, 40), max_new_tokens=8)
  assert [times.num_slots for times in costs.times] == [32, 64]
  assert [(set(times.verify_ms), set(times.draft_ms)) for times in costs.times] == [({1, 2, 4}, {1}), ({1, 2}, {1})]
  assert [one.temperature for one in costs.calibrations] == [0, 1]
  assert all(list(one.value) == sorted(one.value) for one in costs.calibrations)
  assert {one.kind for one in costs.policies} >= {'plain', 'adaptive'}
  assert {Plain(), DynamicTree(2, 2, 2, 4, lookup=True)} <= {one.policy for one in costs.modelled}
  assert [one.num_ids for one in costs.vocabularies] == [97, 97, 48]
  assert [one.is_quantised for one in costs.vocabularies[:2]] == [False, True]
  assert costs.num_ids in (97, 48)
  assert costs.vocabularies[0].coverage == 1
  assert costs.policies[0].tok_per_s == max(one.tok_per_s for one in costs.policies)
  monkeypatch.setattr(auto, 'device_name', lambda mesh: costs.device)
  cost_store.write(costs)
  plain = decode.generate(target, None, [[1, 2, 3]], max_new_tokens=8)
  assert decode.generate(target, drafter, [[1, 2, 3]], max_new_tokens=8).tokens == plain.tokens


SMALLER = dataclasses.replace(tiny.TARGET, num_layers=1, name='smaller')


@pytest.mark.slow
@pytest.mark.usefixtures('little_tuning')
@pytest.mark.parametrize(
  ('drafter_of', 'forms'),
  [
    (functools.partial(hub.load_drafter, 'ngram'), [(97, False)]),
    (functools.partial(as_drafter, tiny.target(SMALLER, seed=4)), [(97, False), (97, True)]),
  ],
  ids=['ngram', 'model'],
)
def test_tune_measures_drafters_of_other_kinds(monkeypatch, drafter_of, forms):
  """One without logits is measured without lookup, and only the target's head is cut or rounded."""
  target = tiny.target()
  drafter = drafter_of(target)
  costs = tune.tune(target, drafter, [[1, 2, 3], [4, 5]], contexts=(8,), max_new_tokens=8)
  assert {one.policy.lookup for one in costs.modelled if one.kind != 'plain'} == {bool(drafter.params)}
  assert [(one.num_ids, one.is_quantised) for one in costs.vocabularies] == forms
  monkeypatch.setattr(auto, 'device_name', lambda mesh: costs.device)
  cost_store.write(costs)
  plain = decode.generate(target, None, [[1, 2, 3]], max_new_tokens=8)
  assert decode.generate(target, drafter, [[1, 2, 3]], max_new_tokens=8).tokens == plain.tokens
