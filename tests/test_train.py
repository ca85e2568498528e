"""Training: losses and packing against loops, steps against drafting, a run that is killed, and one that learns."""

import csv
import dataclasses
import fcntl
import functools
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forked
from eagle_jax import cache as kv_cache
from eagle_jax.config import BlockConfig, DrafterConfig, Eagle3Config, EagleTapsConfig, MedusaConfig, TargetConfig
from eagle_jax.decode.generate import generate
from eagle_jax.draft.block import Block
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.eagle_taps import EagleTaps
from eagle_jax.draft.peagle import PEagleConfig
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import split_taps, with_features
from eagle_jax.evaluate.trace import Traced, first_answer, trace
from eagle_jax.hub import load_drafter, save_drafter
from eagle_jax.models.transformer import Taps, Target, TransformerTarget
from eagle_jax.policy.trees import Chain
from eagle_jax.sharding import make_mesh
from eagle_jax.train import losses
from eagle_jax.train import run as whole_run
from eagle_jax.train.checkpoint import metrics_log, run_lock
from eagle_jax.train.data import Packed, batches, frequent_ids, pack, plan, read_vocabulary
from eagle_jax.train.flops import step_flops
from eagle_jax.train.loop import begin, frozen_inputs, initial_params, train
from eagle_jax.train.reached import mark_reached, reached_places, replay_tree
from eagle_jax.train.report import evaluate_all
from eagle_jax.train.rollout import chain_weights, multistep_attention, prefix_correct, rollout
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Heads, Objective, Recipe, Rows, distill, evaluate, loss_and_metrics, train_step
from killing import run_killed, run_to_the_end, same
from tiny_chat import TOY

CONFIG = TargetConfig(
  vocab_size=31, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_width=32, max_context=256
)  # fmt: skip
DRAFTER = DrafterConfig(vocab_size=31, width=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_width=32)
RECIPE = Recipe(num_steps=6, num_rows=2, num_places=32, chunk_places=8, warmup_steps=2)


@pytest.fixture(scope='module', autouse=True)
def short_chains():
  """Evaluate chains of three steps, in programs of half the size."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('eagle_jax.train.step.NUM_CHAIN', 3)
    evaluate.clear_cache()
    yield
  evaluate.clear_cache()


@pytest.fixture(scope='module', autouse=True)
def frozen_objects():
  """Spare the garbage collector, which every restored checkpoint calls, a look at the objects of other modules."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture(scope='module')
def target():
  return Target(CONFIG, target_params())


@functools.cache
def first_params(network, seed: int = 0):
  return jax.jit(network.init_params)(jax.random.key(seed))


def target_params():
  params = first_params(TransformerTarget(CONFIG))
  return params | {'embed': {'weight': 50 * params['embed']['weight']}}  # else text hardly depends on what came before


@functools.cache
def long_answers(temperature: float) -> list[Example]:
  """The target's answers to one-token prompts, with the features of a whole pass: one program for all tests."""
  params, prompts = target_params(), [[i] for i in range(24)]
  how = {'max_new_tokens': 60, 'temperature': temperature, 'seed': 3}
  tokens = generate(Target(CONFIG, params), None, prompts, **how).tokens
  token_BL = np.asarray([prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)], np.int32)
  feature_BLD = np.asarray(whole_pass(params, token_BL[:, :-1]))
  is_answer = np.arange(61) >= 1
  texts = enumerate(zip(token_BL, feature_BLD, strict=True))
  return [Example(i, token, is_answer, feature) for i, (token, feature) in texts]


def answered(num_examples: int, max_new_tokens: int, temperature: float) -> list[Example]:
  """The beginnings of the first of these answers."""
  size = 1 + max_new_tokens
  return [
    one._replace(token=one.token[:size], is_answer=one.is_answer[:size], feature=one.feature[: size - 1])
    for one in long_answers(temperature)[:num_examples]
  ]


@jax.jit
def whole_pass(params, token_BL):
  """[B, L, D] bf16 features."""
  batch, num_places = token_BL.shape
  network = TransformerTarget(CONFIG)
  position_BL = jnp.broadcast_to(jnp.arange(num_places), token_BL.shape)
  causal_BLL = jnp.broadcast_to(jnp.tri(num_places, dtype=bool), (batch, num_places, num_places))
  taps, _ = network.forward(params, token_BL, position_BL, causal_BLL, network.init_cache(batch, 0))
  return taps.feature.transpose(1, 2, 0).astype(jnp.bfloat16)


def example(rng, num_places, num_prompt, number=0, num_taps=0):
  tokens = rng.integers(0, 31, num_places + 1).astype(np.int32)
  feature = rng.normal(size=(num_places, 16 * (1 + num_taps))).astype(jnp.bfloat16)
  return Example(number, tokens, np.arange(num_places + 1) >= num_prompt, feature)


def test_losses_equal_loops():
  rng = np.random.default_rng(0)
  a_UR, b_UR = rng.normal(size=(7, 3)) * 2, rng.normal(size=(7, 3))
  for row in range(3):
    error = np.abs(a_UR[:, row] - b_UR[:, row])
    huber = np.mean([0.5 * e * e if e < 1 else e - 0.5 for e in error])
    p, q = (np.exp(x[:, row]) / np.exp(x[:, row]).sum() for x in (b_UR, a_UR))
    best = sorted(range(7), key=lambda i: -p[i])[:2]
    kept = losses.top_k_of(jnp.float32(p)[:, None], 2)
    log_q = jnp.float32(np.log(q))[:, None]
    np.testing.assert_allclose(losses.regression(jnp.float32(a_UR), jnp.float32(b_UR))[row], huber, rtol=1e-5)
    np.testing.assert_allclose(losses.cross_entropy(log_q, jnp.float32(p)[:, None])[0], -p @ np.log(q), rtol=1e-5)
    np.testing.assert_allclose(losses.cross_entropy(log_q, kept)[0], -sum(p[i] * np.log(q[i]) for i in best), rtol=1e-5)
    rank = sorted(range(7), key=lambda i: -a_UR[i, row]).index(5)
    assert losses.rank_of(jnp.float32(a_UR)[:, row : row + 1], jnp.array([5])).tolist() == [rank]
    assert losses.rank_of(jnp.float32(a_UR)[:, row : row + 1], jnp.array([-1])).tolist() == [7]


def test_nan_is_never_the_best():
  logits_UR = jnp.asarray([[jnp.nan, 2.0, 2.0], [1.0, jnp.nan, 1.0], [0.0, 0.0, 0.0]])
  assert losses.rank_of(logits_UR, jnp.zeros(3, jnp.int32)).tolist() == [3, 1, 0]


def test_by_chunks_changes_neither_losses_nor_gradients():
  rng = np.random.default_rng(1)
  head_UD = jnp.float32(rng.normal(size=(9, 4)))
  out_DdBL, target_DBL = (jnp.float32(rng.normal(size=shape)) for shape in ((4, 2, 3, 8), (4, 3, 8)))
  rows = (target_DBL, jnp.int32(rng.integers(-1, 9, (3, 8))))
  weight_dBL = jnp.float32(rng.uniform(size=(2, 3, 8)))

  def row_losses(head_UD, out_DdBL, rows):
    heads = Heads(head_UD, head_UD, jnp.arange(9))
    return distill(Objective(top_k=3, top_k_cross_entropy=0.5), heads, out_DdBL, Rows(*rows))

  def total(out_DdBL, function):
    loss_dBL, other = function(head_UD, out_DdBL, rows)
    return (loss_dBL * weight_dBL).sum(), (loss_dBL, other)

  gradient_of = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
  ours, plain = (gradient_of(out_DdBL, function) for function in (losses.by_chunks(row_losses, 4), row_losses))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, plain)


