"""The registry of policies: their names in launchers and cost files."""

from typing import Any

from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.pooled import PooledTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree, TreePolicy

KINDS: dict[str, Any] = {
  form.name: form
  for form in (
    Plain, Chain, StaticTree, DynamicTree, Adaptive, RateTree, DDD, SVIP, SureMass, GapTree, CaPE, C2T, CalibratedTree,
    PooledTree,
  )
}  # fmt: skip


def kind_of(policy: TreePolicy) -> str:
  """Look up a policy's name.

  Raises:
    ValueError: its class is not in `KINDS`.
  """
  for kind, form in KINDS.items():
    if type(policy) is form:
      return kind
  raise ValueError(f'{policy.describe()} is not a registered kind: add {type(policy).__name__} to policy.kinds.KINDS.')
