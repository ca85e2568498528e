"""The benchmark: questions, a log that is gone on with, texts compared, and every number by hand."""

import csv
import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.bench import measure as measuring
from eagle_jax.bench import summary
from eagle_jax.bench.measure import Bench, gap_at_divergence, identity, near_tie
from eagle_jax.bench.plots import plot
from eagle_jax.bench.questions import QUESTIONS, Question, read_questions, tasks_in
from eagle_jax.bench.run import run
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.evaluate.answered import Answered, Timed
from eagle_jax.evaluate.calibration import acceptance_by_rank, calibrate, reliability
from eagle_jax.evaluate.trace import Nodes
from eagle_jax.lossy import TypicalAcceptance
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.sampling import Sampling, position_noise
from tiny_chat import TOY
from tiny_training import SIZES

POLICY = DynamicTree(3, 3, 2, 6)
ASKED = [Question('one', '1', ('ab', 'c')), Question('one', '2', ('de',)), Question('two', '1', ('f',))]
OPTIONS = {'max_new_tokens': 6, 'seed': 3}
SETTINGS = {'policy': POLICY.describe(), **OPTIONS}


@pytest.fixture(scope='module')
def pair():
  config = TargetConfig(**SIZES, num_layers=1, max_context=128, eos_ids=(0,))
  params = TransformerTarget(config).init_params(jax.random.key(0))
  params['embed']['weight'] *= 50
  drafter = DrafterConfig(**SIZES)
  return Target(config, params, TOY), Drafter(drafter, Eagle(drafter).init_params(jax.random.key(1)))


@pytest.fixture(scope='module')
def answers(pair, tmp_path_factory):
  bench = Bench(*pair, POLICY, OPTIONS, num_repeats=2)
  return at_both(bench, tmp_path_factory.mktemp('bench') / 'log')


def at_both(bench: Bench, log) -> list[Answered]:
  """Answer at two temperatures, in one log."""
  return [answer for temperature in (0.0, 1.0) for answer in bench.measure(ASKED, temperature, log, SETTINGS)]


def untimed(answers) -> list[Answered]:
  def bare(timed: Timed) -> Timed:
    return timed._replace(prefill_s=0.0, decode_s=0.0)

  return [a._replace(plain=bare(a.plain), spec=bare(a.spec)) for a in answers]


# Questions.


def test_shipped_questions_are_readable():
  tasks = {path.stem for path in QUESTIONS.glob('*.jsonl')}
  assert tasks == {'mt_bench', 'humaneval', 'gsm8k', 'qa', 'sum_open', 'instruct_open'}
  read = [question for task in sorted(tasks) for question in read_questions(QUESTIONS, task)]
  assert len(read) == 6 * 80
  assert len({question.row_id for question in read}) == 6 * 80
  assert all(0 <= question.row_id < 2**31 for question in read)
  assert [len(question.turns) for question in read_questions(QUESTIONS, 'mt_bench', 2)] == [2, 2]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"question_id": 1, "turns": []}', r'line 2: `turns`.* \[\]'),
    ('{"question_id": 1, "turns": "Why?"}', "line 2: `turns`.* 'Why.'"),
    ('{"turns": ["Why?"]}', "line 2: .*KeyError.'question_id'"),
    ('[' * 100_000, 'line 2 is not valid JSON: it is nested too deeply'),
    ('{"question_id": 1, "turns"', 'line 2 is not valid JSON'),
  ],
)
def test_malformed_question_is_named_by_its_line(tmp_path, line, message):
  (tmp_path / 'own.jsonl').write_text(f'{{"question_id": 0, "turns": ["a"]}}\n{line}\n', encoding='utf-8')
  with pytest.raises(ValueError, match=message):
    read_questions(tmp_path, 'own')


def test_missing_or_empty_task_is_named(tmp_path):
  (tmp_path / 'own.jsonl').write_text('\n', encoding='utf-8')
  with pytest.raises(ValueError, match=r"other.jsonl.*\['own'\]"):
    read_questions(tmp_path, 'other')
  with pytest.raises(ValueError, match='own.jsonl is empty'):
    read_questions(tmp_path, 'own')
  for look in (tasks_in, functools.partial(read_questions, task='own')):
    with pytest.raises(ValueError, match='No questions in .*nowhere'):
      look(tmp_path / 'nowhere')


# Measuring.


