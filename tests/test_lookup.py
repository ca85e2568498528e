"""Lookup in the text: the longest earlier match, what followed it, and its effect on a drafter's children."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import decode
from eagle_jax.draft.lookup import MAX_MATCH, ROUTE, WEIGHTS, Evidence, TextLookup
from eagle_jax.policy.trees import LOOKUPS, Chain, DynamicTree
from eagle_jax.tree import NO_TOKEN

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [30, 31, 32, 33, 34], [9, 9, 9, 9, 8, 7]]
NUM_NEW = 48
IDS = jnp.array([3, 7, 20, 21, 40, 41, 60, 96], jnp.int32)


def longest(text: list[int], path: list[int]) -> tuple[int, int]:
  """Find what followed the longest earlier match of `path` (the newest token first); of equally long ones, the last."""
  best = 0, NO_TOKEN
  for place in range(len(text) - 1):
    length = 0
    while length < min(MAX_MATCH, place + 1) and text[place - length] == path[length]:
      length += 1
    if length and length >= best[0]:
      best = length, text[place + 1]
  return best


@pytest.mark.parametrize('seed', range(10))
def test_find_next_matches_a_search_in_numpy(seed):
  """Texts of two letters have many matches, some longer than MAX_MATCH; undefined tokens follow them."""
  rng = np.random.default_rng(seed)
  text_BS = rng.integers(0, 2, (3, 60)).astype(np.int32)
  text_BS[2] = np.tile([0, 1, 1], 20)
  newest_B = np.asarray([rng.integers(0, 20), 59, 50], np.int32)
  drafted_BW = rng.integers(0, 3, (3, 2)).astype(np.int32)  # a letter that no text has, too

  @jax.jit
  def follow(lookup: TextLookup):
    """Look up what follows the text, one drafted token of two, and one more."""
    matches = [lookup.match()]
    matches.append(lookup.extend(jnp.repeat(matches[0], 2, axis=1), drafted_BW))
    matches.append(lookup.extend(matches[1][:, ::-1], drafted_BW))
    return [lookup.find_next(match_BWS) for match_BWS in matches]

  found = follow(TextLookup(jnp.asarray(text_BS), jnp.asarray(newest_B)))
  for b, newest in enumerate(newest_B):
    text, (first, second) = text_BS[b, : newest + 1].tolist(), drafted_BW[b].tolist()
    paths = [[]], [[first], [second]], [[first, second], [second, first]]
    for level, paths_W in zip(found, paths, strict=True):
      for w, path in enumerate(paths_W):
        length, token = longest(text, [*path, *text[::-1]])
        assert level.token[b, w] == token
        np.testing.assert_allclose(
          level.weight[b, w], WEIGHTS[0] + WEIGHTS[1] * np.log(length) if length else 0, rtol=1e-6
        )


def test_unused_nodes_match_nothing():
  """Covers a text of one token, and the NO_TOKEN of unused nodes."""
  lookup = TextLookup(jnp.full((1, 5), NO_TOKEN).at[0, 0].set(7), jnp.zeros(1, jnp.int32))
  unused_BWS = lookup.extend(lookup.match(), jnp.full((1, 1), NO_TOKEN))
  assert not lookup.match().any()
  assert not unused_BWS.any()
  assert lookup.find_next(unused_BWS) == Evidence(jnp.full((1, 1), NO_TOKEN), jnp.zeros((1, 1)))


@pytest.fixture(scope='module')
def pair():
  target = tiny.target(seed=2)
  return target, tiny.drafter().with_ids(IDS)


@pytest.mark.parametrize('token', [20, 50, NO_TOKEN])  # in the draft vocabulary, outside, none
def test_evidence_raises_one_logit(pair, token):
  params, spec = decode.build(*pair, policy=Chain(1, lookup=True))
  out_D11 = jax.random.normal(jax.random.key(0), (tiny.DRAFTER.width, 1, 1))
  evidence = Evidence(jnp.full((1, 1), token), jnp.full((1, 1), 2.5 * (token >= 0)))

  def noise(token_XB):
    return 0.01 * token_XB.astype(jnp.float32)

  children = spec.drafter.top_children(params.drafter, out_D11, noise, len(IDS), evidence)
  ids = sorted({*IDS.tolist(), token} - {NO_TOKEN})
  logits = np.asarray(pair[0].head_VD)[ids] @ np.asarray(out_D11)[:, 0, 0] + 0.01 * np.asarray(ids)
  log_p = np.asarray(jax.nn.log_softmax(jnp.asarray(logits + 2.5 * (np.asarray(ids) == token), jnp.float32)))
  order = np.argsort(-log_p)[: len(IDS)]
  assert children.token[0, 0].tolist() == [ids[i] for i in order]
  np.testing.assert_allclose(children.log_p[0, 0], log_p[order], atol=1e-5)


def test_a_route_leads_along_long_matches_and_nowhere_else(pair):
  """A match of 5 tokens outweighs any logit, also of a token outside the draft vocabulary; one of 4 says nothing."""
  text = [1, 2, 3, 4, 5, 50, 1, 2, 3, 4, 5]
  long, short = (TextLookup(jnp.asarray([text[first:]]), jnp.asarray([10 - first])) for first in (0, 1))
  found = [lookup.find_next(lookup.match(), ROUTE) for lookup in (long, short)]
  assert [one.token.item() for one in found] == [50, NO_TOKEN]
  assert [one.weight.item() for one in found] == [ROUTE[0], 0]

  params, spec = decode.build(*pair, policy=Chain(1, lookup='route'))
  out_D11 = 20 * jax.random.normal(jax.random.key(0), (tiny.DRAFTER.width, 1, 1))
  shared = params.drafter, out_D11, lambda token_XB: 0.01 * token_XB.astype(jnp.float32), 3
  routed, unrouted, alone = (spec.drafter.top_children(*shared, evidence) for evidence in (*found, None))
  assert routed.token[0, 0, 0] == 50
  assert routed.log_p[0, 0, 0] > -1e-6
  assert unrouted.token.tolist() == alone.token.tolist()
  np.testing.assert_allclose(unrouted.log_p, alone.log_p, atol=1e-6)


@pytest.mark.parametrize('lookup', [True, 'route'])
@pytest.mark.parametrize('policy', [Chain(4), DynamicTree(3, 3, 4, 9)], ids=lambda p: p.describe())
@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_lookup_changes_no_text(pair, policy, temperature, lookup):
  how = {'max_new_tokens': NUM_NEW, 'temperature': temperature, 'eos_ids': (), 'seed': 3}
  plain = decode.generate(pair[0], None, PROMPTS, **how)
  policy = dataclasses.replace(policy, lookup=lookup)
  assert decode.generate(*pair, PROMPTS, policy=policy, **how).tokens == plain.tokens


def test_lookup_drafts_repeated_tokens_outside_the_draft_vocabulary(pair):
  """Greedy text of such a small target soon repeats itself."""
  passes = {
    lookup: decode.generate(*pair, PROMPTS, max_new_tokens=NUM_NEW, eos_ids=(), policy=Chain(4, lookup=lookup)).stats[
      'num_target_passes'
    ]
    for lookup in LOOKUPS
  }
  assert passes == {False: 141, True: 66, 'route': 85}