def test_packing_shifts_tokens_by_one_and_trains_the_place_before_the_answer():
  rng = np.random.default_rng(1)
  first, second = example(rng, 6, 3), example(rng, 9, 5)
  packed = pack([[first, second]], num_places=12, prompt_weight=0.25)
  assert packed.token[0].tolist() == first.token[:6].tolist() + second.token[:6].tolist()
  assert packed.next_token[0].tolist() == first.token[1:7].tolist() + second.token[1:7].tolist()
  assert packed.label[0].tolist() == [*first.token[2:7], -1, *second.token[2:7], -1]
  assert packed.position[0].tolist() == [*range(6), *range(6)]
  assert packed.sequence[0].tolist() == [0] * 6 + [1] * 6
  np.testing.assert_array_equal(packed.feature[0, 6:], second.feature[:6])
  # Place t stands in for feature t + 1, which predicts token t + 2: the first answer token is number num_prompt.
  assert packed.weight[0].tolist() == [0.25, 1, 1, 1, 1, 0] + [0.25, 0.25, 0.25, 1, 1, 0]


def test_every_epoch_holds_every_example_once_and_batches_resume():
  rng = np.random.default_rng(2)
  lengths = rng.integers(2, 30, 40).tolist()
  for epoch in range(2):
    rows = plan(lengths, num_places=32, seed=0, epoch=epoch)
    assert sorted(sum(rows, [])) == list(range(40))
    assert all(sum(lengths[i] for i in row) <= 32 for row in rows)
  assert plan(lengths, num_places=32, seed=0, epoch=0) != plan(lengths, num_places=32, seed=0, epoch=1)
  examples = [example(rng, n, 1, i) for i, n in enumerate(lengths)]
  how = {'num_rows': 3, 'num_places': 32, 'seed': 0}
  whole = [*itertools.islice(batches(examples, **how), 30)]
  resumed = itertools.islice(batches(examples, **how, first=17), 13)
  for ours, expected in zip(resumed, whole[17:], strict=True):
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
  one_epoch = list(batches(examples, **how, num_epochs=1))
  assert sum(packed.weight.sum() for packed in one_epoch) == sum(n - 1 for n in lengths)


def test_frequent_ids_come_from_answers_and_hold_the_forced():
  tokens = np.array([7, 7, 7, 7, 2, 2, 2, 5, 5, 9], np.int32)
  examples = [Example(0, tokens, np.arange(10) >= 4, np.zeros((9, 1), jnp.bfloat16))]
  assert frequent_ids(examples, size=3, vocab_size=31, forced=[30]).tolist() == [30, 2, 5]


@functools.partial(jax.jit, static_argnames=('network', 'num_steps'))
def chain_by_decoding(params, packed: Packed, taps: Taps, row, *, network, num_steps: int):
  """[num_steps, D]: outputs of a chain drafted from `row` of a single text, by the drafter's own cache."""
  num_places = taps.feature.shape[2]
  cache = kv_cache.init(network.config, num_layers=network.num_layers, batch=1, num_slots=num_places, dtype=jnp.float32)
  causal_1LL = jnp.tri(num_places, dtype=bool)[None]
  inputs = packed.next_token, network.fuse_taps(params, taps), packed.position, causal_1LL
  out_D1L, entries = network.forward(params, *inputs, cache)
  cache = kv_cache.append(cache, entries, jnp.atleast_1d(row + 1))
  outs = [jax.lax.dynamic_index_in_dim(out_D1L[:, 0], row, axis=1, keepdims=False)]
  drafted = None
  for step in range(1, num_steps):
    token_11, position_11 = (
      jax.lax.dynamic_slice_in_dim(x, row + step, 1, axis=1) for x in (packed.next_token, packed.position)
    )
    feature_D11 = network.next_feature(params, outs[-1][:, None, None])
    inputs = token_11, feature_D11, position_11, jnp.ones((1, 1, step), bool)
    out_D11, drafted = network.forward(params, *inputs, cache, drafted)
    outs.append(out_D11[:, 0, 0])
  return jnp.stack(outs)


SIZES = {'vocab_size': 31, 'width': 16, 'num_heads': 2, 'num_kv_heads': 1, 'head_dim': 8, 'ffn_width': 32}
NETWORKS = {
  'eagle2': Eagle(DRAFTER),
  'eagle2-taps': EagleTaps(EagleTapsConfig(**SIZES, taps=(0, 1))),
  'griffin': Eagle(DrafterConfig(**SIZES, griffin=True)),
  'layers': Eagle(DrafterConfig(**SIZES, num_layers=2)),
  'block': Block(BlockConfig(**SIZES, rank=4, num_layers=2)),
  'eagle3': Eagle3(Eagle3Config(**SIZES, target_width=16, taps=(0, 1), fc_norm=True, norm_output=True)),
  'window': Eagle3(Eagle3Config(**SIZES, target_width=16, taps=(), window=2)),
}


@pytest.mark.parametrize(('kind', 'is_leaky'), [('eagle2', True), *((kind, False) for kind in NETWORKS)])
def test_a_rollout_is_what_drafting_position_by_position_gives(kind, is_leaky):
  """Every step of every row, for a text alone and behind another one in the same row; the leaky mask is caught."""
  rng, network = np.random.default_rng(4), NETWORKS[kind]
  num_taps = len(network.config.tapped_layers(1))
  first, second = (example(rng, num_places, 1, num_taps=num_taps) for num_places in (5, 11))
  stirred = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), first_params(network))
  params = {**stirred, 'embed': jax.random.normal(jax.random.key(1), (31, 16))}
  alone, both = (pack([texts], num_places=16) for texts in ([second], [first, second]))  # of one size: one program
  features = [split_taps(jnp.float32(packed.feature), 16) for packed in (alone, both)]
  roll = jax.jit(functools.partial(rollout, network=network, num_steps=4, is_leaky=is_leaky))
  steps = [roll(params, taps, packed) for taps, packed in zip(features, (alone, both), strict=True)]
  for row in range(11 - 4):
    expected_SD = chain_by_decoding(params, alone, features[0], row, network=network, num_steps=4)
    for step in range(4):
      ours = steps[0][:, step, 0, row + step], steps[1][:, step, 0, 5 + row + step]
      for out_D in ours:
        if is_leaky and step:
          assert not np.allclose(out_D, expected_SD[step], rtol=1e-3, atol=1e-4)
        else:
          np.testing.assert_allclose(out_D, expected_SD[step], rtol=1e-4, atol=1e-5)


