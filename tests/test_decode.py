"""The public API on tiny random networks: the same text, nothing compiled twice or copied, errors that say why."""

import dataclasses
import gc
import re
import sys
import weakref

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import decode
from eagle_jax.config import DrafterConfig
from eagle_jax.decode import program
from eagle_jax.decode.buckets import require_memory
from eagle_jax.decode.prefill import run_prefill
from eagle_jax.decode.program import Program
from eagle_jax.decode.request import token_ids
from eagle_jax.kernels.argmax import NAN_SCORE
from eagle_jax.kernels.tiling import Columns
from eagle_jax.models.layers import CachedAttention
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.policy.adaptive import Adaptive
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
from listen import compile_events
from tiny_costs import COSTS
from tiny_programs import copies_in_loop, loop_listing, prefilled_pair
from tiny_traces import BYTES

PROMPTS = [[1, 2, 3], [40], [5, 6, 7, 8, 9, 10, 11], [96, 0, 96]]
POLICIES = (Chain(3), StaticTree(), StaticTree([(0,), (1,), (1, 0)]), DynamicTree(3, 3, 3, 8))
SAMPLINGS = (
  {},
  {'temperature': 1.0, 'seed': 3},
  {'temperature': 0.7, 'top_k': 20, 'top_p': 0.8, 'row_ids': [4, 4, 0, 9]},
)
SMALL = DynamicTree(3, 3, 3, 8)
ADAPTIVE = Adaptive(3, 3, 3, 8, smaller=(1, 4))
NUM_NEW = 40
RULED = (
  (DDD(3, 3, 3, 8, smaller=(4,), least_log_mass=-3.0), {'least_log_mass': -99.0}),
  (SVIP(3, 3, 3, 8, smaller=(4,), scale=0.15, most_rejected=0.5), {'most_rejected': 99.0}),
  (SureMass(3, 3, 3, 8, smaller=(4,), scale=0.1, least_mass=0.1), {'least_mass': 0.0}),
  (GapTree(3, 3, 3, 8), {'steepness': 50.0}),
  (CaPE(3, 3, 3, 8), {'siblings': (0, 0, 0, 0)}),
  (C2T(3, 3, 3, 8, smaller=(4,), least_accepted=0.1), {'least_accepted': 0.0}),
  (RateTree(3, 3, 3, 8, smaller=(1, 4)), {'thresholds': (0.0, 0.0)}),
  (PooledTree(3, 3, 3, 8, smaller=(4,), mean_nodes=3.0), {'mean_nodes': 8.0}),
)


GENERATE = sys.modules['eagle_jax.decode.generate']  # the function of that name hides the module


class Bytes:
  """A tokenizer of bytes, many of which are no UTF-8 by themselves."""

  special_ids: frozenset[int] = frozenset()

  def encode_prompt(self, text: str) -> list[int]:
    return [byte % 97 for byte in text.encode()]

  def decode(self, ids) -> str:
    return bytes(5 * token % 256 for token in ids).decode(errors='replace')

  def is_raw_byte(self, token_id: int) -> bool:
    return False


@pytest.fixture(scope='module')
def target():
  return tiny.target(tokenizer=Bytes())


@pytest.fixture(scope='module')
def drafter():
  return tiny.drafter()


@pytest.fixture(scope='module')
def plain(target):
  return [decode.generate(target, None, PROMPTS, max_new_tokens=NUM_NEW, **how) for how in SAMPLINGS]


# The same text.


@pytest.mark.parametrize('policy', POLICIES, ids=lambda p: p.describe())
def test_generate_matches_plain_decoding(target, drafter, plain, policy):
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, **how)
    assert out.tokens == expected.tokens
    assert out.text == expected.text == [target.tokenizer.decode(row) for row in out.tokens]
    assert out.stats['num_target_passes'] == sum(map(len, out.num_accepted))
    assert out.stats['num_new_tokens'] == sum(map(len, out.tokens)) == NUM_NEW * len(PROMPTS)
    assert out.stats['tau'] == (NUM_NEW - 1) * len(PROMPTS) / out.stats['num_target_passes']
    assert out.stats['policy'] == policy.describe()
    assert (out.stats['nodes_per_pass'], out.stats['levels_per_pass']) == (policy.num_nodes, policy.max_depth)


@pytest.mark.slow
@pytest.mark.parametrize(('policy', 'other'), RULED, ids=lambda p: p.describe() if hasattr(p, 'describe') else '')
def test_rules_change_no_text_and_their_numbers_compile_nothing(target, drafter, plain, policy, other):
  """With the other number the rule never stops, or offers fewer siblings."""
  for how, expected in reversed([*zip(SAMPLINGS, plain, strict=True)]):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, costs=COSTS, **how)
    assert out.tokens == expected.tokens
  tuned = dataclasses.replace(policy, **other)
  with compile_events() as events:
    full = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=tuned, costs=COSTS)
  assert events == []
  assert full.tokens == plain[0].tokens
  assert full.stats['policy'] == tuned.describe()
  if isinstance(policy, (CaPE, GapTree)):
    assert out.stats['tau'] != full.stats['tau']
  elif isinstance(policy, PooledTree):
    assert out.stats['nodes_per_pass'] < full.stats['nodes_per_pass'] == policy.num_nodes
  else:
    assert out.stats['levels_per_pass'] < full.stats['levels_per_pass'] == policy.max_depth


