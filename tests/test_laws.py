"""The small pure functions against NumPy loops, on random trees with ties, NaN scores, unused nodes and twins."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import cache as kv_cache
from eagle_jax import sampling
from eagle_jax.config import TargetConfig
from eagle_jax.decode.request import MAX_TEMPERATURE, MIN_TOP_P
from eagle_jax.decode.verify import verify, verify_parallel, verify_sequential
from eagle_jax.draft.expand import Children, entropies, grow
from eagle_jax.kernels import cpu
from eagle_jax.kernels.tiling import Columns
from eagle_jax.models.layers import Experts, SwiGLU, find_asked, route
from eagle_jax.policy.adaptive import AcceptanceModel, Adaptive, CostModel, StepCosts, best_size, is_level_worth
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.pooled import PooledTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import EAGLE1_PATHS, Chain, DynamicTree, Level, StaticTree
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates, DraftTree, ancestor_mask, depth, rerank
from oracle import numpy_keep
from tiny_costs import COSTS

pytestmark = pytest.mark.optimised

SEEDS = range(20)
POLICIES = (
  DynamicTree(), DynamicTree(3, 4, 3, 11), DynamicTree(1, 2, 4, 9), DynamicTree(4, 1, 3, 4), Chain(3), StaticTree(),
  GapTree(3, 4, 3, 11), GapTree(2, 1, 3, 4), CaPE(3, 4, 3, 11, siblings=(3, 2, 1, 0)),
  StaticTree([(0,), (1,), (1, 0)]), StaticTree([(3,), (1,), (3, 2), (1, 0), (1, 4), (1, 4, 1)]),
)  # fmt: skip


def random_tree(rng, num_nodes: int, max_depth: int, vocab_size: int = 3) -> DraftTree:
  """Any parents, few tokens: twins and unused nodes are common."""
  parent_T, depth_T = [NO_PARENT], [0]
  for _ in range(1, num_nodes):
    parent = rng.choice([i for i, d in enumerate(depth_T) if d < max_depth])
    parent_T.append(parent)
    depth_T.append(depth_T[parent] + 1)
  token_T = rng.integers(NO_TOKEN, vocab_size, num_nodes)
  return DraftTree(token_T.astype(np.int32), np.asarray(parent_T, np.int32), np.zeros(num_nodes, np.float32))


# The tree and verification.


@pytest.mark.parametrize('seed', SEEDS)
def test_ancestor_mask_and_depth_match_numpy(seed):
  tree = random_tree(np.random.default_rng(seed), 14, 4)
  expected_TT = np.zeros((14, 14), bool)
  for node in range(14):
    ancestor = node
    while ancestor != NO_PARENT:
      expected_TT[node, ancestor] = True
      ancestor = tree.parent[ancestor]
  mask_TT = ancestor_mask(jnp.asarray(tree.parent), max_depth=4)
  np.testing.assert_array_equal(mask_TT, expected_TT)
  np.testing.assert_array_equal(depth(mask_TT), [row.sum() - 1 for row in expected_TT])


@functools.partial(jax.jit, static_argnames=('way', 'max_depth'))
def verified(way, tree, choice_PT, *, max_depth: int):
  """Verify where the target's choices are known, by depth and node."""
  return way(tree, choice_PT, choose=lambda choice_P, child_T, depth: choice_P[depth], max_depth=max_depth)


@pytest.mark.parametrize('way', [verify_sequential, verify_parallel])
@pytest.mark.parametrize('seed', SEEDS)
def test_verify_matches_numpy(way, seed):
  rng = np.random.default_rng(seed)
  tree = jax.tree.map(jnp.asarray, random_tree(rng, 12, 4))
  choice_TP = rng.integers(0, 3, (12, 5)).astype(np.int32)  # by node and depth: both must be handed over right
  path, token, node = [], [], 0
  while node is not None and len(path) < 5:
    path.append(node)
    token.append(choice_TP[node, len(path) - 1])
    same = [i for i in range(12) if tree.parent[i] == node and tree.token[i] == token[-1]]
    node = same[0] if same else None
  verdict = verified(way, tree, choice_TP.T, max_depth=4)
  assert verdict.num_accepted == len(path) - 1
  np.testing.assert_array_equal(verdict.path, path + [12] * (5 - len(path)))
  np.testing.assert_array_equal(verdict.token, token + [NO_TOKEN] * (5 - len(token)))


@pytest.mark.parametrize('way', [verify_sequential, verify_parallel])
def test_verify_accepts_paths_of_every_length(way):
  """A chain 0-1-2-3 of tokens 5: the target agrees `n` times."""
  tree = DraftTree(jnp.full(4, 5), jnp.asarray([NO_PARENT, 0, 1, 2]), jnp.zeros(4))
  for n in range(4):
    choice_PT = np.repeat(np.where(np.arange(4) < n, 5, 6).astype(np.int32)[:, None], 4, axis=1)
    verdict = verified(way, tree, choice_PT, max_depth=3)
    assert verdict.num_accepted == n
    assert verdict.token.tolist() == [5] * n + [6] + [NO_TOKEN] * (3 - n)


# Growing and reranking.


