"""Tables from the tensor names of other people's files to our parameter tree.

Every linear weight of ours is stored [out, in]; queries, keys and values are joined in one array, and gate and up. A
table lists each tensor a file must hold, and by name the extra ones it may hold; there is no other leniency
(`load.assemble` raises on everything else).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.models.families import FAMILIES, Family


def _same(array: np.ndarray) -> np.ndarray:
  return array


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where one tensor of a file goes."""

  path: tuple[str, ...]  # in our nested dict
  shape: tuple[int, ...]  # in the file
  joint_shape: tuple[int, ...] = ()  # of our array, where that joins several tensors; () where it is this one
  part: Any = ...  # a basic index: this tensor's place in our array
  to_ours: Callable[[np.ndarray], np.ndarray] = _same  # keeps the shape
  to_file: Callable[[np.ndarray], np.ndarray] = _same  # its inverse
  dtype: type | None = None  # in our tree; None: the one that the loader is asked for


@dataclasses.dataclass(frozen=True)
class Table:
  """All tensors of one kind of file."""

  entries: Mapping[str, Entry]  # name in the file -> place in our tree; each one must be there
  ignored: frozenset[str] = frozenset()  # names that may be there and carry nothing of use
  optional: frozenset[str] = frozenset()  # of the entries, those that need not be there


class _LayerDims(Protocol):
  """The fields of a target's or a drafter's config that a decoder layer is built from."""

  @property
  def width(self) -> int: ...
  @property
  def num_heads(self) -> int: ...
  @property
  def num_kv_heads(self) -> int: ...
  @property
  def head_dim(self) -> int: ...
  @property
  def ffn_width(self) -> int: ...
  @property
  def qkv_bias(self) -> bool: ...
  @property
  def o_bias(self) -> bool: ...
  @property
  def mlp_bias(self) -> bool: ...
  @property
  def num_experts(self) -> int: ...


def permute_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """[heads * K, in], rotate-half order -> interleaved order: row (half, i) of a head moves to (i, half)."""
  return _swap_row_axes(weight, num_heads, (2, -1))


def unpermute_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """The inverse of `permute_rope_rows`: interleaved order -> rotate-half order, the one our RoPE turns."""
  return _swap_row_axes(weight, num_heads, (-1, 2))


