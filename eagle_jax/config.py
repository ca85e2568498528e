"""Frozen descriptions of networks: shapes and switches, without arrays and without file access."""

import dataclasses
import math
import numbers
import operator
from typing import Any, ClassVar


def require(owner: Any, name: str, is_met: bool, must_be: str) -> None:
  """Raise a ValueError, which names the field and what it holds, unless a condition on a field is met."""
  if not is_met:
    raise ValueError(f'{type(owner).__name__}: `{name}` must be {must_be}, got {getattr(owner, name)!r:.80}.')


def require_positive(config, *names: str, kind: Any = numbers.Integral) -> None:
  given: dict[str, Any] = {name: getattr(config, name) for name in names}
  if bad := {name: x for name, x in given.items() if not (isinstance(x, kind) and 0 < x < math.inf)}:
    what = 'integers' if kind is numbers.Integral else 'finite numbers'
    fields = ', '.join(f'`{name}` = {x!r}' for name, x in bad.items())
    raise ValueError(f'{type(config).__name__}: sizes and scales must be positive {what}, got {fields}.')


def _require_heads(config) -> None:
  is_multiple = config.num_heads % config.num_kv_heads == 0
  require(config, 'num_heads', is_multiple, f'a multiple of num_kv_heads={config.num_kv_heads}')
  require(config, 'head_dim', config.head_dim % 2 == 0, 'even, since RoPE rotates pairs')


def _require_ids(config) -> None:
  is_part = isinstance(config.num_ids, numbers.Integral) and 1 <= int(config.num_ids) <= config.vocab_size
  require(config, 'draft_vocab_size', is_part, f'between 1 and vocab_size={config.vocab_size}, or None for all ids')


