"""Fit the classifier that `policy.c2t` reads, to the trees that a drafter grows along recorded answers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle_jax.evaluate.positions import Positions
from eagle_jax.evaluate.trace import first_answer
from eagle_jax.policy.c2t import LARGEST, Classifier
from eagle_jax.policy.trees import level_starts

NUM_UNITS = 16  # the paper has 48, and finds 12 no worse
NUM_STEPS = 3000
BATCH = 8192  # nodes; few of them are accepted
LEARNING_RATE = 3e-3


class Labelled(NamedTuple):
  """The n nodes that a classifier, or a table of acceptance, is fitted to."""

  inputs: np.ndarray  # [n, 3] f32: path log-probability, entropy, depth
  is_accepted: np.ndarray  # [n] bool, whether the path equals the text
  log_p: np.ndarray  # [n] f32, nats, log-probability given the parent's path
  is_tried: np.ndarray  # [n] bool, whether the parent's path equals the text


def label(positions: Positions) -> Labelled:
  """Collect all nodes of whole trees, but those beyond the end of an answer."""
  starts = level_starts(positions.policy)
  depth_1A = np.searchsorted(starts, np.arange(starts[-1]), side='right')[None]
  labelled = []
  for example, grown in zip(positions.examples, positions.grown, strict=True):
    num_left_n = first_answer(example).num_new - 1 - np.arange(len(grown.path))
    log_q_nA = np.asarray(grown.candidates.log_q)
    is_known_nA = (depth_1A > 0) & (depth_1A <= num_left_n[:, None]) & (log_q_nA > -np.inf)
    is_path_nA = (grown.path[:, :, None] == np.arange(starts[-1])).any(axis=1)
    seen = log_q_nA, grown.candidates.entropy, np.broadcast_to(depth_1A, is_known_nA.shape)
    inputs = np.stack([x[is_known_nA] for x in seen], axis=1).clip(-LARGEST, LARGEST).astype(np.float32)
    parent_nA = np.maximum(grown.candidates.parent, 0)  # the root has none, and is not among the nodes
    log_p = log_q_nA[is_known_nA] - np.take_along_axis(log_q_nA, parent_nA, axis=1)[is_known_nA]
    is_tried_nA = np.take_along_axis(is_path_nA | (depth_1A == 0), parent_nA, axis=1)
    labelled.append(Labelled(inputs, is_path_nA[is_known_nA], log_p, is_tried_nA[is_known_nA]))
  return Labelled(*map(np.concatenate, zip(*labelled, strict=True)))


def fit(nodes: Labelled, *, num_steps: int = NUM_STEPS, seed: int = 0) -> Classifier:
  """Fit a classifier by binary cross-entropy, with Adam on random nodes.

  Raises:
    ValueError: no node is accepted, or all are.
  """
  share = nodes.is_accepted.mean() if len(nodes.is_accepted) else 0.0
  if not 0 < share < 1:
    raise ValueError(
      f'A classifier needs nodes that were accepted and nodes that were not, got {len(nodes.is_accepted)} nodes, of '
      f'which {share:.0%} were accepted: record longer answers, or more of them.'
    )
  mean_3, scale_3 = nodes.inputs.mean(axis=0), nodes.inputs.std(axis=0) + 1e-6
  weights, draw = jax.random.split(jax.random.key(seed))
  hidden_4J = jax.random.normal(weights, (4, NUM_UNITS))
  first = Classifier(hidden_4J, jnp.zeros(NUM_UNITS), jnp.float32(np.log(share / (1 - share))))
  inputs_n3 = jnp.asarray((nodes.inputs - mean_3) / scale_3)
  fitted = jax.tree.map(
    np.asarray, _descend(first, inputs_n3, jnp.asarray(nodes.is_accepted), draw, num_steps=num_steps)
  )
  hidden_3J = fitted.hidden[:3] / scale_3[:, None]
  bias_J = fitted.hidden[3] - mean_3 @ hidden_3J
  return Classifier(np.vstack([hidden_3J, bias_J]).tolist(), fitted.out.tolist(), fitted.bias.tolist())


@functools.partial(jax.jit, static_argnames='num_steps')
def _descend(
  first: Classifier, inputs_n3: jax.Array, is_accepted_n: jax.Array, key: jax.Array, *, num_steps: int
) -> Classifier:
  adam = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, num_steps))

  def loss(classifier: Classifier, chosen: jax.Array) -> jax.Array:
    logit = classifier.logit(*inputs_n3[chosen].T)
    return optax.sigmoid_binary_cross_entropy(logit, is_accepted_n[chosen].astype(jnp.float32)).mean()

  def update(state: tuple[Classifier, Any], key: jax.Array) -> tuple[tuple[Classifier, Any], None]:
    chosen = jax.random.randint(key, (BATCH,), 0, len(is_accepted_n))
    with jax.numpy_dtype_promotion('standard'):
      change, optimizer = adam.update(jax.grad(loss)(state[0], chosen), state[1])
      return (optax.apply_updates(state[0], change), optimizer), None

  (fitted, _), _ = jax.lax.scan(update, (first, adam.init(first)), jax.random.split(key, num_steps))
  return fitted
