"""Examine a pair: is its text exact, is acceptance what a trained head's is, and is the drafter worth its cost here?"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.bench.diagnosis import Finding, Text, contradictions, diagnose
from eagle_jax.bench.measure import gap_at_divergence, generate_warm, near_tie
from eagle_jax.bench.timing import bytes_read, first_state
from eagle_jax.decode.auto import resolve_policy
from eagle_jax.decode.buckets import bucket, slots_for
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import Generation, generate
from eagle_jax.decode.request import require_pair, token_ids
from eagle_jax.decode.step import tau
from eagle_jax.device import bytes_per_s, free_memory_bytes, ran_on
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of, name_of_kind
from eagle_jax.evaluate.calibration import acceptance_by_rank, nan_to_none, or_none
from eagle_jax.evaluate.trace import Nodes, Traced, nodes_of_cycles
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Chain, DynamicTree, TreePolicy
from eagle_jax.progress import progress_bar
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of, num_devices

NUM_PROMPTS = 3  # that are decoded
TEMPERATURES = (0.0, 1.0)
# What published heads reach, for targets of 7B to 70B: tau over six tasks with the paper's tree (EAGLE-2,
# arXiv:2406.16858, table 1; EAGLE-3, arXiv:2503.01840, table 1), and the share of right first choices on mt_bench
# (EAGLE, arXiv:2401.15077, its 0-alpha); by temperature.
PUBLISHED: dict[str, dict[str, dict[float, tuple[float, float]]]] = {
  'eagle2': {'tau': {0.0: (3.7, 5.4), 1.0: (3.5, 4.9)}, 'first_child': {0.0: (0.67, 0.79), 1.0: (0.71, 0.73)}},
  'eagle3': {'tau': {0.0: (5.0, 7.5), 1.0: (4.2, 6.2)}},
}

log = logging.getLogger('eagle_jax')


@dataclasses.dataclass(frozen=True)
class Plan:
  """The sizes of an examination."""

  tree: TreePolicy = DynamicTree()  # of the acceptance by depth and rank
  policies: tuple[TreePolicy, ...] = (Chain(3), DynamicTree(4, 4, 5, 16), DynamicTree())  # to be timed; () for none
  max_new_tokens: int = 48  # of an answer
  num_read: int = 1536  # tokens of the text along which repairs are tried: a wrong RoPE shows on long texts only


class Prompt(NamedTuple):
  """A prompt as it is decoded, and as it would be without the chat template."""

  token: list[int]
  bare: list[int] | None  # None if there is no template


class Decoded(NamedTuple):
  """One prompt, decoded plainly and with a tree, at one temperature."""

  plain: Generation
  drafted: Generation


def examine(
  target: Target, drafter: Drafter, prompts: Sequence[str] | Sequence[Sequence[int]], *, plan: Plan | None = None
) -> dict[str, Any]:
  """Examine a pair on prompts, and report what is wrong, with the numbers that show it.

  Three prompts are decoded plainly and with `plan.tree`, greedily and sampled. If the drafter is an EAGLE head, the
  target then reads these answers and further prompts once, and the drafter drafts along them, as it is and with each
  of `diagnosis.repairs`.

  Args:
    target, drafter: the pair.
    prompts: three or more strings or lists of token ids, such as in later use.
    plan: sizes; None for the defaults.

  Returns:
    `ok`, whether nothing was found; `findings` and `warnings`, each with `kind`, `evidence` and `try`; then the numbers
    of the examination, None where one does not apply.

  Raises:
    ValueError: the drafter is missing or for another target, or fewer than three prompts fit the context.
  """
  plan = plan or Plan()
  require_pair(target, drafter)
  if drafter is None:
    raise ValueError('`drafter` must be one to examine, got None: load one with load_drafter(..., target).')
  known = read_prompts(target, prompts)
  asked = choose_prompts(target, known, max_new_tokens=plan.max_new_tokens)
  decoded = {temperature: decode_all(target, drafter, asked, temperature, plan) for temperature in TEMPERATURES}
  texts, findings = compare_texts(target, asked, decoded)
  recorded, speed, kind = None, None, kind_of(drafter.config)
  if kind.borrows and not kind.is_one_pass:
    texts_to_read = join_texts(asked, decoded[0.0], known, max_tokens=min(plan.num_read, target.config.max_context))
    recorded, found = diagnose(target, drafter, *texts_to_read)
    findings += found
  if plan.policies:
    speed = time_policies(target, drafter, asked, plan)
    findings += find_slow(speed)
  return {
    'ok': not findings,
    'findings': [one.report() for one in findings],
    'warnings': [one.report() for one in contradictions(target, drafter, recorded)],
    'target': target.config.name,
    'drafter': drafter.config.name,
    'kind': kind.title,
    **ran_on(mesh_of(target.params)),
    'free_memory_bytes': free_memory_bytes(),
    'texts': texts,
    'acceptance': [acceptance(asked, of_one, plan.tree, temperature) for temperature, of_one in decoded.items()],
    'published': PUBLISHED.get(name_of_kind(drafter.config)),
    'recorded': recorded,
    'speed': speed,
    'auto': chosen_by_auto(target, drafter),
  }


def read_prompts(target: Target, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
  """Encode prompts with the chat template, if the target has one, and without."""
  tokenizer = target.tokenizer
  has_bare = tokenizer is not None and tokenizer.has_chat_template
  return [
    Prompt(token, tokenizer.encode(prompt) if has_bare and isinstance(prompt, str) else None)
    for prompt, token in zip(prompts, token_ids(target, prompts), strict=True)
  ]


def choose_prompts(target: Target, known: Sequence[Prompt], *, max_new_tokens: int) -> list[Prompt]:
  """Choose prompts that fit the context, of one bucket if there are enough, since they share programs.

  Raises:
    ValueError: too few fit.
  """
  fitting = [prompt for prompt in known if len(prompt.token) + max_new_tokens <= target.config.max_context]
  if len(fitting) < NUM_PROMPTS:
    raise ValueError(
      f'At least {NUM_PROMPTS} prompts must fit the context of {target.config.max_context} tokens with '
      f'{max_new_tokens} new ones, got {len(fitting)}: pass more prompts, shorter ones, or a smaller max_new_tokens.'
    )
  sizes = [bucket(len(prompt.token)) for prompt in fitting]
  order = sorted(range(len(fitting)), key=lambda number: -sizes.count(sizes[number]))
  return [fitting[number] for number in order[:NUM_PROMPTS]]


def decode_all(
  target: Target, drafter: Drafter, asked: Sequence[Prompt], temperature: float, plan: Plan
) -> list[Decoded]:
  """Decode each prompt alone, plainly and with the tree."""
  log.info('decoding %d prompts at temperature %g ...', len(asked), temperature)
  options: Any = {'temperature': temperature, 'max_new_tokens': plan.max_new_tokens}
  return [
    Decoded(
      generate(target, None, [prompt.token], row_ids=[number], **options),
      generate(target, drafter, [prompt.token], row_ids=[number], policy=plan.tree, trace=True, **options),
    )
    for number, prompt in enumerate(progress_bar(asked, desc=f'decoding, temperature {temperature:g}', unit='prompt'))
  ]


def compare_texts(
  target: Target, asked: Sequence[Prompt], decoded: dict[float, list[Decoded]]
) -> tuple[dict[str, int], list[Finding]]:
  """Count the texts that differ from plain decoding's; in float32 beyond a near tie they are a finding."""
  gaps = [
    (number, temperature, gap)
    for temperature, of_one in decoded.items()
    for number, (prompt, one) in enumerate(zip(asked, of_one, strict=True))
    if (gap := _gap(target, prompt, one, temperature, number)) is not None
  ]
  far = [one for one in gaps if one[2] >= near_tie(target)]
  num_texts = sum(map(len, decoded.values()))
  counts = {'compared': num_texts, 'equal': num_texts - len(gaps), 'near_ties': len(gaps) - len(far)}
  if not far or str(target.dtype) != 'float32':  # narrower dtypes round by the shape of a pass
    return counts, []
  (number, temperature, gap), *_ = far
  evidence = (
    f"{len(far)} of {num_texts} texts differ from plain decoding's; the first, of prompt {number} at temperature "
    f"{temperature:g}, where the target's two best logits are {gap:.2g} apart"
  )
  return counts, [Finding('not_equal', evidence, 'this is a defect of the decoder in float32: report it with the pair')]


