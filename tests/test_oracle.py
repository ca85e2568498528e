"""Speculative decoding equals plain decoding, token for token, on a target that notices every wrong bit."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from eagle_jax.cache import NewEntries
from eagle_jax.decode import step as loop
from eagle_jax.decode.prefill import prepare, run_prefill
from eagle_jax.decode.verify import verify, verify_parallel
from eagle_jax.policy.adaptive import AcceptanceModel, Adaptive, CostTables, StepCosts
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.pooled import PooledTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree
from eagle_jax.sampling import Sampling, choose
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates

VOCAB = 13
PROMPTS = ((7,), (1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11), (3, 3, 3, 3, 12))
ROW_IDS = (5, 0, 901, 5)
NUM_NEW = 96
GREEDY, SAMPLED, FILTERED = {}, {'temperature': 1.0, 'seed': 1}, {'temperature': 0.7, 'top_k': 5, 'top_p': 0.8}
SAMPLINGS = (GREEDY, SAMPLED, FILTERED)


def random_template(seed: int, num_nodes: int, max_depth: int) -> StaticTree:
  """A static tree of random shape, its paths in random order."""
  rng = np.random.default_rng(seed)
  paths = [()]
  while len(paths) < num_nodes:
    parent = paths[rng.integers(len(paths))]
    child = (*parent, min(int(rng.geometric(0.6)) - 1, 3))
    if len(child) <= max_depth and child not in paths:
      paths.append(child)
  return StaticTree([paths[i] for i in 1 + rng.permutation(num_nodes - 1)])


@dataclasses.dataclass(frozen=True)
class RandomTrees(oracle.OracleDrafter):
  """Another random tree for every row and step: unused nodes, twins and any shape that a policy never grows."""

  def propose(self, params, state, root_B, policy, context):
    token_VB = oracle.every_token(self.vocab_size, len(root_B))
    noise_PVB = jnp.stack([context.noise(depth, token_VB) for depth in range(1, policy.max_depth + 1)])
    return jax.vmap(functools.partial(self._row, policy), (0, 0, 2))(state, root_B, noise_PVB)

  def _row(self, policy, state, root, noise_PV):
    T = policy.num_nodes
    zero_T = jnp.zeros(T, jnp.int32)

    def add(tree, node):
      token_T, parent_T, depth_T, hash_T = tree
      dice_3 = jax.random.bits(jax.random.fold_in(jax.random.key(0), state.hash + node.astype(jnp.uint32)), (3,))
      parent = (dice_3[0] % node.astype(jnp.uint32)).astype(jnp.int32)
      parent = jnp.where(depth_T[parent] < policy.max_depth, parent, 0)
      position = state.position + depth_T[parent] + 1
      logits_V = oracle.hash_logits(hash_T[parent][None], vocab_size=self.vocab_size)[:, 0]
      other = (dice_3[1] % jnp.uint32(self.vocab_size)).astype(jnp.int32) - 1  # NO_TOKEN among them
      token = jnp.where(dice_3[2] < jnp.uint32(0.8 * 2**32), jnp.argmax(logits_V + noise_PV[depth_T[parent]]), other)
      values = token, parent, depth_T[parent] + 1, hash_T[parent] + oracle.ingredient(token, position)
      return tuple(x_T.at[node].set(x) for x_T, x in zip(tree, values, strict=True)), None

    start = zero_T.at[0].set(root), zero_T.at[0].set(NO_PARENT), zero_T, zero_T.astype(jnp.uint32).at[0].set(state.hash)
    (token_T, parent_T, _, _), _ = jax.lax.scan(add, start, jnp.arange(1, T))
    return Candidates(token_T, parent_T, jnp.zeros(T, jnp.float32), -jnp.arange(T, dtype=jnp.float32))


@dataclasses.dataclass(frozen=True)
class Moody(oracle.OracleDrafter):
  """Is surer of itself after some texts than after others, so that policies stop and cut here and there."""

  def children(self, hash_BW, noise_VB, fanout: int):
    children = super().children(hash_BW, noise_VB, fanout)
    mood_BW = 0.2 + (oracle.mix(hash_BW) & 0xFF).astype(jnp.float32) / 128
    return children._replace(log_p=children.log_p * mood_BW[..., None])


@dataclasses.dataclass(frozen=True)
class Forgetful(oracle.OracleDrafter):
  """Planted fault: misses the last token of every committed path that is longer than one."""

  def update(self, params, state, token_BP, taps, count_B):
    right, wrong = (super(Forgetful, self).update(params, state, token_BP, taps, c) for c in (count_B, count_B - 1))
    return jax.tree.map(lambda r, w: jnp.where(count_B > 1, w, r), right._replace(position=right.position), wrong)


POLICIES = (
  Chain(1),
  Chain(4),
  StaticTree(),
  StaticTree([(0,), (1,), (1, 0)]),
  random_template(2, 12, 4),
  DynamicTree(),
  DynamicTree(3, 3, 3, 8),
  DynamicTree(2, 4, 5, 11),
)
SMALL = DynamicTree(3, 3, 3, 8)
RULED = (  # by rules with numbers
  DDD(3, 3, 3, 8, smaller=(4,), least_log_mass=0.1),
  SVIP(3, 3, 3, 8, smaller=(4,), scale=1.0, most_rejected=0.8),
  SureMass(3, 3, 3, 8, scale=0.2, least_mass=0.8),
  GapTree(3, 3, 3, 8),
  CaPE(3, 3, 3, 8, siblings=(2, 2, 1, 0)),
  C2T(3, 3, 3, 8, smaller=(4,), least_accepted=0.4),
  CalibratedTree(3, 3, 3, 8),
  PooledTree(3, 3, 3, 8, smaller=(4,), mean_nodes=4.5),
  RateTree(3, 3, 3, 8, smaller=(1, 4)),
)


def run(
  policy, *, drafter=None, arrays=None, prompts=PROMPTS, row_ids=ROW_IDS, max_new_tokens=NUM_NEW, eos_ids=(),
  decode_loop=loop.decode_loop, **sampling,
):  # fmt: skip
  """Tokens and num_accepted, a list a row."""
  tokens_BL = np.zeros((len(prompts), 8), np.int32)
  for row_L, prompt in zip(tokens_BL, prompts, strict=True):
    row_L[: len(prompt)] = prompt
  length_B = np.asarray([len(prompt) for prompt in prompts], np.int32)
  eos_ids = (*eos_ids, NO_TOKEN, NO_TOKEN)[:2]  # always two slots: one program for all
  params, spec = oracle.build(policy, vocab_size=VOCAB, drafter=drafter, arrays=arrays)
  tokens_BN, length_B, num_accepted_BN = map(
    np.asarray,
    oracle.decode(
      params, spec, tokens_BL, length_B, loop=decode_loop, max_new_tokens=max_new_tokens,
      sampling=Sampling.of(**sampling), row_ids=row_ids, eos_ids=eos_ids,
    ),
  )  # fmt: skip
  assert all((row[length:] == NO_TOKEN).all() for row, length in zip(tokens_BN, length_B, strict=True))
  tokens = [row[:length].tolist() for row, length in zip(tokens_BN, length_B, strict=True)]
  return tokens, [row[row >= 0].tolist() for row in num_accepted_BN]


@functools.cache
def plain_text(sampling: tuple) -> list[list[int]]:
  tokens, num_accepted = run(Plain(), **dict(sampling))
  assert num_accepted == [[0] * (NUM_NEW - 1)] * len(PROMPTS)
  return tokens


def plain(sampling: dict) -> list[list[int]]:
  return plain_text(tuple(sampling.items()))


def check_counts(tokens, num_accepted):
  """Every pass emits its drafted tokens and a bonus, which only the last may lack; prefill's token is in neither."""
  for row, counts in zip(tokens, num_accepted, strict=True):
    missing_bonus = sum(counts) + len(counts) - (len(row) - 1)
    assert missing_bonus in (0, 1)
    assert missing_bonus == 0 or counts[-1] > 0