def random_children(rng, policy, *, nan: float) -> list[Children]:
  """By level: coarse scores, so that ties abound; some NaN; children sorted as drafters give them."""
  levels = []
  for width, fanout in zip(policy.widths, policy.fanouts, strict=True):
    log_p_WC = -np.sort(rng.integers(0, 4, (width, fanout)) / 4).astype(np.float32)
    log_p_WC[rng.random((width, fanout)) < nan] = np.nan
    levels.append(Children(rng.integers(0, 5, (width, fanout)).astype(np.int32), log_p_WC))
  return levels


def best(score, size: int) -> list[int]:
  """The largest, ties toward the lower number."""
  return sorted(range(len(score)), key=lambda i: (-score[i], i))[:size]


def numpy_tree(policy, levels: list[Children], root: int):
  """Tokens, parents and path scores of the tree that `grow` and `rerank` must give; template trees rank by template."""
  nodes, frontier = [(root, NO_PARENT, np.float32(0), 0.0)], [0]  # token, parent, log_q, score
  for level, children in enumerate(levels):
    log_p_WC = np.where(np.isnan(children.log_p), np.float32(-np.inf), children.log_p)
    log_q_WC = np.asarray([nodes[n][2] for n in frontier], np.float32)[:, None] + log_p_WC
    frontier_log_q = np.asarray([nodes[n][2] for n in frontier], np.float32)
    seen = Level(level, jnp.asarray(frontier_log_q)[None], jnp.ones(1, bool), jnp.asarray(log_p_WC)[None])
    score_WC = np.asarray(policy.score(policy.arrays(None, None, None), seen))[0]
    first = len(nodes)
    for slot, parent in enumerate(frontier):
      for c in range(log_q_WC.shape[1]):
        used = log_q_WC[slot, c] > -np.inf and score_WC[slot, c] > -np.inf
        score = score_WC[slot, c] if used else -np.inf
        token, log_q = (children.token[slot, c], log_q_WC[slot, c]) if used else (NO_TOKEN, -np.inf)
        nodes.append((token, parent, log_q, score))
    width = policy.widths[level + 1] if level + 1 < policy.max_depth else 0
    frontier = [first + i for i in best([node[3] for node in nodes[first:]], width)]
  kept = sorted(best([node[3] for node in nodes], policy.num_nodes))
  token = [nodes[n][0] for n in kept]
  parent = [kept.index(nodes[n][1]) if n and nodes[n][0] != NO_TOKEN else 0 for n in kept]
  return token, [NO_PARENT, *parent[1:]], [nodes[n][2] for n in kept]


@functools.partial(jax.jit, static_argnames=('policy', 'root'))
def library_tree(policy, levels: list[Children], root: int) -> DraftTree:
  def step(carry, frontier, depth, fanout):
    shape = frontier.token.shape[1], fanout
    alike = [d for d, level in enumerate(levels) if level.token.shape == shape]
    at = jnp.searchsorted(jnp.asarray(alike), depth)
    return jax.tree.map(lambda *x: jnp.stack(x)[at][None], *(levels[d] for d in alike)), carry

  roots = jax.tree.map(lambda x: x[None], levels[0])
  candidates = grow(roots, step, (), jnp.full(1, root, jnp.int32), policy, tiny.context(policy))
  return rerank(jax.tree.map(lambda x: x[0], candidates), num_nodes=policy.num_nodes)


@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
@pytest.mark.parametrize('nan', [0.0, 0.2, 0.8, 1.0])
def test_grow_and_rerank_match_numpy(policy, nan):
  for seed in range(3):
    levels = random_children(np.random.default_rng(seed), policy, nan=nan)
    tree = library_tree(policy, levels, root=9)
    token_T, parent_T, log_q_T = numpy_tree(policy, levels, root=9)
    np.testing.assert_array_equal(tree.token, token_T)
    np.testing.assert_array_equal(tree.parent, parent_T)
    np.testing.assert_array_equal(tree.log_q, log_q_T)
    assert (np.asarray(tree.parent) < np.arange(policy.num_nodes)).all()
    mask_TT = ancestor_mask(tree.parent, max_depth=policy.max_depth)
    np.testing.assert_array_equal(mask_TT, ancestor_mask(tree.parent, max_depth=policy.num_nodes))
    if nan == 1:
      assert token_T == [9] + [NO_TOKEN] * (policy.num_nodes - 1)
      choice_PT = np.full((policy.max_depth + 1, policy.num_nodes), 3, np.int32)
      assert verified(verify, tree, choice_PT, max_depth=policy.max_depth).num_accepted == 0