@pytest.mark.slow
def test_another_table_changes_the_trees_but_no_text_and_compiles_nothing(target, drafter, plain):
  """The other makes deep nodes worth no less than their parents."""
  policy, num_accepted = CalibratedTree(3, 3, 3, 8), []
  log_p, entropy, (shallow, _) = COSTS.acceptance_table
  other = dataclasses.replace(COSTS, acceptance_table=(log_p, entropy, [shallow, [[-0.2, -0.1, 0.0]] * 2]))
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    first = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, costs=COSTS, **how)
    with compile_events() as events:
      then = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy, costs=other, **how)
    assert events == []
    assert first.tokens == then.tokens == expected.tokens
    num_accepted.append((first.num_accepted, then.num_accepted))
  assert any(first != then for first, then in num_accepted)


def test_a_drafter_knows_the_entropy_of_all_its_tokens(target, drafter):
  params, spec = decode.build(target, drafter, policy=Chain(2))
  out_DBW = jax.random.normal(jax.random.key(0), (32, 2, 3))
  few, every = (
    spec.drafter.top_children(params.drafter, out_DBW, lambda ids_UB: jnp.zeros(ids_UB.shape), n, has_entropy=True)
    for n in (2, 97)
  )
  exact_BW = -(jnp.exp(every.log_p) * every.log_p).sum(axis=2)
  np.testing.assert_allclose(few.entropy, exact_BW, rtol=1e-5)


def test_plain_decoding_counts_one_token_a_pass(plain):
  for out in plain:
    assert out.stats['tau'] == 1
    assert (out.stats['nodes_per_pass'], out.stats['levels_per_pass']) == (1, 0)
    assert out.stats['policy'] == 'plain'
    assert out.num_accepted == [[0] * (NUM_NEW - 1)] * len(PROMPTS)
    assert len({tuple(row) for row in out.tokens}) == len(PROMPTS)


def test_drafter_of_nan_changes_no_text(target, plain):
  """Its tree is empty: every pass yields the bonus alone."""
  broken = tiny.drafter()
  broken.params['fc']['weight'] *= jnp.nan
  for how, expected in zip(SAMPLINGS, plain, strict=True):
    out = decode.generate(target, broken, PROMPTS, max_new_tokens=NUM_NEW, policy=SMALL, **how)
    assert (out.tokens, out.num_accepted) == (expected.tokens, expected.num_accepted)


def test_a_drafter_divides_logits_as_its_target_does():
  divided = tiny.target(dataclasses.replace(tiny.TARGET, logit_divisor=4.0))
  out_DBW = jax.random.normal(jax.random.key(0), (32, 1, 2))
  found = {}
  for target in (divided, tiny.target()):
    params, spec = decode.build(target, tiny.drafter(), policy=Chain(2))
    children = spec.drafter.top_children(params.drafter, out_DBW, lambda ids_UB: jnp.zeros(ids_UB.shape), 97)
    found[target.config.logit_divisor] = children.log_p
  log_p = found[1.0][0, 0]  # of the likeliest first, as the others are
  np.testing.assert_allclose(found[4.0][0, 0], jax.nn.log_softmax(log_p / 4), rtol=1e-5)


@pytest.fixture(scope='module')
def overflowing(plain):
  """A target in float16 whose logits become NaN after prompt [1, 2, 3] and two more tokens, and after [40] at once."""
  target, second = tiny.target(), plain[0].tokens[0][1]
  assert not target.config.tied_head
  embed_VD = target.params['embed']['weight'].at[jnp.asarray([second, 40])].set(jnp.nan)
  params = {**target.params, 'embed': {'weight': embed_VD}}
  return dataclasses.replace(target, params=jax.tree.map(lambda x: x.astype(jnp.float16), params))


@pytest.mark.parametrize(('prompt', 'how'), [([40], {}), ([40], SAMPLINGS[1]), ([1, 2, 3], {})])
def test_logits_of_nan_are_an_error_that_names_the_dtype(overflowing, prompt, how):
  options = {'max_new_tokens': NUM_NEW, 'eos_ids': (), **how}
  with pytest.raises(ValueError, match='NaN .*float16'):
    decode.generate(overflowing, None, [prompt], **options)
  with pytest.raises(ValueError, match='NaN .*float16'):
    list(decode.stream(overflowing, None, prompt, **options))


def test_sequences_before_one_of_nan_are_yielded(overflowing):
  answers = decode.generate_each(overflowing, None, [[7], [40]], batch_size=1, max_new_tokens=1)
  assert len(next(answers).tokens) == 1
  with pytest.raises(ValueError, match='float16'):
    next(answers)


def test_a_choice_among_nan_ends_a_sequence_of_the_pure_core(overflowing):
  params, spec = decode.build(overflowing, None)
  prompt_BL, length_B = decode.pad_prompts([[40], [7]], 1)
  state = decode.prefill(params, prompt_BL, length_B, spec=spec, max_new_tokens=4, eos_ids=())
  tokens_BN, length_B, _ = decode.result(decode.decode_loop(params, state, spec=spec))
  assert tokens_BN[0].tolist() == [NAN_SCORE] + [-1] * (tokens_BN.shape[1] - 1)
  assert length_B.tolist() == [1, 4]


@pytest.mark.slow
def test_decoding_works_while_jit_is_disabled(target, drafter):
  """As people do to debug."""
  options = {'max_new_tokens': 2, 'policy': Chain(1), 'temperature': 0.7, 'top_k': 20, 'top_p': 0.8}
  expected = decode.generate(target, drafter, PROMPTS[:1], **options)
  with jax.disable_jit():
    out = decode.generate(target, drafter, PROMPTS[:1], **options)
  assert (out.tokens, out.num_accepted) == (expected.tokens, expected.num_accepted)