def _require_slowdown(config, rotary_dim: int) -> None:
  slowdown, num_pairs = config.rope_slowdown, rotary_dim // 2
  if slowdown and (len(slowdown) != num_pairs or not min(slowdown) > 0):
    raise ValueError(
      f'{type(config).__name__}: `rope_slowdown` must hold one positive number for each of the {num_pairs} pairs that '
      f'RoPE turns, got {len(slowdown)} numbers, the smallest {min(slowdown)}.'
    )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
  """A Llama-like decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

  The switches after `tied_head` are the additions of other families; switched off, they cost nothing.
  """

  vocab_size: int
  width: int  # D
  num_layers: int
  num_heads: int  # H
  num_kv_heads: int  # G
  head_dim: int  # K
  ffn_width: int  # F
  max_context: int  # tokens, prompt and new ones together, that the model was trained for
  norm_eps: float = 1e-5
  rope_theta: float = 10_000.0
  tied_head: bool = False  # the head is the embedding
  qkv_bias: bool = False  # Qwen2: biases of the query, key and value projections
  qk_norm: bool = False  # Qwen3: RMSNorm of each query and key head before RoPE
  joint_qk_norm: bool = False  # OLMo-2: the norms go over all heads together
  o_bias: bool = False  # a bias of the output projection
  mlp_bias: bool = False  # Granite: biases of the feed-forward network
  window: int | None = None  # Mistral: a token attends to this many tokens, itself included; None: to all before it
  has_rope: bool = True  # SmolLM3: False in some layers
  rotary_dim: int | None = None  # Phi: RoPE turns this many numbers of a head, the first ones; None: all K
  rope_slowdown: tuple[float, ...] = ()  # Llama 3.1: divides the frequency of each pair; (): all by 1
  rope_factor: float = 1.0  # YaRN: multiplies cosines and sines, so attention scores grow by its square
  num_experts: int = 0  # E, Mixtral: routed feed-forward networks a layer; 0: a single one for all tokens
  experts_per_token: int = 0
  shares_sum_to_1: bool = True  # of a token's experts; False: they are probabilities among all experts
  expert_bias: bool = False  # gpt-oss: biases of the router and of experts
  activation: str = 'silu'  # of the gate; Gemma: 'gelu_tanh'
  gate_limit: float | None = None  # gpt-oss: gates and inputs are clamped, and SwiGLU is another, see `layers.activate`
  gate_slope: float = 1.702  # its sigmoid's
  has_sinks: bool = False  # gpt-oss: each head's softmax has one more logit, a parameter, that weighs nothing
  has_input_norms: bool = True  # of attention and of the feed-forward network
  has_output_norms: bool = False  # OLMo-2, Gemma 3: norms of what the two add to the residual stream
  norm_in_float32: bool = False  # OLMo-2: norms multiply by their scale before they round to the weights' dtype
  norm_offset: float = 0.0  # Gemma: what norms add to their scale
  embedding_scale: float = 1.0  # Granite, Gemma: multiplies embeddings
  attention_scale: float | None = None  # Granite, Gemma: multiplies scores; None: 1 / sqrt(K)
  residual_scale: float = 1.0  # Granite: multiplies what attention and the feed-forward network add
  logit_divisor: float = 1.0  # Granite
  logit_cap: float | None = None  # Gemma: logits are cap * tanh(logits / cap)
  # Layers that differ from the others: pairs of an index and of fields with their values there, pairs too.
  layer_changes: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()
  eos_ids: tuple[int, ...] = ()  # any of these ends a sequence
  name: str = 'target'

  ACTIVATIONS: ClassVar[tuple[str, ...]] = 'silu', 'gelu_tanh'
  CHANGE_BY_LAYER: ClassVar[frozenset[str]] = frozenset({
    'window', 'has_rope', 'rope_theta', 'rope_slowdown', 'rope_factor', 'num_experts', 'ffn_width',
  })  # fmt: skip

  def __post_init__(self):
    require_positive(
      self, 'vocab_size', 'width', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width', 'max_context'
    )
    scales = 'embedding_scale', 'residual_scale', 'logit_divisor'
    require_positive(self, 'norm_eps', 'rope_theta', 'rope_factor', *scales, kind=numbers.Real)
    limits = [name for name in ('logit_cap', 'gate_limit') if getattr(self, name) is not None]
    require_positive(self, *limits, kind=numbers.Real)
    _require_heads(self)
    if self.window is not None:
      require_positive(self, 'window')
    self._convert_eos_ids()
    is_rotary = self.rotary_dim is None or (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0)
    require(self, 'rotary_dim', is_rotary, f'even and between 2 and head_dim={self.head_dim}')
    _require_slowdown(self, self.rotary_dim or self.head_dim)
    self._require_layer_changes()
    require(self, 'activation', self.activation in self.ACTIVATIONS, f'one of {self.ACTIVATIONS}')
    is_routed = not self.num_experts or 0 < self.experts_per_token <= self.num_experts
    require(self, 'experts_per_token', is_routed, f'between 1 and num_experts={self.num_experts}')

  def _convert_eos_ids(self) -> None:
    """Convert `eos_ids` to a tuple of Python integers, since a config must be hashable."""
    try:
      object.__setattr__(self, 'eos_ids', tuple(map(operator.index, self.eos_ids)))
    except TypeError:
      require(self, 'eos_ids', False, 'a list of token ids')

  def _require_layer_changes(self) -> None:
    for index, changes in self.layer_changes:
      if not 0 <= index < self.num_layers or not self.CHANGE_BY_LAYER.issuperset(dict(changes)):
        raise ValueError(
          f'TargetConfig: `layer_changes` must name layers below num_layers={self.num_layers} and fields among '
          f'{sorted(self.CHANGE_BY_LAYER)}, got {(index, changes)}.'
        )
      self.layer(index)

  def layer(self, index: int) -> 'TargetConfig':
    """Return the config of a model whose layers are all like this one."""
    return dataclasses.replace(self, layer_changes=(), **dict(dict(self.layer_changes).get(index, ())))


