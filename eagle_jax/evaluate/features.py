"""Compute the target's features of whole texts."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decode.buckets import bucket, pad_prompts
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.sharding import batch_axis_size, mesh_of, to_host, use_mesh

_TOKENS_PER_PASS = 4096  # over whole conversations, padding included: bounds the memory of the attention scores


def features(target: Target, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
  """Compute the features [n, D] bf16 of each text of n tokens, in passes over texts of about the same length."""
  network = target.network
  unit = batch_axis_size(mesh_of(target.params))  # every device has as many texts as the others
  sizes = [bucket(len(text)) for text in texts]
  found: dict[int, np.ndarray] = {}
  for size in sorted(set(sizes)):
    batch = max(1, _TOKENS_PER_PASS // (size * unit)) * unit
    alike = [index for index, other in enumerate(sizes) if other == size]
    for start in range(0, len(alike), batch):
      chosen = alike[start : start + batch]
      token_BL, _ = pad_prompts([texts[i] for i in chosen] + [[0]] * (batch - len(chosen)), size)
      with use_mesh(mesh_of(target.params)):
        feature_BLD = to_host(_whole_pass(target.params, token_BL, network=network))
      found |= {i: feature_LD[: len(texts[i])] for i, feature_LD in zip(chosen, feature_BLD, strict=False)}
  return [found[index] for index in range(len(texts))]


@functools.partial(jax.jit, static_argnames='network')
def _whole_pass(params: Any, token_BL: jax.Array, *, network: TransformerTarget) -> jax.Array:
  """Compute features [B, L, D] bf16 in one pass over whole texts."""
  return network.read(params, token_BL).feature.transpose(1, 2, 0).astype(jnp.bfloat16)
