"""Decode prompts with a target and a drafter: `generate`, `stream`, and the pure functions they are made of.

params, spec = build(target, drafter)              the arrays, and the static description of the program
tokens_BL, length_B = pad_prompts(prompts, max_prompt)
state = prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=128)
state = decode_loop(params, state, spec=spec)      or decode_step, for one step at a time
tokens_BN, length_B, num_accepted_BN = result(state)
"""

from eagle_jax.decode.buckets import pad_prompts
from eagle_jax.decode.build import build
from eagle_jax.decode.generate import Answer, Chunk, Generation, generate, generate_each, stream
from eagle_jax.decode.prefill import prefill
from eagle_jax.decode.record import Cycle
from eagle_jax.decode.step import decode_loop, decode_step, result

__all__ = [
  'Answer', 'Chunk', 'Cycle', 'Generation', 'build', 'decode_loop', 'decode_step', 'generate', 'generate_each',
  'pad_prompts', 'prefill', 'result', 'stream',
]  # fmt: skip
