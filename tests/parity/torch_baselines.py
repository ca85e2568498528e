"""Tokens a second of transformers + PyTorch on the benchmark's questions: the same weights, prompts and limits.

    python tests/parity/torch_baselines.py [TASK ...]

Greedy, float32, batch 1: plain `generate`, with prompt lookup (its speculation without a drafter), and with assisted
generation, the assistant being the target's own first layers. Beside it, ours: python launch/bench.py. The share of
texts that equal our plain decoding's is printed too.
"""

import sys
import time

import torch
from torch_llama import llama_of

import eagle_jax
from eagle_jax.bench.questions import QUESTIONS, read_questions

NUM_QUESTIONS, MAX_NEW_TOKENS = 4, 128
NUM_EARLY = 15  # layers of 30, as the assistant: the target's family has no smaller model
WAYS = {
  'plain': {},
  'prompt lookup': {'prompt_lookup_num_tokens': 5},
  f'assisted by {NUM_EARLY} layers': {'assistant_early_exit': NUM_EARLY},
}


def answer(model, prompt: list[int], **options) -> tuple[list[int], float]:
  """New tokens, and seconds of all but the prompt's pass, which is timed by itself and taken off."""
  ids, seconds = torch.tensor([prompt]), []
  for limit in (1, MAX_NEW_TOKENS):
    start = time.perf_counter()
    with torch.no_grad():
      out = model.generate(ids, do_sample=False, max_new_tokens=limit, **({} if limit == 1 else options))
    seconds.append(time.perf_counter() - start)
  return out[0, len(prompt) :].tolist(), max(seconds[1] - seconds[0], 1e-9)


def main() -> None:
  target = eagle_jax.load_target('smollm2-135m-instruct')
  model = llama_of(target)
  model.generation_config.eos_token_id = list(target.config.eos_ids)
  model.generation_config.pad_token_id = target.config.eos_ids[0]
  for task in sys.argv[1:] or sorted(path.stem for path in QUESTIONS.glob('*.jsonl')):
    texts = [question.turns[0] for question in read_questions(QUESTIONS, task, NUM_QUESTIONS)]
    prompts = [target.tokenizer.encode_prompt(text) for text in texts]
    ours = eagle_jax.decode.generate(target, None, prompts, max_new_tokens=MAX_NEW_TOKENS).tokens
    for name, options in WAYS.items():
      answer(model, prompts[0], **options)
      tokens, seconds = zip(*(answer(model, prompt, **options) for prompt in prompts), strict=True)
      same = sum(a == b for a, b in zip(tokens, ours, strict=True))
      speed = sum(map(len, tokens)) / sum(seconds)
      sys.stdout.write(f'{task}, {name}: {speed:.1f} tokens/s; {same} of {len(prompts)} texts are ours\n')


if __name__ == '__main__':
  main()
