"""Folders of drafters: our own, and the layouts that other engines publish and load.

Reading finds out by itself which layout a folder has; `LAYOUTS` says how each is written. Source: EAGLE.md, sections
1.4, 2.4 and 3.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.config import DrafterConfig, Eagle3Config, TargetConfig
from eagle_jax.weights.folder import FAMILIES, llama_fields, naming_config, read_json, read_tensors
from eagle_jax.weights.load import flatten
from eagle_jax.weights.naming import canonical, drafter_table

HeadConfig = DrafterConfig | Eagle3Config

# Where an EAGLE-1/2 head of another layout keeps the ids that it was trained to draft: no engine's tensors name them.
VOCABULARY_FILE = 'draft_vocabulary.json'
_TAPS = 'eagle_aux_hidden_state_layer_ids'
_KINDS: dict[str, type] = {'eagle2': DrafterConfig, 'eagle3': Eagle3Config}  # of our own folders
# What an absent key means in the `transformer_layer_config` of vLLM's speculators: transformers' LlamaConfig.
_LLAMA_DEFAULTS = {
  'vocab_size': 32_000, 'hidden_size': 4096, 'intermediate_size': 11_008, 'num_attention_heads': 32,
  'num_hidden_layers': 1, 'rms_norm_eps': 1e-6,
}  # fmt: skip


def read_head_config(folder: Path, content: Mapping[str, Any]) -> HeadConfig:
  """The head that a config.json describes: ours ("kind"), or a published one of EAGLE-1/2 or EAGLE-3.

  Raises:
    ValueError: another kind of drafter, missing or unknown fields.
  """
  with naming_config(folder):
    if 'kind' in content:
      return _own_config(folder, content)
    if 'speculators_model_type' in content:
      content = _without_speculators(folder, content)
    is_eagle3 = content.get('draft_vocab_size') is not None or 'eagle3' in str(content.get('architectures')).lower()
    return _eagle3_config(folder, content) if is_eagle3 else _eagle_config(folder, content)


def read_head_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
  """Those of a drafter's folder, by their canonical names."""
  for name, array in read_tensors(folder):
    yield canonical(name), array
  if ids := _written_ids(folder):
    yield 'd2t', np.asarray(ids) - np.arange(len(ids))


def _own_config(folder: Path, content: Mapping[str, Any]) -> HeadConfig:
  if content['kind'] not in _KINDS:
    raise ValueError(f'{folder}: drafter kind {content["kind"]!r} is not supported; one of {sorted(_KINDS)} is.')
  form = _KINDS[content['kind']]
  given = {name: value for name, value in content.items() if name != 'kind'}
  known = {field.name for field in dataclasses.fields(form)}
  if missing := sorted(known - given.keys()):
    raise ValueError(f'{folder}/config.json lacks {missing}: save the drafter again with save_drafter.')
  if unknown := sorted(given.keys() - known):
    raise ValueError(f'{folder}/config.json has unknown fields {unknown}; known are {sorted(known)}.')
  return form(**given)


def own_content(config: HeadConfig) -> dict[str, Any]:
  """config.json of a drafter of ours: what `read_head_config` reads."""
  kind = next(kind for kind, form in _KINDS.items() if type(config) is form)
  return {'kind': kind, **dataclasses.asdict(config)}