def _gap(target: Target, prompt: Prompt, one: Decoded, temperature: float, row_id: int) -> float | None:
  sampling = Sampling.of(temperature=temperature)
  return gap_at_divergence(target, prompt.token, one.plain.tokens[0], one.drafted.tokens[0], sampling, row_id)


def acceptance(
  asked: Sequence[Prompt], decoded: Sequence[Decoded], tree: TreePolicy, temperature: float
) -> dict[str, Any]:
  """Compute tau and acceptance of all texts of one temperature: by depth, by rank, and of the root's first child."""
  drafted = [one.drafted for one in decoded]
  traced = Traced([one.num_accepted[0] for one in drafted], [len(one.tokens[0]) for one in drafted], tree)
  by_rank, first_child = [], float('nan')
  found: list[Nodes] = []
  for prompt, one in zip(asked, drafted, strict=True):
    num_tokens = len(prompt.token) + len(one.tokens[0])
    found += nodes_of_cycles((one.trace or [[]])[0], num_tokens=num_tokens, max_depth=tree.max_depth)
  if found:
    nodes = Nodes(*(np.concatenate(x) for x in zip(*found, strict=True)))
    by_rank = nan_to_none(acceptance_by_rank(nodes))
    is_first = (nodes.depth == 1) & (nodes.rank == 0)
    first_child = float(nodes.is_accepted[is_first].mean()) if is_first.any() else first_child
  return {
    'temperature': temperature,
    'policy': tree.describe(),
    'tau': traced.tau,
    'first_child': or_none(first_child),
    'by_depth': nan_to_none(np.asarray(traced.acceptance)) if traced.num_passes else [],
    'by_rank': by_rank,
  }


