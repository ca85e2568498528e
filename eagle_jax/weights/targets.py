"""Read the network that the config.json of a Hugging Face folder describes."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.models.families import FAMILIES, Family
from eagle_jax.weights.folder import llama_fields, naming_config, read_config, read_json
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.quantised import read_floats, require_readable
from eagle_jax.weights.rope import Rope, Settings, chosen_context

log = logging.getLogger('eagle_jax')


# Defaults of keys that the text part of Gemma 3's files may lack.
_GEMMA_3 = {
  'vocab_size': 262_208, 'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26,
  'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 256, 'max_position_embeddings': 131_072,
  'rms_norm_eps': 1e-6, 'query_pre_attn_scalar': 256,
}  # fmt: skip
_PREFIXES = {
  'language_model.model.': 'model.',
  'model.language_model.': 'model.',
  'language_model.lm_head.': 'lm_head.',
}
_OF_IMAGES = 'vision_tower.', 'multi_modal_projector.', 'model.vision_tower.', 'model.multi_modal_projector.'


def read_content(folder: Path) -> dict[str, Any]:
  """Read the config.json of a target: where Gemma 3 takes images too, what it says of the text model."""
  content = read_config(folder)
  text = content.get('text_config')
  if content.get('model_type') != 'gemma3' or not isinstance(text, dict):
    return content
  log.info('%s: the text model alone is read, without the one for images', folder)
  outer = {name: content[name] for name in ('eos_token_id', 'quantization_config') if name in content}
  return {**_GEMMA_3, **text, **outer, 'model_type': 'gemma3_text'}


def read_text_tensors(folder: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield a target's weights as floats: where Gemma 3 takes images too, those of the text model by their own names."""
  tensors = read_floats(folder, content)  # through `map`, for the reason that is given there
  if read_family(folder, content) is not FAMILIES['gemma3_text']:
    return tensors
  return filter(None, map(_of_the_text_model, tensors))


def _of_the_text_model(named: tuple[str, np.ndarray]) -> tuple[str, np.ndarray] | None:
  """Give a tensor of Gemma 3 its name in the text model; None if it is not part of that."""
  name, array = named
  if name.startswith(_OF_IMAGES):
    return None
  prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), '')
  return _PREFIXES.get(prefix, '') + name.removeprefix(prefix), array


def read_family(folder: Path, content: Mapping[str, Any]) -> Family:
  """Find the family of a config.json in `FAMILIES`; ValueError if it is not there."""
  with naming_config(folder):
    kind, architectures = content.get('model_type'), [str(name) for name in content.get('architectures') or ()]
    if any(name.endswith('_config') and name.split('_')[0] in ('vision', 'audio') for name in content):
      raise ValueError(
        f'{folder}: model_type {kind!r} takes images or sounds, which is not supported: use a model of text alone.'
      )
    if architectures and not any(name.endswith('ForCausalLM') for name in architectures):
      raise ValueError(
        f'{folder}: {architectures} does not write text token after token: use a checkpoint whose architectures end in '
        "'ForCausalLM', such as the model that this one was made from."
      )
    if kind not in FAMILIES:
      raise ValueError(f'{folder}: model_type {kind!r} is not supported; one of {sorted(FAMILIES)} is.')
    return FAMILIES[kind]


def target_config(folder: Path, content: Mapping[str, Any], *, max_context: int | None = None) -> TargetConfig:
  """Read the network of a target, and its EOS ids, which generation_config.json may hold.

  Args:
    folder: of the file.
    content: of the file.
    max_context: how many tokens texts may have, see `hub.load_target`.

  Raises:
    ValueError: a family that is not in `FAMILIES`, a key that may change the network in a way that is not supported,
      missing keys, or another context.
  """
  family = read_family(folder, content)
  with naming_config(folder):
    require_readable(folder, content)
    keys = Keys({**content, **_meant_by_absence(family, content)})
    fields = llama_fields(folder, keys, family, 'num_hidden_layers', 'max_position_embeddings')
    scalings = _scalings(keys, family)
    settings = {
      kind: Settings.read(
        folder,
        scaling,
        fields['head_dim'],
        theta=10_000.0,
        kinds=family.rope_kinds,
        is_partial='partial_rotary_factor' in family.holds,
      )
      for kind, scaling in scalings.items()
    }
    of_all = settings[_FULL]
    is_stated = _SLIDING in scalings  # Gemma 3 states the scaled context
    contexts = (int(keys['max_position_embeddings']),) * 2 if is_stated else of_all.contexts()
    max_context = chosen_context(folder, *contexts, max_context)
    ropes = {kind: given.rope(max_context) for kind, given in settings.items()}
    layers = _layers(folder, keys, family, ropes)
    _read_past(keys, family)
    has_biases = 'attention_bias' in family.holds and keys.flag('attention_bias')
    config = TargetConfig(
      **fields | layers[0],
      num_layers=len(layers),
      max_context=max_context,
      rotary_dim=of_all.rotary_dim if of_all.rotary_dim != fields['head_dim'] else None,
      tied_head=keys.flag('tie_word_embeddings'),
      qkv_bias=family.qkv_bias or has_biases,
      o_bias=has_biases,
      mlp_bias='mlp_bias' in family.holds and keys.flag('mlp_bias'),
      **{name: getattr(family, name) for name in SWITCHES},
      **_numbers(keys, family, fields['width']),
      expert_bias=family.experts == 'gpt_oss',
      shares_sum_to_1='norm_topk_prob' not in family.holds or keys.flag('norm_topk_prob'),
      experts_per_token=int(keys['num_experts_per_tok']) if family.experts else 0,
      layer_changes=layer_changes(layers),
      eos_ids=_eos_ids(folder, content),
      name=folder.name,
    )
    keys.require_known(folder, 'a model that cannot be run')
    return config


