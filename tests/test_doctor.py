"""The doctor names what is wrong: faults are planted in pairs that accept nearly everything without them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tiny
import tiny_twin
from eagle_jax import cache as kv_cache
from eagle_jax import hub
from eagle_jax.bench import diagnosis, doctor
from eagle_jax.bench.diagnosis import Text, diagnose
from eagle_jax.bench.doctor import Plan, describe, examine
from eagle_jax.config import Eagle3Config
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import generate
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.model import ModelConfig
from eagle_jax.evaluate.guesses import Agreement, guess, read_text
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Chain, DynamicTree

PLAN = Plan(tree=DynamicTree(3, 3, 3, 8), policies=(), max_new_tokens=48)
KINDS = {'rope', 'taps', 'inputs', 'norms', 'template', 'vocabulary', 'untrained', 'revision', 'slow', 'not_equal'}


@dataclasses.dataclass(frozen=True)
class Chat:
  """A tokenizer of characters, whose template puts '!' before a prompt and '?' behind it."""

  has_chat_template = True

  def encode(self, text):
    return [ord(letter) - 32 for letter in text]

  def encode_prompt(self, text):
    return self.encode(f'!{text}?')

  def decode(self, ids):
    return ''.join(chr(32 + number) for number in ids)


QUESTIONS = ['why is it so', 'name a town', 'what now', 'count to ten', 'who are you']


@pytest.fixture(scope='module')
def target() -> Target:
  return dataclasses.replace(tiny_twin.target(), tokenizer=Chat())


@pytest.fixture(scope='module')
def twin(target) -> Drafter:
  return tiny_twin.drafter_of(target, noise=0.0)


def text_of(target: Target, *, temperature: float = 0.0) -> Text:
  """Prompts of tokens, and the target's answers."""
  options = {'max_new_tokens': 40, 'policy': 'plain', 'temperature': temperature}
  answers = generate(target, None, tiny_twin.PROMPTS, **options).tokens
  parts = [part for pair in zip(tiny_twin.PROMPTS, answers, strict=True) for part in pair]
  token = [number for part in parts for number in part]
  return Text(token, np.concatenate([np.full(len(part), number % 2 == 1) for number, part in enumerate(parts)]))


@pytest.fixture(scope='module')
def text(target) -> Text:
  return text_of(target)


def kinds(found) -> list[str]:
  return [one.kind for one in found]


def test_a_healthy_pair_has_no_finding(target, twin, text):
  numbers, found = diagnose(target, twin, text, None)
  assert found == []
  assert numbers['as_it_is']['first'] > 0.9
  assert numbers['coverage'] == 1


def _swapped(twin):
  fc = twin.params['fc']['weight']
  halves = jnp.concatenate([fc[:, tiny_twin.WIDTH :], fc[:, : tiny_twin.WIDTH]], axis=1)
  return Drafter(twin.config, twin.params | {'fc': {'weight': halves}})


def _rare(twin):
  return twin.with_ids(np.arange(40, 60))


def _random(twin):
  return tiny.drafter(dataclasses.replace(twin.config, name='random'))


def _turned(twin):
  return Drafter(dataclasses.replace(twin.config, rope_theta=7.0), twin.params)


@pytest.mark.parametrize(
  ('kind', 'plant'), [('rope', _turned), ('inputs', _swapped), ('vocabulary', _rare), ('untrained', _random)]
)
def test_a_fault_of_the_drafter_is_named(target, twin, text, kind, plant):
  _, found = diagnose(target, plant(twin), text, None)
  assert kinds(found) == [kind]


def test_a_drafter_in_8_bits_is_read_as_it_is(target, twin, text):
  numbers, found = diagnose(target, twin.quantised(), text, None)
  assert found == []
  assert numbers['as_it_is']['first'] > 0.8
  assert {one['kind'] for one in numbers['repairs']} == {'norms'}


