"""A recorded conversation: what drafters are trained and evaluated on."""

from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
  """A conversation with its answers. The newest token has no feature: no pass saw it."""

  id: int  # with `seed`, keys the noise of its answers
  token: np.ndarray  # [n + 1] i32
  is_answer: np.ndarray  # [n + 1] bool, what the assistant said itself, its EOS included
  feature: np.ndarray  # [n, D] bf16, last hidden state after the final norm; [n, 0] where they are not stored
  temperature: float = 0.0  # that its answers were drawn at
  seed: int = 0