def test_nothing_is_transferred_implicitly(target, drafter):
  sampled = {'max_new_tokens': NUM_NEW, 'policy': SMALL, 'temperature': 0.7, 'top_k': 20, 'seed': 3}
  with jax.transfer_guard('disallow'):
    together = decode.generate(target, drafter, PROMPTS, **sampled)
    refilled = decode.generate(target, drafter, PROMPTS, batch_size=2, **sampled)
    streamed = [token for chunk in decode.stream(target, drafter, PROMPTS[0], **sampled) for token in chunk.tokens]
  assert together.tokens == refilled.tokens
  assert together.tokens[0] == streamed


@pytest.mark.parametrize('policy', ['plain', SMALL], ids=str)
def test_padded_columns_change_nothing(target, drafter, plain, policy):
  """A pass has as many rows as a matrix product takes, whatever the tree."""
  params, spec = decode.build(target, drafter, policy=policy)
  prompt_BL, length_B = decode.pad_prompts(PROMPTS[:1], 3)
  outs = []
  for columns in (Columns(), Columns(least=16)):
    padded = dataclasses.replace(spec, columns=columns)
    state = decode.prefill(params, prompt_BL, length_B, spec=padded, max_new_tokens=NUM_NEW)
    outs.append(decode.result(decode.decode_loop(params, state, spec=padded)))
  for thin, thick in zip(*outs, strict=True):
    np.testing.assert_array_equal(thin, thick)
  assert outs[1][0][0, :NUM_NEW].tolist() == plain[0].tokens[0]


def test_one_new_token_needs_no_pass(target, drafter, plain):
  out = decode.generate(target, drafter, PROMPTS, max_new_tokens=1, policy=SMALL)
  assert out.tokens == [row[:1] for row in plain[0].tokens]
  assert out.num_accepted == [[]] * len(PROMPTS)
  assert (out.stats['num_target_passes'], out.stats['tau'], out.stats['tok_per_s']) == (0, 1, 0)


@pytest.mark.parametrize('how', SAMPLINGS[:2], ids=['greedy', 'sampled'])
def test_stream_matches_generate(target, drafter, how):
  how = how | {'max_new_tokens': NUM_NEW, 'policy': SMALL}
  expected = decode.generate(target, drafter, PROMPTS[:1], **how)
  eos_ids = expected.tokens[0][30:31]
  for eos in ({}, {'eos_ids': eos_ids}):
    expected = decode.generate(target, drafter, PROMPTS[:1], **how, **eos)
    chunks = list(decode.stream(target, drafter, PROMPTS[0], **how, **eos))
    assert ''.join(chunk.text for chunk in chunks) == expected.text[0]
    assert sum((chunk.tokens for chunk in chunks), []) == expected.tokens[0]
    assert chunks[0].num_accepted == 0
    assert [chunk.num_accepted for chunk in chunks[1:]] == expected.num_accepted[0]


def test_conversations_are_encoded_by_the_chat_template():
  template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }};{% endfor %}"
  target = tiny.target(tokenizer=dataclasses.replace(BYTES, chat_template=template))
  chat = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Why?'}]
  ids = token_ids(target, [chat, 'Who?'])
  assert [BYTES.decode(each) for each in ids] == ['system: Be brief.;user: Why?;', 'user: Who?;']
  for prompts, match in (
    (chat, r'got one: pass \[\[\{'),
    ([chat, [1, 2]], 'got both'),
    ([[*chat, 'Why?']], r"dict.*got 'Why\?'"),
    ([[{'role': 'user'}]], r"'content', got \{'role': 'user'\}"),
  ):
    with pytest.raises(ValueError, match=match):
      token_ids(target, prompts)


def test_text_prompts_are_encoded(target, drafter):
  texts = ['abc', 'Hello', 'é', '!']
  ids = [target.tokenizer.encode_prompt(text) for text in texts]
  how = {'max_new_tokens': NUM_NEW, 'policy': SMALL}
  by_text, by_ids = (decode.generate(target, drafter, p, **how) for p in (texts, ids))
  assert by_text.tokens == by_ids.tokens


@pytest.mark.parametrize('form', [np.array, jnp.array, iter], ids=['numpy', 'jax', 'iterator'])
def test_generate_takes_integers_as_numpy_jax_or_iterators(target, drafter, form):
  def tokens(prompts, **how):
    how = how | {'max_new_tokens': NUM_NEW, 'policy': SMALL, 'temperature': 1.0}
    return decode.generate(target, drafter, prompts, **how).tokens

  whole = tokens([[1, 2, 3]], eos_ids=(), row_ids=[5])
  ends = [whole[0][9], whole[0][5]]
  cut = tokens([[1, 2, 3]], eos_ids=ends, row_ids=[5])
  assert cut != whole
  assert tokens([form([1, 2, 3])], eos_ids=form(ends), row_ids=form([5])) == cut
  assert tokens(np.array([[1, 2, 3]]), eos_ids=np.array([], int), row_ids=form([5])) == whole


def test_targets_eos_is_the_default(drafter, plain):
  eos = plain[0].tokens[0][5]
  target = tiny.target(dataclasses.replace(tiny.TARGET, eos_ids=(eos,)))
  cut, whole = (
    decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=SMALL, **eos_ids)
    for eos_ids in ({}, {'eos_ids': ()})
  )
  assert whole.tokens == plain[0].tokens
  assert cut.tokens == [row[: row.index(eos) + 1] if eos in row else row for row in whole.tokens]
  assert cut.text is None


