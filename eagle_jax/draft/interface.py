"""The interface between a drafter's network and the decode loop."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from eagle_jax.draft.lookup import TextLookup
from eagle_jax.policy.trees import Level, TreePolicy
from eagle_jax.tree import Candidates


class DraftContext(NamedTuple):
  """The noise, the policy's rules and the text that a drafter may use in a proposal, besides its own state."""

  # (depth, [U, B] i32 target ids) -> [U, B] f32: the noise that the target adds to the logits of these ids when it
  # draws the token of each sequence `depth` edges below the root.
  noise: Callable[[int | jax.Array, jax.Array], jax.Array]
  score: Callable[[Level], jax.Array]  # a frontier with its children -> [B, W, C] f32: scores of the children
  keep_going: Callable[[Level], jax.Array | None]  # a frontier -> [] bool, whether to draft children; None for always
  lookup: TextLookup  # the text so far

  @classmethod
  def of(
    cls, policy: TreePolicy, arrays: Any, *, noise: Callable, is_live_B: jax.Array, lookup: TextLookup
  ) -> 'DraftContext':
    """Bind a policy's rules to its arrays, which a drafter never sees."""

    def score(level):
      return policy.score(arrays, level._replace(is_live=is_live_B))

    def keep_going(level):
      return policy.keep_going(arrays, level._replace(is_live=is_live_B))

    return cls(noise, score, keep_going, lookup)


class DraftNetwork(Protocol):
  """A drafter's network as pure functions over its parameters; static and hashable."""

  def start(
    self, params, token_BL: jax.Array, taps: Any, length_B: jax.Array, num_slots: int, first_B: jax.Array
  ) -> Any:
    """Read the prompts, and return the first state, a pytree of arrays [B, ...].

    Args:
      params: the drafter's.
      token_BL: [B, L] i32, the token *after* each of L target positions.
      taps: the activations that the target's pass exposes at these positions, arrays [..., B, L].
      length_B: [B] i32, how many of the L positions are valid, at least 1.
      num_slots: static, the number of cache slots that the state must have.
      first_B: [B] i32, the first token of each prompt, which comes after no position.
    """
    ...

  def update(self, params, state, token_BP: jax.Array, taps: Any, count_B: jax.Array) -> Any:
    """Read the committed tokens, and return the next state.

    Args:
      params, state: the drafter's.
      token_BP: [B, P] i32, the token *after* each of P target positions.
      taps: the activations that the target's pass exposes at these positions, arrays [..., B, P].
      count_B: [B] i32, how many of the P positions are valid; 0 leaves a sequence unchanged.
    """
    ...

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Propose candidate nodes for every sequence, [B, A] fields, rooted at its newest token `root_B`, [B] i32."""
    ...
