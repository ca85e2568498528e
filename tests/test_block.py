"""The block drafter: slots that are filled at once, corrections by the token above, the text, files and training."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_files
from eagle_jax import hub
from eagle_jax.config import BlockConfig
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import generate
from eagle_jax.draft.block import Block
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.calibration import AnswerTokens, make_examples
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.train.data import batches
from eagle_jax.train.loop import begin, frozen_inputs, initial_params
from eagle_jax.train.run import first_weights
from eagle_jax.train.step import Objective, Recipe, train_step

CONFIG = BlockConfig(**dataclasses.asdict(tiny.DRAFTER), rank=8)


@pytest.fixture(scope='module')
def target():
  return tiny.sure_target()


@pytest.fixture(scope='module')
def drafter():
  """One of two layers, of which the second adds something, too."""
  config = dataclasses.replace(CONFIG, num_layers=2)
  params = Block(config).init_params(jax.random.key(0))
  keys = jax.random.split(jax.random.key(1), 3)
  params['slot'] = {'bias': jax.random.normal(keys[0], (32,))}
  params['below'] = {'weight': jax.random.normal(keys[1], (32, 8))}
  params['layer_1'] = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(keys[2], x.shape), params['layer_1'])
  return Drafter(config, params)


def test_the_text_is_plain(target, drafter):
  policy, few = DynamicTree(3, 3, 3, 8, lookup=True), drafter.with_ids([*range(90, 30, -1)])
  for sampling in tiny.SAMPLINGS:
    plain, out = (
      generate(target, one, tiny.PROMPTS, policy=policy if one else 'plain', **tiny.HOW, **sampling)
      for one in (None, few)
    )
    assert out.tokens == plain.tokens
    assert {0, 1} <= {count for row in out.num_accepted for count in row}


def started(target, drafter, policy):
  """Network and params, and the state after two prompts."""
  params, spec = build(target, drafter, policy=policy)
  token_BL, length_B = jnp.asarray([[5, 3, 8, 1], [9, 9, 2, 0]]), jnp.asarray([4, 3])
  taps = Taps(jax.random.normal(jax.random.key(4), (32, 2, 4)))
  start = jax.jit(spec.drafter.start, static_argnums=4)
  return spec.drafter, params.drafter, start(params.drafter, token_BL, taps, length_B, 32, length_B)


def test_children_depend_on_their_parent_and_on_nothing_else_above(target, drafter):
  """Slots filled one after the other, corrected by the token of a node, give what the tree says of its children."""
  policy = DynamicTree(3, 3, 3, 20)
  (network, params, state), root_B = started(target, drafter, policy), jnp.array([5, 7])
  propose = jax.jit(lambda params, state: network.propose(params, state, root_B, policy, tiny.context(policy, batch=2)))
  grown = propose(params, state)
  token_BA, parent_BA, log_q_BA = map(np.asarray, grown[:3])

  @functools.partial(jax.jit, static_argnames='depth')
  def log_p(token_B, depth):
    """[U, B]: of the children of tokens at this depth."""
    out_DB1, earlier = state.feature.T[..., None], None
    for slot in range(depth):
      nodes = token_B[:, None], network.next_feature(params, out_DB1), state.cache.length[:, None] + slot
      out_DB1, earlier = network.forward(params, *nodes, jnp.ones((2, 1, slot + 1), bool), state.cache, earlier)
    return jax.nn.log_softmax(params['head'] @ out_DB1[..., 0], axis=0)

  depth_A = np.zeros(token_BA.shape[1], int)
  families = set()
  for node in range(1, len(depth_A)):
    depth_A[node] = depth_A[parent_BA[0, node]] + 1
    for b in range(2):
      parent = parent_BA[b, node]
      own_U = np.asarray(log_p(jnp.asarray(token_BA[:, parent]), int(depth_A[parent])))[:, b]
      np.testing.assert_allclose(
        log_q_BA[b, node] - log_q_BA[b, parent], own_U[token_BA[b, node]], rtol=1e-3, atol=1e-4
      )
    families.add((parent_BA[0, node], token_BA[0, node]))
  siblings = [{token for parent, token in families if parent == node} for node in np.flatnonzero(depth_A == 1)]
  assert siblings[0] != siblings[1]
  context = tiny.context(Chain(1), batch=2)
  assert jax.eval_shape(lambda: network.propose(params, state, state.cache.length, Chain(1), context)).token.shape == (
    2,
    2,
  )


def test_a_block_drafter_comes_back_and_no_other_layout_takes_it(target, drafter, tmp_path):
  tiny_files.assert_only_own_layout(target, drafter, tmp_path)


def test_training_may_begin_with_an_eagle_head(target, tmp_path):
  head = tiny.drafter()
  hub.save_drafter(head, tmp_path / 'head')
  first = first_weights(str(tmp_path / 'head'), target, CONFIG)
  assert first.config == dataclasses.replace(CONFIG, name='drafter')
  assert first.params.keys() == {'fc', 'layer', 'slot', 'above', 'below'}
  jax.tree.map(np.testing.assert_array_equal, {name: first.params[name] for name in ('fc', 'layer')}, head.params)
  assert not np.asarray(first.params['below']['weight']).any()


def test_a_trained_block_is_accepted_whole():
  """The slot learns its own distance: a label off by one would leave it wrong, at a loss as low."""
  target, period, network = tiny.counting(), 12, Block(CONFIG)
  answers = [AnswerTokens(i, [i], [(i + 1 + j) % period for j in range(31)]) for i in range(period)]
  examples = make_examples(target, Drafter(CONFIG, {}), answers)
  sizes = {'num_rows': 2, 'num_places': 32}
  objective = Objective(regression=0.0, num_steps=2)
  recipe = Recipe(
    **sizes, num_steps=160, warmup_steps=2, learning_rate=0.02, weight_decay=0.0, feature_noise=0.0, objective=objective
  )
  frozen, _ = frozen_inputs(target, CONFIG, examples)
  state = begin(initial_params(network, frozen, examples, seed=0), recipe, None)
  for packed in itertools.islice(batches(examples, **sizes, seed=0), recipe.num_steps):
    state, _ = train_step(state, frozen, packed, network=network, recipe=recipe)
  drafter = Drafter(CONFIG, state.params)
  out = generate(target, drafter, [[0], [5]], policy=Chain(2), max_new_tokens=25, eos_ids=())
  assert out.tokens[1] == [(6 + j) % period for j in range(25)]
  assert out.num_accepted == [[2] * 8] * 2
