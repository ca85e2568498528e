"""Compare the drafter's confidence with acceptance: EAGLE-2 relies on their match (arXiv:2406.16858, section 3.2)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from eagle_jax.decode.buckets import group_by_length
from eagle_jax.decode.generate import generate
from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.answered import Answered
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import features
from eagle_jax.evaluate.trace import Nodes, observe
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import TreePolicy


class Reliability(NamedTuple):
  """Acceptance by confidence, in n bins of equal width."""

  confidence: np.ndarray  # [n] f64, mean of the bin; NaN where it is empty
  acceptance: np.ndarray  # [n] f64, share of its nodes accepted; NaN where it is empty
  num_nodes: np.ndarray  # [n] i64

  @property
  def expected_error(self) -> float:
    """The expected calibration error: the mean distance of the two, weighted by nodes."""
    distance = np.abs(self.confidence - self.acceptance)
    return float(np.average(distance[self.num_nodes > 0], weights=self.num_nodes[self.num_nodes > 0]))


def reliability(nodes: Nodes, *, num_bins: int = 20) -> Reliability:
  """Bin drafted tokens whose parent was accepted by the drafter's confidence, and count how many are accepted."""
  confidence, is_accepted = np.exp(nodes.log_p[nodes.is_tried]), nodes.is_accepted[nodes.is_tried]
  bins = np.clip((confidence * num_bins).astype(int), 0, num_bins - 1)
  num_nodes = np.bincount(bins, minlength=num_bins)
  with np.errstate(invalid='ignore'):
    sums = (np.bincount(bins, weights=x, minlength=num_bins) for x in (confidence, is_accepted))
    mean_confidence, acceptance = (x / num_nodes for x in sums)
  return Reliability(mean_confidence, acceptance, num_nodes)


def acceptance_by_rank(nodes: Nodes) -> np.ndarray:
  """Compute the share of tried nodes accepted, by rank among siblings: [C] f64; NaN where a rank has none."""
  rank, is_accepted = nodes.rank[nodes.is_tried], nodes.is_accepted[nodes.is_tried]
  with np.errstate(invalid='ignore'):
    return np.bincount(rank, weights=is_accepted) / np.bincount(rank)


class AnswerTokens(NamedTuple):
  """The tokens of an answer, and how they were sampled."""

  id: int  # keys the noise
  prompt: Sequence[int]  # tokens
  answer: Sequence[int]  # tokens
  temperature: float = 0.0
  seed: int = 0


def answer_plainly(
  target: Target,
  prompts: Sequence[Sequence[int]],
  *,
  temperature: float,
  max_new_tokens: int,
  row_ids: Sequence[int] | None = None,
) -> list[AnswerTokens]:
  """Answer prompts by plain decoding, those of similar length together; return the answers in the prompts' order."""
  ids = range(len(prompts)) if row_ids is None else row_ids
  options: Any = {'temperature': temperature, 'max_new_tokens': max_new_tokens}
  answers: dict[int, list[int]] = {}
  for group in group_by_length([*map(len, prompts)]):
    out = generate(target, None, [prompts[i] for i in group], row_ids=[ids[i] for i in group], **options)
    answers |= zip(group, out.tokens, strict=True)
  return [AnswerTokens(ids[i], prompt, answers[i], temperature) for i, prompt in enumerate(prompts)]


def make_examples(
  target: Target, drafter: Drafter, answers: Sequence[AnswerTokens], *, dtype: Any = jnp.bfloat16
) -> list[Example]:
  """Make examples for `trace` of answers, with what the drafter reads, in `dtype`, of one target pass over each."""
  texts = [np.asarray([*one.prompt, *one.answer], np.int32) for one in answers]
  taps = drafter.config.tapped_layers(target.config.num_layers)
  computed = features(target, [text[:-1].tolist() for text in texts], taps, dtype=dtype)
  return [
    Example(one.id, text, np.arange(len(text)) >= len(one.prompt), feature, one.temperature, one.seed)
    for one, text, feature in zip(answers, texts, computed, strict=True)
  ]


def calibrate(
  target: Target, drafter: Drafter, answers: Sequence[Answered], *, policy: TreePolicy, seed: int
) -> dict[str, Any]:
  """Calibrate the drafter on the nodes that `policy` would have drafted along plain decoding's answers.

  Returns:
    `expected_error`; `acceptance_by_rank`; `below_0.05` and `above_0.95`, the acceptance of tokens with such confidence
    (the paper found 0.04 and 0.98); and the bins, `confidence`, `acceptance`, `num_nodes`.
  """
  once = [answer for answer in answers if answer.repeat == 0]
  texts = [AnswerTokens(one.row_id, one.prompt, one.plain.tokens, one.temperature, seed) for one in once]
  nodes = observe(target, drafter, make_examples(target, drafter, texts), policy=policy)
  bins = reliability(nodes)
  return {
    'expected_error': bins.expected_error,
    'below_0.05': nan_to_none(bins.acceptance)[0],
    'above_0.95': nan_to_none(bins.acceptance)[-1],
    'acceptance_by_rank': nan_to_none(acceptance_by_rank(nodes)),
    **{name: nan_to_none(getattr(bins, name)) for name in Reliability._fields},
  }


def nan_to_none(x_n: np.ndarray) -> list[float | None]:
  """Convert to a list for JSON; see `or_none`."""
  return [or_none(x) for x in x_n.tolist()]


def or_none(x: float) -> float | None:
  """Replace NaN, which JSON does not have."""
  return None if math.isnan(x) else x