def join_texts(
  asked: Sequence[Prompt], decoded: Sequence[Decoded], known: Sequence[Prompt], *, max_tokens: int
) -> tuple[Text, Text | None]:
  """Join the prompts and their answers, then all other prompts: with the chat template, and without if there is one."""
  answers = [one.plain.tokens[0] for one in decoded]
  prompts = [*asked, *(prompt for prompt in known if prompt not in asked)]

  def join(tokens: list[list[int]]) -> Text:
    parts = [(part, False) for part in tokens]
    for number, answer in reversed([*enumerate(answers)]):
      parts.insert(number + 1, (answer, True))
    token = [number for part, _ in parts for number in part]
    is_answer_n = np.concatenate([np.full(len(part), is_answer) for part, is_answer in parts])
    return Text(token[:max_tokens], is_answer_n[:max_tokens])

  bare = [prompt.bare for prompt in prompts if prompt.bare is not None]
  return join([prompt.token for prompt in prompts]), join(bare) if len(bare) == len(prompts) else None


def time_policies(target: Target, drafter: Drafter, asked: Sequence[Prompt], plan: Plan) -> dict[str, Any]:
  """Time greedy decoding of each prompt alone, plainly and with each policy in turn.

  Returns:
    `plain` and `policies`: policy, tau, milliseconds a step, tokens a second; `floor_ms`, the time in which the memory
    delivers what a plain step reads.
  """
  log.info('timing plain decoding and %d policies ...', len(plan.policies))
  policies: list[Any] = ['plain', *(one for one in plan.policies if max(one.fanouts) <= drafter.config.num_ids)]
  stats: list[list[dict[str, Any]]] = [[] for _ in policies]
  for prompt in progress_bar(asked, desc='timing', unit='prompt'):
    for policy, of_policy in zip(policies, stats, strict=True):
      options: Any = {'max_new_tokens': plan.max_new_tokens, 'policy': policy}
      of_policy.append(generate_warm(target, drafter, [prompt.token], **options).stats)
  params, spec = build(target, None, policy='plain')
  num_slots = slots_for(bucket(len(asked[0].token)), bucket(plan.max_new_tokens), spec.max_path)
  state = first_state(params, spec, batch=1, num_slots=num_slots)
  read, _ = bytes_read(params, state.cache, (), has_tied_head=target.config.tied_head)
  plain, *timed = map(_rate, stats)
  rate = num_devices(mesh_of(target.params)) * bytes_per_s()
  return {'floor_ms': 1000 * sum(read) / rate, 'bytes_per_s': rate, 'plain': plain, 'policies': timed}