def test_pure_functions_run_inside_a_jit(target, drafter, plain):
  params, spec = decode.build(target, drafter, policy=SMALL)

  @jax.jit
  def user(params, tokens_BL, length_B):
    state = decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=NUM_NEW)
    return decode.result(decode.decode_loop(params, state, spec=spec))

  length_B = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
  tokens_BL = np.zeros((len(PROMPTS), length_B.max()), np.int32)
  for row_L, prompt in zip(tokens_BL, PROMPTS, strict=True):
    row_L[: len(prompt)] = prompt
  tokens_BN, length_B, num_accepted_BN = user(params, tokens_BL, length_B)
  assert [row[:n] for row, n in zip(tokens_BN.tolist(), length_B, strict=True)] == plain[0].tokens
  assert (tokens_BN[:, NUM_NEW:] == -1).all()
  assert ((num_accepted_BN >= 0).sum(axis=1) < NUM_NEW).all()


@pytest.mark.parametrize('form', [list, np.uint8, np.int64, np.uint32, jnp.uint8], ids=str)
def test_prefill_takes_integers_of_any_dtype(target, drafter, plain, form):
  params, spec = decode.build(target, drafter, policy=SMALL)
  prompt_BL, length_B = decode.pad_prompts(PROMPTS[:1], 3)
  prompt_BL, length_B = form(prompt_BL.tolist()), form(length_B.tolist())
  state = decode.prefill(params, prompt_BL, length_B, spec=spec, max_new_tokens=NUM_NEW)
  assert state.text.dtype == jnp.int32
  tokens_BN, _, _ = decode.result(decode.decode_loop(params, state, spec=spec))
  assert tokens_BN.shape == (1, 48)
  assert tokens_BN[0, :NUM_NEW].tolist() == plain[0].tokens[0]


def test_decode_step_matches_decode_loop(target, drafter, plain):
  params, spec = decode.build(target, drafter, policy=SMALL)
  prompt_BL, length_B = decode.pad_prompts(PROMPTS[:1], 3)
  state = decode.prefill(params, prompt_BL, length_B, spec=spec, max_new_tokens=NUM_NEW)
  for _ in range(NUM_NEW):  # steps after the end change nothing
    state = decode.decode_step(params, state, spec=spec)
  tokens_BN, _, _ = decode.result(state)
  assert tokens_BN[0, :NUM_NEW].tolist() == plain[0].tokens[0]


def test_state_with_too_few_slots_for_a_policys_paths_is_refused(target, drafter, plain):
  prompt_BL, length_B = decode.pad_prompts(PROMPTS[:1], 3)
  params, narrow = decode.build(target, drafter, policy=Chain(2))
  _, wide = decode.build(target, drafter, policy=Chain(3))
  state = decode.prefill(params, prompt_BL, length_B, spec=narrow, max_new_tokens=NUM_NEW)
  for run in (decode.decode_step, decode.decode_loop):
    with pytest.raises(ValueError, match=r'4 free slots.*chain.* 3'):
      run(params, state, spec=wide)
  state = decode.prefill(params, prompt_BL, length_B, spec=wide, max_new_tokens=NUM_NEW)
  tokens_BN, _, _ = decode.result(decode.decode_loop(params, state, spec=narrow))
  assert tokens_BN[0, :NUM_NEW].tolist() == plain[0].tokens[0]


@pytest.mark.parametrize('policy', [Plain(), SMALL, Chain(2, lookup=True)])
def test_jax_enable_x64_changes_nothing(target, drafter, plain, policy):
  with jax.enable_x64(True):
    out = decode.generate(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, policy=policy)
    assert out.tokens == plain[0].tokens
    if policy == SMALL:  # the others' loops hold the steps that a stream of theirs would take
      chunks = decode.stream(target, drafter, PROMPTS[0], max_new_tokens=NUM_NEW, policy=policy)
      assert [token for chunk in chunks for token in chunk.tokens] == plain[0].tokens[0]


# How often, and what, is compiled and run.


def test_second_call_in_the_same_bucket_compiles_nothing(target, drafter, monkeypatch):
  monkeypatch.setattr(GENERATE, '_PREFILL', Program(run_prefill))
  monkeypatch.setattr(GENERATE, '_LOOP', Program(decode.decode_loop))

  def call(prompts, **how):
    return decode.generate(target, drafter, prompts, policy=SMALL, **how)

  first = call(PROMPTS, max_new_tokens=33, eos_ids=[3])
  with compile_events() as events:
    seconds = [
      call([[9] * 16, [8], [1], [2]], max_new_tokens=48, eos_ids=[4]).stats['compile_s'],
      call([[7], [8], [9], [10]], max_new_tokens=40, temperature=0.8, eos_ids=[5]).stats['compile_s'],
      call(PROMPTS, max_new_tokens=34, temperature=1.0, top_k=4, top_p=0.5, seed=9, row_ids=[8, 1, 1, 0]).stats[
        'compile_s'
      ],
    ]
  assert events == []
  assert seconds == [0, 0, 0]
  assert first.stats['compile_s'] > 0


def test_new_bucket_compiles_each_program_once(target, drafter, monkeypatch):
  """And the listener of the test above does hear compilations."""
  monkeypatch.setattr(GENERATE, '_PREFILL', Program(run_prefill))
  monkeypatch.setattr(GENERATE, '_LOOP', Program(decode.decode_loop))
  with compile_events() as events:
    for prompt_len in (17, 20, 24):
      decode.generate(target, drafter, [[1] * prompt_len], max_new_tokens=70, policy=SMALL)
  assert sum('backend_compile' in event for event in events) >= 2
  assert (len(GENERATE._PREFILL._compiled), len(GENERATE._LOOP._compiled)) == (1, 1)


def test_policies_share_one_compiled_prefill(target, drafter, monkeypatch):
  """The slots that they need lie in one bucket."""
  monkeypatch.setattr(GENERATE, '_PREFILL', Program(run_prefill))
  for policy in (SMALL, Chain(3), Chain(2, lookup=True)):
    decode.generate(target, drafter, PROMPTS, max_new_tokens=33, policy=policy)
  assert len(GENERATE._PREFILL._compiled) == 1


