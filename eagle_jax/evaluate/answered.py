"""Records of questions answered by plain and by speculative decoding, the lines of a benchmark's log."""

import json
from typing import NamedTuple

from eagle_jax.decode.generate import Generation


class Timed(NamedTuple):
  """One answer and the time it took, without compiling."""

  tokens: list[int]
  num_accepted: list[int]  # for each target pass; see `decode.Generation`
  nodes_per_pass: float
  levels_per_pass: float
  prefill_s: float
  decode_s: float

  @classmethod
  def of(cls, generation: Generation) -> 'Timed':
    stats = {name: generation.stats[name] for name in cls._fields[2:]}
    return cls(generation.tokens[0], generation.num_accepted[0], **stats)


class Answered(NamedTuple):
  """One turn of a question, answered by plain and by speculative decoding."""

  task: str
  question_id: str
  turn: int
  temperature: float
  repeat: int
  row_id: int  # keys the noise
  prompt: list[int]  # tokens, earlier turns included
  plain: Timed
  spec: Timed
  gap: float | None  # between plain decoding's two best perturbed logits where the texts diverge; None if they do not

  @classmethod
  def parse(cls, line: str) -> 'Answered':
    """Read a line of the log."""
    fields = json.loads(line)
    return cls(**{**fields, 'plain': Timed(**fields['plain']), 'spec': Timed(**fields['spec'])})

  def to_line(self) -> str:
    """Format as a line of the log."""
    return json.dumps({**self._asdict(), 'plain': self.plain._asdict(), 'spec': self.spec._asdict()}) + '\n'
