"""EAGLE-2 heads that are more than the published one: where they begin, what they decode, their files; and training.

They have taps of the target's middle layers, GRIFFIN's block, or a second layer.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_files
from eagle_jax import hub
from eagle_jax.config import BlockConfig, DrafterConfig, Eagle3Config, EagleTapsConfig
from eagle_jax.decode.generate import generate
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.kinds import kind_of
from eagle_jax.evaluate.answered import Answered, Timed
from eagle_jax.evaluate.calibration import AnswerTokens, calibrate, make_examples
from eagle_jax.evaluate.features import choose_taps, features
from eagle_jax.evaluate.trace import trace
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree
from eagle_jax.train import run as whole_run
from eagle_jax.train.flops import step_flops
from eagle_jax.train.loop import settings, train
from eagle_jax.train.report import evaluate_all
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe

POLICIES = (DynamicTree(4, 3, 3, 12, lookup=True), StaticTree([(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]))
SIZES = {'vocab_size': 97, 'width': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 64}
TAPS = (1, 2)
CONFIG = EagleTapsConfig(**SIZES, fc_bias=False, taps=TAPS)
MORE = {
  'taps': CONFIG,
  'griffin': DrafterConfig(**SIZES, fc_bias=False, griffin=True),
  'layers': DrafterConfig(**SIZES, fc_bias=False, num_layers=2),
  'all': EagleTapsConfig(**SIZES, fc_bias=False, taps=TAPS, griffin=True, num_layers=3),
}


@pytest.fixture(scope='module')
def target():
  return tiny.sure_target()


@pytest.fixture(scope='module')
def head(target):
  """An EAGLE-2 head that is right now and then: the target's first layer over the embedding and some of the feature."""
  shuffle_DD = jax.random.orthogonal(jax.random.key(5), 32)
  fc = {'weight': jnp.concatenate([jnp.eye(32), 0.4 * shuffle_DD], axis=1)}
  layer = {name: target.params['layer_0'][name] for name in ('attn', 'mlp_norm', 'mlp')}
  config = dataclasses.replace(tiny.DRAFTER, ffn_width=64, fc_bias=False)
  return Drafter(config, {'fc': fc, 'layer': layer})


@pytest.fixture(scope='module')
def extended(target, head, tmp_path_factory):
  """What training begins with, from the folder of an EAGLE-2 head; by what it has more."""
  folder = tmp_path_factory.mktemp('head') / 'head'
  hub.save_drafter(head, folder)
  return {name: whole_run.first_weights(str(folder), target, config) for name, config in MORE.items()}


@pytest.fixture(scope='module')
def learned(head, extended):
  """The same, but what is new has learned something."""
  old = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(head.params)}

  def stir(path, x):
    is_old = old.get(jax.tree_util.keystr(path)) == x.shape or path[-1].key == 'scale'
    return x if is_old else x + 0.05 * jax.random.normal(jax.random.key(1), x.shape)

  return {
    name: Drafter(drafter.config, jax.tree_util.tree_map_with_path(stir, drafter.params))
    for name, drafter in extended.items()
  }


@pytest.fixture(scope='module')
def tapping(learned):
  return learned['taps']


@pytest.mark.parametrize('sampling', tiny.SAMPLINGS, ids=['greedy', 'sampled'])
@pytest.mark.parametrize(
  ('more', 'policy'),
  [
    *(('taps', policy) for policy in POLICIES),
    *((name, POLICIES[0]) for name in ('griffin', 'layers')),
    pytest.param('all', POLICIES[0], marks=pytest.mark.slow),
  ],
  ids=lambda x: x if isinstance(x, str) else x.describe(),
)
def test_text_is_plain_and_what_is_new_drafts_as_eagle2_at_first(
  target, head, extended, learned, more, policy, sampling
):
  plain, first, same, other = (
    generate(
      target, drafter, tiny.PROMPTS, policy=policy if drafter else 'plain', trace=bool(drafter), **tiny.HOW, **sampling
    )
    for drafter in (None, head, extended[more], learned[more])
  )
  assert first.tokens == same.tokens == other.tokens == plain.tokens
  assert same.num_accepted == first.num_accepted != other.num_accepted
  assert {count for row in other.num_accepted for count in row} >= {0, 1}
  for ours, theirs in zip(*(itertools.chain(*out.trace) for out in (same, first)), strict=True):
    np.testing.assert_array_equal(ours.token, theirs.token)
    np.testing.assert_allclose(ours.log_q, theirs.log_q, rtol=1e-5, atol=1e-5)


