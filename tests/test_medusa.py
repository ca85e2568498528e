"""Medusa's heads: what they offer, the text with them, their files, and that each learns its own distance."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import hub
from eagle_jax.config import MedusaConfig
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import generate
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.expand import Children
from eagle_jax.draft.kinds import kind_of, tensor_table
from eagle_jax.draft.lookup import Evidence
from eagle_jax.draft.medusa import Medusa
from eagle_jax.draft.one_pass import add_evidence
from eagle_jax.evaluate.calibration import AnswerTokens, make_examples
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.train.flops import step_flops
from eagle_jax.train.loop import frozen_inputs, initial_params, train
from eagle_jax.train.step import Heads, Objective, Recipe, Rows, distill
from eagle_jax.weights.load import flatten
from eagle_jax.weights.safetensors import write_safetensors

V, D = 97, 32
OWN = MedusaConfig(V, D, max_depth=3, num_layers=2, own_heads=True, name='heads')
SHARED = MedusaConfig(V, D, max_depth=3, draft_vocab_size=40)


@pytest.fixture(scope='module')
def target():
  return tiny.sure_target()


def heads(config: MedusaConfig, target) -> Drafter:
  """Heads whose blocks are random; those of their own are the target's."""
  leaves, tree = jax.tree.flatten(Medusa(config).init_params(jax.random.key(0)))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  params = jax.tree.unflatten(
    tree, [0.1 * jax.random.normal(*x) for x in zip(keys, (x.shape for x in leaves), strict=True)]
  )
  if config.own_heads:
    params['head'] = {'weight': jnp.stack([target.head_VD] * config.max_depth)}
  ids = {} if config.draft_vocab_size is None else {'ids': jnp.arange(2, 2 + config.num_ids, dtype=jnp.int32)}
  return Drafter(config, params | ids)


@pytest.mark.parametrize(
  ('config', 'policy'),
  [(OWN, DynamicTree(3, 3, 3, 8, lookup=True)), (SHARED, Chain(4))],
  ids=['own, tree', 'shared, chain'],
)
def test_the_text_is_plain(target, config, policy):
  """Also where a chain is longer than there are heads."""
  for sampling in tiny.SAMPLINGS:
    plain, out = (
      generate(target, drafter, tiny.PROMPTS, policy=policy if drafter else 'plain', **tiny.HOW, **sampling)
      for drafter in (None, heads(config, target))
    )
    assert out.tokens == plain.tokens
    accepted = {count for row in out.num_accepted for count in row}
    assert {0, 1} <= accepted <= {*range(config.max_depth + 1)}


def test_nodes_of_a_depth_share_their_children_and_log_probabilities_add(target):
  policy, feature_BD = DynamicTree(4, 4, 4, 20), jax.random.normal(jax.random.key(3), (2, D))
  params, spec = build(target, heads(OWN, target), policy=policy)
  root_B = jnp.array([5, 7])
  context, network = tiny.context(policy, batch=2), spec.drafter
  grown = jax.jit(lambda params: network.propose(params, feature_BD, root_B, policy, context))(params.drafter)
  score_UdB = jax.jit(lambda params: network.score(params, network.read(params, feature_BD.T, 3)))(params.drafter)
  log_p_BdU = np.asarray(jax.nn.log_softmax(score_UdB, axis=0)).transpose(2, 1, 0)
  for b, (token, parent, log_q) in enumerate(zip(*(np.asarray(x) for x in grown[:3]), strict=True)):
    depth = [0]
    for node in range(1, len(token)):
      depth.append(depth[parent[node]] + 1)
      if depth[node] > 3:  # there are three heads
        assert token[node] == -1
        continue
      own_U, siblings = log_p_BdU[b, depth[node] - 1], token[parent == parent[node]]
      assert sorted(siblings) == sorted(np.argsort(-own_U)[:4])
      np.testing.assert_allclose(log_q[node] - log_q[parent[node]], own_U[token[node]], rtol=1e-4)
    assert max(depth) == 4
  depths = jax.jit(lambda params: network.depths(params, feature_BD, SVIP(4, 4, 4, 20), context))(params.drafter)
  expected_dB = -(np.exp(log_p_BdU) * log_p_BdU).sum(axis=2).T
  np.testing.assert_allclose(depths.best.entropy, expected_dB, rtol=1e-4)