def test_one_traced_layer_serves_all_layers(monkeypatch):
  """Tracing takes as long for 30 layers as for one, and so does a program that comes from the compilation cache."""
  calls, real = [], CachedAttention.__call__
  monkeypatch.setattr(CachedAttention, '__call__', lambda mix, *qkv: calls.append(mix) or real(mix, *qkv))
  network = TransformerTarget(dataclasses.replace(tiny.target().config, num_layers=5, norm_eps=0.125))
  params = jax.eval_shape(network.init_params, jax.random.key(0))
  calls.clear()
  jax.make_jaxpr(network.read)(params, jnp.zeros((2, 7), jnp.int32))
  assert len(calls) == 1


def test_program_keeps_the_most_recently_used(monkeypatch):
  monkeypatch.setattr(program, 'MAX_PROGRAMS', 2)
  double = Program(jax.jit(lambda x: 2 * x))
  shapes = [np.zeros(size, np.float32) for size in (1, 2, 3)]
  made = {size: weakref.ref(double.compile(shapes[size - 1])[0]) for size in (1, 2)}
  assert double.compile(shapes[0])[1] == 0  # there already, and now the newest
  assert double.compile(shapes[2])[1] > 0
  gc.collect()
  assert made[2]() is None
  assert made[1]() is not None
  double.forget()
  gc.collect()
  assert made[1]() is None


def test_generate_runs_two_programs_for_any_length(target, drafter, monkeypatch):
  right, runs = Program.compile, []

  def counting(self, *args, **static):
    run, seconds = right(self, *args, **static)
    return lambda *args: runs.append(self) or run(*args), seconds

  monkeypatch.setattr(Program, 'compile', counting)
  for max_new_tokens in (1, 2, 16, 40):
    runs.clear()
    decode.generate(target, drafter, PROMPTS, max_new_tokens=max_new_tokens, policy=SMALL)
    assert runs == [GENERATE._PREFILL, GENERATE._LOOP]


def primitives(jaxpr):
  """Collect the names of all primitives, also those of inner jaxprs."""
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from primitives(inner)


def test_decode_loop_makes_no_host_calls(target, drafter):
  params, spec, state = prefilled_pair(target, drafter, SMALL, batch=2, costs=COSTS)
  names = set(primitives(jax.make_jaxpr(lambda p, s: decode.decode_loop(p, s, spec=spec))(params, state).jaxpr))
  assert {'while', 'dot_general', 'dynamic_update_slice', 'top_k'} <= names
  assert not [name for name in names if 'callback' in name or 'feed' in name or 'print' in name]
  printing = jax.make_jaxpr(jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, x: jax.debug.print('{}', x) or x, x)))
  assert [name for name in primitives(printing(1.0).jaxpr) if 'callback' in name or 'print' in name]


@pytest.mark.optimised
@pytest.mark.parametrize('batch', [1, 5])
@pytest.mark.parametrize('policy', [Plain(), Chain(3), StaticTree(), SMALL, ADAPTIVE], ids=lambda p: p.describe())
def test_decode_loop_copies_no_cache(target, drafter, policy, batch):
  params, spec, state = prefilled_pair(target, drafter, policy, batch=batch, costs=COSTS)
  shape = 'f32[' + ','.join(map(str, state.cache.keys[0].shape)) + ']'
  if policy != Plain():
    assert state.cache.keys[0].shape == state.drafter.cache.keys[0].shape
  hlo = loop_listing(params, state, spec)
  assert re.search(rf'= {re.escape(shape)}\S* dynamic-update-slice', hlo)
  assert copies_in_loop(hlo, shape) == []


@pytest.mark.optimised
def test_rope_angles_are_computed_once_a_pass(target, drafter):
  """Not in every layer for every head, as where XLA fuses them into their readers."""
  params, spec, state = prefilled_pair(target, drafter, Chain(1), batch=1, costs=COSTS)
  assert target.config.num_layers > 1
  hlo = loop_listing(params, state, spec)
  assert len(re.findall(r'\bcosine\(', hlo)) == 2  # the target's pass, and the drafter's over what was committed


@pytest.mark.optimised
def test_cache_copy_detector_sees_a_copy():
  """A loop that needs the old array after writing a new one: XLA must copy."""

  def body(x):
    written = jax.lax.dynamic_update_slice(x, x[:1, :1, :1] + 1, (0, 0, 1))
    return written + x[::-1] * written[0, 0, 1]

  loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0, 0, 0] < 3, body, x))
  hlo = loop.lower(jnp.zeros((2, 3, 7))).compile().as_text()
  assert copies_in_loop(hlo, 'f32[2,3,7]')


# Bad input: one line of the contract each, before anything is traced.