def _rate(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Pool one policy's statistics over the prompts."""
  names = 'num_new_tokens', 'num_target_passes', 'decode_s'
  num_new, num_passes, seconds = (sum(one[name] for one in stats) for name in names)
  return {
    'policy': stats[0]['policy'],
    'tau': tau(num_new, num_passes, num_sequences=len(stats)),
    'step_ms': 1000 * seconds / max(num_passes, 1),
    'tok_per_s': num_new / max(seconds, 1e-9),
  }


def find_slow(speed: dict[str, Any]) -> list[Finding]:
  """Find that no policy is faster than plain decoding."""
  best = max(speed['policies'], key=lambda one: one['tok_per_s'], default=None)
  if best is None or best['tok_per_s'] > speed['plain']['tok_per_s']:
    return []
  plain = speed['plain']
  steps = best['step_ms'] / max(plain['step_ms'], 1e-9)
  evidence = (
    f'plain decoding reaches {plain["tok_per_s"]:.1f} tokens/s, and {best["policy"]}, the fastest of '
    f'{len(speed["policies"])} policies, {best["tok_per_s"]:.1f}: its step takes {steps:.2f} plain steps and yields '
    f'{best["tau"]:.2f} tokens'
  )
  advice = 'launch/cost.py finds the fastest policy; --drafter_dtype=int8 halves what drafting reads'
  return [Finding('slow', evidence, advice)]


def chosen_by_auto(target: Target, drafter: Drafter) -> dict[str, str]:
  """Say which policy 'auto' takes for one sequence, and why."""
  policy, _, costs = resolve_policy(target, drafter, policy='auto')
  if costs is None:
    return {'policy': policy.describe(), 'why': 'a guess: launch/cost.py has not measured this pair on this device'}
  best = costs.policies[0]
  return {
    'policy': policy.describe(),
    'why': f'{best.tok_per_s:.1f} tokens/s with tau {best.tau:.2f} on {costs.device}, {costs.date}, was the best rate',
  }


def describe(report: dict[str, Any]) -> str:
  """Format a report for people; numbers as Markdown tables."""
  versions = ', '.join(f'{name} {version}' for name, version in report['versions'].items() if version)
  free = report['free_memory_bytes']
  texts, speed, recorded = report['texts'], report['speed'], report['recorded']
  lines = [
    f'{report["target"]} + {report["drafter"]} ({report["kind"]}) on {report["device"]}'
    + (f', {free / 1e9:.1f} GB free' if free else ''),
    versions,
    '',
    f"{texts['equal']} of {texts['compared']} texts equal plain decoding's, {texts['near_ties']} differ by a near tie",
    '',
    f'| {report["acceptance"][0]["policy"]} | tau | first child | by depth | by rank |',
    '|---|---|---|---|---|',
    *(_acceptance_line(one) for one in report['acceptance']),
    *_published_lines(report['published']),
  ]
  if recorded:
    readings = [{'change': 'as it is', **recorded['as_it_is']}, *recorded['repairs']]
    lines += [
      '',
      f'| along {recorded["num_tokens"]} tokens | first choice right | of answers | second |',
      '|---|---|---|---|',
    ]
    lines += [
      f'| {one["change"]} | {" | ".join(_share(one[n]) for n in ("first", "answers", "second"))} |' for one in readings
    ]
    guessed = f'The commonest token alone: {recorded["commonest"]:.2f}.'
    lines += ['', f"{guessed} The drafter can draft {recorded['coverage']:.2f} of the target's choices."]
  if speed:
    plain = speed['plain']
    lines += ['', '| batch 1, greedy | tau | ms a step | tokens/s |', '|---|---|---|---|']
    lines += [
      f'| {one["policy"]} | {one["tau"]:.2f} | {one["step_ms"]:.2f} | {one["tok_per_s"]:.1f} |'
      for one in (plain, *speed['policies'])
    ]
    floor, times = speed['floor_ms'], plain['step_ms'] / max(speed['floor_ms'], 1e-9)
    read = f'memory reads {speed["bytes_per_s"] / 1e9:.1f} GB/s'
    lines += ['', f'A plain step takes {times:.2f} times its floor of {floor:.2f} ms: {read}.']
  lines += ['', f'auto takes {report["auto"]["policy"]}: {report["auto"]["why"]}', '']
  for name in ('findings', 'warnings'):
    for one in report[name]:
      lines += [f'{name[:-1]}: {one["kind"]}: {one["evidence"]}', f'  try: {one["try"]}']
  return '\n'.join([*lines, 'ok' if report['ok'] else 'something is wrong'])


def _share(x: float | None) -> str:
  return '' if x is None else f'{x:.2f}'


def _acceptance_line(one: dict[str, Any]) -> str:
  by_depth, by_rank = (' '.join(map(_share, one[name])) for name in ('by_depth', 'by_rank'))
  first = _share(one['first_child'])
  return f'| temperature {one["temperature"]:g} | {one["tau"]:.2f} | {first} | {by_depth} | {by_rank} |'


def _published_lines(published: Any) -> list[str]:
  """Write a line with what published heads reach at each temperature, as far as it is known."""
  lines = []
  for temperature in TEMPERATURES:
    ranges = [
      '{:g} to {:g}'.format(*published[name][temperature]) if published and name in published else ''
      for name in ('tau', 'first_child')
    ]
    if any(ranges):
      lines.append(f'| published, of targets of 7B to 70B, temperature {temperature:g} | {" | ".join(ranges)} | | |')
  return lines
