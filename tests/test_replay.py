"""Recorded text, replayed: the acceptance of real decoding to the token, without the target."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax.decode.buckets import pad_prompts
from eagle_jax.decode.generate import Generation, generate
from eagle_jax.decode.prefill import STATIC, run_prefill
from eagle_jax.decode.step import decode_loop
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate import trace as replay
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.trace import Traced, first_answer, observe, trace
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.policy.trees import Chain, DynamicTree, StaticTree
from eagle_jax.train.reached import mark_reached, replay_tree

NUM_NEW = 24
EOS_IDS = (0, 24, 48, 72, 96)
PROMPTS = [[(10 * first + 3 * i) % 97 for i in range(1 + first % 20)] for first in range(32)]
ROW_IDS = range(100, 132)
POLICIES = (DynamicTree(4, 3, 3, 12), Chain(3), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]))
SAMPLINGS = ({}, {'temperature': 1.0, 'seed': 5})


@pytest.fixture(scope='module')
def target():
  target = tiny.target(dataclasses.replace(tiny.TARGET, num_layers=1), seed=2)
  target.params['embed']['weight'] *= 50  # about unit rms, as its input norm would make it
  target.params['head']['weight'] *= 40
  return target


@pytest.fixture(scope='module')
def drafter(target):
  """The target's layer behind an fc that passes the embedding through, and some of the feature: right now and then."""
  shuffle_DD = jax.random.orthogonal(jax.random.key(5), target.config.width)
  fc = {'weight': jnp.concatenate([jnp.eye(target.config.width), 0.4 * shuffle_DD], axis=1)}
  layer = {name: target.params['layer_0'][name] for name in ('attn', 'mlp_norm', 'mlp')}
  config = dataclasses.replace(tiny.DRAFTER, ffn_width=target.config.ffn_width, fc_bias=False)
  return Drafter(config, {'fc': fc, 'layer': layer})


def decoded(target, drafter, policy, sampling) -> Generation:
  how = {'max_new_tokens': NUM_NEW, 'row_ids': ROW_IDS, 'eos_ids': EOS_IDS, **sampling}
  return generate(target, drafter, PROMPTS, policy=policy, **how)


@functools.partial(jax.jit, static_argnames='network')
def features(params, token_BL, *, network: TransformerTarget):
  """Compute features [B, L, D] f32 of whole texts in one pass."""
  position_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape)
  causal_BLL = jnp.broadcast_to(jnp.tri(token_BL.shape[1], dtype=bool), (*token_BL.shape, token_BL.shape[1]))
  taps, _ = network.forward(params, token_BL, position_BL, causal_BLL, network.init_cache(token_BL.shape[0], 0))
  return taps.feature.transpose(1, 2, 0)


def examples_of(target, generation: Generation, *, temperature=0.0, seed=0) -> list[Example]:
  """Make the examples that these answers would have recorded, but with features in float32."""
  texts = [prompt + answer for prompt, answer in zip(PROMPTS, generation.tokens, strict=True)]
  token_BL, _ = pad_prompts(texts, max(map(len, PROMPTS)) + NUM_NEW)
  feature_BLD = np.asarray(features(target.params, token_BL, network=TransformerTarget(target.config)))
  return [
    Example(
      row_id, np.asarray(text, np.int32), np.arange(len(text)) >= len(prompt), feature_LD[: len(text) - 1],
      temperature, seed,
    )
    for row_id, prompt, text, feature_LD in zip(ROW_IDS, PROMPTS, texts, feature_BLD, strict=True)
  ]  # fmt: skip


def ends_inside_a_path(tokens: list[int], num_accepted: list[int]) -> bool:
  """The last token was a drafted one: its pass emitted no bonus."""
  return sum(num_accepted) + len(num_accepted) == len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize('sampling', SAMPLINGS, ids=['greedy', 'sampled'])
@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_trace_matches_decoding(target, drafter, policy, sampling):
  generation = decoded(target, drafter, policy, sampling)
  traced = trace(target, drafter, examples_of(target, generation, **sampling), policy=policy, num_rows=5)
  assert traced.num_accepted == generation.num_accepted
  assert traced.tau == generation.stats['tau']
  assert traced.num_passes == generation.stats['num_target_passes']

  # The text is worth tracing: every depth is reached, and rows end in every way.
  assert {n for row in generation.num_accepted for n in row} >= {0, 1, 2, 3}
  pairs = list(zip(generation.tokens, generation.num_accepted, strict=True))
  ends = {(tokens[-1] in EOS_IDS, ends_inside_a_path(tokens, accepted)) for tokens, accepted in pairs}
  assert ends == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.slow
@pytest.mark.parametrize('sampling', SAMPLINGS, ids=['greedy', 'sampled'])
def test_places_that_decoding_reaches_are_those_of_its_passes(target, drafter, sampling, tmp_path):
  how = {'max_new_tokens': NUM_NEW, 'row_ids': ROW_IDS, 'eos_ids': (), **sampling}
  generation = generate(target, drafter, PROMPTS, policy=replay_tree(3), trace=True, **how)
  examples = examples_of(target, generation, **sampling)
  marked = mark_reached(target, drafter, examples, tmp_path, num_steps=3)
  kinds = set()
  for one, cycles in zip(marked, generation.trace, strict=True):
    reached = {place: count for place, count in enumerate(one.num_reached.tolist()) if count >= 0}
    assert [*reached] == [cycle.text_length - 2 for cycle in cycles]
    for (place, count), cycle in zip(reached.items(), cycles, strict=True):
      drafted = [cycle.token[node] for node in cycle.path[1:]]
      assert drafted[:count] == one.token[place + 2 : place + 2 + count].tolist()
      is_boundary = len(drafted) == count
      kinds.add((count, is_boundary))
      assert is_boundary or count + 1 in (replay_tree(3).max_depth, len(one.token) - 2 - place)
  assert kinds >= {(0, True), (1, True), (2, True), (3, False)}


