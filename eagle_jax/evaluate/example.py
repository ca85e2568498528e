"""Recorded conversations, which drafters are trained and evaluated on."""

from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
  """A conversation with its answers. The last token has no feature, since no pass has read it."""

  id: int  # keys the noise of its answers, with `seed`
  token: np.ndarray  # [n + 1] i32
  is_answer: np.ndarray  # [n + 1] bool, tokens that the assistant generated, EOS included
  # [n, D], last hidden state after the final norm, bf16 if stored; [n, 0] if it is not. With k tapped layers
  # [n, (1 + k) D]: their inputs follow.
  feature: np.ndarray
  temperature: float = 0.0  # at which its answers were sampled
  seed: int = 0
  num_reached: np.ndarray | None = None  # [n] i32, for a second stage of training: see `train.reached`
