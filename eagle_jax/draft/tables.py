"""Tensor names of published heads, as `heads.canonical` gives them."""

import dataclasses
import itertools

import numpy as np

from eagle_jax.config import (
  BlockConfig,
  DrafterConfig,
  Eagle3Config,
  EagleTapsConfig,
  HeadSizes,
  MedusaConfig,
  TargetConfig,
)
from eagle_jax.draft.eagle import name_of_layer
from eagle_jax.weights.naming import HF_PROJECTIONS, Entry, Table, head_norms, layer_norms, projection_entries


def eagle_table(config: DrafterConfig) -> Table:
  """Make the table of EAGLE-1/2: a layer without an input norm, those behind it, and perhaps an embedding.

  GRIFFIN's names are those of its published files: all that stands in front of the layer is `fc`.
  """
  width, block, fc = config.width, 'layers.0', 'fc.fc' if config.griffin else 'fc'
  entries = {f'{fc}.weight': Entry(('fc', 'weight'), (width, 2 * width))}
  if config.fc_bias:
    entries[f'{fc}.bias'] = Entry(('fc', 'bias'), (width,))
  entries[f'{block}.post_attention_layernorm.weight'] = Entry(('layer', 'mlp_norm', 'scale'), (width,))
  entries |= projection_entries(config.as_layer(), ('layer',), block, HF_PROJECTIONS)
  for index in range(1, config.num_layers):
    entries |= layer_entries(config.as_layer(), name_of_layer(index), f'layers.{index}')
  return head_table(config, _with_griffin(config, entries) if config.griffin else entries)


def _with_griffin(config: DrafterConfig, entries: dict[str, Entry]) -> dict[str, Entry]:
  """Add the fusion of GRIFFIN's head, and double what comes out of its last layer."""
  width, ffn_width, last = config.width, config.ffn_width, name_of_layer(config.num_layers - 1)
  down = {name: entry for name, entry in entries.items() if entry.path[:-1] == (last, 'mlp', 'down')}
  twice = {name: dataclasses.replace(entry, shape=(2 * width, *entry.shape[1:])) for name, entry in down.items()}
  fusion = {
    'fc.post_attention_layernorm.weight': Entry(('fusion', 'x_norm', 'scale'), (width,)),
    'fc.mlp.input_layernorm.weight': Entry(('fusion', 'norm', 'scale'), (width,)),
    'fc.mlp.up_proj.weight': Entry(('fusion', 'up', 'weight'), (ffn_width, 2 * width)),
    'fc.mlp.down_proj.weight': Entry(('fusion', 'down', 'weight'), (width, ffn_width)),
  }
  return entries | twice | fusion


def eagle_taps_table(config: EagleTapsConfig) -> Table:
  """EAGLE-2 with taps: the tensors of EAGLE-2, a norm of each tap, and the matrix over all of them."""
  table, num_taps, width = eagle_table(config), len(config.taps), config.target_width
  entries = {f'tap_norm.{tap}.weight': Entry(('taps', f'norm_{tap}', 'scale'), (width,)) for tap in range(num_taps)}
  entries['tap_fc.weight'] = Entry(('taps', 'fc', 'weight'), (config.width, num_taps * width))
  return dataclasses.replace(table, entries={**table.entries, **entries})


def block_table(config: BlockConfig) -> Table:
  """Make the table of the block drafter: the tensors of EAGLE-2, the vector of slots, and the correction."""
  table, width, rank = eagle_table(config), config.width, config.rank
  entries = {
    'slot.bias': Entry(('slot', 'bias'), (width,)),
    'above.weight': Entry(('above', 'weight'), (rank, width)),
    'below.weight': Entry(('below', 'weight'), (width, rank)),
  }
  return dataclasses.replace(table, entries={**table.entries, **entries})