def test_every_turn_is_decoded_plainly_and_speculatively(answers):
  keys = [(a.task, a.question_id, a.turn, a.temperature, a.repeat) for a in answers]
  turns = [('one', '1', 0), ('one', '1', 1), ('one', '2', 0), ('two', '1', 0)]
  assert keys == [(*turn, temperature, repeat) for temperature in (0.0, 1.0) for turn in turns for repeat in (0, 1)]
  for answer in answers:
    assert answer.plain.tokens == answer.spec.tokens
    assert answer.gap is None
    assert answer.plain.num_accepted == [0] * (len(answer.plain.tokens) - 1)
  assert any(sum(answer.spec.num_accepted) for answer in answers)
  first, again, second = answers[0], answers[1], answers[2]
  assert untimed([first])[0] == untimed([again])[0]._replace(repeat=0)
  assert TOY.decode(second.prompt) == 'ab' + TOY.decode(first.plain.tokens) + 'c'


def test_stopped_run_resumes_from_its_log(pair, answers, tmp_path, monkeypatch):
  bench, log = Bench(*pair, POLICY, OPTIONS, num_repeats=2), tmp_path / 'log'
  run = bench.measure(ASKED, 0.0, log, SETTINGS)
  for _ in range(6):
    next(run)
  run.close()
  with open(log, 'a', encoding='utf-8') as file:
    file.write('{"task": "one", "question')  # a line that was being written
  decoded = []

  def counted(*args, **how):
    decoded.append(how['policy'])
    return generate(*args, **how)

  generate = measuring.generate
  monkeypatch.setattr(measuring, 'generate', counted)
  assert untimed(at_both(bench, log)) == untimed(answers)
  num_made = len(answers) - 6
  assert 2 * num_made <= len(decoded) <= 4 * num_made
  assert len(log.read_text().splitlines()) == 1 + len(answers)
  decoded.clear()
  assert len(at_both(bench, log)) == len(answers)
  assert not decoded
  with pytest.raises(ValueError, match='log .*seed was 3 and is now 4'):
    next(bench.measure(ASKED, 0.0, log, {**SETTINGS, 'seed': 4}))


def test_log_without_answers_is_overwritten(pair, tmp_path):
  log, mistyped = tmp_path / 'log', {**OPTIONS, 'top_p': 1.5}
  with pytest.raises(ValueError, match='`top_p`.* 1.5'):
    next(Bench(*pair, POLICY, mistyped).measure(ASKED, 0.0, log, mistyped))
  log.write_text(json.dumps(mistyped) + '\n')
  assert len([*Bench(*pair, POLICY, OPTIONS).measure(ASKED, 0.0, log, SETTINGS)]) == 4
  assert json.loads(log.read_text().splitlines()[0]) == SETTINGS


def test_logged_answer_to_another_prompt_is_refused(pair, tmp_path):
  bench = Bench(*pair, POLICY, OPTIONS)
  assert len([*bench.measure(ASKED[1:2], 0.0, tmp_path / 'log', SETTINGS)]) == 1
  with pytest.raises(ValueError, match=r"\('one', '2', 0.*another one"):
    next(bench.measure([ASKED[1]._replace(turns=('da',))], 0.0, tmp_path / 'log', SETTINGS))


def test_identity_changes_with_the_weights(pair):
  _, drafter = pair
  assert identity(None) == {}
  other = dataclasses.replace(drafter, params=jax.tree.map(lambda x: x + 1, drafter.params))
  assert identity(drafter) == identity(dataclasses.replace(drafter))
  for changed in (other, drafter.quantised(), drafter.first_ids(9)):
    assert identity(changed) != identity(drafter)


@pytest.mark.parametrize(
  'how', [{}, {'temperature': 1.0, 'seed': 5}, {'temperature': 1.0, 'top_k': 2}, {'top_k': 1}], ids=str
)
def test_gap_is_between_the_two_best_perturbed_logits(pair, how):
  target, _ = pair
  prompt, plain, sampling = [2, 9, 9], [7, 8, 9, 5], Sampling.of(**how)
  assert gap_at_divergence(target, prompt, plain, list(plain), sampling, 4) is None
  gap = gap_at_divergence(target, prompt, plain, [7, 8, 3], sampling, 4)
  network = TransformerTarget(target.config)
  logits_V = network.logits(target.params, network.read(target.params, jnp.asarray([[2, 9, 9, 7, 8]])))[:, 0, -1]
  noise_V = position_noise(sampling.seed, 4, 5, jnp.arange(31))
  kept_V = logits_V if how.get('top_k') != 2 else jnp.where(logits_V >= jnp.sort(logits_V)[-2], logits_V, -jnp.inf)
  best = np.sort(np.asarray(kept_V + sampling.temperature * noise_V))[::-1]
  np.testing.assert_allclose(gap, best[0] - best[1], rtol=1e-5)


