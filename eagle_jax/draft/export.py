"""Write EAGLE heads in the layouts of other engines."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from eagle_jax.config import DrafterConfig, Eagle3Config, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.heads import TAPS, inputs_of
from eagle_jax.draft.kinds import name_of_kind, own_tensors
from eagle_jax.models.transformer import Target

HeadConfig = DrafterConfig | Eagle3Config


@dataclasses.dataclass(frozen=True)
class Written:
  """The files of a drafter in another layout."""

  content: dict[str, Any]  # config.json
  tensors: dict[str, np.ndarray]
  ids: list[int]  # for VOCABULARY_FILE; empty if the tensors name them, or there is no draft vocabulary


@dataclasses.dataclass(frozen=True)
class Form:
  """An engine's form for a kind of head. A drafter that the form cannot express is an error, not a guess."""

  content: Callable[[Any, TargetConfig], dict[str, Any]]
  says: frozenset[str]  # fields of the drafter's config, besides sizes, that it can express
  scalings: frozenset[str] = frozenset({'linear'})  # of RoPE
  rename: Mapping[str, str] = dataclasses.field(default_factory=dict)  # prefixes of canonical names -> the engine's
  has_embedding: bool = False  # the file holds the embedding, even if it is the target's
  names_ids: bool = False  # tensors name the draft vocabulary


# Fields that every layout has words for.
_SIZES = frozenset({
  'vocab_size', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width', 'norm_eps', 'rope_theta', 'target_width',
  'draft_vocab_size', 'name',
})  # fmt: skip
_ROPE = frozenset({'rope_slowdown', 'rope_factor', 'rope_scaling'})


def _require_words(config: HeadConfig, form: Form) -> None:
  """Raise a ValueError if the form cannot express the drafter."""
  said = form.says | _SIZES
  scaling = dict(config.rope_scaling).get('rope_type')
  if scaling in form.scalings:
    said |= _ROPE
  if config.width != config.target_width:
    said |= {'own_embedding'}  # which shows in the widths
  fields = {field.name: field.default for field in dataclasses.fields(config)}
  if unsaid := [name for name, default in fields.items() if name not in said and getattr(config, name) != default]:
    raise ValueError(f'This layout cannot express {unsaid} of drafter {config.name!r}: choose another.')


def written(drafter: Drafter, target: Target, layout: str) -> Written:
  """Put a drafter into a layout.

  Args:
    drafter: to be written.
    target: the model that it drafts for, whose context and name the configs of other engines state.
    layout: a key of `LAYOUTS`.

  Raises:
    ValueError: unknown layout, one that does not hold such drafters, or cannot express something of this one.
  """
  if layout not in LAYOUTS:
    raise ValueError(f'`layout` must be one of {sorted(LAYOUTS)}, got {layout!r}.')
  kind, config = name_of_kind(drafter.config), drafter.config
  if kind not in LAYOUTS[layout]:
    raise ValueError(f'Layout {layout!r} holds drafters of kinds {sorted(LAYOUTS[layout])}, not of kind {kind!r}.')
  form = LAYOUTS[layout][kind]
  _require_words(config, form)
  tensors = own_tensors(drafter)
  ids: list[int] = []
  if 'd2t' in tensors:
    d2t_U = tensors['d2t'].astype(np.int64)
    if form.names_ids:
      tensors['d2t'] = d2t_U
      tensors['t2d'] = np.isin(np.arange(config.vocab_size), d2t_U + np.arange(len(d2t_U)))
    else:
      ids = np.asarray(drafter.params['ids']).tolist()
      del tensors['d2t']
  if form.has_embedding and 'embed_tokens.weight' not in tensors:
    tensors['embed_tokens.weight'] = np.asarray(jax.device_get(target.params['embed']['weight']))
  renamed = {_renamed(name, form.rename): x for name, x in tensors.items()}
  return Written(form.content(config, target.config), renamed, ids)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
  for ours, theirs in prefixes.items():
    if name.startswith(ours):
      return theirs + name.removeprefix(ours)
  return name


def _llama_content(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
  """Return the keys that all layouts share, with the target's `max_position_embeddings`: engines size tables by it."""
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
    'rope_scaling': dict(config.rope_scaling) or None,
    'max_position_embeddings': target.max_context,
    'tie_word_embeddings': False,
  }
  return content | ({'eos_token_id': target.eos_ids[0]} if target.eos_ids else {})


def _given(config: HeadConfig, *names: str) -> dict[str, Any]:
  """Return the fields that are switched on, by name."""
  return {name: getattr(config, name) for name in names if getattr(config, name)}


def _widths(config: Eagle3Config) -> dict[str, Any]:
  wider = {'target_hidden_size': config.target_width} if config.target_width != config.width else {}
  return {'draft_vocab_size': config.num_ids, **wider}


