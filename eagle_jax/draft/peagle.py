"""P-EAGLE (arXiv:2602.01469): an EAGLE-3 head that drafts all depths in one pass, by slots behind the text.

The committed text is read as by EAGLE-3; the output at the newest place predicts the root's children. Behind it stands
a slot for each further depth: the embedding of a mask token in place of the token, and a learned vector, `mask_hidden`,
in place of the taps. All nodes of a depth offer the same children. Decoder layers may follow the first.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import Eagle3Config, TargetConfig, require
from eagle_jax.draft.eagle import EagleState
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.heads import EAGLE3_ARCHITECTURES, SPECULATORS, eagle3_fields, is_p_eagle, require_architecture
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.one_pass import Depths, See, init_layers, run_layers, score_depths
from eagle_jax.draft.tables import eagle3_table, layer_entries
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates
from eagle_jax.weights.folder import read_json
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.naming import Entry, Table

_ARCHITECTURES = EAGLE3_ARCHITECTURES | {
  'PEagleSpeculator', 'PEagleDraftModel', 'PeagleLlamaForCausalLM', 'PeagleQwen3ForCausalLM',
}  # fmt: skip
_MASK_NAMES = 'mask_token_id', 'pard_token', 'ptd_token_id'


@dataclasses.dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
  """The EAGLE-3 head whose slots draft all depths in one pass."""

  _: dataclasses.KW_ONLY
  mask_token_id: int  # whose embedding slots read
  later_windows: tuple[int | None, ...] = ()  # of each layer after the first

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'later_windows', tuple(self.later_windows))
    require(self, 'taps', self.num_taps > 0, 'one layer or more: slots read a vector in their place')
    require(self, 'mask_token_id', 0 <= self.mask_token_id < self.vocab_size, f'an id below {self.vocab_size}')
    require(self, 'norm_output', not self.norm_output, 'False, since no output is read again')


@dataclasses.dataclass(frozen=True)
class PEagle(Eagle3):
  """`Eagle3` with `mask_hidden` [taps x target width] and perhaps `layer_1`, `layer_2`, ... in its params."""

  config: PEagleConfig

  @property
  def num_layers(self) -> int:
    return 1 + len(self.config.later_windows)

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise all at random."""
    c, keys = self.config, jax.random.split(key, self.num_layers + 1)
    layers = init_layers(c.as_layer(), keys[1:-1], self.dtype)
    later = {f'layer_{index}': x for index, x in enumerate(layers, start=1)}
    mask_hidden = jax.random.normal(keys[-1], (c.num_taps * c.target_width,), self.dtype)
    return super().init_params(keys[0]) | later | {'mask_hidden': mask_hidden}

  def forward(
    self, params, token_BT, feature_DBT, position_BT, mask_BTM, cache: KVCache, earlier: NewEntries | None = None
  ) -> tuple[jax.Array, NewEntries]:
    """Run the EAGLE-3 layer, then those behind it; a pass follows none that was not committed."""
    if earlier is not None:
      raise ValueError('P-EAGLE drafts in one pass, so none comes after another: `earlier` must be None.')
    own, behind = (KVCache(cache.keys[part], cache.values[part], cache.length) for part in (slice(1), slice(1, None)))
    out_DBT, first = super().forward(params, token_BT, feature_DBT, position_BT, mask_BTM, own)
    layers = [params[f'layer_{index}'] for index in range(1, self.num_layers)]
    if not layers:
      return out_DBT, first
    sees = [See(window, mask_BTM) for window in self.config.later_windows]
    out_DR = out_DBT.reshape(len(out_DBT), -1)
    out_DR, later = run_layers(self.config.as_layer(), layers, out_DR, position_BT, sees, behind)
    return out_DR.reshape(out_DBT.shape), NewEntries(first.keys + later.keys, first.values + later.values)

  def fill_slots(self, params, state: EagleState, num_slots: int) -> jax.Array:
    """Run the slots of depths 1, 2, ... behind the committed text: outputs [D, B, d]."""
    batch = len(state.feature)
    taps = jnp.split(params['mask_hidden'].astype(self.dtype)[:, None], self.config.num_taps)
    feature_D11 = self._apply(params, tuple(taps), method='fuse')[..., None]
    feature_DBd = jnp.broadcast_to(feature_D11, (self.config.width, batch, num_slots))
    token_Bd = jnp.full((batch, num_slots), self.config.mask_token_id)
    return self.forward(params, token_Bd, feature_DBd, *kv_cache.behind(state.cache, num_slots), state.cache)[0]

  def score(self, params, state: EagleState, root_B, num_depths: int) -> jax.Array:
    """Compute logits [U, d, B] f32 of the children of all depths; the root has been read, with the taps before it."""
    out_DBd = state.feature.T[..., None]
    if num_depths > 1:
      out_DBd = jnp.concatenate([out_DBd, self.fill_slots(params, state, num_depths - 1)], axis=2)
    return score_depths(params['head'], out_DBd, functools.partial(self.pre_head, params))

  def propose(self, params, state: EagleState, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    depths = Depths.of(self.score(params, state, root_B, policy.max_depth), params['ids'], policy, context)
    return depths.grow(params, root_B, policy, context)


def peagle_table(config: PEagleConfig) -> Table:
  """Make the table of P-EAGLE: the tensors of EAGLE-3, those of further layers, and the vector of slots."""
  table, layer, width = eagle3_table(config), config.as_layer(), config.num_taps * config.target_width
  entries = {'mask_hidden': Entry(('mask_hidden',), (1, 1, width), (width,))}
  for index in range(1, 1 + len(config.later_windows)):
    entries |= layer_entries(layer, f'layer_{index}', f'layers.{index}')
  return dataclasses.replace(table, entries={**table.entries, **entries})


def read_peagle(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> PEagleConfig | None:
  """Read the config of a published P-EAGLE head; None if it is of another kind.

  Raises:
    ValueError: a key that would change the network in a way that is not supported, an unknown one, a missing one.
  """
  if not is_p_eagle(content):
    return None
  keys = Keys(_completed(folder, content))
  keys.get('parallel_drafting'), keys.get('norm_output')  # which nothing reads, since no output is read again
  masks = {name: keys[name] for name in _MASK_NAMES if name in keys}
  if len({int(token) for token in masks.values()}) != 1:
    raise ValueError(
      f'{folder}/config.json of a P-EAGLE head (parallel_drafting) must name one mask token, by one of {_MASK_NAMES}; '
      f'it says {masks}.'
    )
  require_architecture(folder, keys, _ARCHITECTURES)
  fields, (window, *later) = eagle3_fields(folder, keys, target, is_one_layer=False)
  (mask_token_id,) = {int(token) for token in masks.values()}
  config = PEagleConfig(**fields, window=window, later_windows=tuple(later), mask_token_id=mask_token_id)
  keys.require_known(folder, 'a head that cannot be drafted with')
  return config


def _completed(folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
  """Return a config.json with what SpecForge tells of the network in a file beside it, if at all."""
  if SPECULATORS in content:
    return content
  path, names = folder / 'peagle_config.json', ('mask_token_id', 'norm_before_residual')
  written = read_json(path) if path.is_file() else {}
  beside = {name: written[name] for name in names if written.get(name) is not None}
  content = {name: value for name, value in content.items() if value is not None}
  if wrong := [name for name in beside.keys() & content.keys() if beside[name] != content[name]]:
    raise ValueError(f'{folder}: config.json and {path.name} contradict each other: {wrong}.')
  content = beside | content
  if 'PEagleDraftModel' in content.get('architectures', []) and 'norm_before_residual' not in content:
    raise ValueError(
      f'{folder}/config.json lacks norm_before_residual, which SpecForge writes into {path.name} or nowhere: add what '
      'the head was trained with.'
    )
  return content
