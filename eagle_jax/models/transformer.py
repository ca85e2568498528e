"""The target network: one decoder-only transformer with switches, its cache passed in and returned."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache, NewEntries
from eagle_jax.config import TargetConfig
from eagle_jax.models.layers import CachedAttention, DecoderLayer, Embedding, Rotation, apply_head, embed, norm_of
from eagle_jax.sharding import mesh_of, param_sharding, put


@dataclasses.dataclass(frozen=True)
class Target:
  """A loaded target: what `load_target` returns and `decode` takes."""

  config: TargetConfig
  params: dict[str, Any]  # nested dict of arrays; logical axes in `sharding.PARAM_AXES`
  tokenizer: Any = None  # a `text.Tokenizer`, or None: then prompts are token ids
  weights_dtype: str | None = None  # 'int8' or 'int4' if matrices were rounded, whatever holds them; None: as `dtype`

  @property
  def dtype(self) -> Any:
    """The dtype of parameters and caches."""
    return self.params['embed']['weight'].dtype

  @property
  def weights_name(self) -> str:
    """The name of its matrices' dtype, for statistics and stored costs."""
    return self.weights_dtype or str(self.dtype)

  @property
  def network(self) -> 'TransformerTarget':
    """The pure functions over `params`."""
    return TransformerTarget(self.config, self.dtype)

  @property
  def head_VD(self) -> Any:
    """The language-model head's weights, which may be the embedding's."""
    return self.params.get('head', self.params['embed'])['weight']

  def head_of(self, ids_U: Any) -> jax.Array:
    """Copy the head's weights of these ids, [U, D] floats; on a mesh, sharded as a head is."""
    head_UD, mesh = _embed_rows(self.head_VD, jnp.asarray(ids_U)), mesh_of(self.params)
    return head_UD if mesh is None else put(head_UD, param_sharding(['head', 'weight'], head_UD.shape, mesh))


@jax.jit
def _embed_rows(weight_VD: Any, ids_U: jax.Array) -> jax.Array:
  return embed(weight_VD, ids_U).T


class Taps(NamedTuple):
  """Activations of a pass that drafters build on."""

  feature: jax.Array  # [D, B, T], last hidden state after the final norm: what the head reads
  residual: tuple[jax.Array, ...] = ()  # [D, B, T] each, inputs of the tapped layers, or of the final norm; not normed


def see_window(window: int | None, position_BT, mask_BTM) -> tuple[jax.Array | None, jax.Array]:
  """Return the oldest slot that each token sees, None for slot 0, and which new entries: slots are positions."""
  if window is None:
    return None, mask_BTM
  oldest_BT = position_BT - (window - 1)
  if mask_BTM.shape[1] == mask_BTM.shape[2]:
    return oldest_BT, mask_BTM & (position_BT[:, None] >= oldest_BT[..., None])
  # A token sees one new entry a position, in order: as many as it sees from one on, so many positions back that is.
  back_BTM = jnp.cumsum(mask_BTM[..., ::-1], axis=-1)[..., ::-1]
  return oldest_BT, mask_BTM & (back_BTM <= window)