def test_gradients_stop_between_steps_only_if_detached():
  rng = np.random.default_rng(5)
  packed = pack([[example(rng, 9, 1)]], num_places=9)
  network = Eagle(DRAFTER)
  params = {**first_params(network), 'embed': jax.random.normal(jax.random.key(1), (31, 16))}
  feature_DBL = jnp.float32(packed.feature).transpose(2, 0, 1)

  first_DBL = jax.jit(functools.partial(rollout, network=network, num_steps=1))(params, Taps(feature_DBL), packed)[:, 0]

  def last_step(feature_DBL, is_detached):
    out_DdBL = rollout(params, Taps(feature_DBL), packed, network=network, num_steps=2, is_detached=is_detached)
    return out_DdBL[:, 1, 0, 8].sum()

  def with_constant_input(feature_DBL):
    step = functools.partial(network.apply_layers, params, packed.next_token, position_BT=packed.position)
    _, (memory,) = step(feature_DBL, attentions=[multistep_attention((), packed.sequence)])
    second = multistep_attention(memory, packed.sequence)
    return step(jnp.roll(first_DBL, 1, axis=2), attentions=[second])[0][:, 0, 8].sum()

  expected, detached, attached = (
    jax.jit(jax.grad(f))(feature_DBL)
    for f in (with_constant_input, lambda x: last_step(x, True), lambda x: last_step(x, False))
  )
  assert np.abs(expected).max() > 0  # through the keys and values of step 1
  np.testing.assert_allclose(detached, expected, rtol=1e-4, atol=1e-6)
  assert not np.allclose(attached, expected, rtol=1e-2)


@pytest.mark.parametrize(('objective', 'half'), [({'regression': 0.0}, 0), ({'cross_entropy': 0.0}, 1)])
def test_each_loss_teaches_one_of_griffins_vectors(target, objective, half):
  """The language-model head reads the first, and the second is the feature."""
  examples, network = answered(3, 24, 0.0), NETWORKS['griffin']
  frozen, _ = frozen_inputs(target, network.config, examples)
  how = {'network': network, 'target': None, 'recipe': dataclasses.replace(RECIPE, objective=Objective(**objective))}
  packed = pack([examples[:1], examples[1:2]], num_places=32)
  gradient_of = jax.jit(jax.grad(functools.partial(loss_and_metrics, **how), has_aux=True))
  gradient, _ = gradient_of(first_params(network), frozen, packed, jax.random.key(0))
  halves = jnp.split(gradient['layer']['mlp']['down']['weight'], 2)
  assert np.abs(halves[half]).max() > 0 == np.abs(halves[1 - half]).max()


def test_masks_of_started_and_reachable_chains():
  weight_L = np.array([0, 1, 1, 1, 0, 1, 1, 1], np.float32)
  packed = pack([[example(np.random.default_rng(0), 4, 1)] * 2], num_places=8)._replace(weight=weight_L[None])
  assert chain_weights(packed, 3)[:, 0].tolist() == [
    [0, 1, 1, 1, 0, 1, 1, 1],
    [0, 0, 1, 1, 0, 0, 1, 1],
    [0, 0, 0, 1, 0, 0, 0, 1],
  ]
  alone = packed._replace(sequence=np.zeros((1, 8), np.int32))  # and none before it: a chain does not begin at its end
  assert chain_weights(alone, 3)[2, 0].tolist() == [0, 0, 0, 1, 0, 1, 0, 1]
  is_hit_dBL = jnp.array([[[1, 0, 1, 1, 1]], [[1, 1, 1, 0, 1]], [[1, 1, 1, 1, 1]]], bool)
  assert prefix_correct(is_hit_dBL)[:, 0, 2:].astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0]]


def test_reached_places_by_hand():
  """Prefill emits token 3; 4 and 5 are accepted, 7 is not, then 8 to 10 are. The answer ends with 11, not the text."""
  is_answer = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1], bool)
  answer = first_answer(example(np.random.default_rng(0), 15, 3)._replace(is_answer=is_answer))

  def reached(num_accepted, max_depth):
    found = reached_places(num_accepted, answer, num_places=15, max_depth=max_depth)
    return {place: count for place, count in enumerate(found.tolist()) if count >= 0}

  assert reached([2, 0, 3], max_depth=4) == {2: 2, 5: 0, 6: 3}
  assert reached([2, 0, 3], max_depth=3) == {2: 2, 5: 0, 6: 2}  # the third was a leaf: nothing was drafted behind it
  assert reached([2, 0, 4], max_depth=6) == {2: 2, 5: 0, 6: 3}  # the answer ends
  assert reached([], max_depth=3) == {}


