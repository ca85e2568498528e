"""Verification: how far the drafted tree agrees with the target's own choices."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.tree import NO_TOKEN, DraftTree


class Verdict(NamedTuple):
  """What one target pass decided for one row."""

  path: jax.Array  # [P] i32, accepted node ids, root first; T where unused
  token: jax.Array  # [P] i32, the target's choice after each node of the path, the bonus last; NO_TOKEN where unused
  num_accepted: jax.Array  # [] i32, drafted tokens accepted: 0 .. P-1


def verify(tree: DraftTree, choose: Callable, *, max_depth: int) -> Verdict:
  """Walks from the root along the target's own choices for as long as the tree holds them.

  One row; batch with `jax.vmap`. Lossless for any tree: every visited node is a prefix of the target's own text, and
  what follows it is what the target chose there.

  Args:
    tree: drafted nodes.
    choose: (node, depth) -> [] i32, the target's token after `node`, which lies `depth` edges below the root.
    max_depth: edges on the longest path, static; P = max_depth + 1.

  Returns:
    A `Verdict`; its `num_accepted + 1` tokens are ready to commit.

  Source: SpecInfer, arXiv:2305.09781, tree verification; for deterministic siblings the same law as the reference's
  sequential rejection (EAGLE.md section 6.3).
  """
  num_nodes, max_path = tree.token.shape[0], max_depth + 1

  def is_walking(walk):
    node, num_visited, _, _ = walk
    return (node < num_nodes) & (num_visited < max_path)

  def visit(walk):
    node, num_visited, path_P, token_P = walk
    choice = choose(node, num_visited)
    child_T = (tree.parent == node) & (tree.token == choice)
    child = jnp.where(child_T.any(), jnp.argmax(child_T).astype(jnp.int32), num_nodes)
    return child, num_visited + 1, path_P.at[num_visited].set(node), token_P.at[num_visited].set(choice)

  start = (
    jnp.int32(0),
    jnp.int32(0),
    jnp.full(max_path, num_nodes, jnp.int32),
    jnp.full(max_path, NO_TOKEN, jnp.int32),
  )
  _, num_visited, path_P, token_P = jax.lax.while_loop(is_walking, visit, start)
  return Verdict(path_P, token_P, num_visited - 1)