class Transformer(nn.Module):
  """A Llama-like decoder. `forward` runs T new tokens behind the committed ones; `logits` applies the head."""

  config: TargetConfig
  dtype: Any = jnp.float32
  tapped_layers: tuple[int, ...] = ()

  def setup(self):
    c = self.config
    self.embed = Embedding(c.vocab_size, c.width, self.dtype)
    # Traced once for all of them; but under `nn.jit` a key gives other random weights.
    layer = DecoderLayer if self.is_initializing() else nn.jit(DecoderLayer)
    self.layer = [layer(c.layer(index)) for index in range(c.num_layers)]
    self.norm = norm_of(c)
    if not c.tied_head:
      self.head = Embedding(c.vocab_size, c.width, self.dtype)

  def forward(
    self, token_BT, position_BT, mask_BTM, cache: KVCache, earlier: NewEntries | None = None
  ) -> tuple[Taps, NewEntries]:
    """Run T tokens, which attend to the committed ones, and to new ones by the mask. The cache is only read.

    Args:
      token_BT, position_BT: [B, T] i32.
      mask_BTM: [B, T, M] bool, [i, j] is True where token i sees new token j: those of `earlier`, then these T.
      cache: of the committed tokens.
      earlier: entries of passes that were not committed; None where M is T.

    Returns:
      Activations for drafters, and the M new entries: `cache.append` takes those that are accepted.
    """
    c = self.config
    x_DR = self.embed(token_BT.reshape(-1))
    if c.embedding_scale != 1:
      x_DR *= jnp.asarray(c.embedding_scale, x_DR.dtype)
    kinds = [c.layer(index) for index in range(c.num_layers)]
    rotations = {kind: Rotation.of(kind, position_BT) for kind in dict.fromkeys(kinds)}
    views = {
      window: see_window(window, position_BT, mask_BTM) for window in dict.fromkeys(kind.window for kind in kinds)
    }
    layers, inputs = [], []
    before: Any = [None] * len(kinds) if earlier is None else zip(*earlier, strict=True)
    of_layers = zip(self.layer, kinds, cache.keys, cache.values, before, strict=True)
    for layer, kind, keys_BGSK, values_BGSK, own in of_layers:
      oldest_BT, mask_of_layer_BTM = views[kind.window]
      attention = CachedAttention(keys_BGSK, values_BGSK, cache.length, mask_of_layer_BTM, own, oldest_BT)
      inputs.append(x_DR)
      x_DR, kv_BGTK = layer(x_DR, rotations[kind], attention)
      layers.append(kv_BGTK)
    inputs.append(x_DR)
    feature_DBT = self.norm(x_DR).reshape(-1, *token_BT.shape)
    residual = tuple(inputs[index].reshape(-1, *token_BT.shape) for index in self.tapped_layers)
    return Taps(feature_DBT, residual), NewEntries(*zip(*layers, strict=True))

  def logits(self, taps: Taps) -> jax.Array:
    """Return [V, B, T] f32, next-token logits of normed features."""
    head = self.embed if self.config.tied_head else self.head
    width, *tokens = taps.feature.shape
    logits_VR = apply_head(head.weight, taps.feature.reshape(width, -1))
    if self.config.logit_divisor != 1:
      logits_VR /= self.config.logit_divisor
    if (cap := self.config.logit_cap) is not None:
      logits_VR = cap * jnp.tanh(logits_VR / cap)
    return logits_VR.reshape(-1, *tokens)

  def read(self, token_BL: jax.Array) -> Taps:
    """Run whole sequences: there is no cache to keep."""
    batch, length = token_BL.shape
    empty = TransformerTarget(self.config, self.dtype).init_cache(batch, 0)
    return self.forward(token_BL, *kv_cache.behind(empty, length), empty)[0]

  def score(self, token_BL: jax.Array) -> jax.Array:
    """Return [V, B, L] f32, logits after every token of whole sequences, as in parity tests."""
    return self.logits(self.read(token_BL))


@dataclasses.dataclass(frozen=True)
class TransformerTarget:
  """`Transformer` as the pure functions that the decode loop calls (`models.interface.TargetNetwork`)."""

  config: TargetConfig
  dtype: Any = jnp.float32
  tapped_layers: tuple[int, ...] = ()  # whose inputs `Taps.residual` shows

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return self.config.eos_ids

  def init_cache(self, batch: int, num_slots: int) -> KVCache:
    num_layers = self.config.num_layers
    return kv_cache.init(self.config, num_layers=num_layers, batch=batch, num_slots=num_slots, dtype=self.dtype)

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Make random weights; under `jax.eval_shape`, the shapes that a checkpoint must have."""
    token_BL = jnp.zeros((1, 1), jnp.int32)
    return Transformer(self.config, self.dtype).init(key, token_BL, method='score')['params']

  def forward(
    self, params, token_BT, position_BT, mask_BTM, cache: KVCache, earlier: NewEntries | None = None
  ) -> tuple[Taps, NewEntries]:
    return self._apply(params, token_BT, position_BT, mask_BTM, cache, earlier, method='forward')

  def read(self, params, token_BL) -> Taps:
    return self._apply(params, token_BL, method='read')

  def logits(self, params, taps: Taps) -> jax.Array:
    return self._apply(params, taps, method='logits')

  def _apply(self, params, *args, method: str) -> Any:
    network = Transformer(self.config, self.dtype, self.tapped_layers)
    return network.apply({'params': params}, *args, method=method)