@pytest.mark.parametrize('template', [EAGLE1_PATHS, *(p.paths for p in POLICIES[-2:])], ids=len)
def test_static_tree_matches_its_paths(template):
  """Tokens spell paths: child c of node x is 10 x + c + 1. Nodes with children come first within their level."""
  policy = StaticTree(template)

  def children(token_BW, fanout):
    token_BWC = 10 * token_BW[..., None] + 1 + jnp.arange(fanout).reshape(1, 1, -1)
    return Children(token_BWC, jnp.full(token_BWC.shape, -1.0))

  def step(carry, frontier, depth, fanout):
    return children(frontier.token, fanout), carry

  root_B = jnp.zeros(1, jnp.int32)
  candidates = grow(children(root_B[:, None], policy.fanouts[0]), step, (), root_B, policy, tiny.context(policy))
  tree = rerank(jax.tree.map(lambda x: x[0], candidates), num_nodes=policy.num_nodes)
  spelt = [int('0' + ''.join(str(rank + 1) for rank in path)) for path in template]
  assert sorted(tree.token.tolist()) == sorted([0, *spelt])
  assert tree.token[tree.parent[1:]].tolist() == (tree.token[1:] // 10).tolist()


# Policies.


def test_eagle1_tree_has_the_references_shape():
  leaves = [path for path in EAGLE1_PATHS if not any(other[:-1] == path for other in EAGLE1_PATHS)]
  policy = StaticTree()
  assert (len(EAGLE1_PATHS), len(leaves), policy.max_depth, policy.num_nodes) == (25, 15, 5, 26)
  assert [sum(len(path) == d for path in EAGLE1_PATHS) for d in range(1, 6)] == [4, 8, 8, 3, 2]
  assert policy.widths == (1, 4, 4, 1, 1)
  assert policy.fanouts == (4, 3, 3, 3, 2)


@pytest.mark.parametrize(
  ('policy', 'widths', 'fanouts', 'num_nodes'),
  [
    (DynamicTree(), (1, 10, 10, 10, 10, 10), (10,) * 6, 60),
    (DynamicTree(10, 3, 4, 20), (1, 3, 9, 10), (3,) * 4, 20),
    (DynamicTree(2, 4, 1, 5), (1,), (4,), 5),
    (Chain(), (1, 1, 1, 1), (1, 1, 1, 1), 5),
    (StaticTree([(0,), (1,), (1, 0)]), (1, 1), (2, 1), 4),
  ],
  ids=lambda x: x.describe() if hasattr(x, 'describe') else '',
)
def test_policy_sizes(policy, widths, fanouts, num_nodes):
  assert (policy.widths, policy.fanouts, policy.num_nodes) == (widths, fanouts, num_nodes)
  assert len(widths) == policy.max_depth


def test_policy_descriptions_and_equality():
  assert DynamicTree().describe() == 'dynamic(width=10, fanout=10, max_depth=6, num_nodes=60)'
  assert Chain().describe() == 'chain(max_depth=4)'
  assert StaticTree([[0], [0, 0]]) == StaticTree(((0,), (0, 0)))
  assert hash(StaticTree()) == hash(StaticTree())


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: DynamicTree(width=0), '`width` = 0'),
    (lambda: DynamicTree(fanout=-1), '`fanout` = -1'),
    (lambda: DynamicTree(max_depth=0), '`max_depth` = 0'),
    (lambda: DynamicTree(num_nodes=0), '`num_nodes` = 0'),
    (lambda: DynamicTree(2, 2, 2, 8), '`num_nodes`.* 7.* got 8'),
    (lambda: DynamicTree(num_nodes=True), '`num_nodes` = True'),
    (lambda: DynamicTree(lookup='no'), "DynamicTree: `lookup`.* 'no'"),
    (lambda: Chain(0), '`max_depth` = 0'),
    (lambda: Chain(5000), 'Chain: `max_depth`.* 256.* 5000'),
    (lambda: Chain(lookup=None), 'Chain: `lookup`.* None'),
    (lambda: Chain(lookup=1.0), "Chain: `lookup`.*'route'.* 1.0"),
    (lambda: StaticTree([(0,) * n for n in range(1, 258)]), 'StaticTree: `max_depth`.* 256.* 257'),
    (lambda: StaticTree(3), 'StaticTree: `paths`.* 3'),
    (lambda: StaticTree([(0.5,)]), r'StaticTree: `paths`.* \[\(0.5,\)\]'),
    (lambda: Chain(1.5), '`max_depth` = 1.5'),
    (lambda: DynamicTree('3'), "`width` = '3'"),
    (lambda: Adaptive(thresholds=(1, np.nan)), r'thresholds.* \(1.0, nan\)'),
    (lambda: Adaptive(thresholds=1), 'thresholds.* 1'),
    (lambda: Adaptive(smaller=(1.7,)), r'smaller.*1.7'),
    (lambda: Adaptive(smaller=3), 'smaller.* 3'),
    (lambda: DDD(smaller=(60,)), r'DDD: `smaller`.*num_nodes=60.*\(60,\)'),
    (lambda: DDD(least_log_mass=-np.inf), 'DDD: `least_log_mass`.*-inf'),
    (lambda: SVIP(scale='0.2'), "SVIP: `scale`.*'0.2'"),
    (lambda: SVIP(scale=-0.2), 'SVIP: `scale`.*-0.2'),
    (lambda: SureMass(scale=-1), 'SureMass: `scale`.*-1'),
    (lambda: SureMass(least_mass=None), 'SureMass: `least_mass`.*None'),
    (lambda: PooledTree(mean_nodes=0.5), 'PooledTree: `mean_nodes`.*0.5'),
    (lambda: GapTree(steepness=np.nan), 'GapTree: `steepness`.*nan'),
    (lambda: GapTree(steepness=(1, 2)), r'GapTree: `steepness`.*\(1, 2\)'),
    (lambda: GapTree(steepness=-1), 'GapTree: `steepness`.* at least 0, got -1'),
    (lambda: C2T(least_accepted=1), 'C2T: `least_accepted`.*1.0'),
    (lambda: CaPE(confidences=0.3), 'CaPE: `confidences`.*0.3'),
    (lambda: CaPE(confidences=(0.3, 0.3, 0.8)), r'CaPE: `confidences`.*\(0.3, 0.3, 0.8\)'),
    (lambda: CaPE(siblings=(7, 5, 3)), r'CaPE: `siblings`.* 4 .*\(7.0, 5.0, 3.0\)'),
    (lambda: CaPE(siblings=(7, 5, 3, 0.5)), r'CaPE: `siblings`.*0.5'),
    (lambda: CaPE(siblings=(7, 5, 3, -1)), r'CaPE: `siblings`.*-1'),
    (lambda: StaticTree([]), r'`paths`.* got \(\)'),
    (lambda: StaticTree([()]), r'`paths`.* got \(\(\),\)'),
    (lambda: StaticTree([(0,), (0,)]), r'`paths`.* got \(\(0,\), \(0,\)\)'),
    (lambda: StaticTree([(0,), (1, 0)]), r'`paths`.* parent: \[\(1, 0\)\]'),
    (lambda: StaticTree([(-1,)]), r'`paths`.* got \(\(-1,\),\)'),
  ],
)
def test_bad_policies_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize(
  'bad', [{'logit_cap': 0.0}, {'gate_limit': -1.0}, {'gate_limit': np.inf}, {'eos_ids': 2}, {'eos_ids': [0.5]}], ids=str
)
def test_bad_configs_are_refused(bad):
  (name,) = bad
  with pytest.raises(ValueError, match=f'TargetConfig.*`{name}`'):
    dataclasses.replace(tiny.TARGET, **bad)