def test_a_head_with_taps_comes_back_and_no_other_layout_takes_it(target, tapping, tmp_path):
  tiny_files.assert_only_own_layout(target, tapping, tmp_path)


@pytest.mark.parametrize('more', MORE)
def test_a_head_comes_back(target, learned, tmp_path, more):
  for one in (learned[more], learned[more].with_ids([5, 3, 90, 11])):
    hub.save_drafter(one, tmp_path / 'own')
    again = hub.load_drafter(tmp_path / 'own', target)
    assert again.config == one.config
    jax.tree.map(np.testing.assert_array_equal, again.params, one.params)


def test_an_older_folder_says_nothing_of_what_is_new(target, head, tmp_path):
  hub.save_drafter(head, tmp_path / 'head')
  path = tmp_path / 'head' / 'config.json'
  content = json.loads(path.read_text())
  path.write_text(json.dumps({name: x for name, x in content.items() if name not in DrafterConfig.PLAIN}))
  assert hub.load_drafter(path.parent, target).config == head.config
  told = {
    name: {key for key in settings(config, RECIPE) if key.startswith('drafter.')} for name, config in MORE.items()
  }
  assert told['layers'] - told['griffin'] == {'drafter.num_layers'}
  assert told['griffin'] - told['layers'] == {'drafter.griffin'}


@pytest.mark.parametrize(
  'more', ['taps', *(pytest.param(name, marks=pytest.mark.slow) for name in ('griffin', 'layers'))]
)
def test_a_quantised_head_writes_the_same_text(target, learned, more):
  how = {'policy': POLICIES[0], 'trace': True, **tiny.HOW}  # a program of the test above
  texts = [generate(target, drafter, tiny.PROMPTS, **how) for drafter in (learned[more], learned[more].quantised())]
  assert texts[0].tokens == texts[1].tokens
  assert texts[0].stats['tau'] == pytest.approx(texts[1].stats['tau'], rel=0.1)


@pytest.mark.parametrize('taps', [(), (-1,)])
def test_taps_are_layers_of_the_target(target, taps):
  with pytest.raises(ValueError, match='`taps`'):
    dataclasses.replace(CONFIG, taps=taps)
  with pytest.raises(ValueError, match=r'layers \(1, 3\).* only 2 layers'):
    dataclasses.replace(CONFIG, taps=(1, 3)).tapped_layers(target.config.num_layers)


def test_bad_configs():
  with pytest.raises(ValueError, match='BlockConfig: `griffin` must be False'):
    BlockConfig(**SIZES, rank=4, griffin=True)
  with pytest.raises(ValueError, match='`num_layers` = 0'):
    dataclasses.replace(CONFIG, num_layers=0)


EAGLE3 = Eagle3Config(**SIZES, target_width=32, taps=(0, 1, 2), fc_norm=True, norm_output=True, draft_vocab_size=60)


def eagle3() -> Drafter:
  params = tiny.random_params(Eagle3(EAGLE3), 2)
  return Drafter(EAGLE3, params | {'ids': jnp.arange(60, dtype=jnp.int32)})


@pytest.mark.slow
@pytest.mark.parametrize('sampling', tiny.SAMPLINGS, ids=['greedy', 'sampled'])
def test_recorded_text_with_taps_gives_the_acceptance_of_decoding(target, tapping, sampling):
  for drafter in (tapping, eagle3()):
    made = generate(target, drafter, tiny.PROMPTS, policy=Chain(3), row_ids=range(8), **tiny.HOW, **sampling)
    answers = [
      AnswerTokens(number, prompt, tokens, sampling.get('temperature', 0.0), sampling.get('seed', 0))
      for number, (prompt, tokens) in enumerate(zip(tiny.PROMPTS, made.tokens, strict=True))
    ]
    examples = make_examples(target, drafter, answers, dtype=jnp.float32)  # as decoding has them
    assert trace(target, drafter, examples, policy=Chain(3)).num_accepted == made.num_accepted
    bare = [one._replace(feature=one.feature[:, :32]) for one in examples]
    with pytest.raises(ValueError, match=rf'{32 * (1 + len(drafter.config.taps))} numbers a token.*hold 32'):
      trace(target, drafter, bare, policy=Chain(3))