def test_weights_of_reached_places_by_hand():
  rng = np.random.default_rng(0)
  first = example(rng, 7, 2)._replace(num_reached=np.array([-1, 2, -1, -1, 0, -1, -1]))
  second = example(rng, 4, 1)._replace(num_reached=np.array([1, -1, 0, -1]))
  packed = pack([[first, second], [second]], num_places=13)
  assert packed.num_reached[0].tolist() == [-1, 2, -1, -1, 0, -1, -1, 1, -1, 0, -1, -1, -1]
  assert packed.num_reached[1].tolist() == [1, -1, 0, -1] + [-1] * 9
  assert chain_weights(packed, 3)[:, 0].astype(int).tolist() == [
    [0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0],
    [0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  ]
  assert pack([[first, second]], num_places=9).num_reached[0].tolist() == [-1, 2, -1, -1, 0, -1, -1, 1, -1]


def test_chain_metrics_are_those_of_a_drafted_chain(target):
  """`chain_s`: the share of places from which a chain, drafted greedily, agrees with the text for s + 1 tokens."""
  examples = answered(3, 24, 0.0)
  network, frozen = Eagle(DRAFTER), frozen_inputs(target, DRAFTER, examples)[0]
  recipe = dataclasses.replace(RECIPE, num_steps=100, learning_rate=1e-2)
  state = begin(first_params(network, 2), recipe, None)
  for packed in itertools.islice(batches(examples, num_rows=2, num_places=32, seed=0), 20):
    state, _ = train_step(state, frozen, packed, network=network, recipe=recipe)
  params = {**state.params, 'embed': frozen.embed}
  packed = pack([[e] for e in examples], num_places=32)
  metrics, weight = evaluate(params, frozen, packed, network=network, recipe=RECIPE)
  leaky = dataclasses.replace(RECIPE, objective=Objective(is_leaky=True))
  assert evaluate(params, frozen, packed, network=network, recipe=leaky)[0] == metrics  # drafting leaks nothing
  hits, starts = np.zeros(3), np.zeros(3)
  for e in examples:
    packed, feature_DL = pack([[e]], num_places=32), jnp.pad(jnp.float32(e.feature).T, ((0, 0), (0, 8)))
    for row in range(len(e.feature) - 1):
      out_SD = chain_by_decoding(params, packed, Taps(feature_DL[:, None]), row, network=network, num_steps=3)
      steps = min(3, len(e.feature) - 1 - row)
      agrees = np.argmax(np.asarray(frozen.head @ out_SD.T), axis=0)[:steps] == packed.label[0, row : row + steps]
      hits[:steps] += np.cumprod(agrees)
      starts[:steps] += 1
  assert hits[0] > hits[1] > hits[2] > 0
  np.testing.assert_allclose([metrics[f'chain_{step}'] for step in range(3)], hits / starts, rtol=1e-5)
  assert [weight[f'chain_{step}'] for step in range(3)] == starts.tolist()


def test_held_out_metrics_are_means_over_the_places_of_all_batches(target):
  """Texts of different lengths, each a batch of its own: few places of the short one are left at later steps."""
  long, short = answered(2, 24, 1.0)
  short = short._replace(token=short.token[:4], is_answer=short.is_answer[:4], feature=short.feature[:3])
  static = {'network': Eagle(DRAFTER), 'target': None}
  params, frozen = first_params(Eagle(DRAFTER)), frozen_inputs(target, DRAFTER, [long])[0]
  expected, _ = evaluate(params, frozen, pack([[long], [short]], num_places=24), recipe=RECIPE, **static)
  recipe = dataclasses.replace(RECIPE, num_rows=1, num_places=24)
  found = evaluate_all(params, frozen, [long, short], None, recipe=recipe, **static)
  np.testing.assert_allclose([found[name] for name in expected], [*expected.values()], rtol=1e-5)


def test_each_step_has_noise_of_its_own_and_later_draft_steps_weigh_less(target):
  examples = answered(6, 24, 1.0)
  network, frozen = Eagle(DRAFTER), frozen_inputs(target, DRAFTER, examples)[0]
  recipe = dataclasses.replace(RECIPE, objective=Objective(cross_entropy=0.0, num_steps=3, step_decay=0.5))
  packed = pack([[e] for e in examples], num_places=32)

  def metrics_at(step):
    state = begin(first_params(network), recipe, None)._replace(step=jnp.int32(step))
    return train_step(state, frozen, packed, network=network, recipe=recipe)[1]

  first, again, later = (metrics_at(step) for step in (0, 0, 1))
  assert first['loss'] == again['loss'] != later['loss']
  of_steps = [first[f'regression_{step}'] * chain_weights(packed, 3)[step].mean() for step in range(3)]
  expected = np.dot(of_steps, [4 / 7, 2 / 7, 1 / 7]) / packed.weight.mean()
  np.testing.assert_allclose(first['loss'], expected, rtol=1e-5)


def test_features_computed_in_the_step_train_as_stored_ones(target):
  examples = answered(6, 24, 1.0)
  bare = [e._replace(feature=np.zeros((len(e.feature), 0), jnp.bfloat16)) for e in examples]
  network = Eagle(DRAFTER)
  recipe = dataclasses.replace(RECIPE, feature_noise=0.0)
  losses_of = []
  for data, reader in ((examples, None), (bare, TransformerTarget(CONFIG))):
    frozen = frozen_inputs(target, DRAFTER, data)[0]
    state = begin(first_params(network), recipe, None)
    packed = next(batches(data, num_rows=2, num_places=32, seed=0))
    _, metrics = train_step(state, frozen, packed, network=network, recipe=recipe, target=reader)
    losses_of.append(float(metrics['loss']))
  np.testing.assert_allclose(*losses_of, rtol=1e-2)


@pytest.mark.parametrize('objective', [Objective(), Objective(num_steps=3, top_k_cross_entropy=1.0, reachable_top=3)])
def test_remat_and_accumulation_change_no_gradient(target, objective):
  examples = answered(6, 24, 1.0)
  network, frozen = Eagle(DRAFTER), frozen_inputs(target, DRAFTER, examples)[0]
  first, second = [examples[0]], [examples[1]]
  one, other, both = (pack(rows, num_places=32) for rows in ([first, []], [second, []], [first, second]))

  def after(recipe, *packed):
    state = begin(first_params(network), recipe, None)
    for batch in packed:
      state, _ = train_step(state, frozen, batch, network=network, recipe=recipe)
    return state

  recipe = dataclasses.replace(RECIPE, objective=objective, clip_norm=1e3, feature_noise=0.0, warmup_steps=0)
  accumulating = dataclasses.replace(recipe, num_accumulated=2)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
  jax.tree.map(close, after(recipe, one).params, after(dataclasses.replace(recipe, remat=True), one).params)
  no_update = after(accumulating, one).params
  jax.tree.map(np.testing.assert_array_equal, no_update, first_params(network))
  # Both texts are of one length, so the gradient of the joint batch is the mean of theirs. Adam's step hardly depends
  # on its size; its moments do.
  ours, expected = after(accumulating, one, other), after(recipe, both)
  jax.tree.map(close, (ours.params, ours.optimizer.inner_opt_state), (expected.params, expected.optimizer))


def test_the_schedule_counts_updates():
  """Adam's step along a constant gradient is the learning rate."""

  def rates(num_accumulated):
    counts = {'num_steps': 8 * num_accumulated, 'warmup_steps': 2 * num_accumulated, 'num_accumulated': num_accumulated}
    optimizer = Recipe(**counts, weight_decay=0.0).optimizer()
    param, state, made = jnp.zeros(1), optimizer.init(jnp.zeros(1)), []
    updated = jax.jit(optimizer.update)
    for _ in range(counts['num_steps']):
      with jax.numpy_dtype_promotion('standard'):
        update, state = updated(jnp.ones(1), state, param)
      made.append(-float(update[0]))
    return made[num_accumulated - 1 :: num_accumulated]

  np.testing.assert_allclose(rates(4), rates(1), rtol=1e-3)
  assert 0 < rates(4)[-1] < 0.1 * max(rates(4))


def test_the_head_of_training_gives_the_logits_of_the_target(target):
  divided = dataclasses.replace(target, config=dataclasses.replace(target.config, logit_divisor=4.0))
  examples = answered(3, 24, 1.0)
  ours, theirs = (frozen_inputs(x, DRAFTER, examples)[0] for x in (divided, target))
  np.testing.assert_allclose(ours.head, theirs.head / 4, rtol=1e-6)


def test_flops_by_hand():
  drafter = 2 * 16 * 16 + 6 * 8 * 16 + 3 * 16 * 32 + 2 * 8 * 32  # fc, q k v o, feed-forward, attention to half of 32
  layer, head, num_places = drafter - 2 * 16 * 16, 31 * 16, 2 * 32
  recipe = dataclasses.replace(RECIPE, objective=Objective(num_steps=3))
  stored = 2 * num_places * (3 * 3 * drafter + (1 + 3 * 2) * head)
  assert step_flops(DRAFTER, recipe, num_ids=31, reader=None) == stored
  assert step_flops(DRAFTER, recipe, num_ids=31, reader=CONFIG) == stored + 2 * num_places * layer
  mixture = dataclasses.replace(CONFIG, num_layers=2, num_experts=8, experts_per_token=2)
  computed = 2 * num_places * 2 * (layer + 3 * 16 * 32)
  assert step_flops(DRAFTER, recipe, num_ids=31, reader=mixture) == stored + computed


@pytest.fixture(scope='module')
def finished_run(target, tmp_path_factory):
  """Return a function that runs or resumes a training, the folder of a finished run, and its metrics."""
  examples, folder = answered(12, 24, 1.0), tmp_path_factory.mktemp('finished') / 'run'
  run = functools.partial(train, target, DRAFTER, examples[:10], examples[10:], RECIPE, report_every=2)
  return run, folder, run(folder)


class Killed(Exception):
  pass


def stop_at(step: int):
  """A function in the place of `train_step` that raises `Killed` at its call of this number."""
  calls = itertools.count(1)

  def counted(*args, **kwargs):
    if next(calls) == step:
      raise Killed
    return train_step(*args, **kwargs)

  return counted


def test_a_killed_run_ends_as_an_undisturbed_one(finished_run, tmp_path, monkeypatch):
  """Drafter and logs are equal bit for bit, wherever the run is stopped."""
  run, whole, expected = finished_run
  for step in (1, 3, 6):
    folder = tmp_path / f'stopped_{step}'
    with monkeypatch.context() as killing:
      killing.setattr('eagle_jax.train.loop.train_step', stop_at(step))
      with pytest.raises(Killed):
        run(folder)
    assert run(folder) == expected
    for name in ('held_out.csv', 'drafter/model.safetensors'):
      assert (folder / name).read_bytes() == (whole / name).read_bytes()
    with open(folder / 'train.csv', newline='') as file:
      assert [row['step'] for row in csv.DictReader(file)] == ['2', '4', '6']


def newest(folder: Path, pattern: str) -> Path:
  """The largest file of the last checkpoint that matches."""
  return max((folder / 'checkpoints' / '6').glob(pattern), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DATA_FILE = 'default/ocdbt.process_*/d/*'


@pytest.mark.parametrize(
  ('pattern', 'harm'),
  [
    ('default/_METADATA', lambda path: path.write_bytes(b'')),
    ('default/_METADATA', Path.unlink),
    ('default/manifest.ocdbt', cut),
    (DATA_FILE, cut),
    (DATA_FILE, Path.unlink),
    ('metrics/metrics', cut),
  ],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(finished_run, tmp_path, caplog, pattern, harm):
  run, whole, expected = finished_run
  folder = tmp_path / 'harmed'
  shutil.copytree(whole, folder)
  harm(newest(folder, pattern))
  assert run(folder) == expected
  assert str(folder / 'checkpoints' / '6') in caplog.text
  assert [path.name for path in (folder / 'damaged').iterdir()] == ['6_0']
  for name in ('held_out.csv', 'drafter/model.safetensors'):
    assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize('pattern', ['default/_METADATA', 'metrics/metrics'])
def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(finished_run, tmp_path, pattern):
  run, whole, _ = finished_run
  folder = tmp_path / 'harmed'
  shutil.copytree(whole, folder)
  for path in (folder / 'checkpoints').glob(f'*/{pattern}'):
    cut(path)
  with pytest.raises(ValueError, match=str(folder / 'checkpoints')):
    run(folder)
  assert not (folder / 'damaged').exists()


def test_a_damaged_best_checkpoint_leaves_the_drafter_as_it_was(finished_run, tmp_path):
  run, whole, _ = finished_run
  folder = tmp_path / 'harmed'
  shutil.copytree(whole, folder)
  (folder / 'drafter' / 'model.safetensors').write_bytes(b'as it was')
  best = folder / 'checkpoints' / '4'
  metrics = json.loads((best / 'metrics' / 'metrics').read_text())
  (best / 'metrics' / 'metrics').write_text(json.dumps({**metrics, 'chain_tau': 99.0}))
  for path in best.glob(DATA_FILE):
    path.unlink()
  assert run(folder)['chain_tau'] == 99
  assert (folder / 'drafter' / 'model.safetensors').read_bytes() == b'as it was'


@pytest.mark.parametrize('content', [b'', b'{"a": ', b'null'])
def test_a_damaged_file_of_settings_is_named(finished_run, tmp_path, content):
  run, whole, _ = finished_run
  shutil.copytree(whole, tmp_path / 'harmed')
  (tmp_path / 'harmed' / 'settings.json').write_bytes(content)
  with pytest.raises(ValueError, match='harmed/settings.json'):
    run(tmp_path / 'harmed')


def test_a_checkpoint_that_cannot_be_written_is_named(finished_run, tmp_path, monkeypatch):
  run, *_ = finished_run

  def fail(*_, **__):
    raise Exception('no space left')  # as bare as TensorStore's own

  monkeypatch.setattr('orbax.checkpoint.CheckpointManager.save', fail)
  with pytest.raises(OSError, match=f'{tmp_path}.*no space left'):
    run(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from eagle_jax.train.checkpoint import run_lock
with run_lock(Path(sys.argv[1])):
  print('held', flush=True)
  sys.stdin.read()
"""


def test_a_folder_is_for_one_run_at_a_time(finished_run, tmp_path):
  run, whole, expected = finished_run
  folder = tmp_path / 'run'
  shutil.copytree(whole, folder)
  environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[1]), 'JAX_PLATFORMS': 'cpu'}
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True, 'env': environment}
  with subprocess.Popen([sys.executable, '-c', HOLDER, str(folder)], **pipes) as holder:
    assert holder.stdout.readline() == 'held\n'
    with pytest.raises(ValueError, match=f'{folder} is in use by process {holder.pid} on '):
      run(folder)
    holder.kill()
  assert run(folder) == expected  # the lock of a process that died is free, and nothing is left to do


def test_a_process_may_hold_its_folder_twice(tmp_path):
  with run_lock(tmp_path), run_lock(tmp_path):
    assert str(os.getpid()) in (tmp_path / '.lock').read_text()


def test_a_run_that_diverges_ends_and_leaves_what_was_good(target, tmp_path):
  examples = answered(12, 24, 1.0)
  run = functools.partial(train, target, DRAFTER, examples[:10], examples[10:], folder=tmp_path, report_every=1)
  run(recipe=dataclasses.replace(RECIPE, num_steps=2))
  kept = (tmp_path / 'drafter' / 'model.safetensors').read_bytes()
  (tmp_path / 'settings.json').unlink()
  with pytest.raises(ValueError, match=r"diverged: after step [3-6], .*'cross_entropy_0'.* are not finite.*drafter"):
    run(recipe=dataclasses.replace(RECIPE, learning_rate=1e38))
  assert (tmp_path / 'drafter' / 'model.safetensors').read_bytes() == kept


def test_texts_without_a_lesson_are_refused_and_what_is_cut_is_counted(target, tmp_path, caplog, monkeypatch):
  examples = answered(12, 24, 1.0)
  late = [one._replace(is_answer=np.arange(len(one.token)) >= 13) for one in examples]
  short = dataclasses.replace(RECIPE, num_places=12, chunk_places=12, num_steps=2)
  for first, second in ((late, examples), (examples, late), (examples, [])):
    with pytest.raises(ValueError, match=r'Of \d+ texts to (train on|hold out), .*none of them among the first 12'):
      train(target, DRAFTER, first, second, short, tmp_path)
  with_prompts = dataclasses.replace(short, prompt_weight=0.3)
  with pytest.raises(ValueError, match='to hold out, .*none of them among the first 12'):  # metrics are of answers
    train(target, DRAFTER, late, late, with_prompts, tmp_path)
  assert not (tmp_path / 'settings.json').exists()
  monkeypatch.setattr('eagle_jax.train.loop.train_step', stop_at(1))
  longer = dataclasses.replace(short, num_places=16, chunk_places=16)
  with pytest.raises(Killed):
    train(target, DRAFTER, examples[:10], examples[10:], longer, tmp_path)
  assert '80 of 230 answer tokens to train on lie beyond num_places, 16' in caplog.text


def test_a_log_of_metrics_may_gain_names(tmp_path):
  for first_step, metrics in ((1, {'a': 1}), (2, {'a': 2, 'b': 3}), (3, {'a': 4})):
    metrics_log(tmp_path / 'log.csv', first_step=first_step)(first_step, metrics)
  metrics_log(tmp_path / 'log.csv', first_step=3)(3, {'b': 5})  # the third was lost
  rows = (tmp_path / 'log.csv').read_text().splitlines()
  assert rows == ['step,a,b', '1,1,', '2,2,3', '3,,5']


def test_features_go_to_their_texts_whatever_those_are_called(target):
  whole = answered(2, 12, 0.0)
  bare = [one._replace(id=7, feature=one.feature[:, :0]) for one in whole]
  for one, again in zip(whole, with_features(target, [whole[0], *bare])[1:], strict=True):
    np.testing.assert_allclose(again.feature.astype(np.float32), one.feature.astype(np.float32), rtol=0.02, atol=0.02)


def test_a_run_is_resumed_only_as_it_began(target, tmp_path, monkeypatch):
  examples = answered(12, 24, 1.0)

  def run(config=DRAFTER, recipe=RECIPE, **origin):
    train(target, config, examples[:10], examples[10:], recipe, tmp_path, origin=origin)

  monkeypatch.setattr('eagle_jax.train.loop.train_step', None)
  with pytest.raises(TypeError):
    run(recipe=dataclasses.replace(RECIPE, num_rows=4))  # fails before the first checkpoint
  monkeypatch.undo()
  run(initial=None)
  begun = (tmp_path / 'settings.json').read_bytes()
  assert b'second_stage' not in begun  # as in folders begun before there was one
  run(initial=None)
  other_objective = dataclasses.replace(RECIPE, objective=Objective(top_k=3))
  for changed, message in (
    ({'config': dataclasses.replace(DRAFTER, rope_theta=5e5)}, 'drafter.rope_theta was 10000.0 and is now 500000.0[.]'),
    (
      {'recipe': dataclasses.replace(RECIPE, num_steps=8, seed=1)},
      'num_steps was 6 and is now 8; recipe.seed was 0 and is now 1',
    ),
    ({'recipe': other_objective}, 'objective.top_k was 10 and is now 3[.] Rerun with .*another --out'),
    ({'initial': 'runs/x/drafter'}, "initial was None and is now 'runs/x/drafter'"),
  ):
    with pytest.raises(ValueError, match=message):
      run(**{'initial': None, **changed})
  assert (tmp_path / 'settings.json').read_bytes() == begun
  (tmp_path / 'settings.json').unlink()
  with pytest.raises(ValueError, match='another drafter or optimizer'):
    run(config=dataclasses.replace(DRAFTER, ffn_width=48))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, 'not what DRAFTER describes: norm_eps was 1e-05 and is now 1e-06[.] Give DRAFTER'),
    ({'DRAFTER': dataclasses.replace(DRAFTER, width=24)}, ': width 24 instead of 16'),
    ({'DATA': {'a': Data(1), 'b': Data(1, stores_features=False)}}, "stores_features is {'a': True, 'b': False}; one"),
    ({'DATA': {}}, 'one kind of data at least'),
    ({'DATA': {'../../x': Data(1)}}, "'../../x'"),
    ({'DRAFTER': Eagle3Config(**SIZES, target_width=16, taps=(0,))}, 'regression is 1.0, .*set regression=0'),
    ({'DRAFTER': MedusaConfig(31, 16, max_depth=2)}, 'num_steps must be 2, .* got 1'),
    ({'DRAFTER': PEagleConfig(**SIZES, target_width=16, taps=(0,), mask_token_id=1)}, 'PEagleConfig cannot be trained'),
    ({'DRAFTER': dataclasses.replace(DRAFTER, own_embedding=True)}, 'own_embedding=True.* set own_embedding=False'),
  ],
)
def test_a_configuration_is_refused_before_anything_is_answered(target, tmp_path, monkeypatch, changes, message):
  theirs = dataclasses.replace(DRAFTER, norm_eps=1e-5, name='other')
  save_drafter(Drafter(theirs, first_params(Eagle(theirs))), tmp_path / 'other')
  monkeypatch.setattr('eagle_jax.train.run.load_target', lambda *_, **__: target)
  monkeypatch.setattr('eagle_jax.train.run.make_conversations', lambda *_: pytest.fail('the target is asked'))
  config = {'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': Data(1)}, 'RECIPE': RECIPE}
  with pytest.raises(ValueError, match=message):
    whole_run.run(
      {**config, **changes}, tmp_path / 'out', shards=tmp_path / 'shards', prompts=None, initial=str(tmp_path / 'other')
    )


DATA = Data(1, num_rows=4, num_refill=2, max_prompt=32, max_new_tokens=32)


@pytest.mark.parametrize(
  ('changes', 'ids', 'message'),
  [
    ({}, None, "out.shards.b holds a run with other settings: target was 'y' and is now 'x'"),
    ({'DATA': {'a': DATA, 'b': dataclasses.replace(DATA, max_prompt=250)}}, None, 'exceeds the context of 256'),
    ({'DATA': {'a': DATA, 'b': dataclasses.replace(DATA, num_refill=5)}}, None, 'num_refill.*4; got 5'),
    ({'DATA': {'a': DATA, 'b': dataclasses.replace(DATA, taps=(2,))}}, None, "DATA 'b' stores .* has 1 layers"),
    ({'DRAFTER': dataclasses.replace(DRAFTER, draft_vocab_size=2)}, None, 'draft_vocab_size is 2, .* holds 4 ids'),
    ({'DRAFTER': dataclasses.replace(DRAFTER, draft_vocab_size=2)}, [7, 8], 'other settings'),  # ids are known
  ],
)
def test_what_can_never_work_is_refused_before_the_first_of_two_kinds_is_answered(
  target, tmp_path, monkeypatch, changes, ids, message
):
  chatty = dataclasses.replace(target, config=dataclasses.replace(CONFIG, eos_ids=(1, 2, 3)), tokenizer=TOY)
  monkeypatch.setattr('eagle_jax.train.run.load_target', lambda *_, **__: chatty)
  monkeypatch.setattr('eagle_jax.train.run.make_shards', lambda *_: pytest.fail('the target is asked'))
  shards, vocabulary = tmp_path / 'out' / 'shards', tmp_path / 'vocabulary.json'
  (shards / 'b').mkdir(parents=True)
  (shards / 'b' / 'settings.json').write_text('{"target": "y"}')
  (shards / 'b' / 'shard_0000.safetensors').touch()
  vocabulary.write_text(json.dumps({'ids': ids}))
  config = {'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': DATA, 'b': DATA}, 'RECIPE': RECIPE, **changes}
  with pytest.raises(ValueError, match=message):
    whole_run.run(config, tmp_path / 'out', shards=shards, prompts=None, vocabulary=str(vocabulary) if ids else None)


def test_one_run_at_a_time_makes_shards(target, tmp_path, monkeypatch):
  """Of two that begin together the second would take the folder for one that was not begun; later they share it."""

  def gather(*_):
    raise ValueError('all is gathered')

  monkeypatch.setattr('eagle_jax.train.run.load_target', lambda *_, **__: target)
  monkeypatch.setattr('eagle_jax.train.run._gather', gather)
  config, shards = {'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': DATA}, 'RECIPE': RECIPE}, tmp_path / 'shards'
  begin_run = functools.partial(whole_run.run, config, shards=shards, prompts=None)
  (shards / 'a').mkdir(parents=True)
  with open(shards / '.lock', 'a') as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='shards is in use by another process'):
      begin_run(tmp_path / 'first')
    (shards / 'a' / 'shard_0000.safetensors').touch()
    with pytest.raises(ValueError, match='all is gathered'):
      begin_run(tmp_path / 'first')


def test_first_weights_with_an_embedding_of_their_own_are_refused(target, monkeypatch):
  own = Drafter(dataclasses.replace(DRAFTER, own_embedding=True), {})
  monkeypatch.setattr('eagle_jax.train.run.load_drafter', lambda *_, **__: own)
  with pytest.raises(ValueError, match="'x' has an embedding of its own, .* begin with another --initial"):
    whole_run.first_weights('x', target, DRAFTER)


def test_a_dry_run_refuses_what_a_run_would():
  eagle3 = Eagle3Config(**SIZES, target_width=16, taps=(0,))
  config = {'TARGET': CONFIG, 'DRAFTER': eagle3, 'RECIPE': RECIPE}
  with pytest.raises(ValueError, match='regression is 1.0'):
    whole_run.dry_run(config, make_mesh())
  one = {'RECIPE': dataclasses.replace(RECIPE, objective=Objective(regression=0.0)), 'DATA': {'a': Data(1, taps=(1,))}}
  with pytest.raises(ValueError, match=r'stores the inputs of layers \(1,\), and DRAFTER reads those of \(0,\)'):
    whole_run.dry_run(config | one, make_mesh())


def test_no_kind_trains_on_a_prompt_that_another_holds_out(target, tmp_path, monkeypatch):
  """The second kind reads the prompts of the first, and holds out the last of its own, which is not the last there."""
  rng = np.random.default_rng(0)
  texts = [example(rng, 7, 3, number) for number in range(4)]
  again = [one._replace(token=np.r_[one.token[:3], one.token[4:2:-1]]) for one in texts[:3]]
  shards = {'a': texts, 'b': again}
  chatty = dataclasses.replace(target, tokenizer=TOY)
  monkeypatch.setattr(whole_run, 'read_conversations', lambda *_: [])
  monkeypatch.setattr(whole_run, 'make_shards', lambda target, source, folder, *_: [folder])
  monkeypatch.setattr(whole_run, 'read_shard', lambda path: shards[path.name])
  gather = functools.partial(whole_run._gather, chatty, folder=tmp_path, prompts='x', prompts_hash='x')
  both = gather({'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': DATA, 'b': DATA}})
  assert [one.id for one in both.held_out] == [3, 2]
  assert [one.id for one in both.examples] == [0, 1, 0, 1]
  assert both.num_withheld == 1
  alone = gather({'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': DATA}})
  assert (len(alone.examples), alone.num_withheld) == (3, 0)  # as before: such a run is resumed


def test_a_run_tells_its_data_and_first_weights(target, tmp_path, monkeypatch, caplog):
  """To the run folder, which is not resumed with others, and to the drafter's provenance."""
  told = {}
  monkeypatch.setattr('eagle_jax.train.run.load_target', lambda *_, **how: told.update(how) or target)
  monkeypatch.setattr('eagle_jax.train.run._gather', lambda *_: whole_run._Gathered([], [], {'a': {}}))
  monkeypatch.setattr('eagle_jax.train.run.train', lambda *_, **how: told.update(how))
  save_drafter(Drafter(DRAFTER, first_params(Eagle(DRAFTER))), tmp_path / 'first')
  config = {'TARGET': 'x', 'DRAFTER': dataclasses.replace(DRAFTER, draft_vocab_size=9, name='new'), 'RECIPE': RECIPE}
  first = str(tmp_path / 'first')
  whole_run.run({**config, 'DATA': {'a': Data(1)}}, tmp_path, shards=tmp_path, prompts=None, initial=first)
  assert told['origin'] == {'initial': first, 'data': {'a': repr(Data(1))}}
  assert told['provenance'].items() >= told['origin'].items()
  assert told['initial'].config == DRAFTER
  assert told['dtype'] == 'float32'
  assert 'left out' not in caplog.text


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_rows': 0, 'chunk_places': -1}, "at least 1: {'num_rows': 0, 'chunk_places': -1}"),
    ({'num_places': 40, 'chunk_places': 12}, 'num_places is 40 and chunk_places 12; chunk_places must divide'),
    ({'num_places': 1000, 'chunk_places': 256}, 'num_places is 1000 and chunk_places 256'),
    ({'dtype': 'float16'}, "dtype is 'float16'; 'float32' or 'bfloat16' is needed"),
    (
      {'learning_rate': float('nan'), 'feature_noise': -1.0},
      "at least 0: {'learning_rate': nan, 'feature_noise': -1.0}",
    ),
    ({'clip_norm': 0.0}, 'clip_norm is 0.0; a number above 0'),
    ({'objective': Objective(num_steps=33)}, 'num_places is 32, and objective.num_steps 33'),
    ({'num_accumulated': 4}, 'num_accumulated is 4; a divisor of num_steps, 6, is needed'),
    ({'seed': -1}, 'seed is -1; a number from 0'),
    ({'seed': 2**31}, 'seed is 2147483648; a number from 0'),
  ],
)
def test_a_recipe_is_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(RECIPE, **changes)


def test_data_of_which_nothing_was_made_may_be_made_of_other_prompts(target, tmp_path, monkeypatch):
  config = {'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': DATA}}
  asked = functools.partial(whole_run._gather, dataclasses.replace(target, tokenizer=TOY), config, tmp_path)
  monkeypatch.setattr(whole_run, 'read_conversations', lambda *_: [])

  def fail(*_):
    raise ValueError('too few')

  monkeypatch.setattr(whole_run, 'make_shards', fail)
  for prompts in ('first', 'second'):
    with pytest.raises(ValueError, match='too few'):
      asked(prompts, prompts)
  (tmp_path / 'a' / 'shard_0000.safetensors').touch()
  with pytest.raises(ValueError, match="other settings: prompts was 'second' and is now 'third'"):
    asked('third', 'third')


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{"ids": [1, 31, 2]}', 'the id 31; the target has those below 31'),
    ('{"ids": [1, 2, 2]}', '3 ids, 2 of them distinct.* 3, are needed'),
    ('{"ids": [1, 2]}', '2 ids, 2 of them distinct.* 3, are needed'),
    ('{"ids": [1, 2, "x"]}', 'vocabulary.json holds no .*of integers'),
    ('[1, 2, 3]', 'vocabulary.json holds no .*of integers'),
    ('{"ids": [1, 2', 'vocabulary.json'),
  ],
)
def test_a_vocabulary_in_a_file_is_checked(tmp_path, content, message):
  config, path = dataclasses.replace(DRAFTER, draft_vocab_size=3), tmp_path / 'vocabulary.json'
  path.write_text('{"ids": [5, 30, 0]}')
  assert read_vocabulary(path, config).tolist() == [5, 30, 0]
  with pytest.raises(ValueError, match='--vocabulary needs draft_vocab_size in DRAFTER'):
    read_vocabulary(path, DRAFTER)
  path.write_text(content)
  with pytest.raises(ValueError, match=message):
    read_vocabulary(path, config)