class DrafterBase:
  """The base of drafters' configs: the ids that a drafter may draft, and what it reads of its target."""

  HAS_FIXED_IDS: ClassVar[bool] = False  # whether it drafts only those that it was made for

  vocab_size: int  # of the target
  draft_vocab_size: int | None  # U of the target's ids; None: all

  @property
  def num_ids(self) -> int:
    """U: number of ids that it drafts."""
    return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target with `num_layers` whose inputs it reads, beside the final feature: here none.

    Raises:
      ValueError: the target has too few layers.
    """
    return ()


@dataclasses.dataclass(frozen=True)
class HeadSizes(DrafterBase):
  """The fields that all drafters with one decoder layer share."""

  # Fields that older drafter folders lack: a missing one has its default.
  MAY_LACK: ClassVar[frozenset[str]] = frozenset({
    'rope_slowdown', 'rope_factor', 'rope_scaling', 'own_embedding', 'o_bias', 'qkv_bias', 'qk_norm', 'fc_bias',
    'window', 'fc_norm', 'norm_before_fc', 'norm_output', 'mlp_bias', 'num_layers', 'griffin',
  })  # fmt: skip

  vocab_size: int  # of the target
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_width: int
  _: dataclasses.KW_ONLY
  norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  draft_vocab_size: int | None = None  # U of the target's ids; None: all
  rope_slowdown: tuple[float, ...] = ()  # see `TargetConfig`
  rope_factor: float = 1.0
  # The two as they were given: pairs of a key and its value in the terms of transformers.
  rope_scaling: tuple[tuple[str, Any], ...] = ()
  own_embedding: bool = False  # whether it brings one instead of the target's
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False  # of the feed-forward network

  def _require_sizes(self) -> None:
    object.__setattr__(self, 'rope_slowdown', tuple(self.rope_slowdown))
    object.__setattr__(self, 'rope_scaling', tuple((key, value) for key, value in self.rope_scaling))
    _require_slowdown(self, self.head_dim)
    require_positive(self, 'vocab_size', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width')
    require_positive(self, 'norm_eps', 'rope_theta', 'rope_factor', kind=numbers.Real)
    _require_heads(self)
    _require_ids(self)

  def as_layer(self) -> TargetConfig:
    """Return the config of a target whose layers are all like the drafter's."""
    of_target = {field.name for field in dataclasses.fields(TargetConfig)}
    shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in of_target}
    return TargetConfig(**(shared | {'num_layers': 1, 'max_context': 1}))


@dataclasses.dataclass(frozen=True)
class DrafterConfig(HeadSizes):
  """The EAGLE-1/2 head: one decoder layer over [embedding, feature] (EAGLE, arXiv:2401.15077).

  Every field is the drafter's own: heads, eps, theta and biases may all differ from the target's.
  """

  # Fields that add something to the published head, with what they are in it; see `draft.eagle.Eagle.extend`.
  PLAIN: ClassVar[dict[str, Any]] = {'num_layers': 1, 'griffin': False}

  fc_bias: bool = True  # the reference's default when its config.json has no "bias"
  name: str = 'drafter'
  _: dataclasses.KW_ONLY
  num_layers: int = 1  # those after the first are ordinary decoder layers, with a norm of their input
  griffin: bool = False  # GRIFFIN: the token is fused in once more, and two vectors come out, see `draft.griffin`

  def __post_init__(self):
    self._require_sizes()
    require_positive(self, 'num_layers')

  @property
  def target_width(self) -> int:
    return self.width

  @property
  def is_plain(self) -> bool:
    """Whether its layers are those of the published head; a kind of its own may have more beside them."""
    return all(getattr(self, name) == value for name, value in self.PLAIN.items())


@dataclasses.dataclass(frozen=True)
class EagleTapsConfig(DrafterConfig):
  """The EAGLE-2 head that also reads normed inputs of middle layers of the target, where the target gives features.

  Without its taps it is the head of `DrafterConfig`, which it may be trained on from.
  """

  _: dataclasses.KW_ONLY
  taps: tuple[int, ...]  # as in `Eagle3Config`

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'taps', tuple(map(int, self.taps)))
    require(self, 'taps', min(self.taps, default=-1) >= 0, 'layers numbered from 0, one or more')

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    return require_layers(self, self.taps, num_layers)


@dataclasses.dataclass(frozen=True)
class BlockConfig(DrafterConfig):
  """The EAGLE-2 head whose slots draft all depths in one pass; each node corrects its slot by its own token."""

  rank: int = dataclasses.field(kw_only=True)  # of the correction

  def __post_init__(self):
    super().__post_init__()
    require_positive(self, 'rank')
    require(self, 'griffin', not self.griffin, 'False: slots and corrections are made for one vector')


