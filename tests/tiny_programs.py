"""Make decode programs for tests of the compiled code."""

import re

import numpy as np

from eagle_jax import decode


def prefilled_pair(target, drafter, policy, *, batch: int, costs=None):
  """Make the arguments of a decode program: parameters, spec, and the state after a prompt of five tokens."""
  params, spec = decode.build(target, drafter, policy=policy, costs=costs)
  tokens_BL, length_B = np.ones((batch, 5), np.int32), np.full(batch, 5, np.int32)
  return params, spec, decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=20)


def copies_in_loop(hlo: str, shape: str) -> list[str]:
  """Find the lines outside ENTRY that copy an array of this shape."""
  computation, lines = '', []
  for line in hlo.splitlines():
    if re.match(r'^(ENTRY )?%?[\w.\-]+ .*\{$', line):
      computation = line
    elif f'= {shape}' in line and re.search(r'\bcopy(-start)?\(', line) and not computation.startswith('ENTRY'):
      lines.append(line.strip())
  return lines
