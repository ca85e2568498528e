"""Folders of config.json + safetensors: what they describe and the tensors they hold."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.weights.safetensors import read_safetensors

DRAFTER_KIND = 'eagle2'  # our own drafter folders; published ones have no "kind"
_DEFAULT_ROPE_THETA = 10_000.0  # what an absent rope_theta means in Llama configs


def read_config(folder: Path) -> dict[str, Any]:
  """config.json of a folder; ValueError when it is absent or not a JSON object."""
  path = folder / 'config.json'
  if not path.is_file():
    raise ValueError(f'{folder} holds no config.json: give a folder with config.json and *.safetensors files.')
  return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON ({error}): fetch or save it again.') from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} holds a JSON {type(content).__name__}, an object is needed.')
  return content


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, array) from model.safetensors, or from the shards that model.safetensors.index.json names."""
  index = folder / 'model.safetensors.index.json'
  if not index.is_file():
    if not (folder / 'model.safetensors').is_file():
      raise ValueError(f'{folder} holds neither model.safetensors nor {index.name}; only safetensors can be read.')
    yield from read_safetensors(folder / 'model.safetensors')
    return
  weight_map = _read_object(index).get('weight_map')
  if not isinstance(weight_map, dict):
    raise ValueError(f'{index} has no "weight_map" object: fetch it again.')
  for shard in sorted(set(weight_map.values())):
    yield from read_safetensors(folder / shard)


def hf_target_config(folder: Path, content: Mapping[str, Any]) -> TargetConfig:
  """The dense Llama that a Hugging Face config.json describes; ValueError for any other network."""
  if content.get('model_type') != 'llama':
    raise ValueError(f"{folder}: model_type {content.get('model_type')!r} is not supported, only 'llama'.")
  _refuse_biases(folder, content)
  eos = content.get('eos_token_id')
  return TargetConfig(
    **_llama_fields(folder, content, 'max_position_embeddings'),
    max_context=int(content['max_position_embeddings']),
    tied_head=bool(content.get('tie_word_embeddings', False)),
    eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    num_layers=int(content['num_hidden_layers']),
    name=folder.name,
  )


def drafter_config(folder: Path, content: Mapping[str, Any]) -> DrafterConfig:
  """The EAGLE-1/2 head a config.json describes: ours ("kind": "eagle2") or a published one (Llama keys).

  Raises:
    ValueError: another kind of drafter, missing or unknown fields.
  """
  if 'kind' in content:
    return _own_drafter_config(folder, content)
  if 'draft_vocab_size' in content:
    raise ValueError(f'{folder} holds an EAGLE-3 drafter (it has draft_vocab_size); only EAGLE-1/2 can be read.')
  fields = _llama_fields(folder, content)
  if content['num_hidden_layers'] != 1:
    raise ValueError(f'{folder}: a drafter has one layer, this config says {content["num_hidden_layers"]}.')
  return DrafterConfig(
    **fields,
    fc_bias=bool(content.get('bias', True)),
    qkv_bias=bool(content.get('qkv_bias', False)),
    name=folder.name,
  )


def _own_drafter_config(folder: Path, content: Mapping[str, Any]) -> DrafterConfig:
  if content['kind'] != DRAFTER_KIND:
    raise ValueError(f'{folder}: drafter kind {content["kind"]!r} is not supported, only {DRAFTER_KIND!r}.')
  given = {name: value for name, value in content.items() if name != 'kind'}
  known = {field.name for field in dataclasses.fields(DrafterConfig)}
  if missing := sorted(known - given.keys()):
    raise ValueError(f'{folder}/config.json lacks {missing}: save the drafter again with save_drafter.')
  if unknown := sorted(given.keys() - known):
    raise ValueError(f'{folder}/config.json has unknown fields {unknown}; known are {sorted(known)}.')
  try:
    return DrafterConfig(**given)
  except TypeError as error:
    raise ValueError(f'{folder}/config.json has a field of the wrong type: {error}.') from error


def drafter_content(config: DrafterConfig) -> dict[str, Any]:
  """config.json of a drafter of ours: the reverse of `drafter_config`."""
  return {'kind': DRAFTER_KIND, **dataclasses.asdict(config)}


def _llama_fields(folder: Path, content: Mapping[str, Any], *also_needed: str) -> dict[str, Any]:
  """The fields that targets and drafters share. An absent key means what it means to the Llama config class."""
  needed = (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_attention_heads',
    'num_hidden_layers',
    'rms_norm_eps',
    *also_needed,
  )
  if missing := [name for name in needed if content.get(name) is None]:
    raise ValueError(f'{folder}/config.json lacks {missing}, which a Llama needs.')
  num_heads = int(content['num_attention_heads'])
  return {
    'vocab_size': int(content['vocab_size']),
    'width': int(content['hidden_size']),
    'ffn_width': int(content['intermediate_size']),
    'num_heads': num_heads,
    'num_kv_heads': int(content.get('num_key_value_heads') or num_heads),
    'head_dim': int(content.get('head_dim') or content['hidden_size'] // num_heads),
    'norm_eps': float(content['rms_norm_eps']),
    'rope_theta': _rope_theta(folder, content),
  }


def _rope_theta(folder: Path, content: Mapping[str, Any]) -> float:
  """The base, from either spelling of RoPE settings: rope_theta + rope_scaling, or the newer rope_parameters."""
  settings = {**(content.get('rope_scaling') or {}), **(content.get('rope_parameters') or {})}
  kind = settings.get('rope_type', settings.get('type', 'default'))
  if kind != 'default':
    raise ValueError(f'{folder}: RoPE scaling {kind!r} is not supported, only unscaled RoPE.')
  return float(settings.get('rope_theta', content.get('rope_theta', _DEFAULT_ROPE_THETA)))


def _refuse_biases(folder: Path, content: Mapping[str, Any]) -> None:
  """Switches that change the network; the tensors of some of them would not give them away."""
  if wrong := {name: content[name] for name in ('attention_bias', 'mlp_bias') if content.get(name)}:
    raise ValueError(f'{folder}: {wrong} are not supported, only layers without biases.')
  if content.get('hidden_act', 'silu') != 'silu':
    raise ValueError(f"{folder}: hidden_act {content['hidden_act']!r} is not supported, only 'silu'.")
