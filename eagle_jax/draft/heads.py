"""Read the folders in which EAGLE heads are published; which layout a folder has shows in its config.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import DrafterConfig, Eagle3Config
from eagle_jax.weights.folder import FAMILIES, llama_fields, read_json, read_tensors

# Where an EAGLE-1/2 head of another layout keeps the ids that it was trained to draft: no engine's tensors name them.
VOCABULARY_FILE = 'draft_vocabulary.json'
TAPS = 'eagle_aux_hidden_state_layer_ids'
# What an absent key means in the `transformer_layer_config` of vLLM's speculators: transformers' LlamaConfig.
_LLAMA_DEFAULTS = {
  'vocab_size': 32_000, 'hidden_size': 4096, 'intermediate_size': 11_008, 'num_attention_heads': 32,
  'num_hidden_layers': 1, 'rms_norm_eps': 1e-6,
}  # fmt: skip


def read_head_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the tensors of a drafter's folder by their canonical names."""
  for name, array in read_tensors(folder):
    yield canonical(name), array
  if ids := _written_ids(folder):
    yield 'd2t', np.asarray(ids) - np.arange(len(ids))


def _without_speculators(folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
  """Put a config of vLLM's speculators in the words of the others."""
  if 'speculators_model_type' not in content:
    return content
  if content['speculators_model_type'] not in ('eagle', 'eagle3'):
    raise ValueError(
      f'{folder}: speculators_model_type {content["speculators_model_type"]!r} is not supported; eagle and eagle3 are.'
    )
  if content.get('layernorms'):
    raise ValueError(f'{folder}: an EAGLE head with layernorms (HASS) is not supported, only one without.')
  layer = content.get('transformer_layer_config') or {}
  if layer.get('attention_bias'):
    raise ValueError(f'{folder}: attention_bias, which the output projection has too, is not supported.')
  return {**_LLAMA_DEFAULTS, **layer, **content, 'bias': content.get('fusion_bias', False)}


def _is_eagle3(content: Mapping[str, Any]) -> bool:
  return content.get('draft_vocab_size') is not None or 'eagle3' in str(content.get('architectures')).lower()


def read_eagle(folder: Path, content: Mapping[str, Any]) -> DrafterConfig | None:
  """Read the config of a published EAGLE-1/2 head; None if it is an EAGLE-3 head's.

  Raises:
    ValueError: another kind of drafter, or missing fields.
  """
  content = _without_speculators(folder, content)
  if _is_eagle3(content):
    return None
  fields = llama_fields(folder, content, FAMILIES['llama'])
  if content['num_hidden_layers'] != 1:
    raise ValueError(f'{folder}: a drafter has one layer, this config says {content["num_hidden_layers"]}.')
  if fields.pop('rope_slowdown'):
    raise ValueError(f'{folder}: an EAGLE-1/2 drafter with RoPE scaling is not supported, only unscaled RoPE.')
  return DrafterConfig(
    **fields,
    fc_bias=bool(content.get('bias', True)),
    qkv_bias=bool(content.get('qkv_bias', False)),
    draft_vocab_size=len(_written_ids(folder)) or None,
    name=folder.name,
  )


def read_eagle3(folder: Path, content: Mapping[str, Any]) -> Eagle3Config | None:
  """Read the config of a published EAGLE-3 head; None if it is another's. The number of layers it states means nothing.

  Raises:
    ValueError: another kind of drafter, or missing fields.
  """
  content = _without_speculators(folder, content)
  if not _is_eagle3(content):
    return None
  fields = llama_fields(folder, {**content, 'num_hidden_layers': 1}, FAMILIES['llama'])
  num_ids = int(content.get('draft_vocab_size') or fields['vocab_size'])
  target_width = int(content.get('target_hidden_size') or fields['width'])
  return Eagle3Config(
    **fields,
    target_width=target_width,
    taps=_taps(content),
    draft_vocab_size=None if num_ids == fields['vocab_size'] else num_ids,
    own_embedding=target_width != fields['width'] or bool(content.get('embed_requires_grad')),
    norm_before_residual=bool(content.get('norm_before_residual', False)),
    name=folder.name,
  )


def _taps(content: Mapping[str, Any]) -> tuple[int, ...] | None:
  """Layers whose inputs the head reads.

  SpecForge and SGLang number layers by what comes out of them, in `eagle_config`; vLLM's speculators, at the top level,
  by what goes in.
  """
  if outputs := (content.get('eagle_config') or {}).get(TAPS):
    return tuple(int(layer) + 1 for layer in outputs)
  inputs = content.get(TAPS)
  return tuple(map(int, inputs)) if inputs else None


def _written_ids(folder: Path) -> list[int]:
  path = folder / VOCABULARY_FILE
  if not path.is_file():
    return []
  ids = read_json(path).get('ids')
  if not isinstance(ids, list) or not ids or not all(isinstance(number, int) for number in ids):
    raise ValueError(f'{path} holds no list of "ids": write the folder again with launch/convert.py.')
  return ids


def canonical(name: str) -> str:
  """The one spelling, of those that engines have, that `tables` knows: the layer as `layers.0`, no `model.`."""
  name = name.removeprefix('model.')
  for theirs, ours in (('midlayer.', 'layers.0.'), ('transformer.', 'layers.0.'), ('fusion_fc.', 'fc.')):
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  return name
