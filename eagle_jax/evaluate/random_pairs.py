"""Pairs of known shapes with random weights, for timing: a step's cost does not depend on the weights' values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.models import rounded
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.sharding import param_shardings, require_mesh

_SIZES: dict[str, dict[str, Any]] = {
  'tiny': {
    'vocab_size': 512, 'width': 256, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 128, 'ffn_width': 512
  },
  'smollm2_135m': {
    'vocab_size': 49152, 'width': 576, 'num_heads': 9, 'num_kv_heads': 3, 'head_dim': 64, 'ffn_width': 1536,
    'rope_theta': 100_000.0,
  },
  'llama3_8b': {
    'vocab_size': 128256, 'width': 4096, 'num_heads': 32, 'num_kv_heads': 8, 'head_dim': 128, 'ffn_width': 14336,
    'rope_theta': 500_000.0,
  },
}  # fmt: skip
_TARGETS: dict[str, dict[str, Any]] = {
  'tiny': {'num_layers': 2},
  'smollm2_135m': {'num_layers': 30, 'tied_head': True},
  'llama3_8b': {'num_layers': 32},
}
NAMES = tuple(_SIZES)


def configs(name: str, *, draft_vocab_size: int | None = None) -> tuple[TargetConfig, DrafterConfig]:
  """Return the configs of a target and of an EAGLE-2 drafter for it.

  Args:
    name: one of `NAMES`.
    draft_vocab_size: None: the drafter drafts all ids.
  """
  sizes = _SIZES[name]
  target = TargetConfig(**sizes, **_TARGETS[name], max_context=8192, name=f'random-{name}')
  return target, DrafterConfig(**sizes, fc_bias=False, draft_vocab_size=draft_vocab_size, name=f'random-{name}-eagle2')


def random_pair(
  name: str,
  *,
  dtype: Any,
  drafter_dtype: str | None = None,
  draft_vocab_size: int | None = None,
  mesh: Mesh | None = None,
) -> tuple[Target, Drafter]:
  """Make a target and its drafter, with weights made on their devices; see `configs` and `hub.load_target`.

  Raises:
    ValueError: the draft vocabulary is larger than the target's, or the mesh is none of `sharding.make_mesh`.
  """
  require_mesh(mesh)
  target, drafter = configs(name, draft_vocab_size=draft_vocab_size)

  def make_params(network: TransformerTarget | Eagle, key: jax.Array) -> dict[str, Any]:
    shapes = jax.eval_shape(network.init_params, key)
    places = None if mesh is None else param_shardings(shapes, mesh)
    return jax.jit(network.init_params, out_shardings=places)(key)

  target_key, drafter_key = jax.random.split(jax.random.key(0))
  rounded_to = dtype if dtype in rounded.NAMES else None
  dtype = rounded.default_compute_dtype() if rounded_to else dtype
  target_params = make_params(TransformerTarget(target, jnp.dtype(dtype)), target_key)
  floats = dtype if drafter_dtype in (None, 'int8') else drafter_dtype
  params = make_params(Eagle(drafter, jnp.dtype(floats)), drafter_key)
  if draft_vocab_size is not None:  # as `first_ids`, and with its own name, since costs are stored by name
    params['ids'] = jnp.arange(draft_vocab_size, dtype=jnp.int32)
    drafter = dataclasses.replace(drafter, name=f'{drafter.name}-{draft_vocab_size}')
  head = Drafter(drafter, params)
  loaded = Target(target, target_params)
  loaded = rounded.rounded_target(loaded, rounded_to) if rounded_to else loaded
  return loaded, head.quantised() if drafter_dtype == 'int8' else head
