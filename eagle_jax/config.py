"""Frozen descriptions of networks. A config says shapes and switches; it holds no array and reads no file."""

import dataclasses
import math
import numbers
from typing import Any, ClassVar


def _require_positive(config, *names: str, kind: Any = numbers.Integral) -> None:
  given: dict[str, Any] = {name: getattr(config, name) for name in names}
  if bad := {name: x for name, x in given.items() if not (isinstance(x, kind) and 0 < x < math.inf)}:
    what = 'integers' if kind is numbers.Integral else 'numbers'
    raise ValueError(f'{type(config).__name__}: these fields must be positive {what}: {bad}.')


def _require_heads(config) -> None:
  if config.num_heads % config.num_kv_heads:
    raise ValueError(
      f'{type(config).__name__}: num_heads {config.num_heads} must be a multiple of num_kv_heads {config.num_kv_heads}.'
    )
  if config.head_dim % 2:
    raise ValueError(f'{type(config).__name__}: head_dim {config.head_dim} must be even: RoPE turns pairs.')


def _require_slowdown(config) -> None:
  slowdown, num_pairs = config.rope_slowdown, config.head_dim // 2
  if slowdown and (len(slowdown) != num_pairs or not min(slowdown) > 0):
    raise ValueError(
      f'{type(config).__name__}: rope_slowdown needs one positive number for each of the {num_pairs} pairs of a head; '
      f'{len(slowdown)} came, the smallest {min(slowdown)}.'
    )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
  """A decoder-only transformer of the Llama kind: RMSNorm, RoPE, grouped-query attention, SwiGLU.

  The switches after `tied_head` are what other families add to a Llama; off, they cost nothing.
  """

  vocab_size: int
  width: int  # D
  num_layers: int
  num_heads: int  # H
  num_kv_heads: int  # G
  head_dim: int  # K
  ffn_width: int  # F
  max_context: int  # tokens the model was trained to see: prompt + new
  norm_eps: float = 1e-5
  rope_theta: float = 10_000.0
  tied_head: bool = False  # the head is the embedding
  qkv_bias: bool = False  # Qwen2: biases of the query, key and value projections
  qk_norm: bool = False  # Qwen3: RMSNorm of each query and key head before RoPE
  o_bias: bool = False  # a bias of the output projection
  window: int | None = None  # Mistral: a row sees this many rows, itself included; None: all before it
  rope_slowdown: tuple[float, ...] = ()  # Llama 3.1: each of the K/2 pairs turns this many times slower; (): none does
  rope_factor: float = 1.0  # YaRN: of cosines and sines, so that scores grow by its square
  num_experts: int = 0  # E, Mixtral: routed feed-forward networks a layer; 0: one, for all rows
  experts_per_token: int = 0
  eos_ids: tuple[int, ...] = ()  # any of these ends a row
  name: str = 'target'

  def __post_init__(self):
    _require_positive(
      self, 'vocab_size', 'width', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width', 'max_context'
    )
    _require_positive(self, 'norm_eps', 'rope_theta', 'rope_factor', kind=numbers.Real)
    _require_heads(self)
    if self.window is not None:
      _require_positive(self, 'window')
    _require_slowdown(self)
    if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
      raise ValueError(
        f'TargetConfig: experts_per_token is {self.experts_per_token}; 1 .. num_experts, {self.num_experts}, is needed.'
      )