def test_run_writes_a_report(pair, answers, tmp_path):
  bench = Bench(*pair, POLICY, OPTIONS)
  out = run(bench, ASKED, 1.0, tmp_path / 'log', tmp_path / 'one', SETTINGS)
  assert json.loads((tmp_path / 'one' / 'report.json').read_text()) == json.loads(json.dumps(out))
  assert (out['temperature'], out['policy'], out['tasks'].keys()) == (1.0, POLICY.describe(), {'one', 'two'})
  assert out['too_long'] == []
  assert out['pooled']['tau'] == summary.traced([a for a in answers if a.temperature == 1], POLICY).tau
  assert sum(out['calibration']['num_nodes']) > 0
  assert (tmp_path / 'one' / 'calibration.png').exists()
  short = dataclasses.replace(bench, options={**OPTIONS, 'max_new_tokens': 1})
  assert 'calibration' not in run(short, ASKED, 1.0, tmp_path / 'short', tmp_path / 'two', {})


def test_turns_beyond_the_context_are_skipped_and_named(pair, tmp_path):
  """The context has 128 tokens; a second turn's prompt includes the first turn and its answer."""
  bench = Bench(*pair, POLICY, OPTIONS)
  asked = [Question('one', '1', ('a' * 70, 'b' * 50)), Question('one', '2', ('c' * 123,)), Question('two', '1', ('d',))]
  out = run(bench, asked, 0.0, tmp_path / 'log', tmp_path / 'report', SETTINGS)
  assert out['too_long'] == ['one/1, turn 2', 'one/2, turn 1']
  assert out['details']['pooled']['num_answers'] == 2
  with pytest.raises(ValueError, match='1 questions .* 128 .*max_new_tokens='):
    run(bench, asked[1:2], 0.0, tmp_path / 'log', tmp_path / 'report', SETTINGS)


# Numbers by hand.


def answered(
  task, question_id, *, spec=(), num_accepted=(), plain=None, turn=0, repeat=0, gap=None, seconds=(1.0, 1.0)
):
  plain_tokens = list(spec if plain is None else plain)
  return Answered(
    task, question_id, turn, 0.0, repeat, 0, [1],
    Timed(plain_tokens, [0] * (len(plain_tokens) - 1), 1, 0, 0.1, seconds[0]),
    Timed(list(spec), list(num_accepted), 4, 2, 0.1, seconds[1]), gap,
  )  # fmt: skip


BY_HAND = (
  answered('a', '1', spec=[1, 2, 3, 4, 5, 6, 7], num_accepted=[2, 1, 0], seconds=(2.0, 1.0)),
  answered('a', '1', spec=[1, 2, 3, 4, 1, 2, 3, 4], num_accepted=[2, 2, 0], turn=1, seconds=(2.0, 1.0)),
  answered('a', '2', spec=[1, 2, 3], num_accepted=[1], seconds=(1.0, 1.0), plain=[1, 2, 4], gap=5e-4),
  answered('b', '1', spec=[5, 6], num_accepted=[0], seconds=(1.0, 2.0), plain=[5, 7], gap=0.5),
)


def test_summary_by_hand():
  policy = Chain(2)
  out = summary.report(BY_HAND, policy)
  a, b, pooled = out['tasks']['a'], out['tasks']['b'], out['pooled']
  assert a['tau'] == (6 + 7 + 2) / (3 + 3 + 1)
  assert a['tau_paper'] == (6 + 7) / (2 + 2)  # question 2 took one pass
  assert a['plain_tok_per_s'] == 18 / 5
  assert a['spec_tok_per_s'] == 18 / 3
  assert a['speedup'] == pytest.approx(5 / 3)
  assert a['identical'] == 2 / 3
  assert b['tau'] == b['tau_paper'] == 1
  assert b['identical'] == 0
  assert pooled['tau'] == (6 + 7 + 2 + 1) / 8
  assert out['mean'] == {name: (a[name] + b[name]) / 2 for name in pooled}
  details = out['details']['pooled']
  assert (details['nodes_per_pass'], details['levels_per_pass']) == (4, 2)
  assert (details['near_ties'], details['far_apart'], details['not_in_tau_paper']) == (1, 1, 2)
  assert details['differing'] == 2 / (7 + 8 + 3 + 2)
  assert details['num_accepted'] == [3, 2, 3]
  assert out['details']['a']['repetition'] == pytest.approx(1 / (4 + 5))
  assert details['plain_spread'] is None
  assert json.loads(json.dumps(out, allow_nan=False)) == out


@pytest.mark.parametrize(('weights_dtype', 'num_far'), [(None, 2), ('int8', 1)])
def test_a_rounded_target_has_wider_near_ties(weights_dtype, num_far):
  gaps = 5e-4, 5e-3, 5e-2
  rows = [answered('a', str(gap), spec=[1], num_accepted=[], plain=[2], gap=gap) for gap in gaps]
  bound = near_tie(SimpleNamespace(weights_dtype=weights_dtype))
  assert summary.report(rows, Chain(2), near_tie=bound)['details']['a']['far_apart'] == num_far


