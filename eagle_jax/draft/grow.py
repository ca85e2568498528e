"""Growing the draft tree: EAGLE-2's expand (arXiv:2406.16858, section 4; EAGLE.md section 4); `tree.rerank` cuts it.

`grow` asks any drafter for children, level by level, and a policy for what ranks them. Its budget is fixed: what is not
in use scores -inf and carries NO_TOKEN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.draft import Outlook
from eagle_jax.draft.policy import TreePolicy
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates


class Children(NamedTuple):
  """What each frontier node offers, likeliest first."""

  token: jax.Array  # [B, W, C] i32, target ids
  log_p: jax.Array  # [B, W, C] f32, the drafter's log-probability given the path, nats


class Frontier(NamedTuple):
  """One row's nodes to be expanded next, best first."""

  token: jax.Array  # [W] i32
  log_q: jax.Array  # [W] f32
  candidate: jax.Array  # [W] i32, their candidate numbers
  parent_slot: jax.Array  # [W] i32, where in the last frontier the parent stood


def expand(
  frontier: Frontier, children: Children, *, policy: TreePolicy, depth: int, first: int, width: int
) -> tuple[Candidates, Frontier]:
  """One level: every frontier node's children become candidates; the best `width` of all form the next frontier.

  Args:
    frontier: one row's frontier at `depth`.
    children: theirs, [W, C].
    first: number of the level's first candidate, static; child c of slot w is candidate first + w * C + c.
    width: size of the next frontier, static.
  """
  fanout = children.token.shape[1]
  # A NaN would break the order that makes rerank's choice a tree.
  log_p_WC = jnp.where(jnp.isnan(children.log_p), -jnp.inf, children.log_p)
  log_q_WC = frontier.log_q[:, None] + log_p_WC
  is_used_WC = log_q_WC > -jnp.inf  # what grows from an unused slot must end as NO_TOKEN, never as a real token
  score_n = jnp.where(is_used_WC, policy.score(depth, log_q_WC), -jnp.inf).reshape(-1)
  token_n = jnp.where(is_used_WC, children.token, NO_TOKEN).reshape(-1)
  parent_n = jnp.repeat(frontier.candidate, fanout)
  level = Candidates(token_n, parent_n, log_q_WC.reshape(-1), score_n)
  _, best_W = jax.lax.top_k(score_n, width)
  return level, Frontier(token_n[best_W], level.log_q[best_W], first + best_W, best_W // fanout)


def grow(step: Callable, carry: Any, root_B: jax.Array, policy: TreePolicy, outlook: Outlook) -> Candidates:
  """Grows every row's candidate tree to the policy's depth, or for as long as a level is worth its time.

  Args:
    step: (carry, frontier, depth, fanout) -> (Children, carry): a drafter runs its network on the frontier's nodes.
    carry: the drafter's own state.
    root_B: [B] i32, the newest token of each row.
    policy: static.
    outlook: says which levels are worth their time; what is left out has unused nodes.

  Returns:
    `Candidates` of A = 1 + sum(widths * fanouts) nodes a row.
  """
  zero_B1 = jnp.zeros((root_B.shape[0], 1), jnp.int32)
  log_q_B1 = jnp.zeros(zero_B1.shape, jnp.float32)
  levels = [Candidates(root_B[:, None], zero_B1 + NO_PARENT, log_q_B1, log_q_B1)]
  frontier = Frontier(root_B[:, None], log_q_B1, zero_B1, zero_B1)
  first = 1
  for depth, fanout in enumerate(policy.fanouts):
    run = functools.partial(step, depth=depth, fanout=fanout)
    is_worth: Any = True if depth == 0 else outlook.is_level_worth(depth, frontier.log_q)
    children, carry = run(carry, frontier) if is_worth is True else _perhaps(is_worth, run, carry, frontier)
    width = policy.widths[depth + 1] if depth + 1 < policy.max_depth else 0
    expand_rows = jax.vmap(lambda f, c: expand(f, c, policy=policy, depth=depth, first=first, width=width))  # noqa: B023
    level, frontier = expand_rows(frontier, children)
    levels.append(level)
    first += policy.widths[depth] * fanout
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *levels)


def _perhaps(is_worth: jax.Array, run: Callable, carry: Any, frontier: Frontier) -> tuple[Children, Any]:
  """The level, or children that are all unused. A drafter only reads its cache, so nothing is copied for the branch."""

  def skip(carry, frontier):
    children, carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, carry, frontier))
    return children._replace(log_p=jnp.full_like(children.log_p, -jnp.inf)), carry

  return jax.lax.cond(is_worth, run, skip, carry, frontier)
