"""Read the folders in which DFlash drafters are published: by z-lab, by JetSpec in the same form, by speculators."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.config import TargetConfig
from eagle_jax.draft.dflash import DFlashConfig
from eagle_jax.draft.heads import (
  SPECULATORS,
  inputs_after,
  is_kind,
  layer_fields,
  require_architecture,
  require_value,
  same_everywhere,
  speculators_layer,
  windows_of,
)
from eagle_jax.draft.tables import head_table, layer_entries
from eagle_jax.weights.folder import read_names
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.naming import Entry, Table

# Of Domino, which is refused by its `projector_type`, and of training.
_MEANINGLESS = (
  'pure_draft_prefix_len', 'emb_dim', 'gru_hidden_dim', 'lambda_base_start', 'lambda_base_decay_ratio', 'auf',
)  # fmt: skip
_OTHERWISE = {
  'projector_type': (('dflash',), 'Domino and DSpark correct what a block says'),
  'attention_mode': (('gqa', 'mha'), 'the layers would be others'),  # SpecForge's names of ordinary attention
  'shift_label': ((False,), 'it would change which token a position predicts'),
  'draft_shift': ((False,), 'it would change which token a position predicts'),
  'output_multiplier': ((1,), 'it would scale the logits'),
}


def dflash_table(config: DFlashConfig) -> Table:
  """Make the table of DFlash: ordinary layers, `fc` and its norm, the final norm, and perhaps a head."""
  width = config.width
  entries: dict[str, Entry] = {}
  for index in range(len(config.windows)):
    entries |= layer_entries(config.as_layer(), f'layer_{index}', f'layers.{index}')
  entries |= {f'{name}.weight': Entry((name, 'scale'), (width,)) for name in ('hidden_norm', 'norm')}
  entries['fc.weight'] = Entry(('fc', 'weight'), (width, len(config.taps) * width))
  if config.own_head:
    entries['lm_head.weight'] = Entry(('head', 'weight'), (config.num_ids, width))
  return head_table(config, entries)


def read_dflash(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> DFlashConfig | None:
  """Read the config of a published DFlash or JetSpec drafter; None if it is of another kind.

  Raises:
    ValueError: a key that would change the network in a way that is not supported, an unknown one, a missing one.
  """
  if not is_kind(content, 'dflash'):
    return None
  keys = Keys(content)
  require_architecture(folder, keys, {'DFlashDraftModel', 'DFlashSpeculator'})
  config = DFlashConfig(**block_fields(folder, keys, target, may_have_head=SPECULATORS in keys))
  keys.require_known(folder, 'a drafter that cannot be drafted with')
  return config


def block_fields(folder: Path, keys: Keys, target: TargetConfig, *, may_have_head: bool) -> dict[str, Any]:
  """Read the fields of a `DFlashConfig`.

  Args:
    folder: where the drafter lies.
    keys: of its config.json.
    target: of the model that it is to draft for.
    may_have_head: whether the writer may give it a head of its own for the target's whole vocabulary.
  """
  is_speculators = SPECULATORS in keys
  if (folder / 'mask_embedding.pt').exists():
    raise ValueError(f'{folder} holds mask_embedding.pt, an embedding of the mask token of its own: not supported.')
  if target.logit_divisor != 1:
    raise ValueError(
      f'{folder}: {target.name!r} divides its logits, and nothing says whether the drafter does so, too.'
    )
  nested = keys.nested('dflash_config')
  for place in (keys, nested):
    for name, (allowed, otherwise) in _OTHERWISE.items():
      require_value(folder, place, name, allowed, otherwise)
  layer, own = _of_speculators(folder, keys) if is_speculators else (keys, _of_z_lab(folder, keys, nested, target))
  fields, has_biases = layer_fields(folder, layer), layer.flag('attention_bias')
  for place in (keys, nested):
    require_value(folder, place, 'target_hidden_size', (fields['width'],), "the target must be of the drafter's width")
  num_ids = int(keys.get('draft_vocab_size', fields['vocab_size']))
  is_part = num_ids != fields['vocab_size']
  own |= {
    'draft_vocab_size': num_ids if is_part else None,
    'own_head': is_part or (may_have_head and 'lm_head.weight' in read_names(folder)),
    'qkv_bias': has_biases,
    'o_bias': has_biases,
    'name': folder.name,
  }
  return fields | own


def _require_all(folder: Path, given: Mapping[str, Any]) -> None:
  if missing := [name for name, value in given.items() if value is None]:
    raise ValueError(f'{folder}/config.json of a DFlash drafter lacks {missing}: fetch the whole file again.')


def _of_speculators(folder: Path, keys: Keys) -> tuple[Keys, dict[str, Any]]:
  """Return the keys of the layers, which are Qwen3's whatever their label, and what speculators say of the block."""
  layer = speculators_layer(folder, keys, is_one=False, usual='qwen3')
  names = 'aux_hidden_state_layer_ids', 'block_size', 'mask_token_id', 'draft_vocab_size'
  given: dict[str, Any] = {name: keys.get(name) for name in names}
  _require_all(folder, given)
  for name in _MEANINGLESS:
    keys.get(name)
  windows, key = windows_of(folder, layer, int(layer['num_hidden_layers'])), 'sliding_window_non_causal'
  if any(windows) and key not in keys:
    raise ValueError(f'{folder}/config.json lacks {key}, which vLLM takes for true and speculators for false: add it.')
  is_causal = not keys.flag(key)
  return layer, {
    'taps': tuple(map(int, given['aux_hidden_state_layer_ids'])),
    'block_size': int(given['block_size']),
    'mask_token_id': int(given['mask_token_id']),
    'windows': windows,
    'causal': tuple(is_causal and window is not None for window in windows),  # layers without a window never are
    'is_shifted': keys.flag('sample_from_anchor'),
  }