SWITCHES = (
  'qk_norm', 'joint_qk_norm', 'has_input_norms', 'has_output_norms', 'norm_in_float32', 'norm_offset', 'activation',
  'has_sinks',
)  # fmt: skip
_ACTIVATIONS = {'silu': ('hidden_act', ('silu', 'swish')), 'gelu_tanh': ('hidden_activation', ('gelu_pytorch_tanh',))}
_FULL, _SLIDING = 'full_attention', 'sliding_attention'
_MULTIPLIERS = {
  'embedding_scale': 'embedding_multiplier',
  'attention_scale': 'attention_multiplier',
  'residual_scale': 'residual_multiplier',
  'logit_divisor': 'logits_scaling',
}


def _numbers(keys: Keys, family: Family, width: int) -> dict[str, Any]:
  """Read the factors and limits that only some families have."""
  numbers = {field: float(keys.get(key, 1.0)) for field, key in _MULTIPLIERS.items() if key in family.holds}
  if family.scales_embedding:
    numbers['embedding_scale'] = width**0.5
  if 'query_pre_attn_scalar' in family.holds:
    numbers['attention_scale'] = float(keys['query_pre_attn_scalar']) ** -0.5
  if 'final_logit_softcapping' in family.holds and 'final_logit_softcapping' in keys:
    numbers['logit_cap'] = float(keys['final_logit_softcapping'])
  if 'swiglu_limit' in family.holds:
    numbers |= {'gate_limit': float(keys['swiglu_limit']), 'gate_slope': float(keys['swiglu_alpha'])}
  return numbers


def _scalings(keys: Keys, family: Family) -> dict[str, Keys]:
  """Return the keys of RoPE, for each type of layer that has its own.

  Gemma 3's older files say all of full layers at the top level, and the base of the others, which are not scaled; newer
  ones have an object for each under rope_parameters.
  """
  if 'rope_local_base_freq' not in family.holds:
    return {_FULL: keys}
  local, newer = keys['rope_local_base_freq'], keys.nested('rope_parameters')
  if 'rope_scaling' in keys or not {_FULL, _SLIDING} & {*newer}:
    return {_FULL: keys, _SLIDING: Keys({'rope_theta': local})}
  of_type = {}
  for kind, base in ((_FULL, keys['rope_theta']), (_SLIDING, local)):
    of_type[kind] = Keys({'rope_theta': base, 'max_position_embeddings': keys['max_position_embeddings']})
    of_type[kind].adopt('rope_parameters', newer.nested(kind))
  return of_type


def _meant_by_absence(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
  """Return what absent keys mean. A null means the same, except for `sliding_window`: there it means no window."""
  present = {name for name, value in content.items() if value is not None or name == 'sliding_window'}
  if 'rope_scaling' in present:
    present.add('rope_parameters')
  return {name: value for name, value in family.absent.items() if name not in present}


def _read_past(keys: Keys, family: Family) -> None:
  """Mark the keys that only name the family as read."""
  keys.get('quantization_config')
  if family.qkv_bias:  # such a family has no switch for them
    keys.get('attention_bias')
  key, names = _ACTIVATIONS[family.activation]
  if keys.get(key, names[0]) not in names:
    raise ValueError(f'{key} {keys[key]!r}: another activation than {names[0]!r} is not supported.')
  if family.qk_norm and keys.get('use_qk_norm', True) is not True:
    raise ValueError(
      f'use_qk_norm {keys["use_qk_norm"]!r}: layers without norms of queries and keys are not supported.'
    )


def layer_changes(layers: list[dict[str, Any]]) -> tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]:
  """List how layers differ from the first one, in the form of `TargetConfig.layer_changes`."""
  differing = ((i, tuple(set(layer.items()) - set(layers[0].items()))) for i, layer in enumerate(layers))
  return tuple((i, tuple(sorted(changes))) for i, changes in differing if changes)