def until(row: list[int], eos_ids) -> list[int]:
  return row[: 1 + next((i for i, token in enumerate(row) if token in eos_ids), len(row))]


def test_oracle_texts_are_varied():
  texts = [plain(sampling) for sampling in SAMPLINGS]
  assert all(len(set(row)) > VOCAB // 2 for text in texts for row in text)
  assert len({tuple(row) for text in texts for row in text}) == len(SAMPLINGS) * len(PROMPTS)


def test_plain_decoding_matches_the_hash_in_numpy():
  """The hash is recomputed from the finished text: whole prompts count, their padding does not."""
  for prompt, row in zip(PROMPTS, plain(GREEDY), strict=True):
    text_L = jnp.asarray([*prompt, *row])
    hash_L = jnp.cumsum(oracle.ingredient(text_L, jnp.arange(len(text_L))), dtype=jnp.uint32)
    logits_VL = oracle.hash_logits(hash_L, vocab_size=VOCAB)
    assert jnp.argmax(logits_VL, axis=0)[len(prompt) - 1 : -1].tolist() == row


@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: f'{p.describe()}-{hash(p) % 97}')
def test_speculative_matches_plain_decoding(policy):
  seen = set()
  for sampling in SAMPLINGS:
    tokens, num_accepted = run(policy, **sampling)
    assert tokens == plain(sampling)
    check_counts(tokens, num_accepted)
    seen |= {count for row in num_accepted for count in row}
  assert seen == set(range(policy.max_depth + 1))


