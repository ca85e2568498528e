"""Drafters: what proposes trees, and what the decode loop asks of one."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from eagle_jax.draft.lookup import TextLookup
from eagle_jax.policy.trees import Level, TreePolicy
from eagle_jax.tree import Candidates


class DraftContext(NamedTuple):
  """What a proposal may use besides what its network knows."""

  # (depth, [U, B] i32 target ids) -> [U, B] f32: what the target adds to the logits of these ids when it draws the
  # token of each sequence `depth` edges below the root.
  noise: Callable[[int | jax.Array, jax.Array], jax.Array]
  # (depth of a frontier, its log_q [B, W], its children's log_p [B, W, C]) -> [B, W, C] f32: what ranks the children.
  score: Callable[[int | jax.Array, jax.Array, jax.Array], jax.Array]
  # (depth of a frontier, its log_q [B, W]) -> [] bool: draft its children? None where the policy always does.
  keep_going: Callable[[int | jax.Array, jax.Array], jax.Array | None]
  lookup: TextLookup  # the text so far

  @classmethod
  def of(
    cls, policy: TreePolicy, arrays: Any, *, noise: Callable, is_live_B: jax.Array, lookup: TextLookup
  ) -> 'DraftContext':
    """Hand a policy's rules to a drafter, which never sees the policy's arrays."""

    def score(depth, log_q_BW, log_p_BWC):
      return policy.score(arrays, Level(depth, log_q_BW, is_live_B, log_p_BWC))

    def keep_going(depth, log_q_BW):
      return policy.keep_going(arrays, Level(depth, log_q_BW, is_live_B))

    return cls(noise, score, keep_going, lookup)


class DraftNetwork(Protocol):
  """Pure functions over parameters; static and hashable."""

  def start(self, params, token_BL: jax.Array, taps: Any, length_B: jax.Array, num_slots: int) -> Any:
    """Read the prompts, and return the first state, a pytree of arrays [B, ...].

    Args:
      params: the drafter's.
      token_BL: [B, L] i32, the token *after* each of L target positions.
      taps: what the target's pass over them shows, arrays [..., B, L].
      length_B: [B] i32, how many of the L positions count, at least 1.
      num_slots: static, the cache slots that the state must have.
    """
    ...

  def update(self, params, state, token_BP: jax.Array, taps: Any, count_B: jax.Array) -> Any:
    """Read what was committed, and return the next state.

    Args:
      params, state: the drafter's.
      token_BP: [B, P] i32, the token *after* each of P target positions.
      taps: what the target's pass shows there, arrays [..., B, P].
      count_B: [B] i32, how many of the P positions count; 0 leaves a sequence as it is.
    """
    ...

  def propose(self, params, state, root_B: jax.Array, policy: TreePolicy, context: DraftContext) -> Candidates:
    """Propose the nodes that trees may be made of, [B, A] fields, each rooted at the newest token `root_B` [B] i32."""
    ...
