"""Traces: what each target pass verified and accepted, beside a text that is the same as without them."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

import tiny
from eagle_jax import decode
from eagle_jax.decode.record import Cycle, sibling_ranks
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree
from eagle_jax.tree import NO_PARENT, NO_TOKEN
from tiny_costs import COSTS

PROMPTS = [[1, 2, 3], [40], [5, 6, 7, 8, 9, 10, 11]]
SMALL = DynamicTree(3, 3, 3, 8)
ADAPTIVE = pytest.param(Adaptive(3, 3, 3, 8, smaller=(1, 4)), marks=pytest.mark.slow)
POLICIES = Plain(), Chain(3, lookup=True), StaticTree([(0,), (1,), (1, 0)]), SMALL, ADAPTIVE
NUM_NEW = 16
GENERATE = sys.modules['eagle_jax.decode.generate']


@pytest.fixture(scope='module')
def target():
  return tiny.target()


@pytest.fixture(scope='module')
def drafter():
  return tiny.drafter()


def both(target, drafter, prompts=PROMPTS, **how):
  """Without a trace, and with it."""
  how = {'max_new_tokens': NUM_NEW, 'costs': COSTS} | how
  return [decode.generate(target, drafter, prompts, trace=trace, **how) for trace in (False, True)]


def emitted(cycle: Cycle) -> list[int]:
  return [*cycle.token[cycle.path[1:]].tolist(), cycle.bonus][: cycle.num_emitted]


def require_consistent(out, prompts=PROMPTS):
  """The cycles make up the text and the counts, and each holds a tree."""
  for prompt, tokens, num_accepted, cycles in zip(prompts, out.tokens, out.num_accepted, out.trace, strict=True):
    text = prompt + tokens[:1]
    for cycle, num in zip(cycles, num_accepted, strict=True):
      assert cycle.text_length == len(text)
      assert cycle.token[0] == text[-1]
      assert min(len(cycle.path) - 1, cycle.num_emitted) == num
      assert (cycle.token != NO_TOKEN).all()
      assert cycle.parent[0] == NO_PARENT
      assert (cycle.parent[1:] < np.arange(1, len(cycle.parent))).all()
      assert cycle.path[0] == cycle.log_q[0] == cycle.log_p[0] == cycle.rank[0] == 0
      assert cycle.parent[cycle.path[1:]].tolist() == cycle.path[:-1].tolist()
      assert (cycle.log_q[1:] <= cycle.log_q[cycle.parent[1:]]).all()
      assert (cycle.log_p <= 0).all()
      text = text + emitted(cycle)
    assert text == prompt + tokens


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_a_traced_text_is_the_text(target, drafter, policy, temperature):
  untraced, traced = both(target, drafter, policy=policy, temperature=temperature)
  assert (traced.tokens, traced.num_accepted) == (untraced.tokens, untraced.num_accepted)
  assert untraced.trace is None
  for name in ('num_target_passes', 'nodes_per_pass', 'levels_per_pass', 'tau'):
    assert traced.stats[name] == untraced.stats[name]
  require_consistent(traced)


def test_drafts_are_accepted_at_all(target, drafter):
  """Otherwise the other tests here would see paths of one node only."""
  _, traced = both(target, drafter, policy=SMALL)
  assert max(len(cycle.path) for cycles in traced.trace for cycle in cycles) > 1


def test_an_eos_inside_a_path_cuts_what_is_emitted(target, drafter):
  whole = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=SMALL, trace=True)
  accepted = []  # tokens that the text first has where a draft was accepted
  for prompt, tokens, cycles in zip(PROMPTS, whole.tokens, whole.trace, strict=True):
    text = prompt + tokens
    found = [(int(c.token[c.path[1]]), c.text_length) for c in cycles if len(c.path) > 1]
    accepted += [token for token, place in found if token not in text[len(prompt) : place]]
  for eos in {accepted[0], accepted[-1]}:
    untraced, traced = both(target, drafter, policy=SMALL, eos_ids=[eos])
    assert (traced.tokens, traced.num_accepted) == (untraced.tokens, untraced.num_accepted)
    require_consistent(traced)
    last = [cycles[-1] for cycles in traced.trace if cycles]
    assert any(cycle.num_emitted < len(cycle.path) for cycle in last)


def test_probabilities_are_those_of_the_target(target, drafter):
  """Each node's, as a pass over the text up to it gives them."""
  out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=SMALL, trace=True, temperature=0.7)
  text, ids, found = PROMPTS[0] + out.tokens[0], [], []
  for cycle in out.trace[0][:3]:
    for node in range(1, len(cycle.token)):
      path = [node]
      while cycle.parent[path[0]] != 0:
        path.insert(0, int(cycle.parent[path[0]]))
      ids.append(text[: cycle.text_length] + cycle.token[path].tolist())
      found.append(cycle.log_p[node])
  ids_BL, length_B = decode.pad_prompts(ids, max(map(len, ids)))
  network, sequence_B = target.network, np.arange(len(ids))
  logits_VBL = jax.jit(lambda params: network.logits(params, network.read(params, ids_BL)))(target.params)
  log_p_VB = jax.nn.log_softmax(logits_VBL[:, sequence_B, length_B - 2], axis=0)
  np.testing.assert_allclose(found, log_p_VB[ids_BL[sequence_B, length_B - 1], sequence_B], atol=1e-4)


def test_siblings_are_ranked_by_the_drafter():
  parent = np.array([NO_PARENT, 0, 0, 0, 2, 2])
  log_q = np.array([0.0, -2.0, -1.0, -2.0, -3.0, -1.5])
  assert sibling_ranks(parent, log_q).tolist() == [0, 1, 0, 2, 1, 0]


def test_a_prompt_that_ends_at_once_has_no_cycle(target, drafter):
  untraced, traced = both(target, drafter, policy=SMALL, max_new_tokens=1)
  assert traced.trace == [[]] * len(PROMPTS)
  assert traced.tokens == untraced.tokens


def test_prompts_that_wait_are_not_traced(target, drafter):
  with pytest.raises(ValueError, match='batch_size 2 for 3 prompts'):
    decode.generate(target, drafter, PROMPTS, batch_size=2, trace=True)
  out = decode.generate(target, drafter, PROMPTS, batch_size=3, max_new_tokens=NUM_NEW, policy=SMALL, trace=True)
  assert len(out.trace) == 3


@pytest.mark.parametrize('policy', [SMALL, ADAPTIVE], ids=lambda p: p.describe())
def test_who_does_not_ask_compiles_no_other_program(target, drafter, monkeypatch, policy):
  """The loop is lowered to the same text as without the code that traces, and the traced step is not compiled."""

  def refuse(*_, **__):
    raise AssertionError('traced')

  monkeypatch.setattr(GENERATE, '_TRACED', None)
  decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, costs=COSTS)
  params, spec = decode.build(target, drafter, policy=policy, costs=COSTS)
  state = decode.prefill(params, np.asarray(PROMPTS[:1], np.int32), np.asarray([3]), spec=spec, max_new_tokens=NUM_NEW)

  def lowered(spec):
    decode.decode_loop.clear_cache()
    return decode.decode_loop.lower(params, state, spec=spec).as_text()

  today = lowered(spec)
  assert not spec.is_traced
  with monkeypatch.context() as without:
    without.setattr(sys.modules['eagle_jax.decode.step'], 'node_log_p', refuse)
    assert lowered(spec) == today
    with pytest.raises(AssertionError, match='traced'):
      lowered(dataclasses.replace(spec, is_traced=True))
