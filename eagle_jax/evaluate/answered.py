"""A question answered both ways, plainly and speculatively: a line of the benchmark's log."""

import json
from typing import NamedTuple

from eagle_jax.decode.generate import Generation


class Timed(NamedTuple):
  """One answer, and how long it took, compiling apart."""

  tokens: list[int]
  num_accepted: list[int]  # by target pass; see `decode.Generation`
  nodes_per_pass: float
  levels_per_pass: float
  prefill_s: float
  decode_s: float

  @classmethod
  def of(cls, generation: Generation) -> 'Timed':
    stats = {name: generation.stats[name] for name in cls._fields[2:]}
    return cls(generation.tokens[0], generation.num_accepted[0], **stats)


class Answered(NamedTuple):
  """A turn of a question, answered both ways."""

  task: str
  question_id: str
  turn: int
  temperature: float
  repeat: int
  row_id: int  # keys the noise
  prompt: list[int]  # tokens, earlier turns included
  plain: Timed
  spec: Timed
  gap: float | None  # where the texts part, between plain decoding's two best perturbed logits; None: they are equal

  @classmethod
  def parse(cls, line: str) -> 'Answered':
    fields = json.loads(line)
    return cls(**{**fields, 'plain': Timed(**fields['plain']), 'spec': Timed(**fields['spec'])})

  def line(self) -> str:
    return json.dumps({**self._asdict(), 'plain': self.plain._asdict(), 'spec': self.spec._asdict()}) + '\n'
