"""A smaller model as drafter: the text stays, and a model that is the target's equal drafts all of it."""

import dataclasses

import jax
import pytest

import eagle_jax
import tiny
from eagle_jax import decode
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.model import ModelConfig, as_drafter
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.text import Tokenizer
from tiny_files import HF_CONFIG, TINY, byte_letters, byte_metadata, hf_folder

PROMPTS = [[1, 2, 3], [40], [5, 6, 7, 8, 9, 10, 11], [96, 0, 96]]
NUM_NEW = 40
SAMPLINGS = ({}, {'temperature': 1.0, 'seed': 3})
POLICIES = (Chain(3), DynamicTree(2, 2, 3, 11))
CONFIG = dataclasses.replace(tiny.TARGET, window=6, name='target')


@pytest.fixture(scope='module')
def target():
  target = tiny.target(CONFIG)
  target.params['embed']['weight'] *= 50  # so that the newest token counts most, for one layer as for two
  target.params['head']['weight'] *= 40  # sure of itself, or trees would be flat
  return target


@pytest.fixture(scope='module')
def small(target):
  """The target's first layer, with fewer ids."""
  config = dataclasses.replace(CONFIG, num_layers=1, vocab_size=90, tied_head=True, name='small')
  params = {name: target.params[name] for name in ('norm', 'layer_0')}
  return Target(config, params | {'embed': {'weight': target.params['embed']['weight'][:90]}})


@pytest.fixture(scope='module')
def plain(target):
  return [decode.generate(target, None, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), **how) for how in SAMPLINGS]


@pytest.mark.slow
@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_a_smaller_model_changes_no_text(target, small, plain, policy):
  drafter = as_drafter(small, target)
  assert drafter.config.num_ids == 90
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), policy=policy, **how)
    assert out.tokens == expected.tokens
  refilled = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), policy=policy, batch_size=2)
  assert refilled.tokens == plain[0].tokens


@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_the_target_drafts_its_own_text(target, plain, policy):
  """Each pass accepts a whole chain, and nearly all levels of a tree, whose frontiers may miss the likeliest path."""
  config = ModelConfig(target.config, target.config.vocab_size, target.config.width)
  drafter = Drafter(config, {'model': target.params, 'head': target.head_VD, 'ids': jax.numpy.arange(97)})
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), policy=policy, **how)
    assert out.tokens == expected.tokens
    assert 3.6 < out.stats['tau'] <= 4
  if policy == Chain(3):
    assert out.num_accepted == [[3] * 10] * len(PROMPTS)


def test_a_model_is_loaded_by_its_folder_and_keeps_it(target, tmp_path):
  small = hf_folder(tmp_path / 'small', HF_CONFIG)
  large = tiny.target(dataclasses.replace(TINY, num_layers=3))
  drafter = eagle_jax.load_drafter(small, large, kind='model')
  out = decode.generate(large, drafter, [[1, 2]], max_new_tokens=8, policy=Chain(2), eos_ids=())
  assert out.tokens == decode.generate(large, None, [[1, 2]], max_new_tokens=8, eos_ids=()).tokens
  with pytest.raises(ValueError, match="'small' is a model"):
    eagle_jax.save_drafter(drafter, tmp_path / 'saved')
  with pytest.raises(ValueError, match="got 'head'"):
    eagle_jax.load_drafter(small, large, kind='head')


BYTES = Tokenizer.from_gguf(byte_metadata(), eos_ids=(258,))
BYTE_TOKENS = [*byte_letters(), 'qu', '<|bos|>', '<|end|>']
BYTE_PAIR = {'tokens': BYTE_TOKENS, 'merges': ['q u']}


@pytest.mark.parametrize(
  ('model', 'message'),
  [
    (lambda target, small: target, 'smaller than its target.*exchange'),
    (lambda target, small: dataclasses.replace(small, tokenizer=None), "'small' cannot draft for 'target': only one"),
    (lambda target, small: dataclasses.replace(small, config=dataclasses.replace(small.config, logit_cap=3.0)), 'cap'),
  ],
)
def test_a_model_that_cannot_draft_is_refused(target, small, model, message):
  target, small = (dataclasses.replace(one, tokenizer=BYTES) for one in (target, small))
  with pytest.raises(ValueError, match=message):
    as_drafter(model(target, small), target)


@pytest.mark.parametrize(
  ('change', 'message'),
  [({'tokens': [*BYTE_TOKENS[1::-1], *BYTE_TOKENS[2:]]}, 'is [01] and [01]'), ({'merges': []}, 'they make')],
)
def test_a_model_of_other_ids_is_refused(target, small, change, message):
  target, small = (
    dataclasses.replace(one, tokenizer=Tokenizer.from_gguf(byte_metadata(**changes), eos_ids=(258,)))
    for one, changes in ((target, BYTE_PAIR), (small, BYTE_PAIR | change))
  )
  with pytest.raises(ValueError, match=message):
    as_drafter(small, target)
