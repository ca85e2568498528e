"""Name the cause of a drafter's low acceptance by trying what would mend it.

A head that is read in a slightly wrong way still loads, and the text stays the target's: only acceptance falls. Each
`Repair` reads the same weights in another way; the one after which the drafter's first choices are right much more
often says what is wrong. Only the drafter runs, over the target's activations of one text.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.decode.build import build
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.evaluate.calibration import or_none
from eagle_jax.evaluate.guesses import Agreement, TextPass, agreement, read_text
from eagle_jax.models.layers import norm_of
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Chain
from eagle_jax.progress import progress_bar
from eagle_jax.sharding import mesh_of, use_mesh

USUAL_BASE = 10_000.0  # of RoPE where a config does not name one
SECOND = 20  # places with a right first choice, at least, for a share at depth 2 to say anything
LOW = 0.35  # a trained head's first choice is right more often
LIFT = 0.1  # of the share of right first choices: a repair that gains as much names the cause
COLLAPSE = 0.5  # a head whose second choice is right in less than this part of the first's share misreads its outputs
COVERED = 0.9  # of the target's choices; a draft vocabulary with fewer of them is worth a warning

log = logging.getLogger('eagle_jax')


class Finding(NamedTuple):
  """Something that is wrong, or a warning."""

  kind: str  # rope, taps, inputs, norms, template, vocabulary, untrained, revision, slow or not_equal
  evidence: str
  advice: str

  def report(self) -> dict[str, str]:
    """Convert for JSON."""
    return {'kind': self.kind, 'evidence': self.evidence, 'try': self.advice}


class Text(NamedTuple):
  """Prompts and answers, one after the other."""

  token: list[int]
  is_answer: np.ndarray  # [n] bool


class Repair(NamedTuple):
  """The same weights, read in another way."""

  kind: str  # of the finding
  change: str  # as in "0.61 with the target's RoPE"
  advice: str
  drafter: Drafter
  norm: str | None = None  # where the target's final norm belongs: see `Renormed`


@dataclasses.dataclass(frozen=True)
class Renormed(Eagle):
  """An EAGLE-1/2 head whose outputs are features before the target's final norm, which its parameters hold."""

  target: TargetConfig | None = None
  reads_normed: bool = True  # whether it reads normed features all the same

  def pre_head(self, params, out_DR: jax.Array) -> jax.Array:
    out_DR = out_DR[: self.config.width]
    return norm_of(self.target).apply({'params': params['target_norm']}, out_DR)  # type: ignore[return-value]

  def next_feature(self, params, out_DBW: jax.Array) -> jax.Array:
    out_DBW = super().next_feature(params, out_DBW)
    if not self.reads_normed:
      return out_DBW
    return self.pre_head(params, out_DBW.reshape(out_DBW.shape[0], -1)).reshape(out_DBW.shape)


def layers_to_read(target: Target, drafter: Drafter) -> set[int]:
  """List the layers of the target whose inputs the drafter or one of its repairs reads."""
  num_layers = target.config.num_layers
  taps = drafter.config.tapped_layers(num_layers)
  return {num_layers} | {tap + shift for tap in taps for shift in (-1, 0, 1) if 0 <= tap + shift <= num_layers}


def measure(target: Target, repair: Repair, read: TextPass, is_answer_n: np.ndarray) -> Agreement:
  """Compare the first choices of a drafter, read in a way, with the target's; see `guesses.agreement`."""
  params, spec = build(target, repair.drafter, policy=Chain(1))
  head, network, config = params.drafter, spec.drafter, repair.drafter.config
  taps = read.taps(config.tapped_layers(target.config.num_layers))
  if repair.norm:
    reads_normed = repair.norm == 'after'
    head = head | {'target_norm': target.params['norm']}
    network = Renormed(config, network.dtype, target.config, reads_normed)  # type: ignore[attr-defined]
    taps = taps if reads_normed else taps._replace(feature=read.residual[target.config.num_layers])
  with use_mesh(mesh_of(target.params)):
    return agreement(head, network, read, taps, is_answer_n)  # type: ignore[arg-type]


