"""Measure the table that `policy.calibrated` reads, on the trees that a drafter grows along recorded answers."""

import numpy as np

from eagle_jax.evaluate.classifier import Labelled
from eagle_jax.policy.calibrated import AcceptanceTable

NUM_DEPTHS = 3  # the last stands for all deeper nodes
NUM_BINS = 4  # of entropy, with equally many nodes
LOG_P = (-10, -8, -7, -6, -5, -4, -3.5, -3, -2.5, -2, -1.5, -1, -0.6, -0.3, -0.1, 0)  # nats
PRIOR = 2.0  # nodes, accepted as often as the drafter says, that each number starts with
LEAST_SLOPE = 0.01  # of log_accepted over log_p: siblings keep their order where equal shares were measured


def tabulate(nodes: Labelled) -> AcceptanceTable:
  """Count how often nodes whose parent was accepted are accepted, by depth, entropy and log-probability.

  A node counts for the two numbers of `LOG_P` that its own lies between, more for the nearer: the look-up, which
  interpolates, does the same.
  """
  _, entropy_n, depth_n = nodes.inputs[nodes.is_tried].T
  log_p_n, is_accepted_n = nodes.log_p[nodes.is_tried], nodes.is_accepted[nodes.is_tried]
  ends = np.quantile(entropy_n, np.arange(1, NUM_BINS) / NUM_BINS)
  row_n = (np.minimum(depth_n.astype(int), NUM_DEPTHS) - 1) * NUM_BINS + np.searchsorted(ends, entropy_n, side='right')
  weight_nX = np.stack([np.interp(log_p_n, LOG_P, own_X) for own_X in np.eye(len(LOG_P))], axis=1)
  num_RX = np.full((NUM_DEPTHS * NUM_BINS, len(LOG_P)), PRIOR)
  accepted_RX = num_RX * np.exp(LOG_P)
  np.add.at(num_RX, row_n, weight_nX)
  np.add.at(accepted_RX, row_n, weight_nX * is_accepted_n[:, None])
  share_RX = [make_rising(*row) for row in zip(accepted_RX / num_RX, num_RX, strict=True)]
  log_accepted_RX = (1 - LEAST_SLOPE) * np.log(share_RX) + LEAST_SLOPE * np.asarray(LOG_P)
  log_accepted_YEX = log_accepted_RX.reshape(NUM_DEPTHS, NUM_BINS, -1)
  return AcceptanceTable([*map(float, LOG_P)], ends.tolist(), log_accepted_YEX.tolist())


def make_rising(value_X: np.ndarray, weight_X: np.ndarray) -> np.ndarray:
  """Fit values that never fall by weighted least squares, by pooling neighbours that do: isotonic regression."""
  blocks: list[np.ndarray] = []  # of pooled values: their weighted sum, their weight, their number
  for value, weight in zip(value_X, weight_X, strict=True):
    block = np.array([value * weight, weight, 1])
    while blocks and blocks[-1][0] / blocks[-1][1] >= block[0] / block[1]:
      block += blocks.pop()
    blocks.append(block)
  total, weight, count = np.transpose(blocks)
  return np.repeat(total / weight, count.astype(int))
