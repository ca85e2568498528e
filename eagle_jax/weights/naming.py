"""Tables from the tensor names of other people's files to our parameter tree.

Every linear weight of ours is stored [out, in]; queries, keys and values are joined in one array, and gate and up. A
table lists each tensor a file must hold, and by name the extra ones it may hold; there is no other leniency
(`load.assemble` raises on everything else).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.models.families import FAMILIES, Family


def _same(array: np.ndarray) -> np.ndarray:
  return array


@dataclasses.dataclass(frozen=True)
class Entry:
  """The place of one tensor of a file in our parameter tree."""

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

  entries: Mapping[str, Entry]  # name in the file -> place in our tree; all are required, except `optional`
  ignored: frozenset[str] = frozenset()  # names that may be present and hold nothing useful
  optional: frozenset[str] = frozenset()  # entries that may be absent


def permute_rope_outputs(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Permute [heads * K, ...] from rotate-half to interleaved order: output (half, i) of a head moves to (i, half)."""
  return _swap_output_axes(weight, num_heads, (2, -1))


def unpermute_rope_outputs(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Permute back from interleaved to rotate-half order, which our RoPE expects."""
  return _swap_output_axes(weight, num_heads, (-1, 2))


def _swap_output_axes(weight: np.ndarray, num_heads: int, split: tuple[int, int]) -> np.ndarray:
  return weight.reshape(num_heads, *split, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _permuted(entry: Entry, num_heads: int) -> Entry:
  return dataclasses.replace(
    entry,
    to_ours=lambda weight: unpermute_rope_outputs(weight, num_heads),
    to_file=lambda weight: permute_rope_outputs(weight, num_heads),
  )


def _attention(config: TargetConfig, path: tuple[str, ...], in_width: int) -> dict[str, Entry]:
  """Map each parameter of the attention at `path`, whose input has `in_width` numbers, to its place."""
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
    num_outputs = heads * head_dim
    entries[f'{name}.weight'] = Entry((*path, 'qkv', 'weight'), (num_outputs, in_width), (*joint, in_width), part)
    if config.qkv_bias:
      entries[f'{name}.bias'] = Entry((*path, 'qkv', 'bias'), (num_outputs,), joint, part)
  return entries


def _swiglu(config: TargetConfig, path: tuple[str, ...]) -> dict[str, Entry]:
  """Map each parameter of the feed-forward network at `path` to its place."""
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
  config: TargetConfig,
  layer: tuple[str, ...],
  block: str,
  names: Mapping[str, str],
  in_width: int | None = None,
) -> dict[str, Entry]:
  """Map one decoder layer's projections, except routed experts; `names` are those of a kind of file, below `block`."""
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
  """Names of the tensors of routed experts, in files where each expert has its own tensors."""

  router: str
  experts: str
  gate: str
  up: str
  down: str


_EXPERTS = {
  'mixtral': _Experts('block_sparse_moe.gate', 'block_sparse_moe.experts', 'w1', 'w3', 'w2'),
  'qwen3_moe': _Experts('mlp.gate', 'mlp.experts', 'gate_proj', 'up_proj', 'down_proj'),
}


def gguf_table(config: TargetConfig, family: Family = FAMILIES['llama']) -> Table:
  """Make the table of a target's tensors in a GGUF file."""
  entries = _outer_entries(config, 'token_embd.weight', 'output_norm.weight', 'output.weight')
  mlp_norm = 'post_attention_norm' if family.gguf == 'gpt-oss' else 'ffn_norm'
  norms = {'attn_norm': 'attn_norm', mlp_norm: 'mlp_norm'} if config.has_input_norms else {}
  norms |= {'post_attention_norm': 'attn_out_norm', 'post_ffw_norm': 'mlp_out_norm'} if config.has_output_norms else {}
  for i in range(config.num_layers):
    layer, block, of_layer = f'layer_{i}', f'blk.{i}', config.layer(i)
    entries |= {
      f'{block}.{name}.weight': Entry((layer, ours, 'scale'), (config.width,)) for name, ours in norms.items()
    }
    projections = projection_entries(of_layer, (layer,), block, _GGUF_PROJECTIONS)
    if family.permuted_qk:
      for name, entry in projections.items():
        if (num_heads := _rotated_heads(config).get(name.split('.')[2])) is not None:
          projections[name] = _permuted(entry, num_heads)
    entries |= (
      _fused(config, layer, projections, f'{block}.attn_qkv', f'{block}.ffn_up') if family.is_fused else projections
    )
    entries |= head_norms(config, (layer,), f'{block}.attn_')
    if config.has_sinks:
      entries[f'{block}.attn_sinks.weight'] = _sinks(config, layer)
    if of_layer.num_experts:
      entries |= _gguf_expert_entries(of_layer, layer, block)
  if config.norm_offset:  # files of this kind hold the sum
    entries = {name: _shifted(entry, config.norm_offset) for name, entry in entries.items()}
  # `gguf.target_config` has read these.
  return Table(entries, frozenset({'rope_freqs.weight', 'rope_factors_long.weight', 'rope_factors_short.weight'}))


def _rotated_heads(config: TargetConfig) -> dict[str, int]:
  """Return the number of heads of each tensor whose outputs GGUF may permute."""
  return {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}


def _sinks(config: TargetConfig, layer: str) -> Entry:
  heads = config.num_kv_heads, config.num_heads // config.num_kv_heads
  return Entry((layer, 'attn', 'sinks'), (config.num_heads,), heads)


def _shifted(entry: Entry, offset: float) -> Entry:
  """Subtract the offset from a norm's scale; return any other entry unchanged."""
  if entry.path[-1] != 'scale':
    return entry
  return dataclasses.replace(
    entry, to_ours=lambda x: x - np.asarray(offset, x.dtype), to_file=lambda x: x + np.asarray(offset, x.dtype)
  )


def _gguf_expert_entries(config: TargetConfig, layer: str, block: str) -> dict[str, Entry]:
  """Map the router and all experts of one layer, where each kind of matrix is one tensor."""
  E, F, D = config.num_experts, config.ffn_width, config.width
  router, inward, outward = ((layer, 'mlp', name) for name in ('router', 'expert_gate_up', 'expert_down'))
  entries = {
    'ffn_gate_inp.weight': Entry((*router, 'weight'), (E, D)),
    'ffn_gate_exps.weight': Entry((*inward, 'weight'), (E, F, D), (E, 2, F, D), np.s_[:, 0]),
    'ffn_up_exps.weight': Entry((*inward, 'weight'), (E, F, D), (E, 2, F, D), np.s_[:, 1]),
    'ffn_down_exps.weight': Entry((*outward, 'weight'), (E, D, F)),
  }
  if config.expert_bias:
    entries |= {
      'ffn_gate_inp.bias': Entry((*router, 'bias'), (E,)),
      'ffn_gate_exps.bias': Entry((*inward, 'bias'), (E, F), (E, 2, F), np.s_[:, 0]),
      'ffn_up_exps.bias': Entry((*inward, 'bias'), (E, F), (E, 2, F), np.s_[:, 1]),
      'ffn_down_exps.bias': Entry((*outward, 'bias'), (E, D)),
    }
  return {f'{block}.{name}': entry for name, entry in entries.items()}


def hf_table(config: TargetConfig, family: Family = FAMILIES['llama']) -> Table:
  """Make the table of a target's tensors in a Hugging Face folder."""
  entries = _outer_entries(config, 'model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight')
  optional = set()
  if config.tied_head:  # some files repeat the embedding under this name, and in some it is another matrix all the same
    entries['lm_head.weight'] = Entry(('head', 'weight'), (config.vocab_size, config.width))
    optional.add('lm_head.weight')
  ignored = {'model.rotary_emb.inv_freq'}  # a table that RoPE recomputes; older files keep one a layer
  for i in range(config.num_layers):
    layer, block, of_layer = f'layer_{i}', f'model.layers.{i}', config.layer(i)
    ignored.add(f'{block}.self_attn.rotary_emb.inv_freq')
    entries |= layer_norms(config, (layer,), block)
    projections = projection_entries(of_layer, (layer,), block, HF_PROJECTIONS)
    fused = f'{block}.self_attn.qkv_proj', f'{block}.mlp.gate_up_proj'
    entries |= _fused(config, layer, projections, *fused) if family.is_fused else projections
    entries |= head_norms(config, (layer,), f'{block}.self_attn.')
    if config.has_sinks:
      entries[f'{block}.self_attn.sinks'] = _sinks(config, layer)
    if of_layer.num_experts and family.experts == 'gpt_oss':
      entries |= _joint_expert_entries(of_layer, layer, f'{block}.mlp')
    elif of_layer.num_experts:
      entries |= _expert_entries(of_layer, layer, block, _EXPERTS[family.experts or 'mixtral'])
  return Table(entries, frozenset(ignored), frozenset(optional))


def layer_norms(config: TargetConfig, layer: tuple[str, ...], block: str) -> dict[str, Entry]:
  """Map the norms of the inputs of attention and feed-forward network, and of their outputs."""
  names = {}
  if config.has_input_norms:
    read = 'pre_feedforward_layernorm' if config.has_output_norms else 'post_attention_layernorm'
    names = {'input_layernorm': 'attn_norm', read: 'mlp_norm'}
  if config.has_output_norms:
    names |= {'post_attention_layernorm': 'attn_out_norm', 'post_feedforward_layernorm': 'mlp_out_norm'}
  return {f'{block}.{name}.weight': Entry((*layer, ours, 'scale'), (config.width,)) for name, ours in names.items()}


def _fused(
  config: TargetConfig, layer: str, entries: dict[str, Entry], qkv_name: str, gate_up_name: str
) -> dict[str, Entry]:
  """Replace entries by fused ones: all queries, then keys, then values in one tensor, gate and up in another."""
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
  return others | {f'{qkv_name}.weight': qkv, f'{gate_up_name}.weight': gate_up}


def head_norms(config: TargetConfig, layer: tuple[str, ...], prefix: str) -> dict[str, Entry]:
  """Map the norms of queries and keys, if there are any."""
  if not config.qk_norm:
    return {}
  sizes = {
    name: config.head_dim * (num_heads if config.joint_qk_norm else 1)
    for name, num_heads in (('q_norm', config.num_heads), ('k_norm', config.num_kv_heads))
  }
  return {f'{prefix}{name}.weight': Entry((*layer, 'attn', name, 'scale'), (size,)) for name, size in sizes.items()}


def _expert_entries(config: TargetConfig, layer: str, block: str, names: '_Experts') -> dict[str, Entry]:
  """Map the router and the experts of one layer."""
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
  """Map gpt-oss's experts: all in one tensor, each [in, out], with the outputs of gate and up interleaved."""
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
