"""Training data: the target answers prompts, and its features at every token are kept.

Answers come from the decode loop itself. A `Recorder` stands where a drafter would: it drafts nothing, and what a
drafter would absorb (the features of the committed rows) it writes down.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import cache as kv_cache
from eagle_jax.draft.drafter import NoDrafter
from eagle_jax.draft.policy import Plain
from eagle_jax.loop import decode_loop
from eagle_jax.prefill import pad_prompts, prefill
from eagle_jax.state import Params, Spec
from eagle_jax.target.transformer import Target, TransformerTarget
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors


class Recording(NamedTuple):
  """Features of each row's committed tokens."""

  feature: jax.Array  # [B, 1, S, D], laid out as one head of a cache
  length: jax.Array  # [B] i32


@dataclasses.dataclass(frozen=True)
class Recorder(NoDrafter):
  """Drafts nothing and writes down every feature."""

  width: int

  def init(self, batch: int, num_slots: int) -> Recording:
    return Recording(jnp.zeros((batch, 1, num_slots, self.width), jnp.float32), jnp.zeros(batch, jnp.int32))

  def absorb(self, params, state: Recording, token_BP, taps, count_B) -> Recording:
    feature_B1PD = taps.feature.transpose(1, 2, 0)[:, None]
    return Recording(kv_cache.write(state.feature, feature_B1PD, state.length), state.length + count_B)


class Example(NamedTuple):
  """One prompt with the target's answer. The newest token has no feature: no pass saw it."""

  token: np.ndarray  # [n + 1] i32
  feature: np.ndarray  # [n, D] float16, last hidden state after the final norm
  num_prompt: int


@dataclasses.dataclass(frozen=True)
class Data:
  """How much text the target writes to learn from, and how."""

  num_shards: int
  batch: int = 64  # answers a shard: the rows decoded together
  max_prompt: int = 128  # tokens; longer prompts are passed over
  max_new_tokens: int = 192
  temperatures: tuple[float, ...] = (0.0, 1.0, 0.7, 0.0)  # by shard, in turn


def answer(
  target: Target, prompts: Sequence[Sequence[int]], data: Data, *, temperature: float, seed: int
) -> list[Example]:
  """The target's own answers to a batch of token-id prompts, with features."""
  width = target.config.width
  spec = Spec(TransformerTarget(target.config), Recorder(width), Plain())
  params = Params(target.params, ())
  tokens_BL, length_B = pad_prompts(prompts, data.max_prompt)
  state = prefill(
    params,
    tokens_BL,
    length_B,
    spec=spec,
    max_new_tokens=data.max_new_tokens,
    temperature=temperature,
    seed=seed,
    eos_ids=target.config.eos_ids,
  )
  state = jax.device_get(decode_loop(params, state, spec=spec)._replace(cache=()))
  examples = []
  for row, prompt in enumerate(prompts):
    token = np.concatenate([prompt, state.tokens[row, : state.num_tokens[row]]]).astype(np.int32)
    feature = state.drafter.feature[row, 0, : len(token) - 1].astype(np.float16)
    examples.append(Example(token, feature, len(prompt)))
  return examples


def write_shard(path: Path, examples: Sequence[Example]) -> None:
  """Packs examples end to end into one safetensors file, written whole or not at all."""
  tensors = {
    'token': np.concatenate([example.token for example in examples]),
    'feature': np.concatenate([example.feature for example in examples]),
    'num_tokens': np.asarray([len(example.token) for example in examples], np.int32),
    'num_prompt': np.asarray([example.num_prompt for example in examples], np.int32),
  }
  write_safetensors(path, tensors)


def read_shard(path: Path) -> list[Example]:
  """The examples of one shard.

  Raises:
    ValueError: the file is damaged.
  """
  shard: dict[str, Any] = dict(read_safetensors(path))
  ends = np.cumsum(shard['num_tokens'])
  tokens = np.split(shard['token'], ends[:-1])
  features = np.split(shard['feature'], (ends - np.arange(1, len(ends) + 1))[:-1])
  return [Example(*fields) for fields in zip(tokens, features, shard['num_prompt'].tolist(), strict=True)]


def generate_shards(target: Target, prompts: Iterator[str], folder: Path, data: Data) -> Iterator[list[Example]]:
  """Writes (or, where they are there already, reads) the shards one by one, and yields their examples.

  Shard i depends on the prompts, the settings and i alone, so an interrupted run goes on where it stopped.

  Raises:
    ValueError: there are too few prompts.
  """
  encoded = (target.tokenizer.encode_prompt(prompt) for prompt in prompts)
  short = (ids for ids in encoded if len(ids) <= data.max_prompt)
  for number in range(data.num_shards):
    chosen = list(itertools.islice(short, data.batch))
    if len(chosen) < data.batch:
      raise ValueError(
        f'The prompts of at most {data.max_prompt} tokens suffice for {number} shards of {data.batch}, and '
        f'{data.num_shards} were asked for. Add prompts or ask for fewer.'
      )
    path = folder / f'shard_{number:04d}.safetensors'
    if not path.exists():
      temperature = data.temperatures[number % len(data.temperatures)]
      write_shard(path, answer(target, chosen, data, temperature=temperature, seed=number))
    yield read_shard(path)
