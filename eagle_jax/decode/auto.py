"""`policy='auto'`: from what was measured on this device, plain decoding among the choices, or a guess."""

import logging
from typing import Any

import jax

from eagle_jax.decode.request import at_least_one, require_pair
from eagle_jax.device import device_name
from eagle_jax.draft.drafter import Drafter
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Costs, find
from eagle_jax.policy.trees import Adaptive, Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.sharding import mesh_of, num_row_parts

log = logging.getLogger('eagle_jax')


def settle(
  target: Target,
  drafter: Drafter | None,
  *,
  policy: str | TreePolicy,
  batch: int = 1,
  waits: bool = True,
  costs: Costs | None = None,
) -> tuple[TreePolicy, Drafter | None, Costs | None]:
  """What a request for a policy comes to. Arguments are those of `decode.build`.

  Returns:
    The policy; the drafter as costs were measured, with their draft vocabulary, and quantised or not; and these costs,
    of this batch, if there are any.
  """
  require_pair(target, drafter)
  batch = at_least_one('batch', batch)
  is_object = hasattr(policy, 'fanouts') and not isinstance(policy, type)
  if not (is_object or (isinstance(policy, str) and policy in ('auto', 'plain'))):
    raise ValueError(
      f"Unknown policy {policy!r}: pass 'auto', 'plain', or an object: DynamicTree(...), Chain(...), StaticTree(...)."
    )
  if drafter is not None and costs is None and (policy == 'auto' or isinstance(policy, Adaptive)):
    costs = find_costs(target, drafter, batch=batch)
  there = None if costs is None else costs.at_batch(batch, waits=waits)
  chosen = _resolve(policy, target, drafter, there, batch)
  if drafter is None or costs is None or there is None:
    return chosen, drafter, None
  drafter = drafter.reduced(costs.num_ids, is_quantised=costs.is_quantised)
  if policy == 'auto':
    source = 'when measured' if there is costs else f'modelled for {batch} rows from a measured {costs.batch}'
    rate = there.policies[0].tok_per_s
    form = f'{costs.num_ids} ids, {"8 bits" if drafter.is_quantised else costs.dtype}'
    log.info('auto: %s, %s, %.1f tokens/s %s (%s, %s)', chosen.describe(), form, rate, source, costs.device, costs.date)
  return chosen, drafter, there


def find_costs(target: Target, drafter: Drafter, *, batch: int = 1) -> Costs | None:
  """What `launch/cost.py` measured for this device and pair, or what is shipped for such a device."""
  names = {'target': target.config.name, 'drafter': drafter.config.name, 'dtype': str(target.dtype)}
  return find(device=device_name(mesh_of(target.params)), **names, batch=batch)


def guessed_policy(batch: int, *, platform: str) -> TreePolicy:
  """What probably pays where nothing was measured: few rows where a row costs much, the paper's tree where they are
  nearly free, and for a batch as much of it as fits: rows are free until arithmetic takes as long as reading weights.

  Args:
    batch: rows on one device.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  free_rows = 4 if platform == 'cpu' else 256
  num_nodes = min(free_rows // batch, DynamicTree().num_nodes)
  if num_nodes < 2:
    return Plain()
  return Chain(min(3, num_nodes - 1), lookup=True) if num_nodes < 16 else DynamicTree(num_nodes=num_nodes, lookup=True)


def _resolve(policy: Any, target: Target, drafter: Drafter | None, costs: Costs | None, batch: int) -> TreePolicy:
  if policy == 'plain' or (policy == 'auto' and drafter is None):
    return Plain()
  if policy == 'auto' and costs is not None:
    return costs.policies[0].policy
  if policy == 'auto':
    num_parts = num_row_parts(batch, mesh_of(target.params))
    guess = guessed_policy(batch // num_parts, platform=jax.default_backend())
    log.info('auto: %s, a guess: launch/cost.py measures what pays on this device', guess.describe())
    return guess
  if drafter is None and not isinstance(policy, Plain):
    raise ValueError(f"{policy.describe()} needs a drafter, and none came. Load one, or pass policy='plain'.")
  if isinstance(policy, Adaptive) and costs is None:
    raise ValueError(f'{policy.describe()} weighs costs, and none are stored for this pair here: run launch/cost.py.')
  return policy