def test_a_run_is_not_resumed_with_other_ids(target, tmp_path):
  """Of equal size, they would pass every check of shapes."""
  examples, config = answered(12, 24, 1.0), dataclasses.replace(DRAFTER, draft_vocab_size=20)
  recipe = dataclasses.replace(RECIPE, num_steps=2)
  run = functools.partial(train, target, config, examples[:10], examples[10:], recipe, tmp_path, report_every=2)
  run(ids=np.arange(20, dtype=np.int32))
  with pytest.raises(ValueError, match='other settings: ids was '):
    run(ids=np.arange(1, 21, dtype=np.int32))
  assert load_drafter(tmp_path / 'drafter', target).params['ids'].tolist() == [*range(20)]
  own = Eagle3Config(**SIZES, target_width=16, taps=(), draft_vocab_size=20)
  head = Drafter(own, first_params(Eagle3(own)) | {'ids': jnp.arange(20)})
  with pytest.raises(ValueError, match='head of its own for 20 ids'):
    train(target, own, examples[:10], examples[10:], recipe, tmp_path, initial=head, ids=np.arange(1, 21))


def test_a_bfloat16_recipe_trains_beside_a_bfloat16_target(target, tmp_path):
  examples = answered(12, 24, 1.0)
  half = dataclasses.replace(target, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
  recipe = dataclasses.replace(RECIPE, num_steps=2)
  one, other = (
    train(at, DRAFTER, examples[:10], examples[10:], dataclasses.replace(recipe, dtype=str(at.dtype)), tmp_path / name)
    for name, at in (('float32', target), ('bfloat16', half))
  )
  assert other['cross_entropy_0'] == pytest.approx(one['cross_entropy_0'], rel=0.01)


@pytest.mark.parametrize('draft_vocab_size', [0, -1, 32, 3.5])
def test_a_draft_vocabulary_is_a_part_of_the_target_s(draft_vocab_size):
  with pytest.raises(ValueError, match=f'draft_vocab_size.*31.*got {draft_vocab_size}'):
    dataclasses.replace(DRAFTER, draft_vocab_size=draft_vocab_size)


def test_a_trained_drafter_is_accepted_more(target, tmp_path):
  """The whole way: the target's answers, a short training, longer acceptance than before."""
  examples = answered(24, 60, 1.0)
  recipe = Recipe(num_steps=150, num_rows=4, num_places=64, learning_rate=3e-3, warmup_steps=10)
  train(target, DRAFTER, examples[:20], examples[20:], recipe, tmp_path, report_every=75)
  drafter = load_drafter(tmp_path / 'drafter', target)
  untrained = Drafter(DRAFTER, first_params(Eagle(DRAFTER), 9))
  prompts = [[token] for token in range(8)]
  taus = [generate(target, d, prompts, max_new_tokens=40, policy=Chain(3)).stats['tau'] for d in (untrained, drafter)]
  assert taus[1] > taus[0] + 0.3


def test_a_second_stage_needs_first_weights(target, tmp_path, monkeypatch):
  """It is refused before the target is loaded, and before anything is written."""
  monkeypatch.setattr('eagle_jax.train.run.load_target', lambda *_, **__: pytest.fail('the target is loaded'))
  examples, recipe = answered(12, 24, 1.0), dataclasses.replace(RECIPE, second_stage=True)
  config = {'TARGET': 'x', 'DRAFTER': DRAFTER, 'DATA': {'a': Data(1)}, 'RECIPE': recipe}
  for begin_run in (
    functools.partial(whole_run.run, config, tmp_path / 'run', shards=tmp_path, prompts=None),
    functools.partial(train, target, DRAFTER, examples[:10], examples[10:], recipe, tmp_path / 'run'),
  ):
    with pytest.raises(ValueError, match='second_stage .*needs one: pass a trained drafter with --initial'):
      begin_run()
  assert [*tmp_path.iterdir()] == []


def test_a_second_stage_needs_answers_of_more_than_a_token(target, tmp_path, monkeypatch):
  examples = answered(2, 1, 0.0)
  monkeypatch.setattr('eagle_jax.train.reached.trace', lambda *_, policy: Traced([[], []], [1, 1], policy))
  with pytest.raises(ValueError, match='nothing along 2 answers of a single token'):
    mark_reached(target, Drafter(DRAFTER, first_params(Eagle(DRAFTER))), examples, tmp_path, num_steps=2)


@pytest.mark.parametrize(('last_tau', 'best'), [(1.9, 0), (2.5, 2)])
def test_the_drafter_is_never_worse_than_the_first_weights(target, tmp_path, monkeypatch, last_tau, best):
  """They are step 0, also of a run that was killed before its first report and is begun again with other settings."""
  examples, first = answered(12, 24, 1.0), Drafter(DRAFTER, first_params(Eagle(DRAFTER)))
  taus = iter((2.0, 2.1, 1.5, last_tau))
  monkeypatch.setattr('eagle_jax.train.loop.evaluate_all', lambda *_, **__: {'chain_tau': next(taus)})
  how = {'folder': tmp_path, 'initial': first, 'report_every': 1}
  run = functools.partial(train, target, DRAFTER, examples[:10], examples[10:], **how)
  recipe = dataclasses.replace(RECIPE, num_steps=2, warmup_steps=0)
  with monkeypatch.context() as killing:
    killing.setattr('eagle_jax.train.loop.train_step', stop_at(1))
    with pytest.raises(Killed):
      run(dataclasses.replace(recipe, seed=1))
  assert run(recipe) == run(recipe) == {'chain_tau': max(2.1, last_tau)}
  lines = (tmp_path / 'held_out.csv').read_text().splitlines()
  assert lines == ['step,chain_tau', '0,2.1', '1,1.5', f'2,{last_tau}']
  assert json.loads((tmp_path / 'drafter' / 'provenance.json').read_text())['step'] == best
  exported = load_drafter(tmp_path / 'drafter', target).params['fc']['weight']
  is_first = np.array_equal(exported, first.params['fc']['weight'].astype(jnp.bfloat16).astype(jnp.float32))
  assert is_first == (best == 0)


@pytest.mark.slow
def test_a_second_stage_is_accepted_more_and_resumes(target, tmp_path, monkeypatch):
  """More than the drafter that it begins with; a run that is stopped ends to the bit as it would, by one replay."""
  examples = answered(24, 60, 0.0)
  frozen = frozen_inputs(target, DRAFTER, examples)[0]
  first = Drafter(DRAFTER, initial_params(Eagle(DRAFTER), frozen, examples, seed=0))
  sizes = {'num_rows': 4, 'num_places': 64, 'learning_rate': 3e-3, 'warmup_steps': 10}
  recipe = Recipe(num_steps=40, objective=Objective(num_steps=3), second_stage=True, **sizes)
  how = {'recipe': recipe, 'initial': first, 'report_every': 20}
  run = functools.partial(train, target, DRAFTER, examples[:20], examples[20:], **how)
  expected = run(folder=tmp_path / 'whole')
  second = load_drafter(tmp_path / 'whole' / 'drafter', target)
  taus = [trace(target, drafter, examples, policy=replay_tree(3)).tau for drafter in (first, second)]
  assert taus[1] > taus[0] + 0.3
  with monkeypatch.context() as killing:
    killing.setattr('eagle_jax.train.loop.train_step', stop_at(25))
    with pytest.raises(Killed):
      run(folder=tmp_path / 'stopped')
  monkeypatch.setattr('eagle_jax.train.reached.trace', lambda *_, **__: pytest.fail('replayed again'))
  assert run(folder=tmp_path / 'stopped') == expected
  assert same(tmp_path / 'whole', tmp_path / 'stopped')
  with pytest.raises(ValueError, match='other settings: recipe.second_stage was True and is now None'):
    run(folder=tmp_path / 'whole', recipe=dataclasses.replace(recipe, second_stage=False))


@pytest.mark.slow
def test_sigkill_at_ten_random_moments_changes_nothing(tmp_path):
  """Of a whole run, in processes of its own: while it answers, trains, evaluates, or writes a checkpoint."""
  whole, script, programs = tmp_path / 'whole', Path(__file__).with_name('tiny_training.py'), str(tmp_path / 'xla')

  def into(out):
    return lambda: forked.start(script, f'--out={out}', JAX_COMPILATION_CACHE_DIR=programs)

  run_to_the_end(into(tmp_path / 'first'))  # compiles
  seconds = run_to_the_end(into(whole))
  killed = 0
  for haste in range(4):  # runs of a machine that is faster by now end before they are killed
    if killed < 5:
      disturbed = tmp_path / f'disturbed_{haste}'
      killed = run_killed(into(disturbed), 10, seconds / 2**haste)
      assert same(whole, disturbed)
  assert killed >= 5
