"""Write EAGLE heads in the layouts of other engines."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from eagle_jax.config import DrafterConfig, Eagle3Config, TargetConfig
from eagle_jax.draft.heads import TAPS
from eagle_jax.weights.load import flatten
from eagle_jax.weights.naming import Table

HeadConfig = DrafterConfig | Eagle3Config


@dataclasses.dataclass(frozen=True)
class Written:
  """A drafter as files of another layout."""

  content: dict[str, Any]  # config.json
  tensors: dict[str, np.ndarray]
  ids: list[int]  # for VOCABULARY_FILE; empty if the tensors name them, or there is no draft vocabulary


@dataclasses.dataclass(frozen=True)
class Form:
  """How an engine wants a kind of head: what cannot be said in it is an error, not a guess."""

  content: Callable[[Any, TargetConfig], dict[str, Any]]
  rename: Mapping[str, str] = dataclasses.field(default_factory=dict)  # prefixes of canonical names -> the engine's
  has_embedding: bool = False  # the file holds the target's embedding, too
  names_ids: bool = False  # tensors name the draft vocabulary


def written(
  kind: str,
  table: Table,
  config: HeadConfig,
  params: Mapping[str, Any],
  target: TargetConfig,
  embed_VD: Any,
  layout: str,
) -> Written:
  """Put a drafter into a layout of `LAYOUTS`.

  Args:
    kind: the drafter's, a key of `kinds.KINDS`.
    table: its tensors.
    config, params: the drafter's.
    target: its target, whose context and name the configs of other engines state.
    embed_VD: the target's embedding.
    layout: a key of `LAYOUTS`.

  Raises:
    ValueError: the layout has no words for such drafters, or for something that this one is.
  """
  if kind not in LAYOUTS[layout]:
    raise ValueError(f'Layout {layout!r} holds drafters of kinds {sorted(LAYOUTS[layout])}, not of kind {kind!r}.')
  form = LAYOUTS[layout][kind]
  own = {entry.path[0] for entry in table.entries.values()} & params.keys()
  tensors = flatten({name: params[name] for name in own}, table)
  ids: list[int] = []
  if 'd2t' in tensors:
    d2t_U = tensors['d2t'].astype(np.int64)
    if form.names_ids:
      tensors['d2t'] = d2t_U
      tensors['t2d'] = np.isin(np.arange(config.vocab_size), d2t_U + np.arange(len(d2t_U)))
    else:
      ids = np.asarray(params['ids']).tolist()
      del tensors['d2t']
  if form.has_embedding:
    tensors['embed_tokens.weight'] = np.asarray(jax.device_get(embed_VD))
  return Written(form.content(config, target), {_renamed(name, form.rename): x for name, x in tensors.items()}, ids)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
  for ours, theirs in prefixes.items():
    if name.startswith(ours):
      return theirs + name.removeprefix(ours)
  return name


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
  switches = ('norm_before_residual', 'fc_norm', 'norm_output', 'rope_slowdown')
  unsaid = [name for name in switches if getattr(config, name) and name not in spoken]
  if default_taps is not None and config.taps not in (None, default_taps):
    unsaid.append('taps')
  if config.own_embedding and config.width == config.target_width and 'embed_requires_grad' not in spoken:
    unsaid.append('own_embedding')  # of another width it shows
  if unsaid:
    raise ValueError(f'This layout has no words for {unsaid} of drafter {config.name!r}: choose another.')
  wider = {'target_hidden_size': config.target_width} if config.target_width != config.width else {}
  return {'draft_vocab_size': config.num_ids, **wider, **spoken}


def _eagle_biases(config: DrafterConfig) -> dict[str, Any]:
  return {'bias': config.fc_bias, 'qkv_bias': config.qkv_bias}


def _safeailab_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  return {'architectures': ['LlamaForCausalLM'], **_llama_content(config, target), **_eagle_biases(config)}


def _safeailab_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  default = dataclasses.replace(config, taps=None).tapped_layers(target.num_layers)
  own = _eagle3_content(config, default_taps=default)
  return {'architectures': ['LlamaForCausalLM'], **_llama_content(config, target), **own}


def _sglang_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  return {'architectures': ['LlamaForCausalLMEagle'], **_llama_content(config, target), **_eagle_biases(config)}


def _sglang_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  taps = config.tapped_layers(target.num_layers)
  if min(taps) < 1:
    raise ValueError(f'This layout has no words for the input of the first layer, which {config.name!r} reads.')
  outputs = {'use_aux_hidden_state': True, TAPS: [layer - 1 for layer in taps]}
  own = _eagle3_content(config, default_taps=None, eagle_config=outputs)
  return {'architectures': ['LlamaForCausalLMEagle3'], **_llama_content(config, target), **own}


def _speculators(algorithm: str, config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  proposal = {'proposal_type': 'greedy', 'speculative_tokens': 5}
  return {
    'speculators_model_type': algorithm,
    'speculators_config': {
      'algorithm': algorithm,
      'default_proposal_method': 'greedy',
      'proposal_methods': [proposal],
      'verifier': {'name_or_path': target.name, 'architectures': []},
    },
    'transformer_layer_config': _llama_content(config, target),
  }


def _speculators_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  if config.qkv_bias:
    raise ValueError(f'This layout has no words for qkv_bias of drafter {config.name!r}: choose another.')
  own = {'fusion_bias': config.fc_bias, 'layernorms': False}
  return {'architectures': ['EagleSpeculator'], **_speculators('eagle', config, target), **own}


def _speculators_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  spoken = {
    'norm_before_residual': config.norm_before_residual,
    'embed_requires_grad': config.own_embedding,
    TAPS: list(config.tapped_layers(target.num_layers)),
  }
  own = _eagle3_content(config, default_taps=None, **spoken)
  return {'architectures': ['Eagle3Speculator'], **_speculators('eagle3', config, target), **own}


_MIDLAYER = {'layers.0.': 'midlayer.'}

# Layout -> kind of drafter -> how it is written.
LAYOUTS: dict[str, dict[str, Form]] = {
  'safeailab': {
    'eagle2': Form(_safeailab_eagle, has_embedding=True),
    'eagle3': Form(_safeailab_eagle3, _MIDLAYER, names_ids=True),
  },
  'sglang': {'eagle2': Form(_sglang_eagle), 'eagle3': Form(_sglang_eagle3, _MIDLAYER, names_ids=True)},
  'speculators': {
    'eagle2': Form(_speculators_eagle, {'layers.0.': 'transformer.', 'fc.': 'fusion_fc.'}),
    'eagle3': Form(_speculators_eagle3, names_ids=True),
  },
}