def test_a_config_of_lists_is_hashable():
  config = dataclasses.replace(tiny.TARGET, eos_ids=[np.int64(2), 3])
  assert config.eos_ids == (2, 3)
  assert hash(config) == hash(dataclasses.replace(tiny.TARGET, eos_ids=(2, 3)))


def test_cape_offers_siblings_by_the_probability_of_the_likeliest_child():
  policy = CaPE(width=6, confidences=(0.25, 0.5, 0.75), siblings=(6, 4, 2, 0))
  log_p_16C = np.log([[[p] + [p / 8] * 7 for p in (0.1, 0.26, 0.4, 0.51, 0.7, 0.76)]]).astype(np.float32)
  seen = Level(1, jnp.full((1, 6), -1.0), jnp.ones(1, bool), jnp.asarray(log_p_16C))
  score_16C = policy.score(policy.arrays(None, None, None), seen)
  assert (score_16C > -jnp.inf).sum(axis=2).tolist() == [[7, 5, 5, 3, 3, 1]]
  np.testing.assert_array_equal(score_16C[0, :, 0], log_p_16C[0, :, 0] - 1)


@pytest.mark.parametrize(('steepness', 'num_offered'), [(0.0, 2), (1e-6, 2), (1.0, 1), (1e30, 1)])
def test_a_child_without_siblings_is_offered_whatever_the_steepness(steepness, num_offered):
  """The gap of the first node is infinite."""
  policy = GapTree(3, 4, 3, 11, steepness=steepness)
  log_p_BWC = jnp.log(jnp.asarray([[[1.0, 0, 0, 0], [1.0, 1e-30, 0, 0]]]))
  seen = Level(1, jnp.zeros((1, 2)), jnp.ones(1, bool), log_p_BWC)
  score_BWC = policy.score(policy.arrays(None, None, None), seen)
  assert (score_BWC > -jnp.inf).sum(axis=2).tolist() == [[1, num_offered]]


def test_a_classifier_scores_a_path_by_its_least_likely_node():
  """The log-odds are 1 + log_q - entropy / 10 + depth / 2, and depth is 3."""
  policy = C2T(2, 2, 3, 6, smaller=(2, 4), least_accepted=0.25)
  arrays = policy.arrays(COSTS, None, None)
  log_q_12, log_p_122 = np.array([[-1, -2]], np.float32), np.array([[[-0.1, -3], [-0.5, -np.inf]]], np.float32)
  child_entropy_12, score_12 = jnp.array([[1.0, 20.0]]), jnp.array([[-0.5, -4.0]])
  seen = Level(2, jnp.asarray(log_q_12), jnp.ones(1, bool), jnp.asarray(log_p_122), None, child_entropy_12, score_12)
  own_122 = -np.log1p(np.exp(-(2.5 + log_q_12[..., None] + np.maximum(log_p_122, -28) - [[[0.1], [2.0]]])))
  expected_122 = np.minimum(own_122, score_12[..., None])
  np.testing.assert_allclose(policy.score(arrays, seen), expected_122, rtol=1e-5)
  assert expected_122[0, 0, 0] == -0.5 > expected_122[0, 0, 1]  # the parent's, and its own
  for best, is_worth in ((0.26, True), (0.24, False)):
    frontier = seen._replace(score=jnp.log(jnp.array([[0.1, best]])))
    assert policy.keep_going(arrays, frontier) == is_worth
    assert not policy.keep_going(arrays, frontier._replace(is_live=jnp.zeros(1, bool)))