@pytest.fixture(scope='module')
def generation(target, drafter):
  return decoded(target, drafter, Chain(3), {})


@pytest.fixture(scope='module')
def examples(target, generation):
  return examples_of(target, generation)


def test_trace_runs_no_target_layers(target, drafter, generation, examples):
  headed = dataclasses.replace(target, params={name: target.params[name] for name in ('embed', 'head')})
  traced = trace(headed, drafter, examples, policy=Chain(3), num_rows=5)
  assert traced.num_accepted == generation.num_accepted
  late = [e._replace(feature=np.roll(e.feature, 1, axis=0)) for e in examples]
  assert trace(headed, drafter, late, policy=Chain(3), num_rows=5).num_accepted != generation.num_accepted


def test_trace_accepts_bfloat16_features(target, drafter, generation, examples):
  """Shards hold features in bfloat16; acceptance is close to that of decoding."""
  halved = [e._replace(feature=e.feature.astype(jnp.bfloat16)) for e in examples]
  traced = trace(target, drafter, halved, policy=Chain(3), num_rows=5)
  np.testing.assert_allclose(traced.tau, generation.stats['tau'], rtol=0.05)


def test_all_batches_share_two_programs(target, drafter, examples, monkeypatch):
  chex.clear_trace_counter()
  sized = STATIC
  for jitted, static in ((run_prefill, sized), (decode_loop, ('spec',))):
    counted = jax.jit(chex.assert_max_traces(jitted.__wrapped__, n=1), static_argnames=static)
    monkeypatch.setattr(replay, jitted.__name__, counted)
  trace(target, drafter, examples, policy=Chain(1), num_rows=7)


def test_only_the_first_answer_is_traced():
  is_answer = np.array([0, 0, 1, 1, 1, 0, 1, 1], bool)
  example = Example(4, np.arange(8, dtype=np.int32), is_answer, np.arange(14, dtype=np.float32).reshape(7, 2))
  answer = first_answer(example)
  assert answer.token.tolist() == [0, 1, 2, 3, 4]
  assert answer.feature.tolist() == example.feature[:4].tolist()
  assert (answer.num_prompt, answer.num_new) == (2, 3)
  assert first_answer(example._replace(is_answer=is_answer & (np.arange(8) > 5))).num_new == 2
  for is_wrong in (np.zeros(8, bool), np.ones(8, bool)):
    with pytest.raises(ValueError, match='Example 4 .*`is_answer`'):
      first_answer(example._replace(is_answer=is_wrong))


def test_short_prompts_are_not_padded_to_a_long_one(target, drafter, examples):
  long = examples[0]
  prompt = np.resize(long.token[:1], 60)
  token, is_answer = (np.concatenate(x) for x in ([prompt, long.token], [prompt < 0, long.is_answer]))
  long = Example(500, token, is_answer, np.resize(long.feature, (len(token) - 1, long.feature.shape[1])))
  mixed = [*examples[:3], long, *examples[3:6]]
  batches = [*replay.replay_batches(target, drafter, mixed, policy=Chain(1), num_rows=4)]
  by_size = sorted((batch.state.text.shape[1], sorted(batch.numbers)) for batch in batches)
  assert [numbers for _, numbers in by_size[-1:]] == [[3]]
  assert sorted(number for _, numbers in by_size for number in numbers) == [*range(7)]
  assert by_size[-1][0] > by_size[0][0]


def test_trace_without_examples_is_refused(target, drafter):
  with pytest.raises(ValueError, match='`examples`.* none'):
    trace(target, drafter, [], policy=Chain(3), num_rows=5)


def test_observe_refuses_answers_of_one_token(target, drafter, examples):
  short = [e._replace(token=e.token[:n + 1], is_answer=e.is_answer[:n + 1], feature=e.feature[:n])
           for e in examples for n in [int(np.argmax(e.is_answer))]]  # fmt: skip
  assert trace(target, drafter, short, policy=Chain(3), num_rows=5).num_passes == 0
  with pytest.raises(ValueError, match=f'got {len(short)} answers of a single token'):
    observe(target, drafter, short, policy=Chain(3), num_rows=5)


def test_trace_statistics_by_hand():
  # Two answers of 7 and 3 tokens, the first token of each from prefill.
  #   room before the pass   6  3  1 | 2
  #   accepted               2  1  1 | 0
  traced = Traced([[2, 1, 1], [0]], [7, 3], Chain(3))
  assert traced.num_passes == 4
  assert traced.tau == 8 / 4
  # Depth 1: all four tried, three hit. Depth 2: the third pass had no room, so one of two. Depth 3: missed once.
  assert traced.acceptance == (3 / 4, 1 / 2, 0)
  none = Traced([[], []], [1, 1], Chain(1))
  assert none.tau == 1
  assert np.isnan(none.acceptance).all()