def test_a_norm_that_the_head_lacks_is_named(twin):
  """The target's final norm is more than a scale; the drafter's outputs are features before it."""
  target = tiny_twin.target()
  scale_D = jnp.exp(jax.random.normal(jax.random.key(3), (tiny_twin.WIDTH,)))
  target = Target(target.config, target.params | {'norm': {'scale': scale_D}})
  _, found = diagnose(target, tiny_twin.drafter_of(target, noise=0.0), text_of(target), None)
  assert kinds(found) == ['norms']
  assert 'final norm behind the drafter' in found[0].evidence


def test_another_revision_of_the_target_is_named(target, twin):
  """The target was trained further."""

  def moved(x):
    return x + 0.35 * x.std() * jax.random.normal(jax.random.key(6), x.shape)

  other = Target(target.config, target.params | {'layer_0': jax.tree.map(moved, target.params['layer_0'])})
  _, found = diagnose(other, twin, text_of(other), None)
  assert kinds(found) == ['revision']


@pytest.fixture(scope='module')
def eagle3_target() -> Target:
  target = tiny.target(dataclasses.replace(tiny.TARGET, num_layers=4), seed=2)
  target.params['embed']['weight'] *= 30
  target.params['head']['weight'] *= 40
  return target


@pytest.fixture(scope='module')
def eagle3_text(eagle3_target) -> Text:
  return text_of(eagle3_target, temperature=1.0)


@pytest.fixture(scope='module')
def eagle3(eagle3_target, eagle3_text) -> Drafter:
  """A head that was trained along the text, on the inputs of layers 1, 2 and 3 and on its own outputs."""
  sizes = {'vocab_size': 97, 'width': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'ffn_width': 64}
  config = Eagle3Config(**sizes, target_width=32, taps=(1, 2, 3), norm_eps=1e-5)
  network = Eagle3(config)
  read = read_text(eagle3_target, eagle3_text.token, layers=(1, 2, 3), max_tokens=len(eagle3_text.token))
  taps, length = read.taps((1, 2, 3)), read.token.shape[1]
  shared = {'embed': eagle3_target.params['embed']['weight'], 'ids': jnp.arange(97)}
  choice_L = jnp.roll(jnp.asarray(read.choice), -1)
  counts_L = jnp.arange(length) < read.num_tokens - 2
  params = network.init_params(jax.random.key(0)) | {'head': {'weight': jax.random.normal(jax.random.key(1), (97, 32))}}
  optimizer = optax.adam(optax.linear_schedule(1e-2, 1e-3, 120))

  def loss(params):
    given = params | shared | {'head': params['head']['weight']}
    position_BL, empty = (
      jnp.arange(length)[None],
      kv_cache.init(config, num_layers=1, batch=1, num_slots=0, dtype=jnp.float32),
    )
    next_BL, causal = jnp.roll(read.token, -1, axis=1), jnp.tri(length, dtype=bool)[None]
    out_DBL, memory = network.forward(given, next_BL, network.fuse_taps(given, taps), position_BL, causal, empty)
    before = jnp.concatenate([jnp.tri(length, k=-1, dtype=bool), jnp.eye(length, dtype=bool)], axis=1)[None]
    own_DBL = jnp.roll(out_DBL, 1, axis=2)
    second_DBL, _ = network.forward(given, next_BL, own_DBL, position_BL, before, empty, memory)
    total = 0.0
    for out in (out_DBL, second_DBL):
      logits_LU = (given['head'] @ network.pre_head(given, out[:, 0])).T
      each_L = optax.softmax_cross_entropy_with_integer_labels(logits_LU, choice_L)
      total += jnp.where(counts_L, each_L, 0).mean()
    return total

  @jax.jit
  def train(params):
    def step(carry, _):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), length=120)[0][0]

  with jax.numpy_dtype_promotion('standard'):
    return Drafter(config, train(params))


@pytest.mark.parametrize(
  ('kind', 'changes', 'says'),
  [
    (None, {}, ''),
    ('taps', {'taps': (2, 3, 4)}, 'earlier, [1, 2, 3]'),
    ('norms', {'norm_before_residual': True}, 'norm_before_residual off'),
    ('norms', {'norm_output': True}, 'second choices'),
  ],
  ids=str,
)
def test_a_fault_of_an_eagle3_head_is_named(eagle3_target, eagle3, eagle3_text, kind, changes, says):
  planted = Drafter(dataclasses.replace(eagle3.config, **changes), eagle3.params)
  _, found = diagnose(eagle3_target, planted, eagle3_text, None)
  assert kinds(found) == ([kind] if kind else [])
  assert all(says in one.evidence for one in found)


