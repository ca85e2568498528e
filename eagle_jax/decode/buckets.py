"""Round array sizes up to buckets, so that prompts of different lengths share compiled programs."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, cast

import jax
import numpy as np

from eagle_jax import device
from eagle_jax.decode.request import integers
from eagle_jax.models.interface import TargetNetwork

MIN_BUCKET = 16


def bucket(size: int) -> int:
  """Round up to the next of 16, 24, 32, 48, 64, 96, ...; above 10, at most a third of the result is padding."""
  power = MIN_BUCKET
  while power < size:
    if power + power // 2 >= size:
      return power + power // 2
    power *= 2
  return power


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
  """Split indices into groups that are worth padding to one length, the longest first.

  In a group no bucket is below half the largest, since each group costs a compilation and decode steps of its own.
  """
  groups: list[list[int]] = []
  for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
    if groups and 2 * bucket(lengths[index]) >= bucket(lengths[groups[-1][0]]):
      groups[-1].append(index)
    else:
      groups.append([index])
  return groups


def pad_prompts(prompts: Sequence[Sequence[int]], max_prompt: int) -> tuple[np.ndarray, np.ndarray]:
  """Pad prompts at the end to the bucket of `max_prompt`.

  Args:
    prompts: token ids of each prompt: lists or arrays of integers.
    max_prompt: tokens of the longest prompt in this batch, and in others that shall have the same shape.

  Returns:
    Padded prompts [B, L] i32 and their lengths [B] i32; in NumPy, so that nothing is compiled.

  Raises:
    ValueError: a prompt is longer than `max_prompt`, or no list of integers.

  Example:
    >>> tokens_BL, length_B = eagle_jax.decode.pad_prompts([[1, 90, 18], [1, 26]], 3)
    >>> tokens_BL.shape, length_B.tolist()
    ((2, 16), [3, 2])
  """
  prompts = [integers(f'Prompt {number}', prompt) for number, prompt in enumerate(prompts)]
  length_B = np.asarray([len(prompt) for prompt in prompts], np.int32)
  if len(prompts) and length_B.max() > max_prompt:
    raise ValueError(
      f'Prompts must have at most max_prompt={max_prompt} tokens, got one of {length_B.max()}: raise max_prompt, or '
      'shorten the prompt.'
    )
  tokens_BL = np.zeros((len(prompts), bucket(max_prompt)), np.int32)
  for tokens_L, prompt in zip(tokens_BL, prompts, strict=True):
    tokens_L[: len(prompt)] = prompt
  return tokens_BL, length_B


def slots_for(num_prompt: int, num_new: int, max_path: int) -> int:
  """Count the cache slots for a prompt, its new tokens and one path."""
  return bucket(num_prompt + num_new + max_path)


def require_memory(target: TargetNetwork, batch: int, num_slots: int) -> None:
  """Raise a ValueError if the target's cache alone is larger than the memory of all devices."""
  needed, available = batch * _cache_bytes(cast(Hashable, target), num_slots), device.memory_bytes()
  if available is not None and needed > available:
    raise ValueError(
      f'The cache of {batch} sequences with {num_slots} slots each must fit the {available} bytes of memory, got '
      f'{needed} bytes: decode fewer sequences together (batch_size), or lower max_new_tokens.'
    )


@functools.lru_cache
def _cache_bytes(target: Any, num_slots: int) -> int:
  """Return the bytes of one sequence's cache."""
  cache = jax.eval_shape(lambda: target.init_cache(1, num_slots))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
