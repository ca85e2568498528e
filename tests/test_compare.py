"""Policies replayed from whole trees: the passes of real decoding to the token; rows, rates and tables by hand."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
import tiny_twin
from eagle_jax import decode
from eagle_jax.bench import compare
from eagle_jax.bench.comparison import Row, dynamic_tau, table
from eagle_jax.bench.plots import plot_comparison
from eagle_jax.bench.questions import Question
from eagle_jax.evaluate.acceptance import make_rising, tabulate
from eagle_jax.evaluate.calibration import AnswerTokens, make_examples
from eagle_jax.evaluate.classifier import Labelled, fit, label
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.positions import Grown, Positions, Replayed, find_path, grow_everywhere, replay
from eagle_jax.policy import cost_store
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.c2t import C2T, Classifier
from eagle_jax.policy.calibrated import AcceptanceTable, CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree
from eagle_jax.tree import NO_TOKEN, Candidates
from listen import compile_events
from tiny_costs import COSTS, SHORT

NUM_NEW = 24
SIZES = {'width': 4, 'fanout': 3, 'max_depth': 4, 'num_nodes': 20}
TREE = DynamicTree(**SIZES)
STOPPING = (
  DDD(**SIZES, smaller=(14,), least_log_mass=-0.5),
  SVIP(**SIZES, smaller=(14,), scale=0.2, most_rejected=0.6),
  SureMass(**SIZES, smaller=(14,), scale=0.1, least_mass=0.4),
  Adaptive(**SIZES, smaller=(4,), thresholds=(0.5, 1.0)),
  RateTree(**SIZES, smaller=(1, 4), thresholds=(0.5, 1.0)),
  C2T(**SIZES, smaller=(2, 4), least_accepted=0.7),
)
GAP = GapTree(**SIZES, steepness=2.0)
CAPE = CaPE(**SIZES, smaller=(8,), confidences=(0.2, 0.4), siblings=(2, 1, 0))
CALIBRATED = CalibratedTree(**SIZES)
POLICIES = (Plain(), Chain(2), GAP, CAPE, CALIBRATED, *STOPPING)
TEMPERATURES = (0.0, 1.0)


class Letters:
  """A tokenizer of characters."""

  def encode_prompt(self, text: str) -> list[int]:
    return [ord(letter) % 97 for letter in text]

  def decode(self, ids) -> str:
    return ' '.join(map(str, ids))


@pytest.fixture(scope='module')
def target():
  return dataclasses.replace(tiny_twin.target(), tokenizer=Letters())


@pytest.fixture(scope='module')
def drafter(target):
  return tiny_twin.drafter_of(target, noise=0.4)


@pytest.fixture(scope='module')
def examples(target, drafter):
  """Answers of both temperatures, one cut to a single token among them."""
  how = {'max_new_tokens': NUM_NEW, 'eos_ids': (), 'seed': 3}
  texts = []
  for temperature in TEMPERATURES:
    for row_id, prompt in enumerate(tiny_twin.PROMPTS):
      out = decode.generate(target, None, [prompt], temperature=temperature, row_ids=[row_id], **how)
      texts.append(AnswerTokens(row_id, prompt, out.tokens[0][: 1 if row_id == 3 else NUM_NEW], temperature, 3))
  return make_examples(target, drafter, texts, dtype=jnp.float32)


@pytest.fixture(scope='module')
def grown(target, drafter, examples):
  deepest = (DynamicTree(4, 3, 5, 20), Chain(3), GAP, CAPE, C2T(**SIZES), CALIBRATED)
  return [grow_everywhere(target, drafter, examples, policy=policy, costs=COSTS, num_rows=5) for policy in deepest]


def replayed(target, drafter, grown, policy) -> Replayed:
  held = next(positions for positions in grown if positions.holds(policy))
  return replay(held, policy, policy.arrays(COSTS, target, drafter), max_new_tokens=NUM_NEW)


@pytest.mark.slow
@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_replay_matches_decoding(target, drafter, examples, grown, policy):
  found = replayed(target, drafter, grown, policy)
  compare_with_decoding(target, drafter, examples, policy, found, num_new=NUM_NEW)
  if policy in STOPPING:
    assert len({levels for row in found.num_levels for levels in row}) > 1  # it stops here and there
  if policy.sizes[:-1]:
    assert len({nodes for row in found.num_nodes for nodes in row}) > 1


def test_replay_of_a_single_token_matches_decoding(target, drafter, examples, grown):
  found = replayed(target, drafter, grown, Chain(2))
  compare_with_decoding(target, drafter, examples, Chain(2), found, num_new=1)


def compare_with_decoding(target, drafter, examples, policy, found, *, num_new):
  """Hold the replay of the answers of `num_new` tokens against decoding: one by one, since a batch shares its sizes."""
  numbers = [number for number, example in enumerate(examples) if example.is_answer.sum() == num_new]
  assert len(numbers) >= len(TEMPERATURES)
  for number in numbers:
    example = examples[number]
    prompt, answer = example.token[~example.is_answer].tolist(), example.token[example.is_answer].tolist()
    out = decode.generate(
      target, drafter, [prompt], policy=policy, costs=COSTS, eos_ids=(), row_ids=[example.id], seed=example.seed,
      temperature=example.temperature, max_new_tokens=num_new,
    )  # fmt: skip
    assert out.tokens == [answer]
    assert found.num_accepted[number] == out.num_accepted[0]
    num_passes = max(out.stats['num_target_passes'], 1)
    assert sum(found.num_nodes[number]) == pytest.approx(out.stats['nodes_per_pass'] * num_passes)
    assert sum(found.num_levels[number]) == pytest.approx(out.stats['levels_per_pass'] * num_passes)


def test_other_numbers_compile_nothing(target, drafter, grown):
  policy = STOPPING[0]
  before = replayed(target, drafter, grown, policy)
  with compile_events() as events:
    after = replayed(target, drafter, grown, dataclasses.replace(policy, least_log_mass=-5.0))
  assert events == []
  assert after.levels_per_pass == policy.max_depth > before.levels_per_pass


def test_trees_that_grow_otherwise_are_refused(target, drafter, grown):
  wide, _, by_gap, by_bins, *_ = grown
  others = Chain(2), DynamicTree(3, 3, 3, 5), DynamicTree(4, 3, 6, 12), dataclasses.replace(TREE, lookup=True), GAP
  for policy in (*others, StaticTree([(0,), (1,)])):
    with pytest.raises(ValueError, match='must hold') as raised:
      replay(wide, policy, max_new_tokens=NUM_NEW)
    assert policy.describe() in str(raised.value)
  assert by_gap.holds(dataclasses.replace(GAP, num_nodes=3, max_depth=2))
  assert not by_gap.holds(dataclasses.replace(GAP, steepness=1.0))
  assert not by_gap.holds(TREE)
  assert not by_bins.holds(dataclasses.replace(CAPE, siblings=(2, 1, 1)))


def test_a_text_is_followed_through_a_tree():
  """The root 9 has children 4 and 6, and node 2 a child 4; an unused node follows."""
  zero_A = jnp.zeros(5)
  tree = Candidates(jnp.array([9, 4, 6, 4, NO_TOKEN]), jnp.array([-1, 0, 0, 2, 2]), zero_A, zero_A)
  for text, path in (([6, 4, 1], [2, 3, 5]), ([4, 4, 4], [1, 5, 5]), ([5, 6, 4], [5, 5, 5])):
    assert find_path(tree, jnp.asarray(text)).tolist() == path


# The classifier and the table.


def test_nodes_are_labelled_by_the_text_and_none_beyond_its_end():
  """An answer of three tokens: at the second position, nodes of depth 2 lie beyond its end."""
  policy, feature = DynamicTree(1, 2, 2, 3), np.zeros((4, 1), np.float32)
  example = Example(0, np.arange(5), np.arange(5) > 1, feature)
  zero_2A = np.zeros((2, 5), np.float32)
  log_q_2A = np.array([[0, -1, -2, -3, -np.inf], [0, -4, -5, -6, -7]], np.float32)
  parent_2A = np.tile(np.array([-1, 0, 0, 1, 1], np.int32), (2, 1))
  seen = Candidates(zero_2A, parent_2A, log_q_2A, log_q_2A, log_q_2A / -10)
  nodes = label(Positions(policy, [example], [Grown(seen, np.array([[1, 3], [5, 5]]))]))
  inputs = [(-1, 0.1, 1), (-2, 0.2, 1), (-3, 0.3, 2), (-4, 0.4, 1), (-5, 0.5, 1)]
  np.testing.assert_allclose(nodes.inputs, inputs, rtol=1e-6)
  assert nodes.is_accepted.tolist() == [True, False, True, False, False]
  assert nodes.log_p.tolist() == [-1, -2, -2, -4, -5]
  assert nodes.is_tried.all()


def test_only_nodes_whose_parent_was_accepted_were_tried():
  """The text goes on with the second child, and then with its child; the first has a child, too."""
  policy, feature = DynamicTree(2, 2, 2, 3), np.zeros((5, 1), np.float32)
  example = Example(0, np.arange(6), np.arange(6) > 1, feature)
  log_q_1A = np.array([[0, -1, -2, -3, -np.inf, -4, -np.inf]], np.float32)
  parent_1A = np.array([[-1, 0, 0, 1, 1, 2, 2]], np.int32)
  seen = Candidates(parent_1A, parent_1A, log_q_1A, log_q_1A, log_q_1A / -10)
  nodes = label(Positions(policy, [example], [Grown(seen, np.array([[2, 5]]))]))
  assert nodes.is_tried.tolist() == [True, True, False, True]
  assert nodes.is_accepted.tolist() == [False, True, False, True]
  assert nodes.log_p.tolist() == [-1, -2, -2, -2]


def test_a_classifier_learns_how_likely_nodes_are_accepted():
  rng = np.random.default_rng(0)
  log_q_n, entropy_n, depth_n = rng.uniform(-8, 0, 20_000), rng.uniform(0, 4, 20_000), rng.integers(1, 7, 20_000)
  p_n = 1 / (1 + np.exp(-(2 + log_q_n - 0.5 * entropy_n + 0.2 * depth_n)))
  inputs_n3 = np.stack([log_q_n, entropy_n, depth_n], axis=1).astype(np.float32)
  nodes = Labelled(inputs_n3, rng.random(20_000) < p_n, log_q_n, np.ones(20_000, bool))
  fitted = fit(nodes, num_steps=600)
  logit_n = Classifier(*map(jnp.float32, fitted)).logit(*jnp.asarray(inputs_n3.T))
  assert np.abs(1 / (1 + np.exp(-logit_n)) - p_n).mean() < 0.02
  with pytest.raises(ValueError, match='got 9 nodes, of which 0%'):
    fit(Labelled(*(x[:9] for x in nodes))._replace(is_accepted=np.zeros(9, bool)))


def test_shares_that_fall_are_pooled():
  """By weight: 3 and 1 are 1.5 together, which 1.4 falls below; 2 thrice and 5 stay as they are."""
  rising_X = make_rising(np.array([3, 1, 1.4, 2, 2, 5]), np.array([1, 3, 6, 1, 2, 1]))
  np.testing.assert_allclose(rising_X, [1.44] * 3 + [2, 2, 5])


def test_a_table_holds_the_shares_of_nodes_that_were_tried():
  """Acceptance depends on all three, and those that were not tried would spoil it."""
  rng, num = np.random.default_rng(0), 60_000
  log_p_n, entropy_n, depth_n = rng.uniform(-5, 0, num), rng.uniform(0, 4, num), rng.integers(1, 6, num)
  bin_n = np.minimum(entropy_n.astype(int), 3)  # quarters
  share_n = np.exp((0.5 + 0.2 * np.minimum(depth_n, 3)) * log_p_n - 0.2 * bin_n)
  is_tried_n = rng.random(num) < 0.7
  inputs_n3 = np.stack([log_p_n * depth_n, entropy_n, depth_n], axis=1).astype(np.float32)
  table = tabulate(Labelled(inputs_n3, is_tried_n & (rng.random(num) < share_n), log_p_n, is_tried_n))
  np.testing.assert_allclose(table.entropy, [1, 2, 3], atol=0.05)
  arrays = AcceptanceTable(*map(jnp.float32, table))
  log_p_11C, one_11 = jnp.linspace(0, -20, 2001)[None, None], jnp.ones((1, 1))
  for depth, entropy in itertools.product((1, 2, 3, 7), (0.5, 2.5, np.inf)):
    found_C = np.asarray(arrays.look_up(depth, entropy * one_11, log_p_11C))[0, 0]
    expected_C = np.exp((0.5 + 0.2 * min(depth, 3)) * log_p_11C[0, 0] - 0.2 * min(int(min(entropy, 3)), 3))
    assert np.abs(np.exp(found_C) - expected_C).mean() < 0.01
    assert found_C[0] <= 0
    assert (np.diff(found_C) < 0).all()  # siblings keep their order


@pytest.mark.slow
def test_a_classifier_is_fitted_to_a_pair_and_stored_with_its_costs(target, drafter, monkeypatch, tmp_path):
  monkeypatch.setattr(compare, 'WIDTHS', (2,))
  monkeypatch.setattr(compare, 'DEPTHS', (3,))
  monkeypatch.setattr(compare, 'find_costs', lambda target, drafter: None)
  with pytest.raises(ValueError, match='run launch/cost.py first'):
    compare.fit_acceptance(target, drafter, ASKED, TEMPERATURES, max_new_tokens=8)
  known = dataclasses.replace(COSTS, classifier=None, acceptance_table=None)
  for policy in (C2T(), CalibratedTree()):
    with pytest.raises(ValueError, match='run launch/classifier.py'):
      policy.arrays(known, target, drafter)
  monkeypatch.setattr(compare, 'find_costs', lambda target, drafter: known)
  costs = compare.fit_acceptance(target, drafter, ASKED, TEMPERATURES, max_new_tokens=8)
  assert dataclasses.replace(costs, classifier=None, acceptance_table=None) == known
  assert cost_store.read(cost_store.write(costs, tmp_path)) == costs
  likely, unlikely = (
    Classifier(*map(jnp.float32, costs.classifier)).logit(*map(jnp.float32, (log_q, 1, 2))) for log_q in (-0.1, -6)
  )
  assert likely > unlikely
  assert CalibratedTree().arrays(costs, target, drafter).log_accepted.shape == (3, 4, len(costs.acceptance_table.log_p))


# The comparison.


def test_answers_are_recorded_by_length_and_come_in_the_order_of_the_questions(target, monkeypatch):
  asked = [Question('one', str(n), ('a' * length,)) for n, length in enumerate((3, 40, 5, 30, 16, 33))]
  lengths = []

  def answer_id(target, drafter, prompts, *, row_ids, **_):
    lengths.append([len(prompt) for prompt in prompts])
    return SimpleNamespace(tokens=[[row_id] for row_id in row_ids])

  monkeypatch.setattr('eagle_jax.evaluate.calibration.generate', answer_id)
  answers = compare.record_answers(target, asked, [1.0], max_new_tokens=8)
  assert lengths == [[40, 33, 30], [16, 5, 3]]
  assert [len(one.prompt) for one in answers] == [3, 40, 5, 30, 16, 33]
  assert [[one.id] for one in answers] == [one.answer for one in answers] == [[question.row_id] for question in asked]


def test_modelled_time_by_hand():
  """Two passes of 4 and 8 nodes behind 3 levels and 1 level of width 3, one of 1 node that drafted nothing."""
  passes = Replayed([[0, 0, 0]], [4], DynamicTree(3, 3, 3, 8), [[4, 8, 1]], [[3, 1, 0]])
  assert compare.modelled_ms(passes, SHORT, is_free=False) == (13 + 1 + 2 * 4) + (21 + 1) + (10 + 1)
  assert compare.modelled_ms(passes, SHORT, is_free=True) == 13 + 21 + 10
  assert compare.modelled_ms(dataclasses.replace(passes, policy=Plain()), SHORT, is_free=False) == 3 * 10


ASKED = [Question('one', '1', ('ab',)), Question('one', '2', ('de',)), Question('two', '1', ('f',))]


@pytest.fixture(scope='module')
def drafters(target, drafter):
  return [drafter, eagle_jax.load_drafter('ngram', target)]


@pytest.fixture(scope='module')
def rows(target, drafters):
  costs = dataclasses.replace(COSTS, drafter=drafters[0].config.name)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compare, 'WIDTHS', (2,))
    patch.setattr(compare, 'DEPTHS', (3,))
    patch.setattr(compare, 'STOPPING_NODES', (4,))
    every = compare.candidates
    patch.setattr(compare, 'candidates', lambda *, lookup, **how: every(lookup=lookup, **how)[: 2 if lookup else None])
    patch.setattr(compare, 'find_costs', lambda target, drafter: costs if drafter.params else None)
    how = {'max_new_tokens': 8, 'num_nodes': (2, 4)}
    found = compare.compare(target, drafters, ASKED, TEMPERATURES, **how)
    return found + compare.decode_best(target, drafters, ASKED, found, num_best=1, max_new_tokens=8)


@pytest.mark.slow
def test_every_policy_has_a_row_at_every_temperature(rows):
  kinds = {(row.series, row.kind, row.temperature) for row in rows if not row.measured}
  for series in ('drafter', 'drafter + lookup', 'drafter + route', 'ngram'):
    for temperature in TEMPERATURES:
      drawn = {kind for name, kind, at in kinds if (name, at) == (series, temperature)} - {'plain'}
      every = {'chain', 'dynamic', 'ddd', 'svip', 'sure_mass', 'gap', 'cape'}
      expected = {'chain'} if '+' in series else every
      assert drawn == expected | ({'adaptive', 'rate', 'c2t', 'calibrated'} if series == 'drafter' else set())
  plain = [row for row in rows if row.kind == 'plain']
  assert [(row.tau, row.measured) for row in plain] == [(1.0, False)] * 2 + [(1.0, True)] * 2
  assert plain[0].rate == pytest.approx(100.0)
  assert {*plain[0].by_task} == {'one', 'two'}


def test_the_best_rows_decode_as_they_were_replayed(rows):
  decoded = [row for row in rows if row.measured and row.kind != 'plain']
  assert [row.temperature for row in decoded] == [*TEMPERATURES]
  for row in decoded:
    alike = [other for other in rows if not other.measured and other.temperature == row.temperature]
    (own,) = [other for other in alike if (other.drafter, other.policy) == (row.drafter, row.policy)]
    assert (row.tau, row.nodes, row.passes) == pytest.approx((own.tau, own.nodes, own.passes))
    assert own.rate == max(other.rate for other in alike if other.kind != 'plain')


def test_rows_tables_and_plots(rows, tmp_path):
  content = json.loads(json.dumps([row.to_json() for row in rows]))
  assert {*content[0]} == {
    'drafter', 'policy', 'kind', 'tau', 'nodes', 'passes', 'rate', 'temperature', 'measured'
  }  # fmt: skip
  page = table(rows)
  assert page.count('\n## Temperature') + page.startswith('## Temperature') == 2
  for row in rows:
    assert row.policy.describe() in page or row.kind in ('chain', 'dynamic', 'gap', 'plain')
  pytest.importorskip('matplotlib')
  paths = plot_comparison(rows, tmp_path)
  assert [path.name for path in paths] == ['tau_against_nodes.png', 'rate_against_tau.png']
  assert all(path.stat().st_size > 5000 for path in paths)


def test_tau_at_equal_nodes_is_that_of_the_best_shape_between_sizes():
  def row(policy, tau: float) -> Row:
    return Row('d', policy, 0.0, tau, policy.num_nodes, 1.0, None)

  found = [row(DynamicTree(2, 2, 3, 8), 2.0), row(DynamicTree(4, 4, 3, 8), 3.0), row(Chain(3), 9.0)]
  assert dynamic_tau(found, 'd', 8) == 3.0
  assert dynamic_tau(found, 'd', 4.5) == 2.0  # halfway from one node, whose tau is 1