@pytest.mark.slow
@pytest.mark.parametrize('policy', RULED, ids=lambda p: p.describe())
def test_trees_by_rules_match_plain_decoding(policy):
  full = DynamicTree(*dataclasses.astuple(policy)[:4])
  seen, num_drafted = set(), {policy: 0, full: 0}
  for sampling in SAMPLINGS:
    tokens, num_accepted = run(policy, drafter=Moody(VOCAB), **sampling)
    assert tokens == plain(sampling)
    check_counts(tokens, num_accepted)
    seen |= {count for row in num_accepted for count in row}
    num_drafted[policy] += sum(map(sum, num_accepted))
    num_drafted[full] += sum(map(sum, run(full, drafter=Moody(VOCAB), **sampling)[1]))
  assert seen == set(range(policy.max_depth + 1))
  assert num_drafted[policy] != num_drafted[full]  # the rule did something


def test_random_trees_match_plain_decoding():
  seen = set()
  for sampling in SAMPLINGS:
    tokens, num_accepted = run(DynamicTree(4, 4, 4, 12), drafter=RandomTrees(VOCAB), **sampling)
    assert tokens == plain(sampling)
    check_counts(tokens, num_accepted)
    seen |= {count for row in num_accepted for count in row}
  assert seen == set(range(5))


@pytest.mark.parametrize(
  ('make', 'policy'),
  [
    *itertools.product([oracle.ngram, oracle.medusa], [Chain(4), DynamicTree(3, 3, 3, 8)]),
    *itertools.product([oracle.suffix, oracle.p_eagle, oracle.dflash], [DynamicTree(3, 3, 3, 8)]),
  ],
  ids=lambda x: x.describe() if hasattr(x, 'describe') else x.__name__,
)
def test_drafters_that_know_nothing_match_plain_decoding(make, policy):
  """With 13 tokens many repeat by chance, so some drafted tokens are accepted."""
  for sampling in SAMPLINGS:
    tokens, num_accepted = run(policy, drafter=make(VOCAB), **sampling)
    assert tokens == plain(sampling)
    check_counts(tokens, num_accepted)
    assert sum(map(sum, num_accepted)) > NUM_NEW // 10


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
@pytest.mark.parametrize('policy', [Chain(4), DynamicTree()], ids=lambda p: p.describe())
def test_eos_ends_a_sequence_anywhere_in_a_path(policy, sampling):
  num_drafted_eos = 0
  for eos_ids in [(token,) for token in range(VOCAB)] + [(1, 2), (12, 0)]:
    tokens, num_accepted = run(policy, eos_ids=eos_ids, **sampling)
    assert tokens == [until(row, eos_ids) for row in plain(sampling)]
    check_counts(tokens, num_accepted)
    num_drafted_eos += sum(len(row) - 1 < sum(n) + len(n) for row, n in zip(tokens, num_accepted, strict=True))
  assert num_drafted_eos > 5  # an EOS inside an accepted path


@pytest.mark.parametrize('policy', [Chain(4), DynamicTree()], ids=lambda p: p.describe())
def test_max_new_tokens_cuts_inside_a_path(policy):
  num_cut = 0
  for max_new_tokens in range(NUM_NEW - 8, NUM_NEW):
    tokens, num_accepted = run(policy, max_new_tokens=max_new_tokens, **SAMPLED)
    assert tokens == [row[:max_new_tokens] for row in plain(SAMPLED)]
    check_counts(tokens, num_accepted)
    num_cut += sum(len(row) - 1 < sum(n) + len(n) for row, n in zip(tokens, num_accepted, strict=True))
  assert num_cut > 5


