"""Show measured costs as tables, and warn about times that cannot be right."""

import logging

import jax.numpy as jnp

from eagle_jax.policy.costs import Costs, StepTimes, Timings

UNEVEN = 0.05  # a larger size that took this share less time than a smaller one points to a busy machine

log = logging.getLogger('eagle_jax')


def find_unsteady(times: StepTimes) -> list[tuple[str, int, int]]:
  """Find sizes that took less time than a smaller size by more than `UNEVEN`, which only a busy machine explains.

  Returns:
    ('verify_ms' or 'draft_ms', the slowest smaller size, the size), ascending; empty if the times are steady.
  """
  found = []
  for field in ('verify_ms', 'draft_ms'):
    ms = getattr(times, field)
    slowest = min(ms)
    for size in sorted(ms):
      if ms[size] < (1 - UNEVEN) * ms[slowest]:
        found.append((field, slowest, size))
      slowest = max(slowest, size, key=lambda size: ms[size])
  return found


def warn_if_unsteady(parts: Timings) -> None:
  """Log a warning about times that cannot be right; see `find_unsteady`."""
  names = {'verify_ms': 'target pass over {} nodes', 'draft_ms': 'level of width {}'}
  for times in parts.times:
    for field, *sizes in find_unsteady(times):
      slow, fast = (f'a {names[field].format(size)} took {getattr(times, field)[size]:.2f} ms' for size in sizes)
      log.warning('Timings look unreliable: with %d slots %s, but %s. Measure again.', times.num_slots, slow, fast)


def table(parts: Timings) -> str:
  """Format a measurement as Markdown: parts in milliseconds, in plain steps and over their floor; then policies."""
  lines = [
    f'{parts.device}, {parts.target} + {parts.drafter}, {parts.dtype}, batch {parts.batch}',
    f'{parts.date}: reads {parts.bytes_per_s / 1e9:.1f} GB/s, computes {parts.flops_per_s / 1e9:.0f} GFLOP/s',
  ]
  for times in parts.times:
    passes = [(f'target pass, {size} nodes', ms, times.target_bytes, size) for size, ms in times.verify_ms.items()]
    root = "root's children", times.root_ms, times.drafter_bytes, 1
    levels = [(f'a level of width {width}', ms, times.drafter_bytes, width) for width, ms in times.draft_ms.items()]
    plain = times.verify_ms[1]
    lines += ['', f'| with {times.num_slots} slots | ms | plain steps | times its floor |', '|---|---|---|---|']
    lines += [
      f'| {name} | {ms:.2f} | {ms / plain:.2f} | {ms / parts.floor_ms(num_bytes, num_nodes):.2f} |'
      for name, ms, num_bytes, num_nodes in (*passes, root, *levels)
    ]
    lines += [f'| whole step, {name} | {ms:.2f} | {ms / plain:.2f} | |' for name, ms in times.whole_ms.items()]
  if isinstance(parts, Costs):
    lines += ['', '| policy | tau | tokens/s |', '|---|---|---|']
    lines += [f'| {one.policy.describe()} | {one.tau:.2f} | {one.tok_per_s:.1f} |' for one in parts.policies]
    lines += [f'| {one.policy.describe()}, modelled | {one.tau:.2f} | {one.tok_per_s:.1f} |' for one in parts.modelled]
    lines += ['', '| draft vocabulary | bits | coverage | tau of a chain of 3 | step, ms |', '|---|---|---|---|---|']
    for v in parts.vocabularies:
      bits = 8 if v.is_quantised else 8 * jnp.dtype(parts.floats).itemsize
      lines.append(f'| {v.num_ids} | {bits} | {v.coverage:.1%} | {v.tau:.2f} | {v.cycle_ms:.2f} |')
  return '\n'.join(lines)