def _without_speculators(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
  """A config of vLLM's speculators in the words of the others."""
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


def _eagle_config(folder: Path, content: Mapping[str, Any]) -> DrafterConfig:
  """EAGLE.md section 1.4."""
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


def _eagle3_config(folder: Path, content: Mapping[str, Any]) -> Eagle3Config:
  """EAGLE.md section 2.4. The number of layers that such a config states means nothing."""
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
  if outputs := (content.get('eagle_config') or {}).get(_TAPS):
    return tuple(int(layer) + 1 for layer in outputs)
  inputs = content.get(_TAPS)
  return tuple(map(int, inputs)) if inputs else None


def _written_ids(folder: Path) -> list[int]:
  path = folder / VOCABULARY_FILE
  if not path.is_file():
    return []
  ids = read_json(path).get('ids')
  if not isinstance(ids, list) or not ids or not all(isinstance(number, int) for number in ids):
    raise ValueError(f'{path} holds no list of "ids": write the folder again with launch/convert.py.')
  return ids


# Out again.


@dataclasses.dataclass(frozen=True)
class Written:
  """A drafter as files of another layout."""

  content: dict[str, Any]  # config.json
  tensors: dict[str, np.ndarray]
  ids: list[int]  # for VOCABULARY_FILE; empty if the tensors name them, or there is no draft vocabulary


@dataclasses.dataclass(frozen=True)
class Layout:
  """How an engine wants a head: what cannot be said in it is an error, not a guess."""

  rename: Callable[[str, bool], str]  # (canonical name, is EAGLE-3) -> the engine's
  content: Callable[[HeadConfig, TargetConfig], dict[str, Any]]
  has_embedding: bool = False  # an EAGLE-1/2 file holds the target's embedding, too


def written(config: HeadConfig, params: Mapping[str, Any], target: TargetConfig, embed_VD: Any, layout: str) -> Written:
  """A drafter in a layout of `LAYOUTS`.

  Args:
    config, params: the drafter's.
    target: its target, whose context and name the configs of other engines state.
    embed_VD: the target's embedding.
    layout: a key of `LAYOUTS`.

  Raises:
    ValueError: the layout has no words for something that this drafter is.
  """
  form, is_eagle3 = LAYOUTS[layout], isinstance(config, Eagle3Config)
  table = drafter_table(config)
  own = {entry.path[0] for entry in table.entries.values()} & params.keys()
  tensors = flatten({name: params[name] for name in own}, table)
  ids: list[int] = []
  if 'd2t' in tensors:
    d2t_U = tensors['d2t'].astype(np.int64)
    if is_eagle3:
      tensors['d2t'] = d2t_U
      tensors['t2d'] = np.isin(np.arange(config.vocab_size), d2t_U + np.arange(len(d2t_U)))
    else:
      ids = np.asarray(params['ids']).tolist()
      del tensors['d2t']
  if form.has_embedding and not is_eagle3:
    tensors['embed_tokens.weight'] = np.asarray(jax.device_get(embed_VD))
  return Written(form.content(config, target), {form.rename(name, is_eagle3): x for name, x in tensors.items()}, ids)


def _llama_content(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  """The keys that all layouts share. Engines size tables of positions by `max_position_embeddings`: the target's."""
  content = {
    'model_type': 'llama',
    'hidden_act': 'silu',
    'num_hidden_layers': 1,
    'vocab_size': config.vocab_size,
    'hidden_size': config.width,
    'intermediate_size': config.ffn_width,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'max_position_embeddings': target.max_context,
    'tie_word_embeddings': False,
  }
  return content | ({'eos_token_id': target.eos_ids[0]} if target.eos_ids else {})


def _eagle3_content(config: Eagle3Config, *, default_taps: tuple[int, ...] | None, **spoken: Any) -> dict[str, Any]:
  """What is EAGLE-3's own, if a layout has words for it.

  Args:
    config: of the drafter.
    default_taps: layers that the layout takes for granted; None if it names them.
    spoken: switches that the layout has words for, and their values.
  """
  switches = ('norm_before_residual', 'norm_taps', 'norm_feedback', 'rope_slowdown')
  unsaid = [name for name in switches if getattr(config, name) and name not in spoken]
  if default_taps is not None and config.taps not in (None, default_taps):
    unsaid.append('taps')
  if config.own_embedding and config.width == config.target_width and 'embed_requires_grad' not in spoken:
    unsaid.append('own_embedding')  # of another width it shows
  if unsaid:
    raise ValueError(f'This layout has no words for {unsaid} of drafter {config.name!r}: choose another.')
  wider = {'target_hidden_size': config.target_width} if config.target_width != config.width else {}
  return {'draft_vocab_size': config.num_ids, **wider, **spoken}


def _eagle_content(config: DrafterConfig) -> dict[str, Any]:
  return {'bias': config.fc_bias, 'qkv_bias': config.qkv_bias}


def _safeailab(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  content = {'architectures': ['LlamaForCausalLM'], **_llama_content(config, target)}
  if isinstance(config, DrafterConfig):
    return content | _eagle_content(config)
  default = dataclasses.replace(config, taps=None).tapped_layers(target.num_layers)
  return content | _eagle3_content(config, default_taps=default)


def _sglang(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  content = _llama_content(config, target)
  if isinstance(config, DrafterConfig):
    return {'architectures': ['LlamaForCausalLMEagle'], **content, **_eagle_content(config)}
  taps = config.tapped_layers(target.num_layers)
  if min(taps) < 1:
    raise ValueError(f'This layout has no words for the input of the first layer, which {config.name!r} reads.')
  outputs = {'use_aux_hidden_state': True, _TAPS: [layer - 1 for layer in taps]}
  own = _eagle3_content(config, default_taps=None, eagle_config=outputs)
  return {'architectures': ['LlamaForCausalLMEagle3'], **content, **own}


def _speculators(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  algorithm = 'eagle' if isinstance(config, DrafterConfig) else 'eagle3'
  proposal = {'proposal_type': 'greedy', 'speculative_tokens': 5}
  content: dict[str, Any] = {
    'speculators_model_type': algorithm,
    'speculators_config': {
      'algorithm': algorithm,
      'default_proposal_method': 'greedy',
      'proposal_methods': [proposal],
      'verifier': {'name_or_path': target.name, 'architectures': []},
    },
    'transformer_layer_config': _llama_content(config, target),
  }
  if isinstance(config, DrafterConfig):
    if config.qkv_bias:
      raise ValueError(f'This layout has no words for qkv_bias of drafter {config.name!r}: choose another.')
    return {'architectures': ['EagleSpeculator'], **content, 'fusion_bias': config.fc_bias, 'layernorms': False}
  spoken = {
    'norm_before_residual': config.norm_before_residual,
    'embed_requires_grad': config.own_embedding,
    _TAPS: list(config.tapped_layers(target.num_layers)),
  }
  return {'architectures': ['Eagle3Speculator'], **content, **_eagle3_content(config, default_taps=None, **spoken)}


def _as_midlayer(name: str, is_eagle3: bool) -> str:
  return name.replace('layers.0.', 'midlayer.') if is_eagle3 else name


def _as_transformer(name: str, is_eagle3: bool) -> str:
  return name if is_eagle3 else name.replace('layers.0.', 'transformer.').replace('fc.', 'fusion_fc.')


LAYOUTS = {
  'safeailab': Layout(_as_midlayer, _safeailab, has_embedding=True),
  'sglang': Layout(_as_midlayer, _sglang),
  'speculators': Layout(_as_transformer, _speculators),
}
