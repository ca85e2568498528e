"""Compute the target's features of whole texts, with taps of its middle layers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decode.buckets import bucket, pad_prompts
from eagle_jax.evaluate.example import Example
from eagle_jax.models.transformer import Taps, Target, TransformerTarget
from eagle_jax.sharding import batch_axis_size, mesh_of, to_host, use_mesh

_TOKENS_PER_PASS = 4096  # over whole conversations, padding included: bounds the memory of the attention scores


def features(
  target: Target, texts: Sequence[Sequence[int]], taps: Sequence[int] = (), *, dtype: Any = jnp.bfloat16
) -> list[np.ndarray]:
  """Compute the features of each text of n tokens, in passes over texts of about the same length.

  Args:
    target, texts: whose features.
    taps: layers whose inputs are kept too, k of them.
    dtype: of the features.

  Returns:
    [n, (1 + k) D] of `dtype` for each text; see `evaluate.example`.
  """
  network = dataclasses.replace(target.network, tapped_layers=tuple(taps))
  unit = batch_axis_size(mesh_of(target.params))  # every device has as many texts as the others
  sizes = [bucket(len(text)) for text in texts]
  found: dict[int, np.ndarray] = {}
  for size in sorted(set(sizes)):
    alike = [index for index, other in enumerate(sizes) if other == size]
    batch = max(1, min(_TOKENS_PER_PASS // (size * unit), -(-len(alike) // unit))) * unit
    for start in range(0, len(alike), batch):
      chosen = alike[start : start + batch]
      token_BL, _ = pad_prompts([texts[i] for i in chosen] + [[0]] * (batch - len(chosen)), size)
      with use_mesh(mesh_of(target.params)):
        feature_BLD = to_host(_whole_pass(target.params, token_BL, network=network, dtype=dtype))
      found |= {i: feature_LD[: len(texts[i])] for i, feature_LD in zip(chosen, feature_BLD, strict=False)}
  return [found[index] for index in range(len(texts))]


@functools.partial(jax.jit, static_argnames=('network', 'dtype'))
def _whole_pass(params: Any, token_BL: jax.Array, *, network: TransformerTarget, dtype: Any) -> jax.Array:
  """Compute features [B, L, (1 + k) D] in one pass over whole texts."""
  return join_taps(network.read(params, token_BL)).transpose(1, 2, 0).astype(dtype)


def with_features(target: Target, examples: Sequence[Example], taps: Sequence[int] = ()) -> list[Example]:
  """Return the examples with the features and taps that were not stored, computed by the target."""
  bare = [example for example in examples if not example.feature.shape[1]]
  made = iter(features(target, [example.token[:-1].tolist() for example in bare], taps))
  return [example if example.feature.shape[1] else example._replace(feature=next(made)) for example in examples]


def require_recorded(
  target: Target, config: Any, examples: Sequence[Example], *, may_lack: bool = False
) -> tuple[int, ...]:
  """Return the layers that a drafter taps; raise a ValueError unless the examples hold what it reads of the target.

  Args:
    target: the target that gave the answers.
    config: of the drafter.
    examples: one or more.
    may_lack: whether all of them may lack features, which are then computed later.
  """
  taps = config.tapped_layers(target.config.num_layers)
  needed, found = target.config.width * (1 + len(taps)), {one.feature.shape[1] for one in examples}
  if found != {needed} and not (may_lack and found == {0}):
    raise ValueError(
      f'Drafter {config.name!r} reads the feature and the inputs of layers {taps}, {needed} numbers a token, and '
      f'recorded answers hold {" or ".join(map(str, sorted(found)))}: make all of them with Data(taps={taps}), or '
      f'compute what they lack with `features(target, texts, taps={taps})`.'
    )
  return taps


def join_taps(taps: Taps) -> jax.Array:
  """Join the feature and the k inputs of tapped layers, [D, B, L] each, as examples hold them: [(1 + k) D, B, L]."""
  return jnp.concatenate([taps.feature, *taps.residual])


def choose_taps(feature_LD: np.ndarray, stored: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
  """Select, of features with the taps `stored`, [L, (1 + k) D], the features with the taps `wanted`, in their order."""
  if tuple(stored) == tuple(wanted):
    return feature_LD
  parts = np.split(feature_LD, 1 + len(stored), axis=1)
  return np.concatenate([parts[0], *(parts[1 + stored.index(layer)] for layer in wanted)], axis=1)


def split_taps(feature_BLD: Any, width: int) -> Taps:
  """Split what examples hold, [B, L, (1 + k) D], into the feature and k inputs of tapped layers, [D, B, L] each."""
  feature_DBL, *residual = jnp.split(feature_BLD.transpose(2, 0, 1), feature_BLD.shape[2] // width)
  return Taps(feature_DBL, tuple(residual))