TOO_LONG = [[1] * 500]
BAD_REQUESTS = [
  ({'prompts': 'Why?'}, "prompts`.*'Why\\?'"),
  ({'prompts': []}, r'prompts`.*\[\]'),
  ({'prompts': [[1], []]}, 'Prompt 1 .*one token'),
  ({'prompts': ['a', '']}, 'Prompt 1 .*one character'),
  ({'prompts': [[1], [2, 97]]}, r'Prompt 1 .*96.*\[97\]'),
  ({'prompts': [[-1]]}, r'Prompt 0 .*\[-1\]'),
  ({'prompts': TOO_LONG}, 'Prompt 0 .*512.* 500 .*max_new_tokens=16'),
  ({'temperature': -0.1}, '`temperature`.* -0.1'),
  ({'temperature': float('nan')}, '`temperature`.* nan'),
  ({'temperature': float('inf')}, '`temperature`.* inf'),
  ({'top_p': 0.0}, '`top_p`.* 0.0'),
  ({'top_p': 1.5}, '`top_p`.* 1.5'),
  ({'top_p': float('nan')}, '`top_p`.* nan'),
  ({'top_k': -1}, '`top_k`.*>= 0.* -1'),
  ({'prompts': None}, 'prompts`.*None'),
  ({'prompts': [1, 2]}, 'Prompt 0 .*list of integers.* 1'),
  ({'prompts': np.array([1, 2])}, 'Prompt 0 .*list of integers.* 1'),
  ({'prompts': jnp.array([1, 2])}, 'Prompt 0 .*list of integers.* 1'),
  ({'prompts': np.array([[1.5]])}, 'Prompt 0 .* 1.5'),
  ({'prompts': [np.array([[1], [2]])]}, r'Prompt 0 .* \[1\]'),
  ({'prompts': [[1], [2.5]]}, 'Prompt 1 .* 2.5'),
  ({'prompts': [b'Why?']}, "Prompt 0 .*b'Why.'"),
  ({'prompts': {'a': 1}}, "prompts`.*{'a': 1}"),
  ({'prompts': [[1] * 300], 'max_new_tokens': np.uint8(250)}, '512.* 300 .*max_new_tokens=250'),
  ({'temperature': 10**400}, '`temperature`.* 1000'),
  ({'policy': np.array([1, 2])}, r'policy`.*array\(\[1, 2\]\)'),
  ({'eos_ids': 3}, 'eos_ids.*list of integers.* 3'),
  ({'policy': 'tree'}, "policy`.*'plain'.*'tree'"),
  ({'policy': None}, 'policy`.*None'),
  ({'policy': Chain}, 'policy`.*trees.Chain'),
  ({'target': 'smollm2'}, "target`.*load_target.*'smollm2'"),
  ({'drafter': 'smollm2'}, "drafter`.*load_drafter.*'smollm2'"),
  ({'drafter': None}, 'dynamic.*needs a drafter'),
  ({'drafter': None, 'policy': Adaptive(2, 2, 3, 6)}, 'adaptive.*needs a drafter'),
  ({'max_new_tokens': 0}, '`max_new_tokens`.*at least 1.* 0'),
  ({'max_new_tokens': -5, 'batch_size': 2}, '`max_new_tokens`.* -5'),
  ({'row_ids': [1, 2, 3]}, '`row_ids`.* 4 .* 3'),
  ({'seed': 2**31}, '`seed`.*32 bits.* 2147483648'),
  ({'temperature': '0.5'}, "`temperature`.* '0.5'"),
  ({'temperature': None}, '`temperature`.* None'),
  ({'top_p': [0.5]}, r'`top_p`.* \[0.5\]'),
  ({'temperature': 1e38}, r'`temperature`.* 1e\+06.* 1e\+38'),
  ({'top_p': 1e-40}, '`top_p`.* 1.18e-38.* 1e-40'),
  ({'top_k': 2**31}, '`top_k`.*32 bits.* 2147483648'),
  ({'top_k': 1.5}, '`top_k`.* 1.5'),
  ({'max_new_tokens': 2.5}, '`max_new_tokens`.* 2.5'),
  ({'row_ids': [1, 2, 3, 2**40]}, 'row_ids.*32 bits.* 1099511627776'),
  ({'eos_ids': np.array([[1], [2]])}, r'eos_ids.* \[1\]'),
  ({'eos_ids': np.array([1, 97])}, r'eos_ids.* \[97\]'),
  ({'eos_ids': [2**33]}, 'eos_ids.*32 bits.* 8589934592'),
  ({'eos_ids': [1, 97, -1]}, r'eos_ids.* 96 .* \[97, -1\]'),
]


@pytest.mark.parametrize(('change', 'match'), BAD_REQUESTS, ids=lambda x: '' if isinstance(x, str) else str(x)[:40])
def test_generate_refuses_bad_requests_before_compiling(target, drafter, plain, change, match):
  request = {'target': target, 'drafter': drafter, 'prompts': PROMPTS, 'max_new_tokens': 16, 'policy': SMALL} | change
  with compile_events() as events, pytest.raises(ValueError, match=match):
    decode.generate(**request)
  assert events == []


@pytest.mark.parametrize('batch', [0, 1.5, 'a'])
def test_build_refuses_bad_batch(target, drafter, batch):
  with pytest.raises(ValueError, match=rf'`batch`.* {batch!r}'):
    decode.build(target, drafter, batch=batch)


def prefilled(target, tokens_BL):
  params, spec = decode.build(target, None)
  length_B = np.full(len(tokens_BL), tokens_BL.shape[1])
  return decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=NUM_NEW)


def cache_bytes(num_slots):
  return 2 * 2 * 2 * num_slots * 8 * 4 + 4  # layers, keys and values, heads, slots, head size, float32; length


@pytest.mark.parametrize(
  ('ask', 'num_slots'),
  [
    (lambda target: decode.generate(target, None, [[1]] * 5, max_new_tokens=NUM_NEW), 96),
    (lambda target: [*decode.generate_each(target, None, [[1]] * 9, batch_size=5, max_new_tokens=NUM_NEW)], 64),
    (lambda target: prefilled(target, np.ones((5, 16), np.int32)), 96),
  ],
  ids=['one batch', 'refilled', 'pure core'],
)
def test_cache_larger_than_memory_is_refused_with_its_bytes(target, monkeypatch, ask, num_slots):
  monkeypatch.setattr('eagle_jax.device.memory_bytes', lambda: 4 * cache_bytes(num_slots))
  with pytest.raises(ValueError, match=f'cache of 5 .*got {5 * cache_bytes(num_slots)} bytes'):
    ask(target)


