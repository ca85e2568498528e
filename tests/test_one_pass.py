"""Drafters that fill all depths in one pass, as other engines publish them: the text with them, and their folders.

What they compute is held by `parity/test_one_pass_heads.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import hub
from eagle_jax.bench import tune
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import generate
from eagle_jax.draft.dflash import DFlashConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.dspark import DSparkConfig
from eagle_jax.draft.kinds import kind_of, tensor_table
from eagle_jax.draft.peagle import PEagleConfig
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import Traced
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.weights.load import flatten

SIZES = {'vocab_size': 97, 'width': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 48}
BLOCK = {'taps': (0, 2), 'draft_vocab_size': 60, 'mask_token_id': 9}
CONFIGS = {
  'dflash': DFlashConfig(**SIZES, **BLOCK, block_size=4, windows=(None, 5), causal=(False, True)),
  'dspark': DSparkConfig(**SIZES, **BLOCK, block_size=3, windows=(None, 5), causal=(False, False), rank=8),
  'p-eagle': PEagleConfig(
    **SIZES, target_width=32, taps=(0, 2), draft_vocab_size=60, mask_token_id=9, later_windows=(4,), qk_norm=True
  ),
}
TREE = DynamicTree(2, 3, 3, 6, lookup=True)


@pytest.fixture(scope='module')
def target():
  return tiny.sure_target()


@pytest.fixture(scope='module')
def plain(target):
  return [generate(target, None, tiny.PROMPTS, policy='plain', **tiny.HOW, **how).tokens for how in tiny.SAMPLINGS]


def drafter_of(kind: str) -> Drafter:
  config, rng = CONFIGS[kind], np.random.default_rng(2)
  shapes = jax.eval_shape(kind_of(config).network(config, jnp.float32).init_params, jax.random.key(0))
  params = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes)
  return Drafter(config, params | {'ids': jnp.arange(60, dtype=jnp.int32)})


@pytest.mark.parametrize('kind', ['dspark', 'p-eagle'])  # DSpark holds all of DFlash
def test_the_text_is_plain(target, plain, kind):
  """Greedy and sampled, whatever is drafted: at random, some tokens are right."""
  for sampling, expected in zip(tiny.SAMPLINGS, plain, strict=True):
    out = generate(target, drafter_of(kind), tiny.PROMPTS, policy=TREE, **tiny.HOW, **sampling)
    assert out.tokens == expected
    assert {0, 1} <= {count for row in out.num_accepted for count in row}


@pytest.mark.parametrize('kind', CONFIGS)
def test_matrices_may_have_8_bits(target, kind):
  params, spec = build(target, drafter_of(kind).quantised(), policy=TREE)
  token_1L, one_1 = jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32)
  taps = Taps(jnp.zeros((32, 1, 3)), (jnp.zeros((32, 1, 3)),) * 2)

  def run(params):
    state = spec.drafter.start(params, token_1L, taps, one_1, 8, one_1)
    return spec.drafter.propose(params, state, one_1, TREE, tiny.context(TREE))

  assert jax.eval_shape(run, params.drafter).token.shape == (1, 1 + sum(np.multiply(TREE.widths, TREE.fanouts)))


def test_only_ids_of_a_borrowed_head_alone_can_be_chosen(target, monkeypatch):
  """DSpark borrows the head too, but each of its ids has a row of the correction: it is tuned with all of them."""
  monkeypatch.setattr(tune, 'build', lambda *_, **__: None)
  monkeypatch.setattr(tune, 'time_steps', lambda target, variants, **_: dict.fromkeys(variants, 1.0))
  monkeypatch.setattr(tune, 'trace', lambda *_, **__: Traced([[1]], [3], TREE))
  answer, how = Example(0, np.arange(4), np.arange(4) > 0, None), {'batch': 1, 'num_prompt': 8, 'progress': None}
  for kind, sizes in (('dflash', [60, 60, 30, 15, 7]), ('dspark', [60, 60])):
    drafter = drafter_of(kind)
    assert [one.num_ids for one in tune.try_vocabularies(target, drafter, [answer], **how)] == sizes
    assert drafter.first_ids(60) is drafter
  for one in (drafter, hub.load_drafter('ngram', target)):
    with pytest.raises(ValueError, match=f'fixed draft vocabulary.*its own {one.config.num_ids} ids'):
      one.first_ids(30)


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_drafter_comes_back(target, tmp_path, kind):
  drafter = drafter_of(kind)
  hub.save_drafter(drafter, tmp_path)
  again = hub.load_drafter(tmp_path, target)
  assert again.config == dataclasses.replace(drafter.config, name=again.config.name)
  assert hub.kinds.name_of_kind(again.config) == kind
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
  names = flatten(drafter.params, tensor_table(drafter.config))
  assert names.keys() >= {'d2t', 'fc.weight', 'layers.1.mlp.up_proj.weight'}