def _layers(folder: Path, keys: Keys, family: Family, ropes: Mapping[str, Rope]) -> list[dict[str, Any]]:
  """Read the fields in which layers may differ, by layer."""
  num_layers = int(keys['num_hidden_layers'])
  if num_layers < 1:
    raise ValueError(f'{folder}: num_hidden_layers must be positive, got {num_layers}.')
  has_rope = _rope_layers(folder, keys, family, num_layers)
  windows, routed = _windows(folder, keys, family, has_rope), _routed_layers(keys, family, num_layers)
  of_rope = [ropes.get(_FULL if window is None else _SLIDING, ropes[_FULL]) for window in windows]
  return [
    {
      'window': window,
      'has_rope': is_on,
      'rope_theta': rope.theta,
      'rope_slowdown': rope.slowdown,
      'rope_factor': rope.factor,
      **experts,
    }
    for window, is_on, rope, experts in zip(windows, has_rope, of_rope, routed, strict=True)
  ]


def _routed_layers(keys: Keys, family: Family, num_layers: int) -> list[dict[str, Any]]:
  """Read each layer's number of experts, 0 if it is not routed, and the width of its feed-forward networks."""
  width = int(keys['intermediate_size'])
  if not family.experts:
    return [{'num_experts': 0, 'ffn_width': width}] * num_layers
  num_experts = keys.get('num_experts', keys.get('num_local_experts'))
  if num_experts is None:
    raise ValueError("it lacks 'num_experts': fetch the whole file again.")
  of_expert = int(keys.get('moe_intermediate_size', width))
  step, dense = 1, []
  if 'decoder_sparse_step' in family.holds:
    step, dense = int(keys['decoder_sparse_step']), keys.get('mlp_only_layers', [])
  is_routed = [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]
  routed, plain = ({'num_experts': e, 'ffn_width': w} for e, w in ((int(num_experts), of_expert), (0, width)))
  return [routed if is_on else plain for is_on in is_routed]


def _rope_layers(folder: Path, keys: Keys, family: Family, num_layers: int) -> list[bool]:
  """Tell for each layer whether it has RoPE."""
  if 'no_rope_layers' not in family.holds:
    return [True] * num_layers
  interval = int(keys['no_rope_layer_interval'])
  given = keys.get('no_rope_layers', [(index + 1) % interval != 0 for index in range(num_layers)])
  if len(given) < num_layers:
    raise ValueError(f'{folder}: no_rope_layers {given} must hold one entry for each of {num_layers} layers.')
  return [bool(is_on) for is_on in given[:num_layers]]


def _windows(folder: Path, keys: Keys, family: Family, has_rope: list[bool]) -> list[int | None]:
  """Return how many tokens each layer sees; None for all."""
  holds, num_layers = family.holds, len(has_rope)
  window = keys.get('sliding_window') if 'sliding_window' in holds else None
  if 'use_sliding_window' in holds and not keys.flag('use_sliding_window'):
    window = None
  usual = [True] * num_layers
  if 'max_window_layers' in holds:
    first = int(keys['max_window_layers'])
    usual = [first <= index for index in range(num_layers)]
  elif 'sliding_window_pattern' in holds:  # every so many layers one sees all
    pattern = int(keys['sliding_window_pattern'])
    usual = [(index + 1) % pattern != 0 for index in range(num_layers)]
  elif 'no_rope_layers' in holds:
    usual = [not is_on for is_on in has_rope]
  types = [str(kind) for kind in keys.get('layer_types', ())]
  known = {_FULL} | ({_SLIDING} if 'layer_types' in holds and window is not None else set())
  if not {*types} <= known or len(types) not in (0, num_layers):
    raise ValueError(
      f'{folder}: layer_types {types} with sliding_window {window} in {num_layers} layers is not supported: how far '
      'attention sees.'
    )
  is_windowed = [kind == _SLIDING for kind in types] or usual
  return [int(window) if window is not None and is_on else None for is_on in is_windowed]


def _eos_ids(folder: Path, content: Mapping[str, Any]) -> tuple[int, ...]:
  """Read the EOS ids that transformers stops at: generation_config.json's, else config.json's."""
  path = folder / 'generation_config.json'
  eos = read_json(path).get('eos_token_id') if path.is_file() else None
  if eos is None:
    eos = content.get('eos_token_id')
  eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
  if not all(isinstance(token, int) for token in eos_ids):
    raise ValueError(f'{folder}: eos_token_id must be an integer, or a list of integers, got {eos!r}.')
  return eos_ids