@dataclasses.dataclass(frozen=True)
class _HeadSizes:
  """What every drafter's one layer has."""

  # Fields that folders written before there were these lack: they mean their defaults there.
  MAY_LACK: ClassVar[frozenset[str]] = frozenset({
    'rope_slowdown', 'rope_factor', 'rope_scaling', 'own_embedding', 'o_bias', 'qkv_bias', 'qk_norm', 'fc_bias',
    'window', 'fc_norm', 'norm_before_fc', 'norm_output',
  })  # fmt: skip

  vocab_size: int  # the target's
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_width: int
  norm_eps: float = dataclasses.field(default=1e-6, kw_only=True)
  rope_theta: float = dataclasses.field(default=10_000.0, kw_only=True)
  draft_vocab_size: int | None = dataclasses.field(default=None, kw_only=True)  # U of the target's ids; None: all
  rope_slowdown: tuple[float, ...] = dataclasses.field(default=(), kw_only=True)  # see `TargetConfig`
  rope_factor: float = dataclasses.field(default=1.0, kw_only=True)
  # What the two come of, as pairs of a key and its value that transformers knows.
  rope_scaling: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), kw_only=True)
  own_embedding: bool = dataclasses.field(default=False, kw_only=True)  # not the target's
  qkv_bias: bool = dataclasses.field(default=False, kw_only=True)
  o_bias: bool = dataclasses.field(default=False, kw_only=True)

  def _require_sizes(self) -> None:
    object.__setattr__(self, 'rope_slowdown', tuple(self.rope_slowdown))
    object.__setattr__(self, 'rope_scaling', tuple((key, value) for key, value in self.rope_scaling))
    _require_slowdown(self)
    _require_positive(self, 'vocab_size', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_width')
    _require_positive(self, 'norm_eps', 'rope_theta', 'rope_factor', kind=numbers.Real)
    _require_heads(self)
    if not (isinstance(self.num_ids, numbers.Integral) and 1 <= self.num_ids <= self.vocab_size):
      raise ValueError(
        f'{type(self).__name__}: draft_vocab_size is {self.draft_vocab_size}; 1 .. vocab_size, {self.vocab_size}, or '
        'None for all, is needed.'
      )

  @property
  def num_ids(self) -> int:
    """U: that it drafts, rows of its head."""
    return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


@dataclasses.dataclass(frozen=True)
class DrafterConfig(_HeadSizes):
  """The EAGLE-1/2 head: one decoder layer over [embedding, feature] (EAGLE, arXiv:2401.15077).

  Every field is the drafter's own: none of heads, eps, theta or biases may be taken from the target.
  """

  fc_bias: bool = True  # the reference's default when its config.json has no "bias"
  name: str = 'drafter'

  # What a target's layer may have, and this one never has.
  qk_norm: ClassVar[bool] = False
  window: ClassVar[int | None] = None
  num_experts: ClassVar[int] = 0

  def __post_init__(self):
    self._require_sizes()

  @property
  def target_width(self) -> int:
    return self.width

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    """It reads the final feature alone."""
    return ()


@dataclasses.dataclass(frozen=True)
class Eagle3Config(_HeadSizes):
  """The EAGLE-3 head: one decoder layer over embeddings and fused features of three depths, and a head of its own
  (EAGLE-3, arXiv:2503.01840; draft/README.md says where its code differs).

  As in `DrafterConfig`, every field is the drafter's own.
  """

  target_width: int
  # Layers of the target, from 0, whose inputs it reads, any number of them; the input of the layer behind the last is
  # what the final norm reads. None: 2, n // 2, n - 3 of n. (): the final feature alone, which no fc joins.
  taps: tuple[int, ...] | None = None
  fc_bias: bool = False
  qk_norm: bool = False  # a Qwen3-style layer
  window: int | None = None  # see `TargetConfig`
  norm_before_residual: bool = False  # the residual stream starts from the normed feature
  norm_before_fc: bool = False  # EAGLE-3.1: one norm of all taps together before fc
  fc_norm: bool = False  # EAGLE-3.1: a norm of each tap before fc
  norm_output: bool = False  # EAGLE-3.1: the normed output is the next step's feature
  name: str = 'drafter'

  # What a target's layer may have, and this one never has.
  num_experts: ClassVar[int] = 0

  def __post_init__(self):
    self._require_sizes()
    _require_positive(self, 'target_width')
    if self.taps is not None:
      object.__setattr__(self, 'taps', tuple(int(layer) for layer in self.taps))
      if min(self.taps, default=0) < 0:
        raise ValueError(f'Eagle3Config: taps is {self.taps}; layers are numbered from 0.')
    if self.window is not None:
      _require_positive(self, 'window')
    if self.norm_before_fc and self.fc_norm:
      raise ValueError('Eagle3Config: norm_before_fc and fc_norm came; taps are normed together or each by itself.')
    if not self.num_taps and (self.fc_bias or self.norm_before_fc or self.fc_norm or self.width != self.target_width):
      raise ValueError(
        'Eagle3Config: taps is (), so there is no fc: fc_bias, norm_before_fc, fc_norm and another width than the '
        "target's cannot be."
      )
    if self.width != self.target_width and not self.own_embedding:
      raise ValueError(
        f"Eagle3Config: width {self.width} is not the target's {self.target_width}, so it needs an own_embedding."
      )

  @property
  def num_taps(self) -> int:
    return 3 if self.taps is None else len(self.taps)

  def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
    """For a target of `num_layers` layers. ValueError if it has too few."""
    taps = (2, num_layers // 2, num_layers - 3) if self.taps is None else self.taps
    if not all(0 <= layer <= num_layers for layer in taps):
      raise ValueError(f'Drafter {self.name!r} reads the inputs of layers {taps}; this target has {num_layers} layers.')
    return taps


def require_match(drafter: DrafterConfig | Eagle3Config, target: TargetConfig) -> None:
  """ValueError if the drafter is for another target."""
  pairs = {'width': (drafter.target_width, target.width), 'vocab_size': (drafter.vocab_size, target.vocab_size)}
  wrong = [f'{name} {ours} instead of {theirs}' for name, (ours, theirs) in pairs.items() if ours != theirs]
  if wrong:
    raise ValueError(
      f'Drafter {drafter.name!r} is for another target than {target.name!r}: {", ".join(wrong)}. '
      'Load the drafter that was trained for this target.'
    )
  drafter.tapped_layers(target.num_layers)