@pytest.mark.parametrize('kind', ['eagle2', 'eagle3'])
def test_guesses_are_what_decoding_drafts(target, text, eagle3_target, eagle3, kind):
  """The chain of every step is the guess at its root, and after its first token the guess at the next place."""
  pairs = {'eagle2': (target, tiny_twin.drafter_of(target, noise=0.5)), 'eagle3': (eagle3_target, eagle3)}
  model, drafter = pairs[kind]
  # As in an examination, which shares these programs.
  how = {'layers': diagnosis.layers_to_read(model, drafter), 'max_tokens': len(text.token)}
  prompt, policy = tiny_twin.PROMPTS[0], Chain(2)
  out = generate(model, drafter, [prompt], max_new_tokens=48, policy=policy, trace=True)
  tokens, taps = prompt + out.tokens[0], drafter.config.tapped_layers(model.config.num_layers)
  params, spec = build(model, drafter, policy=policy)
  assert len(out.trace[0]) < 47  # something was accepted
  for cycle in out.trace[0]:
    root = cycle.text_length - 1  # its position
    _, *drafted = cycle.token.tolist()
    read = read_text(model, tokens[: root + 1] + drafted[:1], **how)
    first_L, second_L = np.asarray(guess(params.drafter, read.token, read.taps(taps), network=spec.drafter))[:, 0]
    assert [first_L[root - 1], second_L[root]] == drafted


@pytest.fixture(scope='module')
def report(target, twin):
  return examine(target, twin, QUESTIONS, plan=PLAN)


def test_an_examination_of_a_healthy_pair(report):
  assert report['ok']
  assert report['findings'] == report['warnings'] == []
  assert report['texts'] == {'compared': 6, 'equal': 6, 'near_ties': 0}
  greedy, sampled = report['acceptance']
  assert greedy['tau'] > 2.5
  assert sampled['tau'] > 2.5
  assert greedy['first_child'] > 0.8
  assert len(greedy['by_depth']) == 3
  assert greedy['by_rank'][0] > greedy['by_rank'][1]
  assert {one['kind'] for one in report['recorded']['repairs']} == {'inputs', 'norms', 'template'}
  json.dumps(report, allow_nan=False)


def test_an_examination_reads_as_a_page(report):
  page = describe(report)
  assert page.splitlines()[0].startswith('target + drafter (EAGLE-1/2) on ')
  assert "6 of 6 texts equal plain decoding's, 0 differ by a near tie" in page
  assert f'| temperature 0 | {report["acceptance"][0]["tau"]:.2f} | ' in page
  assert '3.7 to 5.4' in page
  assert page.endswith('ok')


def test_a_template_that_the_drafter_never_saw_is_named(target, twin):
  """Its own embeddings of the template's two tokens were never trained, and draw all attention."""
  embed_VD = target.params['embed']['weight']
  template = jnp.asarray(Chat().encode('!?'))
  embed_VD = embed_VD.at[template].multiply(-40)
  config = dataclasses.replace(twin.config, own_embedding=True)
  planted = Drafter(config, twin.params | {'embed': {'weight': embed_VD}})
  report = examine(target, planted, QUESTIONS, plan=PLAN)
  assert [one['kind'] for one in report['findings']] == ['template']
  assert not report['ok']


def test_a_text_that_differs_is_named(target, twin, monkeypatch):
  def forged(target, drafter, *args, **options):
    out = generate(target, drafter, *args, **options)
    if drafter is not None:
      out.tokens[0][20] = (out.tokens[0][20] + 1) % 97
    return out

  monkeypatch.setattr(doctor, 'generate', forged)
  report = examine(target, twin, QUESTIONS, plan=PLAN)
  assert [one['kind'] for one in report['findings']] == ['not_equal']
  assert report['texts']['equal'] == 0