def test_a_classifier_decides_how_many_nodes_are_verified():
  policy = C2T(2, 2, 3, 6, smaller=(2, 4), least_accepted=0.25)
  accepted_BA = np.array([[1, 0.9, 0.1, 0.5, 0.2, 0.2, 0.1], [1, *[0.9] * 6]], np.float32)
  zero_BA = jnp.zeros(accepted_BA.shape)
  seen = Candidates(zero_BA, zero_BA, zero_BA, jnp.log(accepted_BA))
  for live, size in (([True, False], 4), ([True, True], 6), ([False, False], 2)):
    index, score_BA = policy.select(policy.arrays(COSTS, None, None), seen, jnp.asarray(live))
    assert policy.sizes[index] == size
    np.testing.assert_array_equal(score_BA > -jnp.inf, accepted_BA > 0.25)


def test_a_path_is_worth_the_product_of_its_tokens_measured_shares():
  """Three frontier nodes at depth 1: the children of one come from a sure distribution, of one not; one is unused."""
  policy = CalibratedTree(3, 4, 3, 6)
  arrays = policy.arrays(COSTS, None, None)
  log_p_34 = [[-0.25, -2, -2.5, -np.inf], [0, -1, -4, -6], [-1, -1, -1, -np.inf]]
  expected_34 = [[-0.625, -2, -2.5, -np.inf], [-4, -6, -9, -11], [-np.inf] * 4]
  log_q_13, entropy_13, score_13 = jnp.asarray([[-1, -2, -np.inf], [0.9, 1.0, np.inf], [-0.5, -3, -np.inf]])[:, None]
  seen = Level(1, log_q_13, jnp.ones(1, bool), jnp.asarray(log_p_34, jnp.float32)[None], None, entropy_13, score_13)
  found_134 = policy.score(arrays, seen)
  np.testing.assert_allclose(found_134[0], np.add(expected_34, score_13.T), rtol=1e-6)
  np.testing.assert_array_equal(policy.score(arrays, seen._replace(depth=7)), found_134)  # as at the last depth
  assert 'gather' not in jax.jit(policy.score).lower(arrays, seen).as_text()  # slow on a TPU
  at_root = Level(0, jnp.zeros((1, 1)), None, jnp.array([[[0, -0.5]]]), None, jnp.zeros((1, 1)), jnp.zeros((1, 1)))
  np.testing.assert_allclose(policy.score(arrays, at_root)[0, 0], [0, -0.25], rtol=1e-6)


def test_policy_sizes_become_python_integers():
  assert Chain(np.uint8(255)).num_nodes == 256
  tree = DynamicTree(*np.asarray([20, 20, 5, 60], np.uint8))
  assert tree.widths == (1, 20, 20, 20, 20)
  assert {type(size) for size in dataclasses.astuple(tree)[:4]} == {int}


def test_largest_possible_tree_is_allowed():
  assert DynamicTree(2, 2, 2, 7).num_nodes == 7


# The cache.


@pytest.mark.parametrize('seed', SEEDS)
def test_append_writes_accepted_entries(seed):
  rng = np.random.default_rng(seed)
  B, G, T, P, S, K = 3, 2, 7, 4, 24, 5
  length_B, count_B = rng.integers(0, S - P, B).astype(np.int32), rng.integers(0, P + 1, B).astype(np.int32)
  old, new = (rng.standard_normal((4, B, G, n, K)).astype(np.float32) for n in (S, T))
  path_BP = np.full((B, P), T, np.int32)
  for path_P, count in zip(path_BP, count_B, strict=True):
    path_P[:count] = np.sort(rng.choice(T, count, replace=False))
  cache = kv_cache.KVCache(tuple(map(jnp.asarray, old[:2])), tuple(map(jnp.asarray, old[2:])), jnp.asarray(length_B))
  rows = kv_cache.NewEntries(tuple(map(jnp.asarray, new[:2])), tuple(map(jnp.asarray, new[2:])))
  after = kv_cache.append(cache, rows.take(jnp.asarray(path_BP)), jnp.asarray(count_B))
  np.testing.assert_array_equal(after.length, length_B + count_B)
  for before, found, then in zip(old, new, (*after.keys, *after.values), strict=True):
    for b, (length, count) in enumerate(zip(length_B, count_B, strict=True)):
      np.testing.assert_array_equal(then[b, :, :length], before[b, :, :length])
      np.testing.assert_array_equal(then[b, :, length : length + count], found[b][:, path_BP[b, :count]])


ROUTED = TargetConfig(
  vocab_size=7, width=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, ffn_width=5, max_context=8,
  num_experts=4, experts_per_token=2,
)  # fmt: skip