def test_few_new_tokens_match_plain_decoding():
  for max_new_tokens in range(1, 9):
    tokens, num_accepted = run(SMALL, max_new_tokens=max_new_tokens, **SAMPLED)
    assert tokens == [row[:max_new_tokens] for row in plain(SAMPLED)]
    check_counts(tokens, num_accepted)
    if max_new_tokens == 1:
      assert num_accepted == [[]] * len(PROMPTS)


def test_sequence_is_independent_of_its_batch():
  for sampling in (GREEDY, FILTERED):
    tokens, num_accepted = run(SMALL, **sampling)
    for row, prompt in enumerate(PROMPTS):
      alone = run(SMALL, prompts=(prompt,), row_ids=(ROW_IDS[row],), **sampling)
      assert alone == ([tokens[row]], [num_accepted[row]])


def test_seed_and_row_id_determine_the_text():
  tokens, _ = run(SMALL, **SAMPLED)
  assert run(SMALL, temperature=1.0, seed=2)[0] != tokens
  other, _ = run(SMALL, row_ids=(5, 0, 901, 6), **SAMPLED)
  assert other[:3] == tokens[:3]
  assert other[3] != tokens[3]


def test_forgetful_drafter_lowers_tau_and_keeps_the_text():
  _, num_accepted = run(SMALL, **SAMPLED)
  tokens, num_accepted_forgetful = run(SMALL, drafter=Forgetful(VOCAB), **SAMPLED)
  assert tokens == plain(SAMPLED)
  assert sum(map(sum, num_accepted_forgetful)) < 0.7 * sum(map(sum, num_accepted))


# Trees that are cut, at every step, to what pays.

ADAPTIVE = Adaptive(3, 3, 3, 8, smaller=(1, 2, 4))


def tables(*, tokens: float = 2.0, dear: dict[str, list[tuple[float, float]]] | None = None) -> CostTables:
  """Nodes are worth what the oracle's drafter says; a node costs 0.1 plain steps and a level 0.3.

  Args:
    tokens: what a plain step's time must bring.
    dear: at 'num_slots' or 'temperature', pairs (there, prices times this or gains divided by it).
  """
  pairs = {'num_slots': [(0.0, 1.0)], 'temperature': [(0.0, 1.0)]} | (dear or {})
  (slots, times), (temperatures, over) = (np.asarray(pairs[name], np.float32).T for name in pairs)
  verify_ms = 1 + 0.1 * np.asarray(ADAPTIVE.sizes, np.float32)
  log_q = np.linspace(-8, 0, 9, dtype=np.float32)
  prices = StepCosts(np.ones_like(times), np.outer(times, verify_ms), np.outer(times, np.full(3, 0.3)))
  gains = AcceptanceModel(
    np.outer(1 / over, np.full(3, 0.8)), np.tile(log_q, (len(over), 1)), np.outer(1 / over, np.exp(log_q))
  )
  return jax.tree.map(jnp.float32, CostTables(tokens, tokens, slots, prices, temperatures, gains))


@pytest.mark.parametrize('sampling', SAMPLINGS, ids=str)
@pytest.mark.parametrize('rate', [0.0, 1.0, 2.0, 5.0, 1e6])
def test_adaptive_tree_matches_plain_decoding(sampling, rate):
  tokens, num_accepted = run(ADAPTIVE, arrays=tables(tokens=rate), **sampling)
  assert tokens == plain(sampling)
  check_counts(tokens, num_accepted)


@pytest.mark.parametrize('rate', [0.0, 2.0, 1e6])
def test_drafter_state_follows_the_text_after_adaptive_trees(rate):
  """Small trees have short paths, so the drafter's update reads few positions."""
  params, spec = oracle.build(ADAPTIVE, vocab_size=VOCAB, arrays=tables(tokens=rate))
  (prompt,), sampling = PROMPTS[:1], Sampling.of(**SAMPLED)
  limits: Any = {'max_new_tokens': NUM_NEW, 'sampling': sampling, 'row_ids': ROW_IDS[:1], 'eos_ids': ()}
  arguments, static = prepare(params, np.asarray([prompt]), np.asarray([len(prompt)]), spec=spec, **limits)
  state = loop.decode_loop(params, run_prefill(*arguments, **static), spec=spec)
  text_L = jnp.asarray(state.text[0, : len(prompt) + NUM_NEW])
  assert state.drafter.hash[0] == oracle.ingredient(text_L, jnp.arange(len(text_L))).sum(dtype=jnp.uint32)