def _of_z_lab(folder: Path, keys: Keys, nested: Keys, target: TargetConfig) -> dict[str, Any]:
  """Return what z-lab, JetSpec and SpecForge say of the block, in `dflash_config` or beside it."""

  def value(name: str) -> Any:
    return same_everywhere(folder, name, keys, nested)

  given = {name: value(name) for name in ('block_size', 'mask_token_id')}
  _require_all(folder, given | {'num_hidden_layers': keys.get('num_hidden_layers')})
  num_target, num_layers = target.num_layers, int(keys['num_hidden_layers'])
  require_value(folder, keys, 'num_target_layers', (num_target,), f'the target has {num_target} layers')
  if num_layers > 1:
    usual = [round(1 + index * (num_target - 4) / (num_layers - 1)) for index in range(num_layers)]
  else:
    usual = [num_target // 2]
  windows, causal = _windows(folder, keys, nested, num_layers)
  places = (keys, 'is_causal'), (nested, 'causal'), (nested, 'causal_head')
  said = {name: place.flag(name) for place, name in places if name in place}
  if len({*said.values()}) > 1:
    raise ValueError(f'{folder}/config.json contradicts itself: {said}.')
  scale, cap = value('input_embedding_scale'), value('final_logit_softcapping')
  if target.embedding_scale != 1 and scale is None:
    raise ValueError(
      f'{folder}/config.json lacks input_embedding_scale: {target.name!r} scales embeddings, and the drafter may.'
    )
  return {
    'taps': inputs_after(folder, value('target_layer_ids') or usual, target),
    'block_size': int(given['block_size']),
    'mask_token_id': int(given['mask_token_id']),
    'windows': windows,
    'causal': (*said.values(),)[:1] * num_layers if said else causal,
    'embedding_scale': 1.0 if scale is None else float(scale),
    'logit_cap': float(cap) if cap else None,
  }


def _windows(
  folder: Path, keys: Keys, nested: Keys, num_layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
  """Return how many positions each layer sees, and whether it is causal if no key says so."""
  windows, size = windows_of(folder, keys, num_layers), nested.get('swa_window_size')
  if nested.flag('use_swa'):  # Model-Optimizer and vLLM: all layers have a window, and `layer_types` says nothing of it
    if any(windows) or size is None:
      raise ValueError(f'{folder}: use_swa needs swa_window_size, and no layer_types but full_attention.')
    return (int(size),) * num_layers, (False,) * num_layers
  if any(windows):
    if keys.get('use_sliding_window') is not True:
      raise ValueError(
        f'{folder}: layer_types {keys["layer_types"]} need use_sliding_window true, or no layer has a window.'
      )
    same_everywhere(folder, 'sliding_window', keys, nested, 'swa_window_size')  # each is read by some engine
  return windows, tuple(window is not None for window in windows)
