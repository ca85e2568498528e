"""The three interfaces carry what is added to them: drafters without weights, policies with rules and numbers of their
own, acceptance rules that are not lossless."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
import tiny
from eagle_jax import decode
from eagle_jax.decode.verify import verify_parallel, verify_sequential
from eagle_jax.draft.kinds import KINDS
from eagle_jax.draft.lookup import TextLookup
from eagle_jax.draft.ngram import suggest
from eagle_jax.policy.kinds import kind_of
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree
from eagle_jax.sampling import GumbelMax, choose
from eagle_jax.tree import NO_TOKEN, DraftTree

PROMPTS = [[1, 2, 3, 1, 2], [40, 41, 40, 41, 40]]
NUM_NEW = 32
SAMPLINGS = ({}, {'temperature': 1.0, 'seed': 3})


@pytest.fixture(scope='module')
def target():
  return tiny.target()


@pytest.fixture(scope='module')
def plain(target):
  return [decode.generate(target, None, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), **how) for how in SAMPLINGS]


# Drafters.


def text_lookup(text: list[int], *, num_slots: int = 12) -> TextLookup:
  padded = np.full((1, num_slots), 77, np.int32)  # what lies behind the text is scratch
  padded[0, : len(text)] = text
  return TextLookup(jnp.asarray(padded), jnp.asarray([len(text) - 1]))


def test_an_ngram_drafter_offers_what_followed_the_longest_matches():
  """After 1 2 came 3 once, and after 2 alone 4, later."""
  lookup = text_lookup([1, 2, 3, 2, 4, 1, 2])
  children = suggest(lookup, lookup.match(), 3)
  assert children.token[0, 0].tolist() == [3, 4, NO_TOKEN]
  p = np.exp(np.asarray(children.log_p[0, 0]))
  assert 1 > p[0] > p[1] > p[2] == 0
  assert p.sum() < 1  # another token may follow


def test_an_ngram_drafter_takes_the_latest_of_equally_long_matches():
  lookup = text_lookup([5, 6, 5, 7, 5])
  assert suggest(lookup, lookup.match(), 2).token[0, 0].tolist() == [7, 6]


def test_an_ngram_drafter_offers_nothing_where_nothing_matches():
  lookup = text_lookup([1, 2, 3])
  assert suggest(lookup, lookup.match(), 1).log_p.tolist() == [[[-np.inf]]]


def test_a_suffix_drafter_offers_first_what_followed_most_often():
  """After 1 2 came 3 twice, and 4 once, later."""
  lookup = text_lookup([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2])
  latest, often = (suggest(lookup, lookup.match(), 3, counts_all=counts_all) for counts_all in (False, True))
  assert latest.token[0, 0].tolist() == [4, 3, NO_TOKEN]
  assert often.token[0, 0].tolist() == [3, 4, NO_TOKEN]
  p = np.exp(np.asarray(often.log_p[0, 0]))
  np.testing.assert_allclose(p[0], 2 * p[1], rtol=1e-6)
  assert p.sum() < 1


@pytest.mark.parametrize('kind', ['ngram', 'suffix'])
@pytest.mark.parametrize('policy', [Chain(3), DynamicTree(3, 3, 3, 8)], ids=lambda p: p.describe())
def test_an_ngram_drafter_is_lossless_and_drafts(target, plain, policy, kind):
  drafter = eagle_jax.load_drafter(kind, target)
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, eos_ids=(), **how)
    assert out.tokens == expected.tokens
  greedy = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, eos_ids=())
  assert greedy.stats['tau'] > 1.1


def test_auto_guesses_a_policy_without_lookup_for_a_drafter_without_logits(target):
  assert decode.build(target, eagle_jax.load_drafter('ngram', target))[1].policy.lookup is False


def test_lookup_needs_logits(target):
  with pytest.raises(ValueError, match=r'lookup=True.*n-gram'):
    decode.build(target, eagle_jax.load_drafter('ngram', target), policy=Chain(3, lookup=True))


def test_an_ngram_drafter_is_saved_and_loaded(target, tmp_path):
  drafter = eagle_jax.load_drafter('ngram', target)
  eagle_jax.save_drafter(drafter, tmp_path / 'saved')
  assert eagle_jax.load_drafter(tmp_path / 'saved', target) == drafter


def test_every_kind_has_a_config_of_its_own():
  assert len({kind.config for kind in KINDS.values()}) == len(KINDS)


# Policies.


@dataclasses.dataclass(frozen=True)
class Confident(DynamicTree):
  """Stops where no path is likely enough, and never verifies nodes below that probability."""

  least_p: float = 0.0

  def static(self) -> 'Confident':
    return dataclasses.replace(self, least_p=0.0)

  def arrays(self, costs: Any, target: Any, drafter: Any) -> jax.Array:
    return jnp.log(jnp.float32(self.least_p))

  def keep_going(self, arrays, level) -> jax.Array:
    return (jnp.where(level.is_live[:, None], level.log_q, -jnp.inf) > arrays).any()

  def select(self, arrays, candidates, is_live_B):
    return jnp.int32(0), jnp.where(candidates.log_q > arrays, candidates.score, -jnp.inf).at[:, 0].set(0)


def test_a_policy_stops_and_selects_by_numbers_that_compile_nothing(target, plain):
  drafter = tiny.drafter()
  levels, programs = {}, set()
  for least_p in (0.0, 0.0127, 1.0):
    policy = Confident(3, 3, 3, 8, least_p=least_p)
    params, spec = decode.build(target, drafter, policy=policy)
    programs.add(spec)
    how = {'max_new_tokens': NUM_NEW, 'eos_ids': ()}
    out = decode.generate(target, drafter, PROMPTS, policy=policy, **how)
    assert out.tokens == plain[0].tokens
    assert bool(levels) == (out.stats['compile_s'] == 0)
    levels[least_p] = out.stats['levels_per_pass']
  assert len(programs) == 1
  assert levels[0.0] == 3 > levels[0.0127] > levels[1.0] == 1  # the root's children are always drafted
  assert out.stats['tau'] == 1  # nothing is likelier than 1, so nothing is verified


def test_a_policy_of_no_registered_kind_is_named():
  with pytest.raises(ValueError, match='Confident'):
    kind_of(Confident(3, 3, 3, 8))


def test_a_policy_is_not_described_as_the_one_that_it_extends():
  class Fixed(StaticTree): ...

  described = 'Confident(width=3, fanout=3, max_depth=3, num_nodes=8, least_p=0.5)'
  assert Confident(3, 3, 3, 8, least_p=0.5).describe() == described
  assert Fixed().describe() == 'Fixed(num_nodes=26, max_depth=5)'


# Acceptance rules.


@dataclasses.dataclass(frozen=True)
class LossyFirstChild(GumbelMax):
  """Takes the last of the drafted children instead of the target's own token, if its logit is not far below."""

  margin: float = 1.0
  name = 'lossy-first-child'

  def choose(self, logits_V, child_T, sampling, row_id, position):
    own, child = choose(logits_V, sampling, row_id, position), child_T.max()
    is_near = logits_V[jnp.maximum(child, 0)] > logits_V[own] - self.margin
    return jnp.where((child != NO_TOKEN) & is_near, child, own)

  def noise(self, sampling, row_id, position, token_U):
    return jnp.zeros(token_U.shape)