def _attention_bias(config: HeadConfig) -> dict[str, Any]:
  """Return the one key that tells whether all four projections have biases."""
  if config.qkv_bias != config.o_bias:
    raise ValueError(
      f'This layout cannot express the biases of drafter {config.name!r}: qkv_bias {config.qkv_bias}, but o_bias '
      f'{config.o_bias}. Choose another.'
    )
  return {'attention_bias': config.o_bias}


def _safeailab_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  biases = {'bias': config.fc_bias, 'qkv_bias': config.qkv_bias}
  return {'architectures': ['LlamaForCausalLM'], **_llama_content(config, target), **biases}


def _safeailab_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  default = dataclasses.replace(config, taps=None).tapped_layers(target.num_layers)
  if config.tapped_layers(target.num_layers) != default:
    raise ValueError(f"This layout cannot express ['taps'] of drafter {config.name!r}, only layers {default}.")
  return {'architectures': ['LlamaForCausalLM'], **_llama_content(config, target), **_widths(config)}


def _sglang_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  return _safeailab_eagle(config, target) | {'architectures': ['LlamaForCausalLMEagle']}


def _sglang_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  taps, num_layers = config.tapped_layers(target.num_layers), target.num_layers
  if 0 in taps:
    raise ValueError(f'This layout cannot express the input of the first layer, which {config.name!r} reads.')
  # Outputs, unless the norm's input is among the taps.
  written = taps if num_layers in taps else tuple(layer - 1 for layer in taps)
  if taps and inputs_of(written, num_layers) != taps:
    raise ValueError(f'This layout takes {TAPS} {written} for other layers than those that {config.name!r} reads.')
  nested = {'use_aux_hidden_state': bool(taps)} | ({TAPS: [*written]} if taps else {})
  switches = _given(config, 'norm_before_fc', 'fc_norm', 'norm_output') | ({'bias': True} if config.fc_bias else {})
  content = _llama_content(config, target) | _widths(config) | {'eagle_config': nested}
  return {'architectures': ['LlamaForCausalLMEagle3'], **content, **switches}


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
    'transformer_layer_config': _llama_content(config, target) | _given(config, 'mlp_bias'),
  }


def _speculators_eagle(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
  content = _speculators('eagle', config, target)
  content['transformer_layer_config'] |= _attention_bias(config)
  return {'architectures': ['EagleSpeculator'], **content, 'fusion_bias': config.fc_bias, 'layernorms': False}


def _speculators_eagle3(config: Eagle3Config, target: TargetConfig) -> dict[str, Any]:
  content = _speculators('eagle3', config, target)
  layer = content['transformer_layer_config'] | _attention_bias(config)
  if config.qk_norm:
    layer['model_type'] = 'qwen3'
  if config.window is not None:
    layer |= {'layer_types': ['sliding_attention'], 'sliding_window': config.window, 'use_sliding_window': True}
  if not (taps := config.tapped_layers(target.num_layers)):
    raise ValueError(f'This layout cannot express the final feature alone, which {config.name!r} reads.')
  switches = {
    'norm_before_residual': config.norm_before_residual,
    'embed_requires_grad': config.own_embedding,
    TAPS: [*taps],
    **_given(config, 'norm_before_fc', 'fc_norm', 'norm_output'),
  }
  own = {'transformer_layer_config': layer, **_widths(config), **switches}
  return {'architectures': ['Eagle3Speculator'], **content, **own}


_MIDLAYER = {'layers.0.': 'midlayer.'}
_EAGLE_31 = frozenset({'taps', 'norm_before_fc', 'fc_norm', 'norm_output'})
_SCALINGS = frozenset({'linear', 'llama3', 'yarn'})

# Layout -> kind of drafter -> how it is written.
LAYOUTS: dict[str, dict[str, Form]] = {
  'safeailab': {
    'eagle2': Form(_safeailab_eagle, says=frozenset({'fc_bias', 'qkv_bias', 'own_embedding'}), has_embedding=True),
    'eagle3': Form(_safeailab_eagle3, says=frozenset({'taps'}), rename=_MIDLAYER, names_ids=True),
  },
  'sglang': {
    'eagle2': Form(_sglang_eagle, says=frozenset({'fc_bias', 'qkv_bias'}), scalings=_SCALINGS),
    'eagle3': Form(_sglang_eagle3, says=_EAGLE_31 | {'fc_bias'}, scalings=_SCALINGS, rename=_MIDLAYER, names_ids=True),
  },
  'speculators': {
    'eagle2': Form(
      _speculators_eagle,
      says=frozenset({'fc_bias', 'qkv_bias', 'o_bias', 'mlp_bias'}),
      scalings=_SCALINGS,
      rename={'layers.0.': 'transformer.', 'fc.': 'fusion_fc.'},
    ),
    'eagle3': Form(
      _speculators_eagle3,
      says=_EAGLE_31 | {'norm_before_residual', 'own_embedding', 'qkv_bias', 'o_bias', 'mlp_bias', 'qk_norm', 'window'},
      scalings=_SCALINGS,
      names_ids=True,
    ),
  },
}
