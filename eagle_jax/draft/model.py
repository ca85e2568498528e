"""A smaller model of the same tokenizer as a drafter (Leviathan et al., arXiv:2211.17192), for chains and trees.

It reads the text alone, nothing of the target. Its own layers run over every level of the tree, so unlike a head's, its
passes cost as much as those of a model of its size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax import cache as kv_cache
from eagle_jax.cache import KVCache
from eagle_jax.config import DrafterBase, TargetConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle, EagleState, take_position
from eagle_jax.kernels.tiling import round_up_slots
from eagle_jax.models.transformer import Target, TransformerTarget

_PROBE = "The 3 quick foxes' naïve dens:\n\tx += 2**10  # 今日は 😀 №1,234.5\n\n"  # splits in many ways


@dataclasses.dataclass(frozen=True)
class ModelConfig(DrafterBase):
  """The smaller model, and the sizes of the target that it drafts for."""

  model: TargetConfig
  vocab_size: int  # the target's
  target_width: int
  draft_vocab_size: None = None

  @property
  def name(self) -> str:
    return self.model.name

  @property
  def width(self) -> int:
    return self.model.width

  @property
  def num_ids(self) -> int:
    """Number of ids that it may draft: those that both models know."""
    return min(self.model.vocab_size, self.vocab_size)


@dataclasses.dataclass(frozen=True)
class Model(Eagle):
  """A smaller model as a `draft.interface.DraftNetwork`.

  Its cache is one token ahead of the target's, since it has read the newest. Its params are `model`, the parameters of
  the smaller model; `head` [U, D], its head cut to the target's vocabulary; and `ids` [U] i32.
  """

  config: ModelConfig

  @property
  def network(self) -> TransformerTarget:
    return TransformerTarget(self.config.model, self.dtype)

  @property
  def num_layers(self) -> int:
    return self.config.model.num_layers

  def forward(self, params, token_BT, feature_DBT, position_BT, mask_BTM, cache: KVCache, earlier=None):
    """Run T tokens behind the cache; what came out at their parents is not read."""
    taps, entries = self.network.forward(params['model'], token_BT, position_BT, mask_BTM, cache, earlier)
    return taps.feature, entries

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> EagleState:
    token_BP = jnp.concatenate([first_B[:, None], token_BL], axis=1)
    out_DBP, entries = self.apply_behind(params, self.network.init_cache(len(length_B), 0), token_BP, taps)
    cache = kv_cache.fill(entries, length_B + 1, num_slots=round_up_slots(num_slots + 1))
    return EagleState(cache, take_position(out_DBP, length_B))


def as_drafter(model: Target, target: Target) -> Drafter:
  """Make a drafter of a smaller model.

  Raises:
    ValueError: it is not smaller than the target, its tokenizer is another, or it caps its logits.
  """
  if model.config.logit_cap is not None:
    raise ValueError(f'{model.config.name!r} cannot draft: drafters do not cap logits as it does. Take another model.')
  sizes = [sum(x.size for x in jax.tree.leaves(one.params)) for one in (model, target)]
  if sizes[0] >= sizes[1]:
    raise ValueError(
      f'A draft model must be smaller than its target, got {model.config.name!r} of {sizes[0]:,} parameters for '
      f'{target.config.name!r} of {sizes[1]:,}: exchange them.'
    )
  _require_same_tokenizer(model, target)
  config = ModelConfig(model.config, target.config.vocab_size, target.config.width)
  ids_U = jnp.arange(config.num_ids, dtype=jnp.int32)
  head_UD = model.head_VD if config.num_ids == model.config.vocab_size else model.head_of(ids_U)
  params = {'model': model.params, 'head': head_UD, 'ids': ids_U}
  if model.config.logit_divisor != 1:
    params['logit_divisor'] = jnp.float32(model.config.logit_divisor)
  return Drafter(config, params)


def _require_same_tokenizer(model: Target, target: Target) -> None:
  """Raise a ValueError unless both read the same strings as the same ids, as far as they have tokenizers."""
  if model.tokenizer is None and target.tokenizer is None:
    return
  names = f'{model.config.name!r} cannot draft for {target.config.name!r}'
  if model.tokenizer is None or target.tokenizer is None:
    raise ValueError(f'{names}: only one of them has a tokenizer, so nothing says that their ids mean the same.')
  ours, theirs = (one.tokenizer.backend.get_vocab() for one in (model, target))
  if unlike := sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]):
    token = unlike[0]
    raise ValueError(f'{names}: token {token!r} is {ours[token]} and {theirs[token]}. Tokenizers must agree.')
  read = [one.tokenizer.encode(_PROBE) for one in (model, target)]
  if read[0] != read[1]:
    raise ValueError(f'{names}: of {_PROBE!r} they make {read[0]} and {read[1]}. Tokenizers must agree.')


def no_file(config: ModelConfig) -> Any:
  """Raise a ValueError: a smaller model has a folder of its own."""
  raise ValueError(f'{config.name!r} is a model, not a head: keep its own folder, and load it with kind="model" again.')
