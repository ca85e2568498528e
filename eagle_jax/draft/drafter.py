"""The `Drafter` that users hold: a config and its parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.kernels.int8 import Quantised, round_to_int8


@dataclasses.dataclass(frozen=True)
class Drafter:
  """A loaded drafter, as `load_drafter` returns it, without the embedding and head that it shares with the target."""

  config: Any  # the config class of a kind in `kinds.KINDS`
  params: dict[str, Any]  # nested dict of arrays; logical axes in `sharding.PARAM_AXES`

  @property
  def has_own_head(self) -> bool:
    """Whether the drafter has a head of its own, as EAGLE-3 does; the others read the target's."""
    return 'head' in self.params

  @property
  def has_fixed_ids(self) -> bool:
    """Whether its ids cannot be chosen anew: it has a head of its own, or other weights for each id."""
    return self.has_own_head or self.config.HAS_FIXED_IDS

  @property
  def dtype(self) -> Any:
    """The dtype of its activations: that of its matrices before any quantisation; None without weights."""
    leaves = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Quantised))
    return next((x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), None)

  @property
  def is_quantised(self) -> bool:
    """Whether its matrices are in 8 bits; see `quantised`."""
    leaves = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Quantised))
    return any(isinstance(x, Quantised) for x in leaves)

  def quantised(self) -> 'Drafter':
    """Return a copy that drafts with 8-bit matrices, the head included. Activations keep their dtype.

    The decoded text does not change, since it is the target's whatever is drafted. A draft pass is bound by the bytes
    it reads, so it takes half the time of bfloat16 or less. The embedding, of which a pass reads only the vectors of
    its tokens, is not quantised.
    """
    return (
      self
      if self.is_quantised
      else Drafter(self.config, _quantise_matrices(self.params, width=self.config.target_width))
    )

  def reduced(self, num_ids: int, *, is_quantised: bool) -> 'Drafter':
    """Return a copy that drafts its first `num_ids` ids only, quantised if `is_quantised`."""
    drafter = self.first_ids(num_ids)
    return drafter.quantised() if is_quantised else drafter

  def require_exact(self) -> None:
    """Raise a ValueError if the drafter is quantised, for callers that need its exact weights."""
    if self.is_quantised:
      raise ValueError(
        f'Drafter {self.config.name!r} is quantised and no longer holds its exact weights: load it without '
        "dtype='int8'."
      )

  def with_ids(self, ids: Any) -> 'Drafter':
    """Return a copy that drafts only these of the target's ids (FR-Spec, arXiv:2502.14856).

    The head is the target's, so nothing is retrained.

    Args:
      ids: [U] integers, distinct target ids.

    Raises:
      ValueError: the ids repeat or lie outside the vocabulary, or the drafter has a fixed vocabulary.
    """
    if self.has_fixed_ids:
      raise ValueError(
        f'Drafter {self.config.name!r} has a fixed draft vocabulary, so its ids cannot be chosen: use it with its own '
        f'{self.config.num_ids} ids.'
      )
    known_U = np.asarray(ids)
    if len(np.unique(known_U[(known_U >= 0) & (known_U < self.config.vocab_size)])) < len(ids):
      raise ValueError(
        f'`ids` must be distinct, each between 0 and {self.config.vocab_size - 1}, got {known_U.tolist()!r:.80}.'
      )
    return self._restrict(ids)

  def _restrict(self, ids: Any) -> 'Drafter':
    config = dataclasses.replace(self.config, draft_vocab_size=len(ids))
    return Drafter(config, {**self.params, 'ids': jnp.asarray(ids, jnp.int32)})

  def first_ids(self, num_ids: int) -> 'Drafter':
    """Return a copy that drafts only the first `num_ids` of its ids.

    `launch/train.py` puts the ids that every vocabulary needs first, then the most frequent. A drafter without a draft
    vocabulary takes the first of the target's ids.
    """
    if num_ids >= self.config.num_ids:
      return self
    if self.has_fixed_ids or 'ids' not in self.params:
      return self.with_ids(np.arange(num_ids))
    return self._restrict(self.params['ids'][:num_ids])  # checked before; `with_ids` would check on every request


@functools.partial(jax.jit, static_argnames='width')
def _quantise_matrices(params: dict[str, Any], *, width: int) -> dict[str, Any]:
  """Quantise every matrix but an embedding, in one program; `fc` takes concatenated vectors of `width`."""

  def quantise(path: Any, x: jax.Array) -> jax.Array | Quantised:
    *_, owner, name = ('', *(key.key for key in path))
    if name != 'weight' or owner == 'embed':
      return x
    return round_to_int8(x, num_parts=x.shape[-1] // width if owner == 'fc' else 1)

  return jax.tree_util.tree_map_with_path(quantise, params)
