"""Resolve `policy='auto'` from measured costs, with plain decoding among the choices, or from a guess."""

import logging
from typing import Any, NamedTuple

from eagle_jax.decode.request import at_least_one, require_pair
from eagle_jax.device import device_name, num_free_nodes
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.kernels.cpu import in_use
from eagle_jax.models.transformer import Target
from eagle_jax.policy.cost_store import find
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, TreePolicy
from eagle_jax.sharding import mesh_of, num_batch_shards

log = logging.getLogger('eagle_jax')


class Resolved(NamedTuple):
  """A resolved policy, with the drafter and the costs that go with it."""

  policy: TreePolicy
  drafter: Drafter | None  # with the draft vocabulary and the bits that the costs, or a guess, take for the fastest
  costs: Costs | None  # for this batch size


def resolve_policy(
  target: Target,
  drafter: Drafter | None,
  *,
  policy: str | TreePolicy,
  batch: int = 1,
  is_refilled: bool = False,
  costs: Costs | None = None,
) -> Resolved:
  """Choose the policy, and find the costs that it needs.

  Args:
    target, drafter, policy, batch, costs: as in `decode.build`.
    is_refilled: for 'auto', whether finished sequences are replaced at once.

  Raises:
    ValueError: unknown policy, a tree without a drafter, costs that are none, or a policy that needs costs where none
      are stored.
  """
  require_pair(target, drafter)
  batch = at_least_one('batch', batch)
  if not (isinstance(policy, TreePolicy) or (isinstance(policy, str) and policy in ('auto', 'plain'))):
    raise ValueError(
      f"`policy` must be 'auto', 'plain', or an object such as DynamicTree(), Chain(), StaticTree(), got {policy!r}."
    )
  if not isinstance(costs, Costs | None):
    raise ValueError(f'`costs` must be a `Costs`, as policy.cost_store.read returns them, or None, got {costs!r:.80}.')
  needs_costs = policy == 'auto' or (isinstance(policy, TreePolicy) and policy.needs_costs)
  if drafter is not None and costs is None and needs_costs:
    costs = find_costs(target, drafter, batch=batch)
  batch_costs = None if costs is None else costs.at_batch(batch, is_refilled=is_refilled)
  chosen = _choose(policy, target, drafter, batch_costs, batch)
  if drafter is None:
    return Resolved(chosen, None, None)
  if costs is None or batch_costs is None:
    is_guess = policy == 'auto'
    return Resolved(chosen, guessed_form(drafter, in_use(mesh_of(target.params))) if is_guess else drafter, None)
  drafter = drafter.reduced(costs.num_ids, is_quantised=costs.is_quantised)
  if policy == 'auto':
    source = 'when measured' if batch_costs is costs else f'modelled for a batch of {batch} from one of {costs.batch}'
    rate = batch_costs.policies[0].tok_per_s
    form = f'{costs.num_ids} ids, {"8 bits" if drafter.is_quantised else costs.dtype}'
    log.info('auto: %s, %s, %.1f tokens/s %s (%s, %s)', chosen.describe(), form, rate, source, costs.device, costs.date)
  return Resolved(chosen, drafter, batch_costs)


def find_costs(target: Target, drafter: Drafter, *, batch: int = 1) -> Costs | None:
  """Find the costs that `launch/cost.py` measured for this device and pair, or those shipped for such a device."""
  mesh = mesh_of(target.params)
  names = {'target': target.config.name, 'drafter': drafter.config.name}
  dtypes = {'dtype': target.weights_name, 'floats': str(target.dtype)}
  return find(device=device_name(mesh), kernels=in_use(mesh), **names, **dtypes, batch=batch)


def guessed_policy(batch: int, *, num_free: int, lookup: bool = True) -> TreePolicy:
  """Guess a policy where nothing was measured: the largest part of the paper's tree that costs about a plain step.

  Args:
    batch: sequences on one device.
    num_free: nodes, over all sequences, that a pass verifies in about the time of one; see `device.num_free_nodes`.
    lookup: whether the drafter can use earlier matches of the text; see `draft.lookup`.
  """
  num_nodes = min(num_free // batch, DynamicTree().num_nodes)
  if num_nodes < 2:
    return Plain()
  return Chain(min(3, num_nodes - 1), lookup) if num_nodes < 16 else DynamicTree(num_nodes=num_nodes, lookup=lookup)


def guessed_form(drafter: Drafter, kernels: str) -> Drafter:
  """Return a drafter as it is probably fastest where nothing was measured: a head in 8 bits, by compiled kernels."""
  is_head = bool(kind_of(drafter.config).borrows)
  return drafter.quantised() if is_head and kernels == 'compiled' else drafter


def _choose(policy: Any, target: Target, drafter: Drafter | None, costs: Costs | None, batch: int) -> TreePolicy:
  """Return the policy that was asked for: an object as it is, plain decoding, or the best known one for 'auto'."""
  if policy == 'plain':
    return Plain()
  if policy == 'auto':
    if drafter is None:
      return Plain()
    if costs is not None:
      return costs.policies[0].policy
    num_shards = num_batch_shards(batch, mesh_of(target.params))
    guess = guessed_policy(batch // num_shards, num_free=num_free_nodes(), lookup=kind_of(drafter.config).has_logits)
    log.info('auto: %s, a guess; run launch/cost.py to measure the fastest policy on this device', guess.describe())
    return guess
  if drafter is None and not isinstance(policy, Plain):
    raise ValueError(f"{policy.describe()} needs a drafter, got None: load one, or pass policy='plain'.")
  return policy