def repairs(target: Target, drafter: Drafter) -> Iterator[Repair]:
  """Yield all other ways to read this drafter that are known to be mistaken for its own."""
  yield from _of_rope(target, drafter)
  yield from _of_inputs(target, drafter)
  yield from _of_taps(target, drafter)
  yield from _of_norms(drafter)
  yield from _of_vocabulary(drafter)


def _with(drafter: Drafter, params: dict[str, Any] | None = None, /, **fields: Any) -> Drafter:
  """Return the drafter with other fields of its config, and other parameters."""
  return Drafter(dataclasses.replace(drafter.config, **fields), drafter.params if params is None else params)


def rope_of(config: Any) -> dict[str, Any]:
  """Return the fields that RoPE's angles depend on."""
  return {name: getattr(config, name) for name in ('rope_theta', 'rope_slowdown', 'rope_factor')}


def _of_rope(target: Target, drafter: Drafter) -> Iterator[Repair]:
  own, advice = rope_of(drafter.config), "correct rope_theta and rope_scaling in the drafter's config.json"
  targets, usual = rope_of(target.config), {'rope_theta': USUAL_BASE, 'rope_slowdown': (), 'rope_factor': 1.0}
  is_alike = drafter.config.head_dim == target.config.head_dim and target.config.rotary_dim is None
  if own != targets and is_alike:
    yield Repair(
      'rope', f"with the target's RoPE, of base {targets['rope_theta']:g}", advice, _with(drafter, **targets)
    )
  if usual not in (own, targets):
    change = f'with RoPE of base {USUAL_BASE:g}, which an absent rope_theta means'
    yield Repair('rope', change, advice, _with(drafter, **usual))


def _of_inputs(target: Target, drafter: Drafter) -> Iterator[Repair]:
  params, num_taps = drafter.params, len(drafter.config.tapped_layers(target.config.num_layers))
  num_taps = 0 if 'taps' in params else num_taps  # which have an fc of their own
  if drafter.is_quantised:  # in parts, whose scales stand in the order of the inputs
    return
  advice = (
    'join the inputs as the trainer did: embedding first, then the feature; taps from the lowest layer to the last'
  )
  if 'fc' in params and num_taps != 1:
    change = 'with the taps in reverse order' if num_taps else "with fc's halves exchanged"
    fc = _reversed_inputs(params['fc'], num_parts=num_taps or 2)
    yield Repair('inputs', change, advice, _with(drafter, params | {'fc': fc}))
  if 'attn' in params:  # of a layer that reads both halves there
    attn = params['attn'] | {'qkv': _reversed_inputs(params['attn']['qkv'], num_parts=2)}
    yield Repair('inputs', "with attention's halves exchanged", advice, _with(drafter, params | {'attn': attn}))


def _reversed_inputs(linear: dict[str, Any], *, num_parts: int) -> dict[str, Any]:
  """Exchange the parts of the vector that a matrix takes: the first becomes the last."""
  parts_OpI = jnp.split(linear['weight'], num_parts, axis=-1)
  return linear | {'weight': jnp.concatenate(parts_OpI[::-1], axis=-1)}


def _of_taps(target: Target, drafter: Drafter) -> Iterator[Repair]:
  num_layers = target.config.num_layers
  taps = drafter.config.tapped_layers(num_layers)
  for shift, change in ((1, 'with every tap one layer later'), (-1, 'with every tap one layer earlier')):
    shifted = tuple(tap + shift for tap in taps)
    if taps and min(shifted) >= 0 and max(shifted) <= num_layers:
      advice = f'tap the inputs of layers {[*shifted]}: writers count layers by what goes in, or by what comes out'
      yield Repair('taps', f'{change}, {[*shifted]}', advice, _with(drafter, taps=shifted))