def test_cache_that_just_fits_is_accepted(target, monkeypatch):
  network = TransformerTarget(target.config)
  monkeypatch.setattr('eagle_jax.device.memory_bytes', lambda: 4 * cache_bytes(96))
  require_memory(network, 4, 96)
  monkeypatch.setattr('eagle_jax.device.memory_bytes', lambda: None)
  require_memory(network, 10**9, 96)


def test_bad_request_is_refused_before_the_drafter_is_reduced(target, drafter):
  """Rows of the head are gathered and rounded, which is compiled too."""
  few = drafter.first_ids(12).quantised()
  with compile_events() as events, pytest.raises(ValueError, match='`temperature`.* -1'):
    decode.generate(target, few, PROMPTS, policy=SMALL, temperature=-1)
  assert events == []


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'tokens_BL': [1, 2, 3]}, r'`tokens_BL`.* 2 .*int64\[3\]'),
    ({'tokens_BL': np.ones((2, 3))}, r'`tokens_BL`.*float64\[2, 3\]'),
    ({'tokens_BL': [[1, 2, 97], [1, 97, 97]]}, r'Prompt 0 .* 96 .* \[97\]'),
    ({'tokens_BL': [[1, 2, 2**32], [1, 0, 0]]}, r'Prompt 0 .* \[4294967296\]'),
    ({'length_B': [1.0, 2.0]}, r'`length_B`.*float64\[2\]'),
    ({'length_B': [3, 0]}, r'`length_B`.* 3.* \[0\]'),
    ({'length_B': jnp.array([4, 1])}, r'`length_B`.* \[4\]'),
    ({'length_B': [3]}, '`length_B`.* 2 .* 1'),
    ({'max_new_tokens': 0}, '`max_new_tokens`.* 0'),
    ({'max_new_tokens': [16]}, r'`max_new_tokens`.* \[16\]'),
    ({'max_new_tokens': 510}, 'Prompt 0 .*512.* 3 .*max_new_tokens=510'),
    ({'tokens_BL': np.zeros((0, 3), int), 'length_B': np.zeros(0, int)}, r'`tokens_BL`.*\(0, 3\)'),
    ({'temperature': -1.0}, '`temperature`.* -1.0'),
    ({'temperature': np.array([0.5, -1.0])}, '`temperature`.* -1.0'),
    ({'temperature': np.array([0.5, np.nan])}, '`temperature`.* nan'),
    ({'top_k': [1, 2, 3]}, r'`top_k`.* 2 .*\(3,\)'),
    ({'top_p': 0}, '`top_p`.* 0'),
    ({'top_k': -1}, '`top_k`.* -1'),
    ({'row_ids': [1]}, r'`row_ids`.* 2 .*\(1,\)'),
    ({'eos_ids': [97]}, r'eos_ids.* \[97\]'),
  ],
  ids=lambda x: '' if isinstance(x, str) else str(x)[:40],
)
def test_prefill_refuses_bad_input_before_compiling(target, drafter, change, match):
  params, spec = decode.build(target, drafter, policy=SMALL)
  request = {'tokens_BL': [[1, 2, 3], [1, 97, 97]], 'length_B': [3, 1], 'max_new_tokens': 16} | change
  with compile_events() as events, pytest.raises(ValueError, match=match):
    decode.prefill(params, **request, spec=spec)
  assert events == []


def test_each_sequence_may_have_its_own_sampling(target, drafter):
  params, spec = decode.build(target, drafter, policy=SMALL)
  ways = {'temperature': [0.0, 1.0, 0.7], 'top_k': [0, 5, 0], 'top_p': [1.0, 1.0, 0.8], 'seed': [3, 4, 5]}
  tokens_BL, length_B = [[1, 2, 3]] * 3, [3, 3, 3]
  of_rows = {name: np.array(values) for name, values in ways.items()}
  state = decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=12, eos_ids=(), **of_rows)
  tokens_BN, *_ = decode.result(decode.decode_loop(params, state, spec=spec))
  for row, tokens in enumerate(tokens_BN[:, :12].tolist()):
    how = {name: values[row] for name, values in ways.items()}
    prompts, row_ids = [[1, 2, 3]] * len(PROMPTS), [row] * len(PROMPTS)  # plain decoding of so many is compiled already
    plain = decode.generate(target, None, prompts, max_new_tokens=NUM_NEW, eos_ids=(), row_ids=row_ids, **how).tokens
    assert tokens == plain[0][:12]


@pytest.mark.parametrize(
  ('name', 'shape'), [('temperature', (3,)), ('seed', (2, 1)), ('row_ids', (3,)), ('row_ids', ())]
)
def test_shapes_of_traced_values_are_checked(target, drafter, name, shape):
  params, spec = decode.build(target, drafter, policy=SMALL)

  def user(values):
    return decode.prefill(params, [[1, 2], [3, 4]], [2, 2], spec=spec, max_new_tokens=16, **{name: values})

  jax.eval_shape(user, jnp.zeros(2, jnp.int32))
  with pytest.raises(ValueError, match=rf'`{name}`.* 2 prompts.*{re.escape(str(shape))}'):
    jax.eval_shape(user, jnp.zeros(shape, jnp.int32))


@pytest.mark.parametrize(
  ('prompts', 'match'), [([[1, 2], [1.7]], 'Prompt 1 .*1.7'), (['ab'], "Prompt 0 .*'ab'"), ([1, 2], 'Prompt 0 .* 1')]
)
def test_only_integers_are_padded(prompts, match):
  with pytest.raises(ValueError, match=match):
    decode.pad_prompts(prompts, 2)


