"""Grow the draft tree: EAGLE-2's expansion phase (arXiv:2406.16858, section 4). `tree.rerank` then prunes it.

`grow` asks the drafter for children, level by level, and the policy for their scores. The number of candidates is
fixed; unused ones score -inf and carry NO_TOKEN.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

from eagle_jax.draft.interface import DraftContext
from eagle_jax.kernels.scan import scan
from eagle_jax.kernels.top_k import top_k
from eagle_jax.policy.trees import Level, TreePolicy, level_starts
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates


class Children(NamedTuple):
  """The children that each frontier node offers, likeliest first."""

  token: jax.Array  # [B, W, C] i32, target ids
  log_p: jax.Array  # [B, W, C] f32, the drafter's log-probability given the path, nats
  entropy: Any = None  # [B, W] f32, of the distribution over all tokens, nats; None: see `entropies`


class Frontier(NamedTuple):
  """One sequence's nodes to be expanded next, best first."""

  token: jax.Array  # [W] i32
  log_q: jax.Array  # [W] f32, log-probability of the path; -inf where unused
  candidate: jax.Array  # [W] i32, candidate numbers
  parent_slot: jax.Array  # [W] i32, the parent's slot in the previous frontier
  score: jax.Array  # [W] f32, as ranked by the policy; 0 at the root
  entropy: Any = None  # [W] f32, of the distribution that each was drawn from; None unless the policy needs it


class Shape(NamedTuple):
  """Static sizes of a level below the root's children: frontier widths, and the children that each node offers."""

  last_width: int  # of the previous frontier; the first level takes its own width
  width: int
  fanout: int
  next_width: int  # of the next frontier; the deepest level takes its own width, and nothing reads it

  @classmethod
  def of(cls, policy: TreePolicy, depth: int) -> 'Shape':
    widths = policy.widths
    return cls(widths[max(depth - 1, 1)], widths[depth], policy.fanouts[depth], (*widths, widths[-1])[depth + 1])


def first_width(policy: TreePolicy) -> int:
  """Return the width of the first frontier below the root; 1, unused, if the tree ends with the root's children."""
  return (*policy.widths, 1)[1]


def entropies(children: Children) -> jax.Array:
  """Take the drafter's entropies, [B, W], or bound them from below: all tokens that are not offered count as one."""
  entropy_BW = children.entropy
  if entropy_BW is None:
    p_BWC = jnp.exp(children.log_p)
    rest_BW = jnp.maximum(1 - p_BWC.sum(axis=2), 0)
    entropy_BW = entr(p_BWC).sum(axis=2) + entr(rest_BW)
  return jnp.where(jnp.isnan(entropy_BW), jnp.inf, entropy_BW)


def likeliest(log_p_UBW: jax.Array, fanout: int, *, has_entropy: bool = False) -> Children:
  """Take the `fanout` likeliest of U tokens after each node; they are given as 0 .. U - 1."""
  num_ids, *shape_BW = log_p_UBW.shape
  log_p_RC, index_RC = top_k(log_p_UBW.reshape(num_ids, -1).T, fanout)
  entropy_BW = entr(jnp.exp(log_p_UBW)).sum(axis=0) if has_entropy else None
  return Children(index_RC.reshape(*shape_BW, fanout), log_p_RC.reshape(*shape_BW, fanout), entropy_BW)