@pytest.mark.parametrize('num_rows', [1, 9])
def test_moe_routes_each_token_to_its_likeliest_experts(num_rows):
  x_DR = np.random.default_rng(num_rows).standard_normal((6, num_rows)).astype(np.float32)
  network = Experts(ROUTED)
  variables = network.init(jax.random.key(0), jnp.asarray(x_DR))
  out_DR = network.apply(variables, jnp.asarray(x_DR))
  weights = jax.tree.map(np.asarray, variables['params'])
  for x_D, out_D in zip(x_DR.T, np.asarray(out_DR).T, strict=True):
    odds_E = np.exp(weights['router']['weight'] @ x_D)
    chosen, expected_D = np.argsort(odds_E)[-2:], np.zeros(6)
    for index in chosen:
      (gate, up), down = (weights[f'expert_{part}']['weight'][index] for part in ('gate_up', 'down'))
      silu_F = gate @ x_D / (1 + np.exp(-gate @ x_D))
      expected_D += odds_E[index] / odds_E[chosen].sum() * (down @ (silu_F * (up @ x_D)))
    np.testing.assert_allclose(out_D, expected_D, rtol=1e-5, atol=1e-6)


def test_a_program_is_as_long_for_many_experts_as_for_few():
  """Sixteen are no more products than four, and a loop goes over those that were chosen."""
  programs = []
  for num_experts in (4, 16):
    network = Experts(dataclasses.replace(ROUTED, num_experts=num_experts))
    variables = network.init(jax.random.key(0), jnp.ones((6, 3)))
    programs.append(jax.jit(network.apply).lower(variables, jnp.ones((6, 3))).as_text())
  assert len({program.count('dot_general') for program in programs}) == 1
  assert all('stablehlo.while' in program for program in programs)


def test_experts_that_no_column_chose_come_last_and_do_not_count():
  share_ER = jnp.asarray([[0, 0], [0.4, 0], [0, 0], [0, 1], [0.6, 0]])
  order_E, num_asked = find_asked(share_ER)
  assert (order_E.tolist(), int(num_asked)) == ([1, 3, 4, 0, 2], 3)


@pytest.mark.parametrize(('is_normalised', 'total'), [(True, 1.0), (False, 0.9)])
def test_shares_of_experts(is_normalised, total):
  logits_ER = jnp.log(jnp.asarray([[0.1], [0.6], [0.3]]))
  share_ER = route(logits_ER, 2, is_normalised=is_normalised)
  np.testing.assert_allclose(share_ER[:, 0], np.array([0, 0.6, 0.3]) / 0.9 * total, rtol=1e-6)


def test_moe_ignores_outputs_of_unrouted_experts():
  """At float16 it may overflow, and 0 x inf would be NaN."""
  network = Experts(dataclasses.replace(ROUTED, num_experts=2, experts_per_token=1))
  x_DR = jnp.asarray(np.array([[30, -1], *[[30, 1]] * 5]), jnp.float16)
  params = network.init(jax.random.key(0), x_DR)['params']
  params['router']['weight'] = jnp.zeros((2, 6), jnp.float16).at[:, 0].set(jnp.asarray([1, -1], jnp.float16))
  params['expert_gate_up']['weight'] = params['expert_gate_up']['weight'].at[1, 1].set(100)
  expert = {part: {'weight': params[f'expert_{part}']['weight'][1]} for part in ('gate_up', 'down')}
  assert not jnp.isfinite(SwiGLU(5).apply({'params': expert}, x_DR[:, :1])).all()
  alone_D1 = network.apply({'params': params}, x_DR[:, :1])
  out_DR = network.apply({'params': params}, x_DR)
  assert jnp.isfinite(out_DR).all()
  np.testing.assert_array_equal(out_DR[:, :1], alone_D1)


# What pays.


@pytest.mark.parametrize('seed', SEEDS)
def test_best_size_gains_most(seed):
  rng = np.random.default_rng(seed)
  B, A, sizes = 3, 12, (1, 2, 5, 9)
  log_q_BA = np.concatenate([np.zeros((B, 1)), -rng.exponential(1.0, (B, A - 1))], axis=1).astype(np.float32)
  log_q_BA[rng.random((B, A)) < 0.3] = -np.inf
  log_q_BA[:, 0] = 0
  is_live_B = rng.random(B) < 0.7
  knots = np.linspace(-4, 0, 5).astype(np.float32)
  verify_ms = np.cumsum(rng.random(4)).astype(np.float32)
  prices = StepCosts(jnp.float32(2.0), jnp.asarray(verify_ms), jnp.zeros(3))
  economy = CostModel(
    jnp.float32(9), jnp.float32(1.2), prices, AcceptanceModel(jnp.ones(3), jnp.asarray(knots), jnp.exp(knots))
  )
  gains = []
  for size, ms in zip(sizes, verify_ms, strict=True):
    values = [np.interp(np.sort(row[1:])[::-1][: size - 1], knots, np.exp(knots)) for row in log_q_BA]
    used = [np.sort(row[1:])[::-1][: size - 1] > -np.inf for row in log_q_BA]
    gain = [(v * u).sum() - 0.6 * ms for v, u in zip(values, used, strict=True)]
    gains.append(np.asarray(gain)[is_live_B].sum())
  chosen = int(best_size(economy, jnp.asarray(log_q_BA), jnp.asarray(is_live_B), sizes=sizes))
  assert gains[chosen] >= max(gains) - 1e-5


