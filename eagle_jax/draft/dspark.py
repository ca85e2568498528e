"""DSpark (arXiv:2607.05147): a DFlash block whose logits each node corrects by its own token.

The correction is of low rank: a vector of the token (`above`), turned into a number for each drafted id (`below`). So
children depend on their parent, though on nothing above it, and a level costs that matrix but no layer.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from eagle_jax.cache import KVCache
from eagle_jax.config import TargetConfig, require
from eagle_jax.draft.dflash import DFlash, DFlashConfig
from eagle_jax.draft.dflash_files import block_fields, dflash_table
from eagle_jax.draft.expand import Children, likeliest
from eagle_jax.draft.heads import SPECULATORS, is_kind, require_architecture, require_value
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import Evidence
from eagle_jax.draft.one_pass import grow_levels
from eagle_jax.models.layers import apply_head, embed
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.tree import Candidates
from eagle_jax.weights.layouts import Keys
from eagle_jax.weights.naming import Entry, Table

# How sure it is that a token is accepted, which no policy here asks, and training.
_MEANINGLESS = (
  'enable_confidence_head', 'confidence_head_with_markov', 'ce_loss_alpha', 'l1_loss_alpha', 'confidence_head_alpha',
  'loss_decay_gamma',
)  # fmt: skip
_CONFIDENCE = frozenset({'confidence_head.proj.weight', 'confidence_head.proj.bias'})


@dataclasses.dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
  """A DFlash block, and the rank of what corrects its logits."""

  HAS_FIXED_IDS: ClassVar[bool] = True  # of which `below` has a row each

  _: dataclasses.KW_ONLY
  rank: int

  def __post_init__(self):
    super().__post_init__()
    require(self, 'rank', self.rank > 0, 'positive')


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
  """`DFlash` with `above` [V, r] and `below` [U, r] in its params."""

  config: DSparkConfig

  def init_params(self, key: jax.Array) -> dict[str, Any]:
    """Initialise all at random."""
    c, keys = self.config, jax.random.split(key, 3)
    init = nn.initializers.lecun_normal(in_axis=-1, out_axis=0)
    sizes = ('above', c.vocab_size, keys[1]), ('below', c.num_ids, keys[2])
    own = {name: {'weight': init(one, (size, c.rank), self.dtype)} for name, size, one in sizes}
    return super().init_params(keys[0]) | own

  def correct(self, params, token_BW: jax.Array) -> jax.Array:
    """Compute what the tokens of nodes add to the logits of their children: [U, B, W] f32."""
    above_rR = embed(params['above']['weight'], token_BW.reshape(-1))
    below_Ur = params['below']['weight']
    return apply_head(below_Ur, above_rR.astype(below_Ur.dtype)).reshape(-1, *token_BW.shape)

  def propose(self, params, state: KVCache, root_B, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Grow every sequence's candidates."""
    ids_U, logits_UdB = params['ids'], self.score(params, state, root_B, policy.max_depth)
    num_ids, num_depths, batch = logits_UdB.shape
    id_UB = jnp.broadcast_to(ids_U[:, None], (num_ids, batch))

    def offer(token_BW, evidence: Evidence | None, depth: int | jax.Array, fanout: int) -> Children:
      base_UB = jnp.take(logits_UdB, depth, axis=1, mode='clip') + context.noise(depth + 1, id_UB)
      logits_UBW = base_UB[..., None] + self.correct(params, token_BW)
      if evidence is not None:
        is_it_UBW = ids_U[:, None, None] == evidence.token[None]
        logits_UBW += jnp.where(is_it_UBW, evidence.weight[None], 0)
      log_p_UBW = jnp.where(depth < num_depths, jax.nn.log_softmax(logits_UBW, axis=0), -jnp.inf)
      best = likeliest(log_p_UBW, fanout, has_entropy=policy.needs_entropy)
      return best._replace(token=jnp.take(ids_U, best.token, mode='clip'))

    return grow_levels(offer, params, root_B, policy, context)


def dspark_table(config: DSparkConfig) -> Table:
  """Make the table of DSpark: the tensors of DFlash, and both matrices of the correction."""
  table, rank = dflash_table(config), config.rank
  entries = {
    'markov_head.markov_w1.weight': Entry(('above', 'weight'), (config.vocab_size, rank)),
    'markov_head.markov_w2.weight': Entry(('below', 'weight'), (config.num_ids, rank)),
  }
  return dataclasses.replace(table, entries={**table.entries, **entries}, ignored=table.ignored | _CONFIDENCE)


def read_dspark(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> DFlashConfig | None:
  """Read the config of a published DSpark drafter; None if it is of another kind. Of rank 0, it is a DFlash block.

  Raises:
    ValueError: a key that would change the network in a way that is not supported, an unknown one, a missing one.
  """
  if not is_kind(content, 'dspark'):
    return None
  keys = Keys(content)
  rank, is_speculators = int(keys.get('markov_rank', 0)), SPECULATORS in keys
  known = {'DSparkSpeculator', 'DSparkDraftModel'} if is_speculators else {'Qwen3DSparkModel'}
  require_architecture(folder, keys, known)
  require_value(folder, keys, 'markov_head_type', ('vanilla',), 'the correction would read more than the token')
  for name in _MEANINGLESS:
    keys.get(name)
  fields = block_fields(folder, keys, target, may_have_head=True)
  # Before speculators had this key, no place of theirs predicted the token after its own.
  fields['is_shifted'] = keys.flag('sample_from_anchor', not is_speculators)
  config = DSparkConfig(**fields, rank=rank) if rank else DFlashConfig(**fields)
  keys.require_known(folder, 'a drafter that cannot be drafted with')
  return config
