"""Read the folders in which EAGLE and Medusa heads are published; config.json shows which layout a folder has."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import DrafterConfig, Eagle3Config, MedusaConfig, TargetConfig
from eagle_jax.models.families import FAMILIES
from eagle_jax.weights.folder import llama_fields, read_json, read_names, read_tensors
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.rope import read_rope

log = logging.getLogger('eagle_jax')

# Where an EAGLE-1/2 head of another layout keeps the ids that it was trained to draft: no engine's tensors name them.
VOCABULARY_FILE = 'draft_vocabulary.json'
TAPS = 'eagle_aux_hidden_state_layer_ids'
SPECULATORS = 'speculators_model_type'

# What an absent key means in the `transformer_layer_config` of vLLM's speculators: what it means to transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
  'llama': {
    'vocab_size': 32_000, 'hidden_size': 4096, 'intermediate_size': 11_008, 'num_attention_heads': 32,
    'num_hidden_layers': 1, 'rms_norm_eps': 1e-6,
  },
  'qwen3': {
    'vocab_size': 151_936, 'hidden_size': 4096, 'intermediate_size': 22_016, 'num_attention_heads': 32,
    'num_key_value_heads': 32, 'head_dim': 128, 'num_hidden_layers': 1, 'rms_norm_eps': 1e-6,
  },
}  # fmt: skip
_EAGLE_ARCHITECTURES = frozenset({
  'LlamaForCausalLM', 'MistralForCausalLM', 'MixtralForCausalLM', 'Qwen2ForCausalLM',  # SafeAILab: its target's
  'LlamaForCausalLMEagle', 'Qwen2ForCausalLMEagle', 'EagleLlamaForCausalLM', 'EAGLEModel', 'EagleSpeculator',
})  # fmt: skip
EAGLE3_ARCHITECTURES = frozenset({
  'LlamaForCausalLM', 'LlamaForCausalLMEagle3', 'Eagle3LlamaForCausalLM', 'Eagle3Speculator', 'Eagle3DraftModel',
  'LlamaEagle3DraftModel',
})  # fmt: skip
_DEEPSPEC = 'Qwen3Eagle3Model'


def is_kind(content: Mapping[str, Any], kind: str) -> bool:
  """Return whether a config.json names this kind of drafter: as speculators do, or in its architecture."""
  if (named := content.get(SPECULATORS)) is not None:
    return named == kind
  return kind in str(content.get('architectures')).lower()


def is_p_eagle(content: Mapping[str, Any]) -> bool:
  """Return whether a config.json is that of a P-EAGLE head: an EAGLE-3 head that drafts all tokens in one pass.

  Amazon's say so only by a name of the mask token, which vLLM reads of no other head.
  """
  if content.get(SPECULATORS) is not None or is_kind(content, 'peagle'):
    return is_kind(content, 'peagle')
  names_mask = any(content.get(name) is not None for name in ('pard_token', 'ptd_token_id'))
  return content.get('parallel_drafting') is True or (names_mask and _is_eagle3(content))


def _is_eagle3(content: Mapping[str, Any]) -> bool:
  if content.get(SPECULATORS) is None:
    if content.get('model_type') == 'eagle':
      return False
    if any(content.get(name) is not None for name in ('draft_vocab_size', 'truncated_vocab_size')):
      return True
  return is_kind(content, 'eagle3')


def require_architecture(folder: Path, keys: Keys, known: Collection[str]) -> None:
  given = keys.get('architectures', [])
  if unknown := [name for name in given if name not in known]:
    raise ValueError(f'{folder}: architectures {unknown} are not supported; {sorted(known)} are.')


def require_value(folder: Path, keys: Keys, name: str, allowed: tuple[Any, ...], otherwise: str) -> None:
  """Raise a ValueError if a key is present with a value that is not among the allowed ones."""
  if name in keys and keys[name] not in allowed:
    raise ValueError(f'{folder}: {name} {keys[name]!r} is not supported: {otherwise}.')


def speculators_layer(folder: Path, keys: Keys, *, is_one: bool = True, usual: str | None = None) -> Keys:
  """Return the layers' own keys in a config of vLLM's speculators, with transformers' defaults.

  Args:
    folder: for messages.
    keys: of the config.
    is_one: whether only one layer is supported.
    usual: what an absent model_type means; None: that depends on the version.
  """
  require_value(folder, keys, 'transformer_layer_architecture', ('LlamaDecoderLayer',), 'the layer would be another')
  name, is_eagle3 = 'transformer_layer_config', keys[SPECULATORS] != 'eagle'
  content = keys.nested(name).content
  if usual is not None:
    content = {'model_type': usual, **content}
  elif is_eagle3 and 'model_type' not in content:
    if (version := _speculators_version(keys)) is None:
      raise ValueError(
        f'{folder}/config.json lacks model_type in {name}, which is llama to speculators up to 0.6 and qwen3 to later '
        'ones: add it.'
      )
    content = {'model_type': 'llama' if version < (0, 7) else 'qwen3', **content}
  form = content.get('model_type', 'llama')
  known = ('llama', 'qwen3') if is_eagle3 else ('llama',)
  if form not in known:
    raise ValueError(f'{folder}: model_type {form!r} in {name} is not supported: one of {known} is.')
  layer = Keys(_DEFAULTS[form] | content, prefix=f'{name}.')
  keys.adopt(name, layer)
  if is_one:
    require_value(folder, layer, 'num_hidden_layers', (1,), 'only heads of one layer are')
  return layer


def _speculators_version(keys: Keys) -> tuple[int, ...] | None:
  """Return the version of speculators that wrote the file, if it says so."""
  found = re.match(r'(\d+)\.(\d+)', str(keys.get('speculators_version', '')))
  return found and (*map(int, found.groups()),)


def layer_fields(folder: Path, layer: Keys) -> dict[str, Any]:
  """Read the fields that a head's layer has in common with a Llama, and its RoPE."""
  fields = llama_fields(folder, layer, FAMILIES['llama'])
  rope = read_rope(folder, layer, fields['head_dim'], 10_000.0)
  return fields | {
    'rope_theta': rope.theta,
    'rope_slowdown': rope.slowdown,
    'rope_factor': rope.factor,
    'rope_scaling': rope.words,
  }