def test_a_lossy_rule_accepts_more_and_says_its_name(target, plain):
  out = {
    chooser.name: decode.generate(
      target, tiny.drafter(), PROMPTS, policy=Chain(3), max_new_tokens=NUM_NEW, eos_ids=(), chooser=chooser
    )
    for chooser in (GumbelMax(), LossyFirstChild())
  }
  exact, lossy = out['gumbel-max'], out['lossy-first-child']
  assert (exact.stats['chooser'], lossy.stats['chooser']) == tuple(out)
  assert exact.tokens == plain[0].tokens != lossy.tokens
  assert lossy.stats['tau'] > exact.stats['tau']


def test_both_forms_of_verification_show_a_rule_the_same_children():
  """The root has children 4 and 6, node 1 has a child 2; the rule takes the largest child."""
  tree = DraftTree(jnp.array([9, 4, 6, 2, NO_TOKEN]), jnp.array([-1, 0, 0, 1, 0]), jnp.zeros(5))

  def largest(shown, child_T, node_depth):
    return jnp.maximum(child_T.max(), 1)

  verdicts = [form(tree, (), choose=largest, max_depth=2) for form in (verify_sequential, verify_parallel)]
  for verdict in verdicts:
    assert verdict.path.tolist() == [0, 2, 5]
    assert verdict.token.tolist() == [6, 1, NO_TOKEN]


@dataclasses.dataclass(frozen=True)
class Unhashable(GumbelMax):
  numbers: Any = ()


@pytest.mark.parametrize('chooser', [GumbelMax, 'gumbel-max', None, Unhashable([1])], ids=str)
def test_a_chooser_must_be_one(target, chooser):
  with pytest.raises(ValueError, match='chooser'):
    decode.generate(target, None, PROMPTS, chooser=chooser)


def test_costs_must_be_costs(target):
  with pytest.raises(ValueError, match="`costs`.* 'x'"):
    decode.build(target, tiny.drafter(), costs='x')


def test_an_unknown_keyword_is_named(target):
  with pytest.raises(TypeError, match=r"temprature.*'temperature'"):
    decode.generate(target, None, PROMPTS, temprature=1.0)


def test_help_shows_every_option():
  shown = inspect.signature(decode.generate).parameters
  assert [*shown][:4] == ['target', 'drafter', 'prompts', 'batch_size']
  assert (shown['max_new_tokens'].default, shown['policy'].default) == (128, 'auto')