def _of_norms(drafter: Drafter) -> Iterator[Repair]:
  config, params = drafter.config, drafter.params
  for name in ('norm_before_residual', 'norm_output'):
    if hasattr(config, name):
      value = not getattr(config, name)
      advice = f"set {name} to {str(value).lower()} in the drafter's config.json"
      yield Repair('norms', f'with {name} {"on" if value else "off"}', advice, _with(drafter, **{name: value}))
  for name, tensors in (('fc_norm', 'fc_norm_'), ('norm_before_fc', 'input_norm')):
    if getattr(config, name, False):
      kept = {key: x for key, x in params.items() if not key.startswith(tensors)}
      advice = f"set {name} to false in the drafter's config.json"
      yield Repair('norms', f'with {name} off', advice, _with(drafter, kept, **{name: False}))
  if not drafter.has_own_head:
    advice = "train on features after the target's final norm, which its head reads"
    yield Repair('norms', "with the target's final norm behind the drafter", advice, drafter, norm='after')
    yield Repair('norms', "with features before the target's final norm", advice, drafter, norm='before')


def _of_vocabulary(drafter: Drafter) -> Iterator[Repair]:
  config, params = drafter.config, drafter.params
  if 'ids' not in params:
    return
  if not drafter.has_fixed_ids:
    rest = {name: x for name, x in params.items() if name != 'ids'}
    advice = 'choose the ids that the target writes most often: `frequent_ids` of train/data.py counts them'
    yield Repair('vocabulary', 'with all ids', advice, _with(drafter, rest, draft_vocab_size=None))
    return
  ids_U = np.asarray(params['ids'])
  for sign, change in ((-1, 'with d2t read as ids'), (1, 'with d2t read as offsets')):
    other_U = ids_U + sign * np.arange(len(ids_U))
    if other_U.min() >= 0 and other_U.max() < config.vocab_size:
      advice = 'write d2t as offsets: draft id j is target id j + d2t[j]'
      yield Repair('vocabulary', change, advice, _with(drafter, params | {'ids': jnp.asarray(other_U, jnp.int32)}))


def diagnose(target: Target, drafter: Drafter, text: Text, bare: Text | None) -> tuple[dict[str, Any], list[Finding]]:
  """Find the cause of low acceptance along a text.

  Args:
    target, drafter: the pair; the drafter is a head with weights of its own.
    text: what the target reads once.
    bare: the same answers behind prompts without the chat template; None if there is none.

  Returns:
    The shares of right choices, as the drafter is and with each repair; and the finding, if there is one.
  """
  own = Repair('', 'as it is', '', drafter)
  max_tokens = max(len(one.token) for one in (text, bare) if one)
  layers = layers_to_read(target, drafter)

  def read(one: Text):
    return read_text(target, one.token, layers=layers, max_tokens=max_tokens)

  log.info('reading %d tokens, and trying repairs along them ...', len(text.token))
  seen = read(text)
  base = measure(target, own, seen, text.is_answer)
  ways = progress_bar([*repairs(target, drafter)], desc='repairs', unit='repair')
  tried = [(repair, measure(target, repair, seen, text.is_answer)) for repair in ways]
  if bare is not None:
    advice = 'use the chat template that the drafter was trained with, or train it on this one'
    alone = measure(target, own, read(bare), bare.is_answer)
    tried.append((Repair('template', 'behind prompts without the chat template', advice, drafter), alone))
  ids_U = drafter.params.get('ids', np.arange(target.config.vocab_size))
  choice = seen.choice[1 : seen.num_tokens - 1]
  coverage = float(np.isin(choice, np.asarray(ids_U)).mean())
  commonest = float(np.bincount(choice).max() / len(choice))
  numbers = {
    'num_tokens': seen.num_tokens,
    'coverage': coverage,
    'commonest': commonest,
    'as_it_is': _shares(base),
    'repairs': [{'kind': one.kind, 'change': one.change, **_shares(mended)} for one, mended in tried],
  }
  return numbers, find_cause(base, tried, coverage=coverage, commonest=commonest, num_tokens=seen.num_tokens)


def _shares(one: Agreement) -> dict[str, Any]:
  return {'first': or_none(one.first), 'answers': or_none(one.answers), 'second': or_none(one.second)}