def test_an_eagle3_head_is_calibrated_and_drafts_in_8_bits(target):
  drafter, policy = eagle3(), Chain(2)
  prompt = tiny.PROMPTS[2]
  plain = generate(target, None, tiny.PROMPTS, **tiny.HOW)
  made = generate(target, drafter.quantised(), tiny.PROMPTS, policy=policy, trace=True, **tiny.HOW)
  assert made.tokens == plain.tokens
  assert len(made.trace[0]) == len(made.num_accepted[0])
  timed = Timed(plain.tokens[2], [], nodes_per_pass=1, levels_per_pass=0, prefill_s=0, decode_s=0)
  question = {'task': 'a', 'question_id': '0', 'turn': 0, 'temperature': 0.0, 'repeat': 0, 'row_id': 0, 'gap': None}
  found = calibrate(
    target, drafter, [Answered(**question, prompt=prompt, plain=timed, spec=timed)], policy=policy, seed=0
  )
  assert sum(found['num_nodes']) >= 4  # places that are tried
  assert 0 <= found['expected_error'] <= 1


# Training.

OBJECTIVES = {
  'eagle2-taps': Objective(num_steps=2, step_decay=0.8, perturbed_cross_entropy=0.5, length_floor=0.5),
  'all': Objective(num_steps=2, reachable_top=3),
  'eagle3': Objective(regression=0.0, lk_hybrid=1.0, num_steps=2, is_detached=False, skips_unknown=True),
}
RECIPE = Recipe(num_steps=4, num_rows=2, num_places=32, chunk_places=8, warmup_steps=1, learning_rate=1e-2)
FEW = {
  kind: dataclasses.replace(config, draft_vocab_size=40)
  for kind, config in (('eagle2-taps', CONFIG), ('all', MORE['all']), ('eagle3', EAGLE3))
}


@functools.cache
def recorded(taps: tuple[int, ...]):
  """Answers with these taps, from the same texts."""
  target = tiny.target(seed=2)
  target.params['embed']['weight'] *= 50
  target.params['head']['weight'] *= 40
  drafter = Drafter(dataclasses.replace(CONFIG, taps=taps), {})
  answers = []
  for ids in np.arange(16).reshape(2, -1).tolist():  # as many prompts as the tests above decode together
    made = generate(target, None, [[i] for i in ids], row_ids=ids, temperature=1.0, **tiny.HOW)
    answers += [AnswerTokens(i, [i], answer, 1.0) for i, answer in zip(ids, made.tokens, strict=True)]
  return make_examples(target, drafter, answers[:12])


