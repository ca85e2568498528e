"""The drafter as users hold it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.kernels.int8 import Quantised, round_to_int8


@dataclasses.dataclass(frozen=True)
class Drafter:
  """A loaded drafter: what `load_drafter` returns and `decode` takes. The target's embedding and head are not in it."""

  config: Any  # of a kind of `kinds.KINDS`
  params: dict[str, Any]  # nested dict of arrays; logical axes in `sharding.PARAM_AXES`

  @property
  def has_own_head(self) -> bool:
    """EAGLE-3 has; the others read the target's."""
    return 'head' in self.params

  @property
  def dtype(self) -> Any:
    """Of its activations: that of its matrices, or that which they were quantised from; None without weights."""
    leaves = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Quantised))
    return next((x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), None)

  @property
  def is_quantised(self) -> bool:
    """See `quantised`."""
    leaves = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Quantised))
    return any(isinstance(x, Quantised) for x in leaves)

  def quantised(self) -> 'Drafter':
    """Drafts with matrices in 8 bits, the head too, be it the target's. Activations keep their dtype.

    No text changes, for that is the target's whatever is drafted; a draft pass, which costs what it reads, costs half
    (of bfloat16) or less. The embedding, of which a pass reads a few rows, stays as it is.
    """
    return self if self.is_quantised else Drafter(self.config, _in_bytes(self.params, width=self.config.target_width))

  def reduced(self, num_ids: int, *, is_quantised: bool) -> 'Drafter':
    """With its first ids only, and quantised if that is asked for."""
    drafter = self.first_ids(num_ids)
    return drafter.quantised() if is_quantised else drafter

  def require_exact(self) -> None:
    """ValueError if it is quantised: rounded matrices are for drafting alone."""
    if self.is_quantised:
      raise ValueError(
        f'Drafter {self.config.name!r} is quantised, and what it was rounded from is gone. '
        "Load it without dtype='int8'."
      )

  def with_ids(self, ids: Any) -> 'Drafter':
    """Drafts these of the target's ids only, [U] i32. The head is the target's, so nothing is trained anew (FR-Spec,
    arXiv:2502.14856)."""
    if self.has_own_head:
      raise ValueError(
        f'Drafter {self.config.name!r} has a head of its own, for ids of its own: they cannot be chosen.'
      )
    known_U = np.asarray(ids)
    if len(np.unique(known_U[(known_U >= 0) & (known_U < self.config.vocab_size)])) < len(ids):
      raise ValueError(f'{len(ids)} ids came; distinct ones are needed, 0 .. {self.config.vocab_size - 1}.')
    return self._drafting(ids)

  def _drafting(self, ids: Any) -> 'Drafter':
    config = dataclasses.replace(self.config, draft_vocab_size=len(ids))
    return Drafter(config, {**self.params, 'ids': jnp.asarray(ids, jnp.int32)})

  def first_ids(self, num_ids: int) -> 'Drafter':
    """Drafts the first `num_ids` of its ids only: `launch/train.py` put those first that no vocabulary may lack, then
    the most frequent. Without ids of its own, the first of the target's."""
    if num_ids >= self.config.num_ids:
      return self
    if self.has_own_head or 'ids' not in self.params:
      return self.with_ids(np.arange(num_ids))
    return self._drafting(self.params['ids'][:num_ids])  # checked already, and each request comes here


@functools.partial(jax.jit, static_argnames='width')
def _in_bytes(params: dict[str, Any], *, width: int) -> dict[str, Any]:
  """With every matrix but an embedding quantised, all in one program; `fc` joins vectors of `width`."""

  def small(path: Any, x: jax.Array) -> jax.Array | Quantised:
    *_, owner, name = ('', *(key.key for key in path))
    if name != 'weight' or owner == 'embed':
      return x
    return round_to_int8(x, num_parts=x.shape[-1] // width if owner == 'fc' else 1)

  return jax.tree_util.tree_map_with_path(small, params)