def expand(
  frontier: Frontier, children: Children, score_WC: jax.Array, first: jax.Array, *, width: int
) -> tuple[Candidates, Frontier]:
  """Turn every frontier node's children into candidates, and the best `width` of them into the next frontier.

  Args:
    frontier: of one sequence.
    children: of the frontier's nodes, [W, C] fields; entropies [W], or None if the policy needs none.
    score_WC: [W, C] f32, ranks the children; -inf: not offered.
    first: [] i32, number of the level's first candidate; child c of slot w is candidate first + w * C + c.
    width: size of the next frontier, static.
  """
  fanout = children.token.shape[1]
  log_q_WC = frontier.log_q[:, None] + children.log_p
  # A child of an unused slot must end as NO_TOKEN, never as a real token.
  is_used_WC = (log_q_WC > -jnp.inf) & (score_WC > -jnp.inf)
  log_q_WC = jnp.where(is_used_WC, log_q_WC, -jnp.inf)
  score_n = jnp.where(is_used_WC, score_WC, -jnp.inf).reshape(-1)
  token_n = jnp.where(is_used_WC, children.token, NO_TOKEN).reshape(-1)
  parent_n = jnp.repeat(frontier.candidate, fanout)
  entropy_n = None if children.entropy is None else jnp.repeat(children.entropy, fanout)
  level = Candidates(token_n, parent_n, log_q_WC.reshape(-1), score_n, entropy_n)
  score_W, best_W = jax.lax.top_k(score_n, width)
  entropy_W = None if entropy_n is None else entropy_n[best_W]
  return level, Frontier(token_n[best_W], level.log_q[best_W], first + best_W, best_W // fanout, score_W, entropy_W)


def grow(
  roots: Children, step: Callable, carry: Any, root_B: jax.Array, policy: TreePolicy, context: DraftContext
) -> Candidates:
  """Grow every sequence's candidate tree to the policy's depth, or for as long as the policy keeps going.

  Levels of the same shape are traced once.

  Args:
    roots: the root's children, [B, 1, C] fields.
    step: (carry, frontier, depth, fanout) -> (Children, carry): runs the drafter's network on the frontier's nodes,
      `depth` edges below the root, [] i32.
    carry: the drafter's own state, as after a step over `first_width` nodes that are all the root.
    root_B: [B] i32, the newest token of each sequence.
    policy: static; its sizes are read here, its rules through `context`.
    context: scores children and decides when to stop; levels that are not drafted have unused nodes.

  Returns:
    `Candidates` with A = 1 + sum(widths * fanouts) nodes a sequence, [B, A] fields.

  Raises:
    ValueError: the drafter offers another number of children than the policy's fanout.
  """
  first_d = np.asarray(level_starts(policy), np.int32)

  def expand_batch(
    frontier: Frontier, children: Children, depth: int | jax.Array, fanout: int, width: int
  ) -> tuple[Candidates, Frontier]:
    _require_children(children, (*frontier.token.shape, fanout), policy)
    # A NaN would break the order of scores that makes rerank's choice a tree.
    log_p_BWC = jnp.where(jnp.isnan(children.log_p), -jnp.inf, children.log_p)
    children = children._replace(log_p=log_p_BWC)
    children = children._replace(entropy=entropies(children) if policy.needs_entropy else None)
    seen = Level(depth, frontier.log_q, None, log_p_BWC, frontier.entropy, children.entropy, frontier.score)
    score_BWC = context.score(seen)
    run = functools.partial(expand, width=width)
    return jax.vmap(run, (0, 0, 0, None))(frontier, children, score_BWC, jnp.asarray(first_d)[depth])

  def level(grown: tuple[Any, Frontier], depth: jax.Array, *, shape: Shape) -> tuple[tuple[Any, Frontier], Candidates]:
    run = functools.partial(step, depth=depth, fanout=shape.fanout)
    seen = Level(depth, grown[1].log_q, entropy=grown[1].entropy, score=grown[1].score)
    keep_going = context.keep_going(seen)
    children, carry = run(*grown) if keep_going is None else _run_if(keep_going, run, *grown)
    candidates, frontier = expand_batch(grown[1], children, depth, shape.fanout, shape.next_width)
    return (carry, frontier), candidates

  zero_B1 = jnp.zeros((root_B.shape[0], 1), jnp.int32)
  log_q_B1 = jnp.zeros(zero_B1.shape, jnp.float32)
  entropy_B1 = log_q_B1 if policy.needs_entropy else None
  root = Frontier(root_B[:, None], log_q_B1, zero_B1, zero_B1, log_q_B1, entropy_B1)
  of_root, frontier = expand_batch(root, roots, 0, policy.fanouts[0], first_width(policy))
  levels = [Candidates(root_B[:, None], zero_B1 + NO_PARENT, log_q_B1, log_q_B1, entropy_B1), of_root]
  grown = carry, frontier
  for shape, depths in itertools.groupby(range(1, policy.max_depth), functools.partial(Shape.of, policy)):
    grown, of_levels = scan(functools.partial(level, shape=shape), grown, jnp.asarray([*depths], jnp.int32))
    levels.append(jax.tree.map(lambda x_dBn: x_dBn.swapaxes(0, 1).reshape(len(root_B), -1), of_levels))
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *levels)


def _require_children(children: Children, shape_BWC: tuple[int, ...], policy: TreePolicy) -> None:
  """Raise a ValueError unless every frontier node offers as many children as the policy asks for."""
  if children.token.shape != shape_BWC or children.log_p.shape != shape_BWC:
    raise ValueError(
      f'{policy.describe()}: the drafter must offer children of the shape {shape_BWC} (batch, frontier nodes, children '
      f'of each), got tokens {children.token.shape} and log-probabilities {children.log_p.shape}. Add children with '
      'log_p = -inf, which are never drafted, or use a policy with this fanout.'
    )


def _run_if(keep_going: jax.Array, run: Callable, carry: Any, frontier: Frontier) -> tuple[Children, Any]:
  """Run the level, or return unused children. A drafter only reads its cache here, so no cache is copied."""
  run = jax.jit(run)  # traced once for its shapes and for the branch

  def skip(carry, frontier):
    children, carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, carry, frontier))
    return children._replace(log_p=jnp.full_like(children.log_p, -jnp.inf)), carry

  return jax.lax.cond(keep_going, run, skip, carry, frontier)
