"""The draft tree and its algebra, written for one sequence; batch with `jax.vmap`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NO_PARENT, NO_TOKEN = -1, -1


class DraftTree(NamedTuple):
  """One sequence's drafted nodes, parents first: `parent[i] < i`. Node 0 is the newest token, not yet in the cache."""

  token: jax.Array  # [T] i32, target ids; NO_TOKEN marks an unused node, which no choice ever equals
  parent: jax.Array  # [T] i32, node id; NO_PARENT at the root
  log_q: jax.Array  # [T] f32, drafter's log-probability of the path from the root, nats; 0 at the root


class Candidates(NamedTuple):
  """One sequence's nodes as grown, root first, then level by level."""

  token: jax.Array  # [A] i32, NO_TOKEN where unused
  parent: jax.Array  # [A] i32, candidate number; NO_PARENT at the root
  log_q: jax.Array  # [A] f32, log-probability of the path; -inf where unused
  score: jax.Array  # [A] f32, ranks the candidates; never above the parent's
  # [A] f32, entropy of the distribution that each was drawn from, nats; 0 at the root. None unless the policy asks.
  entropy: Any = None


def root_only(token_B: jax.Array) -> Candidates:
  """Make the candidates of plain decoding: the roots `token_B` [B] i32 alone, in [B, 1] fields."""
  zero_B1 = jnp.zeros((token_B.shape[0], 1), jnp.float32)
  return Candidates(token_B[:, None], jnp.full(zero_B1.shape, NO_PARENT, jnp.int32), zero_B1, zero_B1)


def rerank(candidates: Candidates, *, num_nodes: int) -> DraftTree:
  """Keep one sequence's `num_nodes` best candidates (the root always) in their order, and renumber their parents.

  The result is always a tree: no child outscores its parent, and top_k breaks ties toward the lower number, where the
  parents are. A candidate that scores -inf ends as an unused node.
  """
  _, kept_T = jax.lax.top_k(candidates.score, num_nodes)
  kept_T = jnp.sort(kept_T)
  token_T = jnp.where(candidates.score[kept_T] > -jnp.inf, candidates.token[kept_T], NO_TOKEN)
  parent_T = (kept_T[None, :] < candidates.parent[kept_T][:, None]).sum(axis=1, dtype=jnp.int32)
  parent_T = jnp.where(token_T == NO_TOKEN, 0, parent_T)  # the parent of an unused node may not have been kept
  return DraftTree(token_T, parent_T.at[0].set(NO_PARENT), candidates.log_q[kept_T])


def pad_nodes(tree: DraftTree, num_nodes: int) -> DraftTree:
  """Append unused nodes to trees [.., T], up to `num_nodes`."""
  widths = [(0, 0)] * (tree.token.ndim - 1) + [(0, num_nodes - tree.token.shape[-1])]
  fillers = NO_TOKEN, 0, -jnp.inf
  return DraftTree(*(jnp.pad(x, widths, constant_values=filler) for x, filler in zip(tree, fillers, strict=True)))


def ancestor_mask(parent_T: jax.Array, *, max_depth: int) -> jax.Array:
  """Make the tree's attention mask: [T, T] bool, True at [i, j] iff j is i or an ancestor of i.

  Squaring the mask doubles its reach. A compiler computes these products once, whereas it may fuse a chain of parent
  lookups, one a generation, into the attention of every layer and repeat it there.

  Args:
    parent_T: [T] i32, node ids, NO_PARENT at the root.
    max_depth: edges on the longest path, static.
  """
  node_T = jnp.arange(parent_T.shape[0])
  mask_TT = (node_T[:, None] == node_T[None]) | (parent_T[:, None] == node_T[None])
  for _ in range(max(max_depth - 1, 0).bit_length()):
    reach_TT = mask_TT.astype(jnp.float32)
    mask_TT = reach_TT @ reach_TT > 0
  return mask_TT


def depth(mask_TT: jax.Array) -> jax.Array:
  """Count the edges from the root to each node, [T] i32, given `ancestor_mask`."""
  return mask_TT.sum(axis=1, dtype=jnp.int32) - 1
