"""Combine a target, a drafter and a policy into the arrays and the static description of a decode program."""

import dataclasses
from typing import Any

import jax
import numpy as np

from eagle_jax.decode.auto import Resolved, resolve_policy
from eagle_jax.decode.state import Params, Spec
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.draft.lookup import ROUTE, WEIGHTS
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.kernels.int8 import Quantised, round_to_int8
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import Plain, TreePolicy
from eagle_jax.sampling import Chooser, GumbelMax
from eagle_jax.sharding import mesh_of, place_param


def build(
  target: Target,
  drafter: Drafter | None,
  *,
  policy: str | TreePolicy = 'auto',
  batch: int = 1,
  costs: Costs | None = None,
  chooser: Chooser = GumbelMax(),  # noqa: B008 frozen, without state
) -> tuple[Params, Spec]:
  """Make the arrays and the static description of a decode program.

  If the target is on several devices, call `prefill`, `decode_step` and `decode_loop`, or your own jitted functions of
  them, in `with jax.set_mesh(mesh):`. Outside it, each device would hold the whole cache.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None for plain decoding.
    policy: 'auto', 'plain', or a policy object.
    batch: number of sequences that will be decoded together, for 'auto'.
    costs: measured costs, for 'auto' and policies that need them; default those stored for this device and pair.
    chooser: the acceptance rule.

  Returns:
    `params`, which shares the target's arrays, and `spec`, static and hashable.

  Raises:
    ValueError: unknown policy, a tree without a drafter, a drafter for another target, a policy that the drafter does
      not support, or costs or a chooser that are none.

  Example:
    >>> params, spec = eagle_jax.decode.build(target, drafter, policy=eagle_jax.Chain(3))
    >>> spec.policy.num_nodes
    4
  """
  resolved = resolve_policy(target, drafter, policy=policy, batch=batch, costs=costs)
  return assemble(target, resolved, chooser=chooser)


def assemble(target: Target, resolved: Resolved, *, chooser: Chooser) -> tuple[Params, Spec]:
  """Make params and spec from a resolved policy; see `build`."""
  policy, drafter, costs = resolved
  require_chooser(chooser)
  network = target.network
  if isinstance(policy, Plain) or drafter is None:
    return Params(target.params, {}), Spec(network, NoDrafter(), Plain(), chooser)
  kind, num_ids = kind_of(drafter.config), drafter.config.num_ids
  if (fanout := max(policy.fanouts)) > num_ids:
    raise ValueError(
      f'{policy.describe()}: each node may have at most {num_ids} children, the ids in the draft vocabulary, got '
      f'{fanout}. Lower the fanout, or the ranks of the paths.'
    )
  if policy.lookup and not kind.has_logits:
    raise ValueError(
      f'{policy.describe()} raises logits of the drafter, and a drafter of kind {kind.title!r} has none: use '
      'lookup=False.'
    )
  params = drafter.params | _borrowed(target, drafter)
  if kind.has_logits:
    weights = ROUTE if policy.lookup == 'route' else WEIGHTS
    params['lookup_weights'] = _place('lookup_weights', np.asarray(weights, np.float32), target)
  network = dataclasses.replace(network, tapped_layers=drafter.config.tapped_layers(target.config.num_layers))
  spec = Spec(network, kind.network(drafter.config, drafter.dtype or target.dtype), policy.static(), chooser)
  return Params(target.params, params, policy.arrays(costs, target, drafter)), spec


def require_chooser(chooser: Any) -> None:
  """Raise a ValueError unless `chooser` is an acceptance rule that can be hashed; see `sampling.Chooser`."""
  if isinstance(chooser, type) or not all(hasattr(chooser, name) for name in ('choose', 'noise', 'name')):
    raise ValueError(
      f'`chooser` must be an object with choose, noise and name, such as GumbelMax(), got {chooser!r:.80}.'
    )
  try:
    hash(chooser)
  except TypeError as error:
    raise ValueError(
      f'`chooser` must be hashable, since programs are compiled for it, got {chooser!r:.80} ({error}): make it a '
      'frozen dataclass of Python numbers.'
    ) from None


def _borrowed(target: Target, drafter: Drafter) -> dict[str, Any]:
  """Collect embedding, head and the head's ids: the drafter's own, or the target's by reference.

  With a draft vocabulary, or quantised, the head is a copy.
  """
  own, config = drafter.params, target.config
  if not kind_of(drafter.config).borrows:
    return {}
  borrowed = {'embed': own.get('embed', target.params['embed'])['weight']}
  borrowed['ids'] = own['ids'] if 'ids' in own else _place('ids', np.arange(config.vocab_size, dtype=np.int32), target)
  if drafter.has_own_head:
    return borrowed | {'head': own['head']['weight']}
  head_UD = target.head_VD
  if 'ids' in own:
    borrowed['whole_head'], head_UD = head_UD, target.head_of(own['ids'])
  if drafter.is_quantised:
    is_rounded = isinstance(head_UD, Quantised)  # the target's; unlike the target, a drafter may round activations
    head_UD = dataclasses.replace(head_UD, num_parts=1) if is_rounded else round_to_int8(head_UD)
  if config.logit_divisor != 1:
    borrowed['logit_divisor'] = _place('logit_divisor', np.float32(config.logit_divisor), target)
  return borrowed | {'head': head_UD}


def _place(name: str, numbers: Any, target: Target) -> jax.Array:
  """Place numbers, as a drafter's parameter of this name, on the target's devices."""
  return place_param(np.asarray(numbers), (name,), mesh_of(target.params))