def test_a_tree_of_the_best_rate_counts_what_was_drafted():
  """The root alone takes 1 ms and gives one token; four nodes take 2 ms."""
  policy, knots, zero_BA = RateTree(2, 2, 2, 4, smaller=(1,)), jnp.linspace(-4, 0, 400), jnp.zeros((1, 7), int)
  model = AcceptanceModel(jnp.ones(2), knots, jnp.exp(knots))

  def chosen(p: list[float], *draft_ms: float) -> int:
    log_q_BA = jnp.pad(jnp.log(jnp.asarray([[1.0, *p]])), ((0, 0), (0, 6 - len(p))), constant_values=-jnp.inf)
    costs = CostModel(1.0, 9.0, StepCosts(1.0, jnp.asarray([1.0, 2.0]), jnp.asarray(draft_ms)), model)
    return int(policy.select(costs, Candidates(zero_BA, zero_BA, log_q_BA, log_q_BA), jnp.asarray([True]))[0])

  assert chosen([0.6, 0.5, 0.4], 0.0, 0.0) == 1  # 2.5 / 2 against 1 / 1
  assert chosen([0.5, 0.3], 0.0, 99.0) == 0  # 1.8 / 2 against 1 / 1: the second level was not drafted
  assert chosen([0.5, 0.3], 1.0, 0.0) == 1  # 1.8 / 3 against 1 / 2: drafting is paid for either way


def test_a_pooled_budget_goes_to_the_likeliest_nodes_of_all_sequences():
  score_BA = jnp.asarray([[0.0, -1, -2, -9], [0, -3, -4, -5], [0, -1, -1, -1]])
  candidates = Candidates(jnp.zeros((3, 4), int), jnp.zeros((3, 4), int), score_BA, score_BA)
  policy = PooledTree(2, 3, 1, 4, smaller=(2,), mean_nodes=2.5)
  size, kept_BA = policy.select(policy.arrays(None, None, None), candidates, jnp.asarray([True, True, False]))
  assert (kept_BA > -jnp.inf).sum(axis=1)[:2].tolist() == [3, 2]  # 5 nodes for the two that are not done
  assert policy.sizes[int(size)] == 4
  few = dataclasses.replace(policy, mean_nodes=2.0)
  size, kept_BA = few.select(few.arrays(None, None, None), candidates, jnp.asarray([True, True, False]))
  assert (kept_BA > -jnp.inf).sum(axis=1)[:2].tolist() == [3, 1]


def test_level_is_worth_its_expected_tokens():
  knots = jnp.asarray([-2.0, 0.0])
  draft_ms, growth = jnp.asarray([0.0, 2.0, 2.0]), jnp.asarray([1.0, 0.5, 1.0])
  prices = StepCosts(jnp.float32(4.0), jnp.zeros(1), draft_ms)
  table = CostModel(jnp.float32(2.0), jnp.float32(9), prices, AcceptanceModel(growth, knots, jnp.exp(knots)))
  live_B, frontier_BW = jnp.asarray([True, False]), jnp.asarray([[0.0, 0.0], [-jnp.inf, 0.0]])
  assert not is_level_worth(table, Level(1, frontier_BW, live_B))  # 0.5 x 2 against 2 x 2 / 4
  assert is_level_worth(table, Level(2, frontier_BW, live_B))
  assert not is_level_worth(table, Level(2, jnp.full((2, 2), -jnp.inf), live_B))
  np.testing.assert_allclose(
    table.acceptance.values(jnp.asarray([0.0, -jnp.inf, -9.0, -1.0])), [1, 0, np.exp(-2), (1 + np.exp(-2)) / 2]
  )


@pytest.mark.parametrize('smaller', [(0,), (2, 1), (8,), (9,), (2, 2)])
def test_adaptive_sizes_must_ascend(smaller):
  with pytest.raises(ValueError, match='smaller') as raised:
    Adaptive(3, 3, 3, 8, smaller=smaller)
  assert str(smaller) in str(raised.value)


@pytest.mark.parametrize('fanout', [1, 4, 7])
def test_entropies_of_what_is_offered_bound_those_of_all_tokens(fanout):
  log_p_BWV = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (2, 3, 7)))
  log_p_BWV = log_p_BWV.at[0, 0].set(jnp.where(jnp.arange(7) > 0, -jnp.inf, 0.0)).at[1, 2].set(jnp.nan)
  p_BWV = np.exp(np.asarray(log_p_BWV, np.float64))
  exact_BW = -np.where(p_BWV > 0, p_BWV * np.log(np.maximum(p_BWV, 1e-30)), 0).sum(axis=2)
  exact_BW[1, 2] = np.inf  # nothing is known there
  bound_BW = entropies(Children(jnp.zeros((2, 3, fanout), int), jax.lax.top_k(log_p_BWV, fanout)[0]))
  assert (np.asarray(bound_BW) <= exact_BW + 1e-5).all()
  assert bound_BW[1, 2] == np.inf
  if fanout == 7:
    np.testing.assert_allclose(bound_BW, exact_BW, atol=1e-5)
  assert entropies(Children(None, None, jnp.asarray([[1.5, jnp.nan]]))).tolist() == [[1.5, np.inf]]


# Sampling.


