"""Is the drafter's confidence the probability of acceptance? EAGLE-2 stands on it (arXiv:2406.16858, section 3.2)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.answered import Answered
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import features
from eagle_jax.evaluate.trace import Nodes, observe
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import TreePolicy


class Reliability(NamedTuple):
  """Confidence against acceptance, in n bins of equal width."""

  confidence: np.ndarray  # [n] f64, mean of the bin; NaN where it is empty
  acceptance: np.ndarray  # [n] f64, share accepted
  num_nodes: np.ndarray  # [n] i64

  @property
  def expected_error(self) -> float:
    """Mean distance of the two, by nodes: the expected calibration error."""
    distance = np.abs(self.confidence - self.acceptance)
    return float(np.average(distance[self.num_nodes > 0], weights=self.num_nodes[self.num_nodes > 0]))


def reliability(nodes: Nodes, *, num_bins: int = 20) -> Reliability:
  """How often drafted tokens are accepted, by the drafter's confidence in each, given that their parent was."""
  confidence, is_accepted = np.exp(nodes.log_p[nodes.is_tried]), nodes.is_accepted[nodes.is_tried]
  bins = np.clip((confidence * num_bins).astype(int), 0, num_bins - 1)
  num_nodes = np.bincount(bins, minlength=num_bins)
  with np.errstate(invalid='ignore'):
    sums = (np.bincount(bins, weights=x, minlength=num_bins) for x in (confidence, is_accepted))
    mean_confidence, acceptance = (x / num_nodes for x in sums)
  return Reliability(mean_confidence, acceptance, num_nodes)


def acceptance_by_rank(nodes: Nodes) -> np.ndarray:
  """[C] f64: the share of tried nodes accepted, by their rank among their siblings; NaN where there is none."""
  rank, is_accepted = nodes.rank[nodes.is_tried], nodes.is_accepted[nodes.is_tried]
  with np.errstate(invalid='ignore'):
    return np.bincount(rank, weights=is_accepted) / np.bincount(rank)


class Said(NamedTuple):
  """An answer, and what it was drawn with."""

  id: int  # keys the noise
  prompt: Sequence[int]  # tokens
  answer: Sequence[int]  # tokens
  temperature: float = 0.0
  seed: int = 0


def examples(target: Target, all_said: Sequence[Said]) -> list[Example]:
  """Answers with the features of a target pass over each, ready to be traced."""
  texts = [np.asarray([*said.prompt, *said.answer], np.int32) for said in all_said]
  made = features(target, [text[:-1].tolist() for text in texts])
  return [
    Example(said.id, text, np.arange(len(text)) >= len(said.prompt), feature, said.temperature, said.seed)
    for said, text, feature in zip(all_said, texts, made, strict=True)
  ]


def calibrate(
  target: Target, drafter: Drafter, answers: Sequence[Answered], *, policy: TreePolicy, seed: int
) -> dict[str, Any]:
  """What became of every node that `policy` would have drafted along plain decoding's answers.

  Returns:
    `expected_error`; `acceptance_by_rank`; `below_0.05` and `above_0.95`, the acceptance of tokens of such confidence
    (the paper found 0.04 and 0.98); and the bins, `confidence`, `acceptance`, `num_nodes`.
  """
  once = [answer for answer in answers if answer.repeat == 0]
  said = [Said(answer.row_id, answer.prompt, answer.plain.tokens, answer.temperature, seed) for answer in once]
  nodes = observe(target, drafter, examples(target, said), policy=policy)
  bins = reliability(nodes)
  return {
    'expected_error': bins.expected_error,
    'below_0.05': _plain(bins.acceptance)[0],
    'above_0.95': _plain(bins.acceptance)[-1],
    'acceptance_by_rank': _plain(acceptance_by_rank(nodes)),
    **{name: _plain(getattr(bins, name)) for name in Reliability._fields},
  }


def _plain(x_n: np.ndarray) -> list[float | None]:
  """For JSON, which has no NaN."""
  return [None if np.isnan(x) else x for x in x_n.tolist()]