def test_evidence_raises_one_logit_of_the_whole_distribution():
  """For a token among the best, one that is not, and none."""
  logits_U = jax.random.normal(jax.random.key(0), (30,))
  log_p_U = jax.nn.log_softmax(logits_U)
  best, order = jax.lax.top_k(log_p_U, 4)
  for token, weight in ((int(order[1]), 2.5), (int(jnp.argmin(log_p_U)), 6.0), (int(jnp.argmin(log_p_U)), 0.1)):
    given = Children(order[None, None], best[None, None]), Evidence(jnp.array([[token]]), jnp.array([[weight]]))
    raised = jax.jit(add_evidence)(*given, log_p_U[token][None, None])
    expected, index = jax.lax.top_k(jax.nn.log_softmax(logits_U.at[token].add(weight)), 4)
    np.testing.assert_allclose(raised.log_p[0, 0], expected, rtol=1e-5)
    assert raised.token[0, 0].tolist() == index.tolist()
  none = Evidence(jnp.array([[-1]]), jnp.array([[0.0]]))
  same = add_evidence(given[0], none, jnp.array([[-jnp.inf]]))
  assert same.token.tolist() == given[0].token.tolist()
  np.testing.assert_allclose(same.log_p, given[0].log_p)


@pytest.mark.parametrize('config', [OWN, SHARED], ids=['own', 'shared'])
def test_heads_in_8_bits_score_alike(target, config):
  policy, feature_D1 = Chain(3), jax.random.normal(jax.random.key(3), (D, 1))
  drafter = heads(config, target)
  scores = []
  for one in (drafter, drafter.quantised()):
    params, spec = build(target, one, policy=policy)
    network, params = spec.drafter, params.drafter
    scores.append(network.score(params, network.read(params, feature_D1, 2)))
  assert scores[0].shape == (config.num_ids, 2, 1)
  assert np.abs(scores[0] - scores[1]).max() < 0.05 * np.abs(scores[0]).max()


# Files.


def published(folder, drafter: Drafter, **changes):
  """Write a folder as Medusa's own trainer does, but for the file's format."""
  folder.mkdir(exist_ok=True)
  write_safetensors(folder / 'medusa_lm_head.safetensors', flatten(drafter.params, tensor_table(drafter.config)))
  content = {
    'base_model_name_or_path': 'lmsys/vicuna-7b-v1.3', 'medusa_num_heads': 2, 'medusa_num_layers': 2,
    'transformers_version': '4.31.0',
  }  # fmt: skip
  content |= changes
  (folder / 'config.json').write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
  return folder