def eagle3_table(config: Eagle3Config) -> Table:
  """Make the table of EAGLE-3: attention over twice the width, its own norms and head, and perhaps an embedding."""
  width, block = config.width, 'layers.0'
  num_ids = config.num_ids
  norms = {
    f'{block}.input_layernorm.weight': ('embedding_norm', width),
    f'{block}.hidden_norm.weight': ('feature_norm', width),
    f'{block}.post_attention_layernorm.weight': ('mlp_norm', width),
    'norm.weight': ('norm', width),
  }
  num_taps, fc_width = config.num_taps, config.num_taps * config.target_width
  if config.fc_norm:
    norms |= {f'fc_norm.{tap}.weight': (f'fc_norm_{tap}', config.target_width) for tap in range(num_taps)}
  if config.norm_before_fc:
    norms['input_norm.weight'] = 'input_norm', fc_width
  entries = {name: Entry((ours, 'scale'), (size,)) for name, (ours, size) in norms.items()}
  if num_taps:
    entries['fc.weight'] = Entry(('fc', 'weight'), (width, fc_width))
  if config.fc_bias:
    entries['fc.bias'] = Entry(('fc', 'bias'), (width,))
  entries['lm_head.weight'] = Entry(('head', 'weight'), (num_ids, width))
  entries |= projection_entries(config.as_layer(), (), block, HF_PROJECTIONS, in_width=2 * width)
  entries |= head_norms(config.as_layer(), (), f'{block}.self_attn.')
  return head_table(config, entries)


def layer_entries(layer: TargetConfig, ours: str, block: str) -> dict[str, Entry]:
  """Map an ordinary decoder layer of a head, `block` in the file."""
  entries = layer_norms(layer, (ours,), block) | projection_entries(layer, (ours,), block, HF_PROJECTIONS)
  return entries | head_norms(layer, (ours,), f'{block}.self_attn.')


def medusa_table(config: MedusaConfig) -> Table:
  """Make the table of Medusa's heads: of head d, block j is `d.j.linear`, and what follows the blocks its own head."""
  num_heads, width, entries = config.max_depth, config.width, {}
  for head, layer in itertools.product(range(num_heads), range(config.num_layers)):
    name, path = f'{head}.{layer}.linear', f'block_{layer}'
    for leaf, shape in (('weight', (width, width)), ('bias', (width,))):
      entries[f'{name}.{leaf}'] = Entry((path, leaf), shape, (num_heads, *shape), np.s_[head])
  if config.own_heads:
    shape = config.num_ids, width
    entries |= {
      f'{head}.{config.num_layers}.weight': Entry(('head', 'weight'), shape, (num_heads, *shape), np.s_[head])
      for head in range(num_heads)
    }
  return Table(entries | _draft_vocabulary(config))


# Tables that RoPE recomputes, and what training needed of the target.
_IGNORED = frozenset({
  'rotary_emb.inv_freq', 'layers.0.self_attn.rotary_emb.inv_freq', 'verifier_norm.weight', 'verifier_lm_head.weight',
})  # fmt: skip


def head_table(config: HeadSizes, entries: dict[str, Entry]) -> Table:
  """Add the embedding, which a file may hold even if its config does not say that the head has its own."""
  name = 'embed_tokens.weight'
  embedding = {name: Entry(('embed', 'weight'), (config.vocab_size, config.width))}
  optional = frozenset() if config.own_embedding else frozenset({name})
  return Table(entries | _draft_vocabulary(config) | embedding, _IGNORED, optional)


def _draft_vocabulary(config: HeadSizes | MedusaConfig) -> dict[str, Entry]:
  if config.draft_vocab_size is None:
    return {}
  shape = (config.draft_vocab_size,)
  return {'d2t': Entry(('ids',), shape, to_ours=_ids_of_offsets, to_file=_offsets_of_ids, dtype=np.int32)}


def _ids_of_offsets(d2t_U: np.ndarray) -> np.ndarray:
  """Convert a draft vocabulary from offsets, target id minus draft id, as files hold it."""
  return d2t_U + np.arange(len(d2t_U))


def _offsets_of_ids(ids_U: np.ndarray) -> np.ndarray:
  return ids_U.astype(np.int64) - np.arange(len(ids_U))