def the_target_itself(target):
  config = ModelConfig(target.config, target.config.vocab_size, target.config.width)
  ids_U = jnp.arange(target.config.vocab_size)
  return Drafter(config, {'model': target.params, 'head': target.head_VD, 'ids': ids_U})


@pytest.mark.parametrize(
  ('make', 'title'),
  [(lambda target: hub.load_drafter('ngram', target), 'n-gram'), (the_target_itself, 'a smaller model')],
)
def test_a_drafter_that_is_no_head_is_examined_too(target, make, title):
  report = examine(target, make(target), QUESTIONS, plan=PLAN)
  assert report['recorded'] is None
  assert report['findings'] == []
  assert title in describe(report)


def rate(policy: str, tok_per_s: float) -> dict:
  return {'policy': policy, 'tau': 2.0, 'step_ms': 1.0, 'tok_per_s': tok_per_s}


@pytest.mark.parametrize(('fastest', 'expected'), [(30.0, []), (19.0, ['slow'])])
def test_a_drafter_that_costs_more_than_it_gains_is_named(fastest, expected):
  speed = {'plain': rate('plain', 20.0), 'policies': [rate('chain', 10.0), rate('tree', fastest)]}
  assert kinds(doctor.find_slow(speed)) == expected


def test_policies_are_timed(target, twin, monkeypatch):
  monkeypatch.setattr(doctor, 'bytes_per_s', lambda: 1e9)
  plan = dataclasses.replace(PLAN, policies=(PLAN.tree,))
  asked = doctor.choose_prompts(target, doctor.read_prompts(target, QUESTIONS), max_new_tokens=PLAN.max_new_tokens)
  speed = doctor.time_policies(target, twin, asked, plan)
  assert speed['plain']['policy'] == 'plain'
  assert speed['plain']['tau'] == 1
  assert [one['policy'] for one in speed['policies']] == [PLAN.tree.describe()]
  weights = sum(x.size for name, x in target.params.items() if name != 'embed' for x in jax.tree.leaves(x))
  assert speed['floor_ms'] > 1000 * 4 * weights / 1e9


@pytest.mark.parametrize(
  ('changes', 'kind', 'evidence'),
  [
    ({'rope_theta': 5000.0}, 'rope', '5000 in the drafter and 10000'),
    ({'rope_slowdown': (1.0, 1.0, 2.0, 2.0)}, 'rope', 'scaling'),
    ({'norm_eps': 1e-3}, 'norms', '0.001 in the drafter and 1e-05'),
  ],
)
def test_settings_that_contradict_the_target_s_are_warnings(target, twin, changes, kind, evidence):
  (found,) = diagnosis.contradictions(
    target, Drafter(dataclasses.replace(twin.config, **changes), twin.params), {'coverage': 1.0}
  )
  assert found.kind == kind
  assert evidence in found.evidence


def test_a_head_that_cannot_read_its_own_outputs_is_named():
  base = Agreement(first=0.6, answers=0.6, second=0.1, num_second=100)
  sizes = {'coverage': 1.0, 'commonest': 0.1, 'num_tokens': 500}
  assert kinds(diagnosis.find_cause(base, [], **sizes)) == ['untrained']
  assert diagnosis.find_cause(base._replace(second=0.4), [], **sizes) == []
  assert diagnosis.find_cause(base._replace(second=math.nan, num_second=0), [], **sizes) == []


@pytest.mark.parametrize(
  ('given', 'complaint'),
  [
    ({'drafter': None}, 'got None'),
    ({'drafter': 'other'}, 'width 64 instead of 32'),
    ({'prompts': QUESTIONS[:2]}, 'got 2'),
    ({'max_new_tokens': 510}, 'got 0'),
  ],
)
def test_what_cannot_be_examined_is_refused(target, twin, given, complaint):
  other = dataclasses.replace(twin.config, width=64, name='other')
  drafters = {'other': Drafter(other, twin.params), None: None}
  drafter = drafters[given['drafter']] if 'drafter' in given else twin
  plan = dataclasses.replace(PLAN, max_new_tokens=given.get('max_new_tokens', 16))
  with pytest.raises(ValueError, match=complaint):
    examine(target, drafter, given.get('prompts', QUESTIONS), plan=plan)