def test_adaptive_tree_is_full_at_no_cost_and_empty_at_high_cost():
  full = run(DynamicTree(3, 3, 3, 8), **SAMPLED)[1]
  accepted = {rate: run(ADAPTIVE, arrays=tables(tokens=rate), **SAMPLED)[1] for rate in (0.0, 2.0, 5.0, 1e6)}
  by_rate = {rate: sum(map(sum, num_accepted)) for rate, num_accepted in accepted.items()}
  assert by_rate[0.0] == sum(map(sum, full))
  assert by_rate[0.0] > by_rate[2.0] > by_rate[5.0] >= by_rate[1e6] == 0


def test_adaptive_tree_uses_acceptance_at_the_requested_temperature():
  only_greedy, only_sampled = (
    tables(dear={'temperature': [(0.0, greedy), (0.5, sampled)]}) for greedy, sampled in ((1, 1e6), (1e6, 1))
  )
  assert sum(map(sum, run(ADAPTIVE, arrays=only_greedy, **SAMPLED)[1])) == 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_sampled)[1])) == 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_greedy)[1])) > 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_sampled, **SAMPLED)[1])) > 0


def test_adaptive_tree_uses_costs_of_the_actual_cache_size():
  only_small, only_large = (
    tables(dear={'num_slots': [(500.0, small), (800.0, large)]}) for small, large in ((1, 1e6), (1e6, 1))
  )
  assert sum(map(sum, run(ADAPTIVE, arrays=only_small)[1])) > 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_large)[1])) == 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_small, max_new_tokens=600)[1])) == 0
  assert sum(map(sum, run(ADAPTIVE, arrays=only_large, max_new_tokens=600)[1])) > 0


# Planted faults: the oracle must notice each.


def the_first_rows(rows, path_BP):
  return right_rows(rows, jnp.broadcast_to(jnp.arange(path_BP.shape[1]), path_BP.shape))


def late_position(mask_TT):
  return right_depth(mask_TT).at[1].add(1)


def one_wrong_bit(parent_T, *, max_depth):
  return right_mask(parent_T, max_depth=max_depth).at[2, 1].set(True)


def noise_of_the(key):
  """`step.verify_batch` whose noise belongs to something else than the position."""

  def verify_batch(tree, logits_VBT, state, *, spec):
    def verify_one(tree, logits_VT, row_id, length, num_passes):
      def choose_after(shown, child_T, node_depth):
        logits_V, node = shown
        return choose(logits_V, state.sampling, row_id, key(length, node, node_depth, num_passes))

      return verify(tree, (logits_VT, jnp.arange(logits_VT.shape[1])), choose_after, max_depth=spec.policy.max_depth)

    rows = tree, logits_VBT, state.row_id, state.cache.length, state.num_passes
    return jax.vmap(verify_one, in_axes=(0, 1, 0, 0, 0))(*rows)

  return verify_batch


def without_a_walk(tree, shown, choose, *, max_depth):
  return verify_parallel(tree, shown, choose=choose, max_depth=max_depth)


right_depth, right_mask, right_rows = loop.depth, loop.ancestor_mask, NewEntries.take
FAULTS = {
  'none': (loop, 'verify_batch', noise_of_the(lambda length, node, depth, step: length + depth + 1)),
  'none, verified as on GPUs': (loop, 'verify', without_a_walk),
  'other rows than the accepted ones are kept': (NewEntries, 'take', the_first_rows),
  'one position late': (loop, 'depth', late_position),
  'one wrong mask bit': (loop, 'ancestor_mask', one_wrong_bit),
  'noise by node': (loop, 'verify_batch', noise_of_the(lambda length, node, depth, step: length + node + 1)),
  'noise by step': (loop, 'verify_batch', noise_of_the(lambda length, node, depth, step: step)),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_planted_faults_change_the_text(fault, monkeypatch):
  monkeypatch.setattr(*FAULTS[fault])

  def freshly_traced(params, state, *, spec):
    step = functools.partial(loop.decode_step.__wrapped__, params, spec=spec)
    return jax.lax.while_loop(lambda state: ~state.is_done.all(), step, state)

  assert (run(SMALL, decode_loop=freshly_traced, **SAMPLED)[0] == plain(SAMPLED)) == fault.startswith('none')
