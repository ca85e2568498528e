"""The n-gram drafter with a vote for every earlier match, as SuffixDecoding has it (arXiv:2411.04975).

`draft.ngram` trusts the longest match of each token, and of equally long ones the latest. Here every earlier match
votes for the token that followed it, and long matches count more, so that what followed often is drafted first. The
paper counts matches of one length, which it chooses; its store of earlier texts is not part of this drafter.
"""

import dataclasses
from typing import ClassVar

from eagle_jax.draft.ngram import Ngram, NgramConfig


@dataclasses.dataclass(frozen=True)
class SuffixConfig(NgramConfig):
  """The target's sizes that the drafter must match."""

  name: str = 'suffix'


@dataclasses.dataclass(frozen=True)
class Suffix(Ngram):
  """The drafter as a `draft.interface.DraftNetwork` without a state."""

  counts_all: ClassVar[bool] = True