@pytest.mark.slow
@pytest.mark.parametrize('kind', FEW)
def test_heads_learn_and_resume(target, learned, tmp_path, monkeypatch, kind):
  """In one run: every parameter learns; a run begun again ends as before; the drafter loads.

  EAGLE-3 begins at random. The others go on from heads of 40 ids, and keep them.
  """
  rising = map(float, itertools.count())  # so that the last drafter counts as the best
  monkeypatch.setattr(
    'eagle_jax.train.loop.evaluate_all', lambda *args, **how: evaluate_all(*args, **how) | {'chain_tau': next(rising)}
  )
  monkeypatch.setattr('eagle_jax.train.report.TREES', {'tree_tau': Chain(3)})
  config, recipe = FEW[kind], dataclasses.replace(RECIPE, objective=OBJECTIVES[kind])
  first_head = {'eagle2-taps': 'taps'}.get(kind, kind)
  initial = learned[first_head].with_ids([*range(90, 50, -1)]) if first_head in learned else None
  examples, how = recorded(config.taps), {'initial': initial, 'report_every': 4, 'num_traced': 2 if initial else 0}
  run = functools.partial(train, target, config, examples[:10], examples[10:], recipe, **how)
  metrics = run(tmp_path / 'run')
  assert run(tmp_path / 'run') == metrics
  assert ('regression_0' in metrics) == (initial is not None)
  drafter = hub.load_drafter(tmp_path / 'run' / 'drafter', target)
  if initial is None:
    first = kind_of(config).network(config).init_params(jax.random.key(RECIPE.seed))
  else:
    assert metrics['tree_tau'] >= 1
    assert drafter.params['ids'].tolist() == initial.params['ids'].tolist()
    first = {name: x for name, x in initial.params.items() if name != 'ids'}
  for name in first:
    for ours, theirs in zip(jax.tree.leaves(drafter.params[name]), jax.tree.leaves(first[name]), strict=True):
      assert np.abs(ours - theirs).max() > 1e-3, name


def test_examples_of_other_taps_are_refused_before_training(target, tmp_path):
  examples = recorded((1,))
  with pytest.raises(
    ValueError, match=r'\(1, 2\), 96 numbers a token, and recorded answers hold 64: .*Data\(taps=\(1, 2\)\)'
  ):
    train(target, CONFIG, examples[:10], examples[10:], RECIPE, tmp_path)
  mixed = [one._replace(feature=one.feature[:, : 96 * (one.id % 2)]) for one in recorded((1, 2))]
  with pytest.raises(ValueError, match='96 numbers a token, and recorded answers hold 0 or 96'):
    train(target, CONFIG, mixed[:10], mixed[10:], RECIPE, tmp_path)
  with pytest.raises(ValueError, match='regression is 1.0, and a drafter of kind EAGLE-3'):
    train(target, FEW['eagle3'], recorded((0, 1, 2))[:10], recorded((0, 1, 2))[10:], RECIPE, tmp_path)
  assert not (tmp_path / 'settings.json').exists()


def test_shards_hold_the_taps_of_the_drafter_or_more():
  data = Data(num_shards=1, taps=(0, 2))
  assert whole_run.with_taps('a', data, (2,), num_layers=2).taps == (0, 2)
  assert whole_run.with_taps('a', Data(num_shards=1), TAPS, num_layers=2).taps == TAPS
  with pytest.raises(ValueError, match=r'layers \(0, 2\), and DRAFTER reads those of \(1, 2\)'):
    whole_run.with_taps('a', data, TAPS, num_layers=2)
  with pytest.raises(ValueError, match=r'layers \(0, 5\), and the target has 2 layers'):
    whole_run.with_taps('a', dataclasses.replace(data, taps=(0, 5)), (), num_layers=2)


def test_features_with_taps_are_chosen_by_layer(target):
  (whole,), (part,) = (features(target, [[3, 1, 4, 1]], taps) for taps in ((0, 1, 2), (2, 0)))
  np.testing.assert_array_equal(choose_taps(whole, (0, 1, 2), (2, 0)), part)
  assert choose_taps(whole, (0, 1, 2), ()).shape == (4, 32)


def test_taps_are_fused_once_a_place_and_the_rest_in_every_step():
  drafter = dataclasses.replace(tiny.DRAFTER, ffn_width=64, fc_bias=False)
  recipe = dataclasses.replace(RECIPE, objective=Objective(num_steps=3))

  def more_than_plain(config):
    ours, theirs = (step_flops(one, recipe, num_ids=97, reader=None) for one in (config, drafter))
    return (ours - theirs) / (6 * RECIPE.num_rows * RECIPE.num_places)

  assert more_than_plain(CONFIG) == 2 * 32 * 32
  layer = 32 * (2 * 32 + 2 * 16) + 3 * 64 * 32 + 32 * RECIPE.num_places  # attention is to half the places
  assert more_than_plain(MORE['layers']) == 3 * layer
  assert more_than_plain(MORE['griffin']) == 3 * (3 * 64 * 32 + 64 * 32)  # the fusion, and twice what comes out