@dataclasses.dataclass(frozen=True)
class Eagle3Config(HeadSizes):
  """The EAGLE-3 head: one decoder layer over embeddings and fused features of three target layers, and its own head.

  As in `DrafterConfig`, every field is the drafter's own. Source: EAGLE-3, arXiv:2503.01840; draft/README.md lists
  where its code differs from the paper.
  """

  target_width: int
  # Layers of the target, numbered from 0, whose inputs the head reads, any number of them; of n layers, layer n stands
  # for the final norm. None: 2, n // 2, n - 3. (): the head reads the final feature alone, without fc.
  taps: tuple[int, ...] | None = None
  fc_bias: bool = False
  qk_norm: bool = False  # a Qwen3-style layer
  window: int | None = None  # see `TargetConfig`
  norm_before_residual: bool = False  # the residual stream starts from the normed feature
  norm_before_fc: bool = False  # EAGLE-3.1: one norm of all taps together before fc
  fc_norm: bool = False  # EAGLE-3.1: a norm of each tap before fc
  norm_output: bool = False  # EAGLE-3.1: the normed output is the next step's feature
  name: str = 'drafter'

  def __post_init__(self):
    self._require_sizes()
    require_positive(self, 'target_width')
    if self.taps is not None:
      object.__setattr__(self, 'taps', tuple(map(int, self.taps)))
      require(self, 'taps', min(self.taps, default=0) >= 0, 'layers numbered from 0')
    if self.window is not None:
      require_positive(self, 'window')
    is_one_norm = not (self.norm_before_fc and self.fc_norm)
    require(
      self, 'norm_before_fc', is_one_norm, 'False (one norm of all taps) where each tap has its own and fc_norm is True'
    )
    needs_fc = self.fc_bias or self.norm_before_fc or self.fc_norm or self.width != self.target_width
    of_fc = f"fc_bias, norm_before_fc or fc_norm is True or `width` is not the target's, {self.target_width}"
    require(self, 'taps', self.num_taps > 0 or not needs_fc, f'one layer or more, which fc reads, if {of_fc}')
    is_width = self.width == self.target_width or self.own_embedding
    require(self, 'width', is_width, f"the target's, {self.target_width}, unless own_embedding is True")

  @property
  def num_taps(self) -> int:
    return 3 if self.taps is None else len(self.taps)

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    taps = (2, num_layers // 2, num_layers - 3) if self.taps is None else self.taps
    return require_layers(self, taps, num_layers)


@dataclasses.dataclass(frozen=True)
class MedusaConfig(DrafterBase):
  """Medusa's heads (arXiv:2401.10774): for each depth of a tree, residual blocks over the target's final feature."""

  vocab_size: int  # of the target
  width: int  # of the target
  max_depth: int  # heads
  num_layers: int = 1  # residual blocks of each head
  own_heads: bool = False  # whether each has a language-model head of its own, as published ones do; else the target's
  draft_vocab_size: int | None = None  # U of the target's ids; None: all
  name: str = 'drafter'

  def __post_init__(self):
    require_positive(self, 'vocab_size', 'width', 'max_depth', *(() if self.own_heads else ('num_layers',)))
    _require_ids(self)

  @property
  def target_width(self) -> int:
    return self.width


def require_layers(drafter: Any, taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
  if not all(0 <= layer <= num_layers for layer in taps):
    raise ValueError(
      f'Drafter {drafter.name!r} reads the inputs of layers {taps}, but this target has only {num_layers} layers: load '
      'the target that the drafter was trained for.'
    )
  return taps


def require_match(drafter: DrafterConfig | Eagle3Config, target: TargetConfig) -> None:
  """Raise a ValueError if the drafter was trained for a target of other sizes."""
  pairs = {'width': (drafter.target_width, target.width), 'vocab_size': (drafter.vocab_size, target.vocab_size)}
  wrong = [f'{name} {ours} instead of {theirs}' for name, (ours, theirs) in pairs.items() if ours != theirs]
  if wrong:
    raise ValueError(
      f'Drafter {drafter.name!r} does not fit target {target.name!r}: {", ".join(wrong)}. '
      'Load the drafter that was trained for this target.'
    )
  drafter.tapped_layers(target.num_layers)