def test_repeats_give_a_spread_and_count_once_in_tau():
  again = answered('a', '1', spec=[1, 2, 3, 4, 5, 6, 7], num_accepted=[2, 1, 0], repeat=1, seconds=(4.0, 1.0))
  rows = [BY_HAND[0], again]
  assert summary.summarise(rows, Chain(2))['tau'] == 6 / 3
  assert summary.summarise(rows, Chain(2))['plain_tok_per_s'] == 14 / 6
  np.testing.assert_allclose(summary.details(rows, Chain(2))['plain_spread'], np.std([7 / 2, 7 / 4], ddof=1))


def test_tables_and_plots_are_written(tmp_path, monkeypatch):
  out = summary.report(BY_HAND, Chain(2))
  out['calibration'] = {'confidence': [0.1, 0.9], 'acceptance': [0.2, 0.8], 'expected_error': 0.1}
  text = summary.markdown(out)
  assert [line.split('|')[1].strip() for line in text.splitlines()] == ['task', '---', 'a', 'b', 'mean', 'pooled']
  assert [line.split('|')[-3:-1] for line in text.splitlines()[2:]] == [
    [' 1 ', ' 0 '], [' 0 ', ' 1 '], ['  ', '  '], [' 1 ', ' 1 ']
  ]  # fmt: skip
  summary.write(out, tmp_path)
  assert (tmp_path / 'report.md').read_text().strip() == text
  assert json.loads((tmp_path / 'report.json').read_text()) == out
  with open(tmp_path / 'report.csv', newline='', encoding='utf-8') as file:
    rows = {row['task']: row for row in csv.DictReader(file)}
  assert float(rows['pooled']['tau']) == 2.0
  assert (rows['a']['near_ties'], rows['b']['far_apart'], rows['mean']['far_apart']) == ('1', '1', '')
  paths = plot(out, tmp_path)
  assert {path.name for path in paths} == {'accepted.png', 'acceptance_by_depth.png', 'calibration.png'}
  assert all(path.read_bytes().startswith(b'\x89PNG') for path in paths)
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  assert plot(out, tmp_path / 'without_matplotlib') == []


@pytest.mark.parametrize(('dtype', 'why'), [('float32', 'which is a defect'), ('bfloat16', 'since bfloat16 rounds')])
def test_differing_texts_are_logged(tmp_path, caplog, dtype, why):
  target = SimpleNamespace(dtype=jnp.dtype(dtype), weights_dtype=None)
  made = {'policy': Chain(2), 'drafter': None, 'num_repeats': 1, 'target': target}
  bench = SimpleNamespace(**made, options={}, measure=lambda *_: iter(BY_HAND))
  run(bench, [], 0.0, tmp_path / 'log', tmp_path, {})
  assert f'1 of 4 texts differ from plain decoding beyond near ties, {why}' in caplog.text
  caplog.clear()
  bench.options['chooser'] = TypicalAcceptance()
  run(bench, [], 0.0, tmp_path / 'log', tmp_path, {})
  assert not caplog.text


def test_reliability_by_hand():
  log_p = np.log([0.9, 0.95, 0.1, 0.3, 0.8])
  is_tried, is_accepted = np.array([1, 1, 1, 1, 0], bool), np.array([1, 0, 0, 1, 0], bool)
  nodes = Nodes(log_p, log_p, np.ones(5, int), np.array([0, 0, 1, 2, 0]), is_tried, is_accepted)
  bins = reliability(nodes, num_bins=2)
  np.testing.assert_allclose(bins.confidence, [0.2, 0.925])
  np.testing.assert_allclose(bins.acceptance, [0.5, 0.5])
  assert bins.num_nodes.tolist() == [2, 2]
  np.testing.assert_allclose(bins.expected_error, (0.3 + 0.425) / 2)
  np.testing.assert_allclose(acceptance_by_rank(nodes), [0.5, 0, 1])


def test_calibration_counts_the_nodes_of_decoding(pair, answers):
  greedy = [answer for answer in answers if answer.temperature == 0]
  out = calibrate(*pair, greedy, policy=POLICY, seed=OPTIONS['seed'])
  num_tried = sum(out['num_nodes'])
  num_accepted = np.nansum(np.multiply(np.asarray(out['acceptance'], float), out['num_nodes']))
  num_passes = sum(len(a.spec.num_accepted) for a in greedy if a.repeat == 0)
  assert num_tried >= num_passes
  np.testing.assert_allclose(num_accepted, sum(sum(a.spec.num_accepted) for a in greedy if a.repeat == 0), atol=1)