@pytest.mark.parametrize(
  'config', [OWN, dataclasses.replace(OWN, num_layers=0), SHARED], ids=['own', 'linear', 'shared']
)
def test_heads_come_back(target, tmp_path, config):
  """From our own folder, and from a published one, whose config.json may say fewer heads than there are."""
  drafter = heads(config, target)
  hub.save_drafter(drafter, tmp_path / 'ours')
  folders = [tmp_path / 'ours']
  if config.own_heads:
    folders.append(published(tmp_path / 'heads', drafter, medusa_num_layers=config.num_layers))
  for folder in folders:
    again = hub.load_drafter(folder, target)
    assert again.config == dataclasses.replace(drafter.config, name=again.config.name)
    assert kind_of(again.config).title == 'Medusa'
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'medusa_num_heads': 4}, 'holds 3 heads, and medusa_num_heads is 4'),
    ({'medusa_num_layers': None}, r'0\.1\.weight: missing'),
    ({'medusa_choices': 'mc_sim_7b_63'}, "medusa_choices 'mc_sim_7b_63': not known"),
    ({'hidden_act': 'gelu'}, 'hidden_act'),
    ({'medusa_num_heads': 'many'}, 'config.json has an invalid value'),
  ],
)
def test_what_a_published_folder_must_not_say(target, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    hub.load_drafter(published(tmp_path / 'heads', heads(OWN, target), **changes), target)


def test_a_config_without_blocks_or_heads_is_refused():
  with pytest.raises(ValueError, match='`num_layers` = 0'):
    MedusaConfig(V, D, max_depth=3, num_layers=0)
  with pytest.raises(ValueError, match='draft_vocab_size'):
    MedusaConfig(V, D, max_depth=3, draft_vocab_size=V + 1)


# Training.

PERIOD = 12
RECIPE = Recipe(
  num_steps=80, num_rows=2, num_places=32, warmup_steps=2, learning_rate=0.05, weight_decay=0.0, feature_noise=0.0,
  objective=Objective(regression=0.0, num_steps=3),
)  # fmt: skip


@pytest.fixture(scope='module')
def counting():
  return tiny.counting(PERIOD)


@pytest.fixture(scope='module')
def examples(counting):
  answers = [AnswerTokens(i, [i], [(i + 1 + j) % PERIOD for j in range(31)]) for i in range(PERIOD)]
  return make_examples(counting, Drafter(SHARED, {}), answers)


def test_trained_heads_accept_as_many_tokens_as_there_are(counting, examples, tmp_path):
  """Each learns its own distance. A label off by one would leave none of them right, at a loss as low."""
  config = MedusaConfig(V, D, max_depth=3)
  metrics = train(counting, config, examples[2:], examples[:2], RECIPE, tmp_path, report_every=80)
  assert metrics['chain_tau'] > 3.99
  assert [name for name in metrics if name.startswith('chain_')] == ['chain_tau', 'chain_0', 'chain_1', 'chain_2']
  drafter = hub.load_drafter(tmp_path / 'drafter', counting)
  out = generate(counting, drafter, [[0], [5]], policy=Chain(3), max_new_tokens=25, eos_ids=())
  assert out.tokens[1] == [(6 + j) % PERIOD for j in range(25)]
  assert out.num_accepted == [[3] * 6] * 2


def test_heads_of_their_own_begin_as_the_targets_and_each_scores_its_own_step(counting, examples):
  config = MedusaConfig(V, D, max_depth=3, own_heads=True)
  frozen, _ = frozen_inputs(counting, config, examples)
  first = initial_params(Medusa(config), frozen, examples, seed=0)['head']['weight']
  np.testing.assert_array_equal(first, np.stack([counting.head_VD] * 3))
  keys = jax.random.split(jax.random.key(0), 3)
  head_dVD, out_DdBL, feature_DBL = map(jax.random.normal, keys, ((3, V, D), (D, 3, 1, 4), (D, 1, 4)))
  rows = Rows(feature_DBL, jnp.arange(4)[None])

  @jax.jit
  def losses_of(head, out_DdBL):
    return distill(RECIPE.objective, Heads(frozen.head, head, frozen.row_of), out_DdBL, rows)[0]

  alone = [losses_of(head_dVD[step], out_DdBL[:, step : step + 1])[0] for step in range(3)]
  np.testing.assert_allclose(losses_of(head_dVD, out_DdBL), alone, rtol=1e-5)


@pytest.mark.parametrize(
  ('own_heads', 'objective', 'message'),
  [(False, Objective(num_steps=2), 'num_steps must be 3'), (True, Objective(num_steps=3), 'regression is 1.0')],
)
def test_an_objective_must_fit_the_heads(counting, tmp_path, own_heads, objective, message):
  config = MedusaConfig(V, D, max_depth=3, own_heads=own_heads)
  examples = make_examples(counting, Drafter(config, {}), [AnswerTokens(i, [i], [i, i, i]) for i in range(4)])
  recipe = dataclasses.replace(RECIPE, objective=objective)
  with pytest.raises(ValueError, match=message):
    train(counting, config, examples[:2], examples[2:], recipe, tmp_path)


def test_flops_by_hand():
  config = MedusaConfig(V, D, max_depth=3, num_layers=2)
  ours = step_flops(config, RECIPE, num_ids=V, reader=None)
  assert ours == 2 * 32 * (6 * 3 * 2 * D * D + 2 * V * (D + 2 * 3 * D))