@pytest.mark.parametrize('top_k', [0, 1, 2, 7, 40, 100])
@pytest.mark.parametrize('top_p', [MIN_TOP_P, 0.1, 0.53, 0.9, 0.999, 1.0])
def test_keep_matches_sorting(top_k, top_p):
  keep = jax.jit(sampling.keep)
  for seed in range(5):
    rng = np.random.default_rng(seed)
    logits_V = rng.standard_normal(40).astype(np.float32) * 3
    if seed % 2:
      logits_V = np.round(logits_V) + np.float32(0.5)  # ties
    for temperature in (0.3, 1.0, 2.0):
      how = sampling.Sampling.of(temperature=temperature, top_k=top_k, top_p=top_p)
      np.testing.assert_array_equal(keep(logits_V, how), numpy_keep(logits_V, temperature, top_k, top_p))


def test_order_maps_floats_monotonically_and_back():
  x_V = jnp.asarray([-jnp.inf, -1e30, -2.0, -1e-30, 1e-30, 0.5, 3.0, jnp.inf], jnp.float32)
  order_V = sampling._order(x_V)
  assert (jnp.diff(order_V.astype(jnp.float32)) > 0).all()
  np.testing.assert_array_equal(sampling._float_of(order_V), x_V)


@pytest.mark.parametrize('seed', SEEDS)
def test_the_least_logit_kept_matches_sorting(seed):
  rng = np.random.default_rng(seed)
  logits_V = rng.normal(0, 10, 30).astype(np.float32)
  logits_V[:10] = logits_V[10:20]
  weight_V, need = rng.integers(0, 9, 30).astype(np.float32), np.float32(rng.integers(1, 200))
  enough = [logit for logit in logits_V if weight_V[logits_V >= logit].sum() >= need]
  assert sampling._least_kept(jnp.asarray(logits_V), weight_V, need) == max(enough, default=-np.inf)


@pytest.mark.parametrize('tokens', [[0], [7, 3, 49_151], range(1000)], ids=str)
def test_noise_of_some_tokens_matches_noise_of_all(tokens):
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 2), 9)
  all_V = jax.random.gumbel(key, (49_152,))
  found_U = sampling.position_noise(5, 2, 9, jnp.asarray(tokens))
  np.testing.assert_allclose(found_U, all_V[jnp.asarray(tokens)], rtol=1e-6)  # the last bit of a logarithm


def test_choose_is_gumbel_max_of_kept_logits():
  logits_V, position_n = np.random.default_rng(0).standard_normal(30).astype(np.float32), np.arange(10)
  choose = jax.jit(jax.vmap(sampling.choose, in_axes=(None, None, None, 0)))
  noise = jax.jit(jax.vmap(lambda position: sampling.position_noise(7, 3, position, jnp.arange(30))))
  noise_nV = np.asarray(noise(position_n))
  filters = [(0.0, 3, 0.5), (1.0, 0, 1.0), (0.7, 4, 1.0), (1.5, 0, 0.6), (MAX_TEMPERATURE, 9, 0.8)]
  for temperature, top_k, top_p in filters:
    how = sampling.Sampling.of(temperature=temperature, top_k=top_k, top_p=top_p, seed=7)
    keep_V = numpy_keep(logits_V, temperature, top_k, top_p) if temperature else np.ones(30, bool)
    perturbed_nV = np.where(keep_V, logits_V + np.float32(temperature) * noise_nV, -np.inf)
    np.testing.assert_array_equal(choose(logits_V, how, jnp.int32(3), position_n), perturbed_nV.argmax(axis=1))


def test_choose_takes_the_first_of_equal_logits():
  logits_V = jnp.asarray([0.5, -jnp.inf, 2.0, 1.0, 2.0, 2.0])
  assert sampling.choose(logits_V, sampling.Sampling.of(), jnp.int32(0), jnp.int32(0)) == 2


@pytest.mark.parametrize(
  ('num_nodes', 'batch', 'wanted'),
  [
    (1, 1, 1),
    (2, 1, 2),
    (5, 1, 8),
    (12, 1, 16),
    (17, 1, 32),
    (60, 1, 64),
    (64, 1, 64),
    (60, 2, 64),
    (8, 3, 8),
    (3, 4, 4),
  ],
)
def test_columns_fill_tiles(num_nodes, batch, wanted):
  assert Columns().per_sequence(num_nodes, batch) == wanted
  assert Columns(any_until=16).per_sequence(num_nodes, batch) == (num_nodes if num_nodes * batch <= 16 else wanted)


@pytest.mark.parametrize(('num_nodes', 'batch', 'wanted'), [(1, 1, 8), (1, 4, 2), (1, 3, 1), (5, 2, 8), (9, 1, 16)])
def test_columns_are_at_least_what_costs_nothing(num_nodes, batch, wanted):
  assert Columns(least=8).per_sequence(num_nodes, batch) == wanted


def test_columns_that_devices_ask_for(monkeypatch):
  monkeypatch.setattr(cpu, 'library', lambda: 'a digest')
  assert Columns.of() == Columns(any_until=16)
  assert (Columns.of('gpu'), Columns.of('tpu')) == (Columns(), Columns(least=8))