def _swap_row_axes(weight: np.ndarray, num_heads: int, split: tuple[int, int]) -> np.ndarray:
  return weight.reshape(num_heads, *split, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def _permuted(entry: Entry, num_heads: int) -> Entry:
  return dataclasses.replace(
    entry,
    to_ours=lambda weight: unpermute_rope_rows(weight, num_heads),
    to_file=lambda weight: permute_rope_rows(weight, num_heads),
  )


def _attention(config: _LayerDims, path: tuple[str, ...], in_width: int) -> dict[str, Entry]:
  """Parameter -> place in the attention at `path`, which reads `in_width` numbers a row."""
  num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
  queries = num_heads // num_kv_heads  # of a key-value head; its key and its value stand behind them
  joint = num_kv_heads, queries + 2, head_dim
  entries = {'o.weight': Entry((*path, 'o', 'weight'), (config.width, num_heads * head_dim))}
  if config.o_bias:
    entries['o.bias'] = Entry((*path, 'o', 'bias'), (config.width,))
  for name, heads, part in (
    ('q', num_heads, np.s_[:, :queries]),
    ('k', num_kv_heads, np.s_[:, queries]),
    ('v', num_kv_heads, np.s_[:, queries + 1]),
  ):
    rows = heads * head_dim
    entries[f'{name}.weight'] = Entry((*path, 'qkv', 'weight'), (rows, in_width), (*joint, in_width), part)
    if config.qkv_bias:
      entries[f'{name}.bias'] = Entry((*path, 'qkv', 'bias'), (rows,), joint, part)
  return entries


def _swiglu(config: _LayerDims, path: tuple[str, ...]) -> dict[str, Entry]:
  """Parameter -> place in the feed-forward network at `path`."""
  inward = config.ffn_width, config.width
  joint = functools.partial(Entry, (*path, 'gate_up', 'weight'), inward, (2, *inward))
  entries = {
    'gate.weight': joint(0), 'up.weight': joint(1), 'down.weight': Entry((*path, 'down', 'weight'), inward[::-1])
  }  # fmt: skip
  if config.mlp_bias:
    of_both = functools.partial(Entry, (*path, 'gate_up', 'bias'), inward[:1], (2, inward[0]))
    of_down = Entry((*path, 'down', 'bias'), inward[1:])
    entries |= {'gate.bias': of_both(0), 'up.bias': of_both(1), 'down.bias': of_down}
  return entries


def projection_entries(
  config: _LayerDims,
  layer: tuple[str, ...],
  block: str,
  names: Mapping[str, str],
  in_width: int | None = None,
) -> dict[str, Entry]:
  """One decoder layer's projections, but for routed experts; `names` are those of a kind of file, below `block`."""
  entries = _attention(config, (*layer, 'attn'), in_width or config.width)
  if not config.num_experts:
    entries |= _swiglu(config, (*layer, 'mlp'))
  return {_renamed(name, block, names): entry for name, entry in entries.items()}


def _renamed(name: str, block: str, names: Mapping[str, str]) -> str:
  projection, _, leaf = name.partition('.')
  return f'{block}.{names[projection]}.{leaf}'


_GGUF_PROJECTIONS = {
  'q': 'attn_q',
  'k': 'attn_k',
  'v': 'attn_v',
  'o': 'attn_output',
  'gate': 'ffn_gate',
  'up': 'ffn_up',
  'down': 'ffn_down',
}

HF_PROJECTIONS = {
  'q': 'self_attn.q_proj',
  'k': 'self_attn.k_proj',
  'v': 'self_attn.v_proj',
  'o': 'self_attn.o_proj',
  'gate': 'mlp.gate_proj',
  'up': 'mlp.up_proj',
  'down': 'mlp.down_proj',
}


@dataclasses.dataclass(frozen=True)
class _Experts:
  """Names of the tensors of routed experts, each of which has tensors of its own."""

  router: str
  experts: str
  gate: str
  up: str
  down: str


_EXPERTS = {
  'mixtral': _Experts('block_sparse_moe.gate', 'block_sparse_moe.experts', 'w1', 'w3', 'w2'),
  'qwen3_moe': _Experts('mlp.gate', 'mlp.experts', 'gate_proj', 'up_proj', 'down_proj'),
}


def gguf_table(config: TargetConfig, *, permuted_qk: bool) -> Table:
  """GGUF names of a dense Llama-kind target; `permuted_qk` is `Family.permuted_qk`."""
  entries = _outer_entries(config, 'token_embd.weight', 'output_norm.weight', 'output.weight')
  for i in range(config.num_layers):
    layer, block = f'layer_{i}', f'blk.{i}'
    entries[f'{block}.attn_norm.weight'] = Entry((layer, 'attn_norm', 'scale'), (config.width,))
    entries[f'{block}.ffn_norm.weight'] = Entry((layer, 'mlp_norm', 'scale'), (config.width,))
    entries |= projection_entries(config, (layer,), block, _GGUF_PROJECTIONS)
    entries |= head_norms(config, (layer,), f'{block}.attn_')
    if permuted_qk:
      for name, num_heads in (('attn_q', config.num_heads), ('attn_k', config.num_kv_heads)):
        weight = f'{block}.{name}.weight'
        entries[weight] = _permuted(entries[weight], num_heads)
  return Table(entries, frozenset({'rope_freqs.weight'}))  # `gguf.target_config` has read it


def hf_table(config: TargetConfig, family: Family = FAMILIES['llama']) -> Table:
  """Hugging Face names of a target of a family."""
  entries = _outer_entries(config, 'model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight')
  optional = set()
  if config.tied_head:  # some files repeat the embedding under this name, and in some it is another matrix all the same
    entries['lm_head.weight'] = Entry(('head', 'weight'), (config.vocab_size, config.width))
    optional.add('lm_head.weight')
  ignored = {'model.rotary_emb.inv_freq'}  # a table that RoPE recomputes; older files keep one a layer
  for i in range(config.num_layers):
    layer, block, of_layer = f'layer_{i}', f'model.layers.{i}', config.layer(i)
    ignored.add(f'{block}.self_attn.rotary_emb.inv_freq')
    entries |= _layer_norms(config, (layer,), block)
    projections = projection_entries(of_layer, (layer,), block, HF_PROJECTIONS)
    entries |= _fused(config, layer, block, projections) if family.is_fused else projections
    entries |= head_norms(config, (layer,), f'{block}.self_attn.')
    if config.has_sinks:
      heads = config.num_kv_heads, config.num_heads // config.num_kv_heads
      entries[f'{block}.self_attn.sinks'] = Entry((layer, 'attn', 'sinks'), (config.num_heads,), heads)
    if of_layer.num_experts and family.experts == 'gpt_oss':
      entries |= _joint_expert_entries(of_layer, layer, f'{block}.mlp')
    elif of_layer.num_experts:
      entries |= _expert_entries(of_layer, layer, block, _EXPERTS[family.experts or 'mixtral'])
  return Table(entries, frozenset(ignored), frozenset(optional))


def _layer_norms(config: TargetConfig, layer: tuple[str, ...], block: str) -> dict[str, Entry]:
  """The norms of what attention and the feed-forward network read, and of what they give."""
  names = {}
  if config.has_input_norms:
    read = 'pre_feedforward_layernorm' if config.has_output_norms else 'post_attention_layernorm'
    names = {'input_layernorm': 'attn_norm', read: 'mlp_norm'}
  if config.has_output_norms:
    names |= {'post_attention_layernorm': 'attn_out_norm', 'post_feedforward_layernorm': 'mlp_out_norm'}
  return {f'{block}.{name}.weight': Entry((*layer, ours, 'scale'), (config.width,)) for name, ours in names.items()}


def _fused(config: TargetConfig, layer: str, block: str, entries: dict[str, Entry]) -> dict[str, Entry]:
  """Phi-3's names: one tensor of all queries, then all keys, then all values; and one of gate, then up."""
  num_kv_heads, head_dim, width = config.num_kv_heads, config.head_dim, config.width
  queries = config.num_heads // num_kv_heads
  head_GQ = np.arange(config.num_heads).reshape(num_kv_heads, queries)
  kv_G2 = config.num_heads + np.arange(2 * num_kv_heads).reshape(2, num_kv_heads).T
  head_of_ours = np.concatenate([head_GQ, kv_G2], axis=1).reshape(-1)  # for each head in our order, where it stands

  def reorder(weight: np.ndarray, heads: np.ndarray) -> np.ndarray:
    return weight.reshape(-1, head_dim, width)[heads].reshape(weight.shape)

  qkv = Entry(
    (layer, 'attn', 'qkv', 'weight'),
    (len(head_of_ours) * head_dim, width),
    (num_kv_heads, queries + 2, head_dim, width),
    to_ours=lambda weight: reorder(weight, head_of_ours),
    to_file=lambda weight: reorder(weight, np.argsort(head_of_ours)),
  )
  both = 2 * config.ffn_width, width
  gate_up = Entry((layer, 'mlp', 'gate_up', 'weight'), both, (2, config.ffn_width, width))
  others = {name: entry for name, entry in entries.items() if entry.path[-2] not in ('qkv', 'gate_up')}
  return others | {f'{block}.self_attn.qkv_proj.weight': qkv, f'{block}.mlp.gate_up_proj.weight': gate_up}


def head_norms(config: Any, layer: tuple[str, ...], prefix: str) -> dict[str, Entry]:
  """The norms of queries and keys, where there are any."""
  if not config.qk_norm:
    return {}
  sizes = {
    name: config.head_dim * (num_heads if config.joint_qk_norm else 1)
    for name, num_heads in (('q_norm', config.num_heads), ('k_norm', config.num_kv_heads))
  }
  return {f'{prefix}{name}.weight': Entry((*layer, 'attn', name, 'scale'), (size,)) for name, size in sizes.items()}


def _expert_entries(config: TargetConfig, layer: str, block: str, names: '_Experts') -> dict[str, Entry]:
  """The router and the experts of one layer."""
  E, F, D = config.num_experts, config.ffn_width, config.width
  mlp = (layer, 'mlp')
  entries = {f'{block}.{names.router}.weight': Entry((*mlp, 'router', 'weight'), (E, D))}
  for index in range(E):
    expert = f'{block}.{names.experts}.{index}'
    for name, part in ((names.gate, np.s_[index, 0]), (names.up, np.s_[index, 1])):
      entries[f'{expert}.{name}.weight'] = Entry((*mlp, 'expert_gate_up', 'weight'), (F, D), (E, 2, F, D), part)
    entries[f'{expert}.{names.down}.weight'] = Entry((*mlp, 'expert_down', 'weight'), (D, F), (E, D, F), np.s_[index])
  return entries


def _joint_expert_entries(config: TargetConfig, layer: str, block: str) -> dict[str, Entry]:
  """Those of gpt-oss: all experts in one tensor, [in, out] each, and outputs of gate and up in turns."""
  E, F, D = config.num_experts, config.ffn_width, config.width

  def entry(ours: tuple[str, str], file_axes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> Entry:
    """Of a tensor of the file, in which some of these axes may be joined; transposed by the order they are ours."""
    joint = tuple(file_axes[axis] for axis in order)
    back = tuple(np.argsort(order))
    return Entry(
      (layer, 'mlp', *ours),
      shape,
      joint,
      to_ours=lambda x: x.reshape(file_axes).transpose(order).reshape(shape),
      to_file=lambda x: x.reshape(joint).transpose(back).reshape(shape),
    )

  experts = f'{block}.experts'
  return {
    f'{block}.router.weight': Entry((layer, 'mlp', 'router', 'weight'), (E, D)),
    f'{block}.router.bias': Entry((layer, 'mlp', 'router', 'bias'), (E,)),
    f'{experts}.gate_up_proj': entry(('expert_gate_up', 'weight'), (E, D, F, 2), (0, 3, 2, 1), (E, D, 2 * F)),
    f'{experts}.gate_up_proj_bias': entry(('expert_gate_up', 'bias'), (E, F, 2), (0, 2, 1), (E, 2 * F)),
    f'{experts}.down_proj': entry(('expert_down', 'weight'), (E, F, D), (0, 2, 1), (E, F, D)),
    f'{experts}.down_proj_bias': Entry((layer, 'mlp', 'expert_down', 'bias'), (E, D)),
  }


def _outer_entries(config: TargetConfig, embed: str, norm: str, head: str) -> dict[str, Entry]:
  vocab_by_width = (config.vocab_size, config.width)
  entries = {
    embed: Entry(('embed', 'weight'), vocab_by_width),
    norm: Entry(('norm', 'scale'), (config.width,)),
  }
  if not config.tied_head:
    entries[head] = Entry(('head', 'weight'), vocab_by_width)
  return entries
