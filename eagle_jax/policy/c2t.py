"""C2T (arXiv:2502.13652): trees of the nodes that a small classifier takes to be likely enough to be accepted."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.policy.trees import Level
from eagle_jax.policy.tuned import TunedTree
from eagle_jax.tree import Candidates

LARGEST = 30.0  # nats; what the classifier reads is cut to this


class Classifier(NamedTuple):
  """A network with one hidden layer: arrays, or the nested lists that a cost file holds.

  It reads a node's path log-probability, the entropy of the distribution that the node was drawn from, and its depth.
  """

  hidden: Any  # [4, J] f32, the weights of the three inputs and the bias of J hidden units
  out: Any  # [J] f32
  bias: Any  # [] f32

  def logit(self, log_q: jax.Array, entropy: jax.Array, depth: jax.Array) -> jax.Array:
    """Estimate the log-odds of nodes to be accepted, nats: all arguments and the result have one shape."""
    inputs = jnp.maximum(log_q, -LARGEST), jnp.minimum(entropy, LARGEST), depth, jnp.ones_like(log_q)
    units = jax.nn.relu(jnp.tensordot(jnp.stack(inputs, axis=-1), self.hidden, axes=1, precision='highest'))
    return jnp.tensordot(units, self.out, axes=1, precision='highest') + self.bias


@dataclasses.dataclass(frozen=True)
class C2T(TunedTree):
  """A dynamic tree of the nodes that a classifier, fitted to the pair, gives a sufficient chance of acceptance.

  `launch/classifier.py` fits it. A path is worth as much as the node on it that is the least likely to be accepted. The
  best nodes of a level are expanded, as long as one of them is worth it, and only nodes that are worth it are verified.

  Attributes:
    least_accepted: the probability of being accepted above which a node is worth it. Changing it does not recompile.

  Example:
    >>> eagle_jax.C2T(num_nodes=32, smaller=(4, 8, 16)).sizes
    (4, 8, 16, 32)
  """

  max_depth: int = 10
  least_accepted: float = 0.1
  name: ClassVar[str] = 'c2t'
  needs_costs: ClassVar[bool] = True
  needs_entropy: ClassVar[bool] = True
  tunable: ClassVar[tuple[str, ...]] = ('least_accepted',)

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.least_accepted < 1:
      raise ValueError(f'C2T: `least_accepted` must be at least 0 and below 1, got {self.least_accepted}.')

  def arrays(self, costs: Any, target: Any, drafter: Any) -> Any:
    if costs is None or costs.classifier is None:
      raise ValueError(
        f'{self.describe()} needs a classifier, and none is stored for this device and pair: run launch/classifier.py '
        'first (after launch/cost.py, whose file holds it), or pass costs=.'
      )
    fitted = Classifier(*(jnp.asarray(weights, jnp.float32) for weights in costs.classifier))
    return super().arrays(costs, target, drafter) | {'classifier': fitted}

  def score(self, arrays: Any, level: Level) -> jax.Array:
    log_q_BWC = super().score(arrays, level)
    entropy_BWC = jnp.broadcast_to(level.child_entropy[..., None], log_q_BWC.shape)
    depth_BWC = jnp.full(log_q_BWC.shape, level.depth + 1, jnp.float32)
    log_accepted_BWC = jax.nn.log_sigmoid(arrays['classifier'].logit(log_q_BWC, entropy_BWC, depth_BWC))
    return jnp.minimum(level.score[..., None], log_accepted_BWC)  # no child may outscore its parent

  def keep_going(self, arrays: Any, level: Level) -> jax.Array:
    return (level.is_used & (level.score > jnp.log(arrays['least_accepted']))).any()

  def select(self, arrays: Any, candidates: Candidates, is_live_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_worth_BA = candidates.score > jnp.log(arrays['least_accepted'])
    score_BA = jnp.where(is_worth_BA, candidates.score, -jnp.inf)
    return super().select(arrays, candidates._replace(score=score_BA), is_live_B)