def read_eagle(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> DrafterConfig | None:
  """Read the config of a published EAGLE-1/2 head; None if it is of another kind.

  Raises:
    ValueError: a key that would change the network in a way that is not supported, an unknown one, a missing one.
  """
  if _is_eagle3(content) or content.get(SPECULATORS, 'eagle') != 'eagle':
    return None
  keys = Keys(content)
  require_architecture(folder, keys, _EAGLE_ARCHITECTURES)
  architecture = ''.join(keys.get('architectures', []))
  # Its config.json is that of an EAGLE-2 head, so only the tensors tell. Its `fc` has a bias whatever "bias" says.
  is_griffin = 'fc.fc.weight' in read_names(folder)
  if SPECULATORS in keys:
    layer = speculators_layer(folder, keys)
    has_fc_bias = keys.flag('fusion_bias')
    require_value(folder, keys, 'layernorms', (False,), 'engines disagree on what its norms are applied to')
    _refuse_window(folder, layer)
  else:
    layer = keys.nested('model') if keys.get('model_type') == 'eagle' else keys
    never = architecture == 'EagleLlamaForCausalLM'  # vLLM builds none
    has_fc_bias = layer.flag('bias', keys.flag('eagle_fc_bias', not never)) or is_griffin
    require_value(folder, layer, 'num_hidden_layers', (1,), 'a drafter has one layer')
    _read_past(keys, layer, _WINDOW)  # none of these engines gives it a window
  fields = layer_fields(folder, layer)
  require_value(folder, keys, 'truncated_vocab_size', (fields['vocab_size'],), 'which ids it drafts would not be known')
  biases = _biases(layer)
  biases['qkv_bias'] |= layer.flag('qkv_bias', architecture == 'Qwen2ForCausalLMEagle')
  config = DrafterConfig(
    **fields,
    **biases,
    fc_bias=has_fc_bias,
    griffin=is_griffin,
    draft_vocab_size=len(_written_ids(folder)) or None,
    name=folder.name,
  )
  keys.require_known(folder, 'a head that cannot be drafted with')
  return config


def read_eagle3(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> Eagle3Config | None:
  """Read the config of a published EAGLE-3 head; None if it is of another kind.

  Raises:
    ValueError: a key that would change the network in a way that is not supported, an unknown one, a missing one.
  """
  if not _is_eagle3(content):
    return None
  keys = Keys(content)
  require_architecture(folder, keys, EAGLE3_ARCHITECTURES | {_DEEPSPEC})
  if SPECULATORS in keys and 'norm_before_residual' not in keys:
    raise ValueError(
      f'{folder}/config.json lacks norm_before_residual, which vLLM takes for true and speculators for false: add it.'
    )
  fields, (window,) = eagle3_fields(folder, keys, target)
  norm_output = _norm_output(folder, keys, _is_midlayer(folder, keys))
  config = Eagle3Config(**fields, window=window, norm_output=norm_output)
  keys.require_known(folder, 'a head that cannot be drafted with')
  return config


def _is_midlayer(folder: Path, keys: Keys) -> bool:
  """Return whether the writer is one of those that name the layer `midlayer`."""
  names = read_names(folder)
  is_other = _DEEPSPEC in keys.get('architectures', []) or SPECULATORS in keys
  return not is_other and (not names or any('midlayer.' in name for name in names))


def eagle3_fields(
  folder: Path, keys: Keys, target: TargetConfig, *, is_one_layer: bool = True
) -> tuple[dict[str, Any], tuple[int | None, ...]]:
  """Read the fields of an `Eagle3Config` but its window and `norm_output`, and the windows of all layers."""
  is_deepspec, is_midlayer = _DEEPSPEC in keys.get('architectures', []), _is_midlayer(folder, keys)
  layer, windows = _eagle3_layers(folder, keys, is_midlayer, is_deepspec, is_one_layer)
  nested = keys.nested('eagle_config')
  fields = layer_fields(folder, layer)
  num_ids = same_everywhere(folder, 'draft_vocab_size', keys, keys, 'truncated_vocab_size') or fields['vocab_size']
  target_width = int(keys.get('target_hidden_size', fields['width']))
  is_trained = keys.flag('embed_requires_grad', keys.get(SPECULATORS) == 'peagle')  # its embedding
  if is_deepspec:
    taps: Any = inputs_after(folder, keys.get('target_layer_ids', []), target)
  else:
    taps = _taps(folder, keys, nested, target.num_layers)
  require_value(
    folder, keys, 'num_aux_hidden_states', (3 if taps is None else len(taps),), 'which they are is not said'
  )
  if not nested.flag('use_aux_hidden_state', True):
    taps = ()
  require_value(folder, keys, 'num_target_layers', (target.num_layers,), f'the target has {target.num_layers} layers')
  is_qwen3 = is_deepspec or 'PeagleQwen3ForCausalLM' in keys.get('architectures', [])
  own = {
    'target_width': target_width,
    'taps': taps,
    'draft_vocab_size': None if num_ids == fields['vocab_size'] else int(num_ids),
    'own_embedding': is_trained or target_width != fields['width'],
    'fc_bias': keys.flag('bias'),
    'qk_norm': is_qwen3 or (SPECULATORS in keys and layer['model_type'] == 'qwen3'),
    'norm_before_fc': _is_on(folder, 'norm_before_fc', keys, nested),
    'norm_before_residual': keys.flag('norm_before_residual'),
    'fc_norm': _is_on(folder, 'fc_norm', keys, keys, 'use_aux_norm'),
    'name': folder.name,
  }
  return fields | ({} if is_midlayer else _biases(layer)) | own, windows


def read_medusa(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> MedusaConfig | None:
  """Read the config of published Medusa heads; None if it is of another kind.

  It says neither widths, which are the target's, nor for sure how many heads there are, which the tensors tell.

  Raises:
    ValueError: a key that is not known, or fewer heads than the config says.
  """
  if 'medusa_num_heads' not in content:
    return None
  keys = Keys(content)
  keys.get('base_model_name_or_path')
  num_heads = len({name.partition('.')[0] for name in read_names(folder)})
  if num_heads < (said := int(keys.get('medusa_num_heads', 0))):
    raise ValueError(f'{folder} holds {num_heads} heads, and medusa_num_heads is {said}: fetch the whole folder again.')
  config = MedusaConfig(
    target.vocab_size, target.width, num_heads, int(keys.get('medusa_num_layers', 1)), own_heads=True, name=folder.name
  )
  keys.require_known(folder, 'heads that cannot be drafted with')
  return config


def _eagle3_layers(
  folder: Path, keys: Keys, is_midlayer: bool, is_deepspec: bool, is_one: bool
) -> tuple[Keys, tuple[int | None, ...]]:
  """Return the keys of the layers, and their windows."""
  if SPECULATORS in keys:
    layer = speculators_layer(folder, keys, is_one=is_one)
    return layer, windows_of(folder, layer, int(layer['num_hidden_layers']))
  if is_midlayer:  # its writers copy these keys from the target; windows and biases they have none
    _read_past(keys, keys, (*_WINDOW, 'num_hidden_layers', 'attention_bias', 'mlp_bias'))
    return keys, (None,) * (1 if is_one else int(keys.get('num_hidden_layers', 1)))
  if is_deepspec:  # which copies the target's keys too, and never has a window
    _read_past(keys, keys, _WINDOW)
  else:
    _refuse_window(folder, keys)
  if is_one:
    require_value(folder, keys, 'num_hidden_layers', (1,), 'only heads of one layer are')
  return keys, (None,) * int(keys.get('num_hidden_layers', 1))


def _biases(layer: Keys) -> dict[str, Any]:
  """Return which biases the layer has, if it is made of a Llama's or a Qwen3's parts."""
  has_biases = layer.flag('attention_bias')  # of the output projection, too
  return {'qkv_bias': has_biases, 'o_bias': has_biases, 'mlp_bias': layer.flag('mlp_bias')}


def same_everywhere(folder: Path, name: str, keys: Keys, others: Keys, alias: str | None = None) -> Any:
  """Return the value of a key that may stand in two places, or have two spellings; None without either."""
  value, other = keys.get(name), others.get(alias or name)
  if value is not None and other is not None and value != other:
    raise ValueError(f'{folder}/config.json contradicts itself: {name} is {value!r}, {alias or name} is {other!r}.')
  return other if value is None else value


def _is_on(folder: Path, name: str, keys: Keys, others: Keys, alias: str | None = None) -> bool:
  same_everywhere(folder, name, keys, others, alias)
  return keys.flag(name, others.flag(alias or name))


_WINDOW = ('layer_types', 'sliding_window', 'use_sliding_window')


def _read_past(keys: Keys, layer: Keys, names: tuple[str, ...]) -> None:
  """Mark these keys as read: this writer gives them no meaning."""
  for name in names:
    keys.get(name), layer.get(name)


def _refuse_window(folder: Path, layer: Keys) -> None:
  """Raise a ValueError if the layer does not see everything before it. `sliding_window` alone is left over."""
  if any(kind != 'full_attention' for kind in layer.get('layer_types', [])):
    raise ValueError(
      f'{folder}: layer_types {layer["layer_types"]!r} is not supported: it would change how far attention sees.'
    )
  require_value(folder, layer, 'use_sliding_window', (False,), 'it would change how far attention sees')
  layer.get('sliding_window')


def windows_of(folder: Path, layer: Keys, num_layers: int) -> tuple[int | None, ...]:
  """Return how many positions each layer sees; None for all. As in vLLM and speculators, `layer_types` decides."""
  if 'layer_types' not in layer:
    _refuse_window(folder, layer)
    return (None,) * num_layers
  window, kinds = layer.get('sliding_window'), layer['layer_types'][:num_layers]
  layer.get('use_sliding_window')
  known = {'full_attention': None} | ({} if window is None else {'sliding_attention': int(window)})
  if len(kinds) < num_layers or not known.keys() >= {*kinds}:
    raise ValueError(f'{folder}: layer_types {layer["layer_types"]!r} with sliding_window {window} is not supported.')
  return tuple(known[kind] for kind in kinds)


def _norm_output(folder: Path, keys: Keys, is_midlayer: bool) -> bool:
  """Return whether the next draft step reads the normed output.

  vLLM, SGLang, speculators and AutoModel mean that. SpecForge up to 0.2.0, whose tensors say `midlayer`, means by
  false a head that reads outputs without the norm.
  """
  value = keys.flag('norm_output')
  if 'norm_output' in keys and not value and is_midlayer:
    raise ValueError(
      f'{folder}: norm_output false means to SpecForge up to 0.2.0 that the head reads outputs without the final norm, '
      'which is not supported. If a later version trained this head, remove the key.'
    )
  if value and is_midlayer:
    log.warning(
      '%s: norm_output: the next step reads the normed output, as in vLLM and SGLang. SpecForge up to 0.2.0 trained '
      'heads to read it raw: if this is one, remove the key.', folder,
    )  # fmt: skip
  return value


def inputs_of(listed: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
  """Return the layers, of `num_layers`, whose inputs a list in `eagle_config` means.

  One that names the input of the final norm, or the usual inputs, counts layers by what goes into them; any other by
  what comes out.
  """
  usual = 2, num_layers // 2, num_layers - 3
  return listed if num_layers in listed or listed == usual else tuple(layer + 1 for layer in listed)


def _taps(folder: Path, keys: Keys, nested: Keys, num_layers: int) -> tuple[int, ...] | None:
  """Return the layers, of `num_layers`, whose inputs the head reads; None for the usual ones.

  A list at the top level counts layers by what goes into them.
  """
  above, inside = (tuple(int(layer) for layer in place.get(TAPS, [])) for place in (keys, nested))
  inputs = inputs_of(inside, num_layers)
  if inputs not in (inside, (2, num_layers // 2, num_layers - 3)):
    log.warning(
      '%s: eagle_config.%s is %s: taken for outputs of these layers. If they are inputs, put the list at the top '
      'level of config.json.', folder, TAPS, [*inside],
    )  # fmt: skip
  if above and inputs and above != inputs:
    raise ValueError(f'{folder}/config.json contradicts itself: {TAPS} is {above}, in eagle_config {inside}.')
  return above or inputs or None


def inputs_after(folder: Path, target_layer_ids: Iterable[Any], target: TargetConfig) -> tuple[int, ...]:
  """Return the layers whose inputs a head reads, if its `target_layer_ids` count layers by what comes out of them."""
  listed, last = tuple(int(layer) for layer in target_layer_ids), target.num_layers - 1
  if not listed or not all(0 <= layer < last for layer in listed):
    raise ValueError(
      f'{folder}: target_layer_ids {[*listed]} is not supported: layers from 0 to {last - 1} are needed. What comes '
      f'out of layer {last}, the last, writers took before the final norm in some versions and after it in others.'
    )
  return tuple(layer + 1 for layer in listed)


def _written_ids(folder: Path) -> list[int]:
  path = folder / VOCABULARY_FILE
  if not path.is_file():
    return []
  ids = read_json(path).get('ids')
  if not isinstance(ids, list) or not ids or not all(isinstance(number, int) for number in ids):
    raise ValueError(f'{path} holds no list of "ids": write the folder again with launch/convert.py.')
  return ids


# Tensors.

_SPELLINGS = [
  (re.compile(pattern), ours)
  for pattern, ours in (
    (r'^model\.', ''),
    (r'^(midlayer|transformer)\.', 'layers.0.'),
    (r'^(fusion_fc|encoder\.fc)\.', 'fc.'),
    (r'^encoder\.output_norm_enc\.', 'hidden_norm.'),
    (r'^aux_norm_low\.', 'fc_norm.0.'),
    (r'^aux_norm_mid\.', 'fc_norm.1.'),
    (r'^aux_norm_high\.', 'fc_norm.2.'),
  )
]


def canonical(name: str) -> str:
  """Convert an engine's spelling of a name to the one that `tables` knows: the layer as `layers.0`, no `model.`."""
  for pattern, ours in _SPELLINGS:
    name = pattern.sub(ours, name)
  return name


def read_head_tensors(
  folder: Path, config: Any, is_the_targets: Callable[[np.ndarray], bool], *, is_own: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the tensors of a drafter's folder by their canonical names, but for an embedding that is the target's.

  Args:
    folder: the drafter's.
    config: of the drafter.
    is_the_targets: whether an embedding is the target's, which then need not be held twice.
    is_own: whether we wrote the folder; then ids may stand in any order.

  Raises:
    ValueError: a draft vocabulary that repeats ids, leads outside the target's, or contradicts itself.
  """
  vocabulary: dict[str, np.ndarray] = {}
  for written, array in read_tensors(folder):
    name = canonical(written)
    if name in ('d2t', 't2d'):
      vocabulary[name] = array
    elif name != 'embed_tokens.weight' or config.own_embedding or not is_the_targets(array):
      yield name, array
  if ids := _written_ids(folder):
    vocabulary['d2t'] = np.asarray(ids) - np.arange(len(ids))
  if 'd2t' in vocabulary:
    _require_vocabulary(folder, config, vocabulary['d2t'], vocabulary.get('t2d'), is_own=is_own or bool(ids))
    if config.draft_vocab_size is not None:
      yield 'd2t', vocabulary['d2t']


def _require_vocabulary(
  folder: Path, config: DrafterConfig | Eagle3Config, d2t_U: np.ndarray, t2d_V: np.ndarray | None, *, is_own: bool
) -> None:
  """Raise a ValueError unless `d2t` holds offsets from draft ids to distinct target ids, those that `t2d` marks."""
  if d2t_U.ndim != 1 or not np.issubdtype(d2t_U.dtype, np.integer):
    return  # `assemble` raises an error that says what is needed
  if config.draft_vocab_size is None:
    if d2t_U.any():
      raise ValueError(f'{folder}: d2t names ids of a draft vocabulary, but config.json says it is the whole one.')
    return
  d2t_U = d2t_U.astype(np.int64)
  ids_U, vocab_size = d2t_U + np.arange(len(d2t_U)), config.vocab_size
  perhaps = " Its numbers may be ids themselves: then subtract each entry's own index." if (d2t_U >= 0).all() else ''
  if not 0 <= ids_U.min() <= ids_U.max() < vocab_size:
    raise ValueError(f'{folder}: d2t leads outside the target vocabulary of {vocab_size} ids.{perhaps}')
  if len(np.unique(ids_U)) < len(ids_U):
    repeated = ids_U[np.bincount(ids_U, minlength=vocab_size)[ids_U] > 1]
    raise ValueError(f'{folder}: d2t names ids more than once, such as {repeated[0]}.{perhaps}')
  if t2d_V is not None:
    marked = np.flatnonzero(t2d_V)
    if t2d_V.shape != (vocab_size,) or not np.array_equal(marked, np.sort(ids_U)):
      wrong = sorted({*ids_U.tolist()} ^ {*marked.tolist()})[:3]
      raise ValueError(f'{folder}: d2t and t2d contradict each other, on ids {wrong}.{perhaps}')
  elif not is_own and len(d2t_U) > 1 and (np.diff(d2t_U) > 0).all():
    raise ValueError(f'{folder}: d2t increases from entry to entry, and no t2d says that it holds offsets.{perhaps}')
