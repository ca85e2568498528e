"""Decode with few programs, and make decode programs for tests of the compiled code."""

import functools
import re

import jax
import numpy as np

from eagle_jax import decode

# The listing of a program is the same whether or not its machine code is good.
LISTED = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def decode_alike(target, drafter, policies, prompts, **how) -> tuple[list, list]:
  """Decode plainly and by each policy, all behind one prefill: the tokens of plain decoding, and those of each policy.

  Args:
    target, drafter, policies: as in `decode.build`.
    prompts: token ids.
    how: of `decode.prefill`. There must be no EOS.
  """
  tokens_BL, length_B = decode.pad_prompts(prompts, max(map(len, prompts)))
  ways = [decode.build(target, drafter, policy=policy) for policy in policies]

  def begin(params, spec):
    return decode.prefill(params, tokens_BL, length_B, spec=spec, **how)

  def finish(params, spec, state):
    tokens_BN, _, _ = decode.result(decode.decode_loop(params, state, spec=spec))
    return tokens_BN[:, : how['max_new_tokens']].tolist()

  plain = finish(*decode.build(target, None), begin(*ways[0])._replace(drafter=()))
  return plain, [finish(*way, begin(*way)) for way in ways]


def loop_listing(params, state, spec) -> str:
  """Compile a decode loop, and return its listing."""
  return decode.decode_loop.lower(params, state, spec=spec).compile(LISTED).as_text()


def prefilled_pair(target, drafter, policy, *, batch: int, costs=None):
  """Make what a decode program is lowered for: parameters, spec, and the shapes of the state after five tokens."""
  params, spec = decode.build(target, drafter, policy=policy, costs=costs)
  tokens_BL, length_B = np.ones((batch, 5), np.int32), np.full(batch, 5, np.int32)
  prefill = functools.partial(decode.prefill, spec=spec, max_new_tokens=20)
  return params, spec, jax.eval_shape(prefill, params, tokens_BL, length_B)


def copies_in_loop(hlo: str, shape: str) -> list[str]:
  """Find the lines outside ENTRY that copy an array of this shape."""
  computation, lines = '', []
  for line in hlo.splitlines():
    if re.match(r'^(ENTRY )?%?[\w.\-]+ .*\{$', line):
      computation = line
    elif f'= {shape}' in line and re.search(r'\bcopy(-start)?\(', line) and not computation.startswith('ENTRY'):
      lines.append(line.strip())
  return lines