def test_traced_values_are_not_checked(target, drafter):
  params, spec = decode.build(target, drafter, policy=SMALL)

  def user(tokens_BL, length_B, number, integer):
    sampling = {'temperature': number, 'top_p': number, 'top_k': integer, 'seed': integer}
    how = {'row_ids': integer[None], 'eos_ids': [integer], **sampling}
    return decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=500, **how)

  jax.eval_shape(user, jnp.array([[500]], jnp.uint16), jnp.array([9]), -1.0, jnp.int32(-1))
  with pytest.raises(ValueError, match='`tokens_BL`.*float32'):
    jax.eval_shape(user, jnp.array([[1.0]]), jnp.array([1]), 1.0, jnp.int32(1))


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'prompt': []}, 'Prompt 0 .*one token'),
    ({'prompt': ['Why?']}, "Prompt 0 .* 'Why.'"),
    ({'prompt': [97]}, r'Prompt 0 .* \[97\]'),
    ({'prompt': TOO_LONG[0]}, '512.* 500 '),
    ({'temperature': -1.0}, '`temperature`.* -1.0'),
    ({'policy': 'tree'}, "policy`.*'tree'"),
    ({'row_ids': [1, 2]}, '`row_ids`.* 1 .* 2'),
    ({'max_new_tokens': 0}, '`max_new_tokens`.* 0'),
  ],
  ids=lambda x: '' if isinstance(x, str) else str(x)[:40],
)
def test_stream_refuses_bad_requests_at_the_call(target, drafter, plain, change, match):
  request = {'prompt': PROMPTS[0], 'max_new_tokens': 16, 'policy': SMALL} | change
  with pytest.raises(ValueError, match=match):
    decode.stream(target, drafter, **request)


def test_stream_compiles_before_the_first_token_only_what_it_runs(target, drafter, monkeypatch):
  monkeypatch.setattr(GENERATE, '_STEP', Program(decode.decode_step))
  assert len(list(decode.stream(target, drafter, PROMPTS[0], max_new_tokens=1, policy=SMALL))) == 1
  assert not GENERATE._STEP._compiled
  chunks = decode.stream(target, drafter, PROMPTS[0], max_new_tokens=NUM_NEW, policy=SMALL, eos_ids=())
  assert len(next(chunks).tokens) == 1
  assert len(GENERATE._STEP._compiled) == 1
  assert sum(len(chunk.tokens) for chunk in chunks) == NUM_NEW - 1


def test_text_prompts_without_a_tokenizer_are_refused(drafter):
  with pytest.raises(ValueError, match='no tokenizer'):
    decode.generate(tiny.target(), drafter, ['Why?'])


@pytest.mark.parametrize('policy', [SMALL, 'plain', 'auto'])
@pytest.mark.parametrize(('field', 'size'), [('width', 48), ('vocab_size', 96)])
def test_drafter_of_another_target_is_refused(target, field, size, policy):
  fields = {'vocab_size': 97, 'width': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 48}
  other = tiny.drafter(DrafterConfig(**fields | {field: size}))
  with pytest.raises(ValueError, match=f'{field} {size} instead of'):
    decode.generate(target, other, PROMPTS, policy=policy)


def test_a_parameter_of_another_shape_is_refused(target):
  other = dataclasses.replace(target, params={**target.params, 'norm': {'scale': jnp.ones(31)}})
  with pytest.raises(ValueError, match=r'norm/scale .*\(32,\).*\(31,\)'):
    decode.generate(other, None, [[1]], max_new_tokens=2)


@pytest.mark.parametrize('drafter_dtype', [jnp.bfloat16, jnp.float32])
def test_bfloat16_target_takes_a_drafter_of_either_dtype(drafter_dtype):
  def cast(model, dtype):
    return dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(dtype), model.params))

  target, drafter = cast(tiny.target(), jnp.bfloat16), cast(tiny.drafter(), drafter_dtype)
  for policy, prompts in ((SMALL, PROMPTS[:1]), ('plain', PROMPTS[:2])):
    out = decode.generate(target, drafter, prompts, max_new_tokens=8, policy=policy, eos_ids=())
    assert [len(row) for row in out.tokens] == [8] * len(prompts)


def test_draft_vocabulary_drafts_only_its_ids_and_changes_no_text(target, drafter, plain):
  ids = jnp.array([3, 7, 20, 21, 40, 41, 60, 96], jnp.int32)
  small = drafter.with_ids(jnp.append(ids, 50)).first_ids(8)
  assert small.params['ids'].tolist() == ids.tolist()
  assert (small.config.draft_vocab_size, drafter.first_ids(5).params['ids'].tolist()) == (8, [*range(5)])
  assert small.first_ids(8) is small
  out = decode.generate(target, small, PROMPTS, max_new_tokens=NUM_NEW, policy=SMALL, **SAMPLINGS[1])
  assert out.tokens == plain[1].tokens
  params, spec = decode.build(target, small, policy=SMALL)
  prompt_BL, length_B = decode.pad_prompts(PROMPTS, 7)
  state = decode.prefill(params, prompt_BL, length_B, spec=spec, max_new_tokens=NUM_NEW)

  @jax.jit
  def propose(params, state):
    context = tiny.context(SMALL, batch=len(PROMPTS))
    return spec.drafter.propose(params, state.drafter, state.root, SMALL, context)

  candidates = propose(params.drafter, state)
  assert set(candidates.token[:, 1:].ravel().tolist()) <= set(ids.tolist())
  with pytest.raises(ValueError, match='8 children.* 10'):
    decode.build(target, small, policy=DynamicTree())


def test_mixed_texts_and_ids_are_refused(target, drafter):
  with pytest.raises(ValueError, match='`prompts`.*Why'):
    decode.generate(target, drafter, ['Why?', [1, 2]])
