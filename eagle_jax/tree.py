"""The draft tree and its algebra. Written for one row; batch with `jax.vmap`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_PARENT, NO_TOKEN = -1, -1


class DraftTree(NamedTuple):
  """One row's drafted nodes, parents first: `parent[i] < i`. Node 0 is the newest token, not yet in the cache."""

  token: jax.Array  # [T] i32, target ids; NO_TOKEN marks an unused node: no choice ever equals it
  parent: jax.Array  # [T] i32, node id; NO_PARENT at the root
  log_q: jax.Array  # [T] f32, drafter's log-probability of the path from the root, nats; 0 at the root


def root_only(token: jax.Array) -> DraftTree:
  """The tree of plain decoding: nothing drafted. `token`: [] i32."""
  return DraftTree(token[None], jnp.full(1, NO_PARENT, jnp.int32), jnp.zeros(1, jnp.float32))


def ancestor_mask(parent_T: jax.Array, *, max_depth: int) -> jax.Array:
  """[T, T] bool: True at [i, j] iff j is i or an ancestor of i, which is the tree's attention mask.

  Args:
    parent_T: [T] i32, node ids, NO_PARENT at the root.
    max_depth: edges on the longest path, static.
  """
  mask_TT = jnp.eye(parent_T.shape[0], dtype=bool)
  for _ in range(max_depth):  # one generation a hop; cheaper than squaring at these sizes
    mask_TT |= jnp.where((parent_T >= 0)[:, None], mask_TT[parent_T], False)
  return mask_TT


def depth(mask_TT: jax.Array) -> jax.Array:
  """[T] i32: edges from the root to each node, given `ancestor_mask`."""
  return mask_TT.sum(axis=1, dtype=jnp.int32) - 1