def find_cause(
  base: Agreement, tried: Sequence[tuple[Repair, Agreement]], *, coverage: float, commonest: float, num_tokens: int
) -> list[Finding]:
  """Name the one cause that explains most, or none.

  Args:
    base: of the drafter as it is.
    tried: of each repair. The template's answers are compared, of all others all places.
    coverage: share of the target's choices that the drafter can draft.
    commonest: share of the target's commonest choice: what guessing it everywhere would reach.
    num_tokens: of the text.
  """
  where = f'first choices along {num_tokens} tokens'
  gains = [(*gain(base, repair, mended), repair, mended) for repair, mended in tried]
  if gains and (best := max(gains, key=lambda one: one[0]))[0] >= LIFT:
    _, _, repair, mended = best
    was, now = (base.answers, mended.answers) if repair.kind == 'template' else (base.first, mended.first)
    return [
      Finding(repair.kind, f'{where} are right in {was:.2f} of places, {repair.change} in {now:.2f}', repair.advice)
    ]
  if coverage and base.first / coverage - base.first >= LIFT:
    evidence = (
      f"the draft vocabulary has {coverage:.2f} of the target's choices, and {where} are right in {base.first:.2f}"
    )
    return [Finding('vocabulary', evidence, 'train a head with a larger or better chosen draft vocabulary')]
  if gains and (best := max(gains, key=lambda one: one[1]))[1] >= LIFT:
    _, _, repair, mended = best
    evidence = (
      f'second choices along {num_tokens} tokens are right in {base.second:.2f}, {repair.change} in {mended.second:.2f}'
    )
    return [Finding(repair.kind, evidence, repair.advice)]
  share = base.first if math.isnan(base.answers) else base.answers
  if share < LOW and base.first <= commonest:
    evidence = f'{where} are right in {base.first:.2f} of places; the commonest token alone would be in {commonest:.2f}'
    return [Finding('untrained', evidence, 'check that these are the weights of a finished training run')]
  if share < LOW:
    evidence = (
      f'{where} are right in {share:.2f} of places, above chance but under {LOW}, and none of the repairs helps'
    )
    advice = 'load the very target that the drafter was trained for (a fine-tuned one is another), or train further'
    return [Finding('revision', evidence, advice)]
  if base.num_second >= SECOND and base.second < COLLAPSE * base.first:
    evidence = (
      f'{where} are right in {base.first:.2f}, second ones in {base.second:.2f}: it cannot read its own outputs'
    )
    return [
      Finding('untrained', evidence, 'train it on its own outputs, over several steps (num_steps of the objective)')
    ]
  return []


def gain(base: Agreement, repair: Repair, mended: Agreement) -> tuple[float, float]:
  """Compute how much more often a repair's choice is right, at depths 1 and 2; 0 where one of the two says nothing."""
  if repair.kind == 'template':
    first, second = mended.answers - base.answers, float('nan')  # other texts, which share their answers alone
  else:
    first, second = mended.first - base.first, mended.second - base.second
  is_told = min(base.num_second, mended.num_second) >= SECOND and not math.isnan(second)
  return (0.0 if math.isnan(first) else first), (second if is_told else 0.0)


def contradictions(target: Target, drafter: Drafter, recorded: dict[str, Any] | None) -> list[Finding]:
  """List settings of the drafter that differ from the target's: right where it was trained so, else a cause."""
  if recorded is None:
    return []
  ours, theirs, found = drafter.config, target.config, []
  if rope_of(ours) != rope_of(theirs):
    what = f'rope_theta is {ours.rope_theta:g} in the drafter and {theirs.rope_theta:g} in the target'
    if ours.rope_theta == theirs.rope_theta:
      what = 'the RoPE scaling of the drafter is not that of the target'
    found.append(Finding('rope', what, 'nothing, if the drafter was trained so; else correct its config.json'))
  if not math.isclose(ours.norm_eps, theirs.norm_eps, rel_tol=1e-3):  # a GGUF file holds it in 32 bits
    what = f'norm_eps is {ours.norm_eps:g} in the drafter and {theirs.norm_eps:g} in the target'
    found.append(Finding('norms', what, 'nothing, if the drafter was trained so; else correct its config.json'))
  if recorded['coverage'] < COVERED:
    what = f"the draft vocabulary of {ours.num_ids} ids has {recorded['coverage']:.2f} of the target's choices"
    found.append(Finding('vocabulary', what, 'a larger or better chosen draft vocabulary'))
  return found
