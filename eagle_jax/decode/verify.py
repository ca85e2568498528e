"""Verification: how far the drafted tree agrees with the target's own choices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.tree import NO_TOKEN, DraftTree, ancestor_mask, depth


class Verdict(NamedTuple):
  """What one target pass decided for one row."""

  path: jax.Array  # [P] i32, accepted node ids, root first; T where unused
  token: jax.Array  # [P] i32, the target's choice after each node of the path, the bonus last; NO_TOKEN where unused
  num_accepted: jax.Array  # [] i32, drafted tokens accepted: 0 .. P-1


def verify(tree: DraftTree, shown: Any, choose: Callable, *, max_depth: int) -> Verdict:
  """Follows the target's own choices from the root for as long as the tree holds them.

  One row; batch with `jax.vmap`. Lossless for any tree: every visited node is a prefix of the target's own text, and
  what follows it is what the target chose there.

  Args:
    tree: drafted nodes.
    shown: what the target showed at each node: its logits, [V, T], or any pytree of arrays [.., T].
    choose: (what it showed at a node, depth) -> [] i32, its token after a node that lies `depth` edges below the root.
    max_depth: edges on the longest path, static; P = max_depth + 1.

  Returns:
    A `Verdict`; its `num_accepted + 1` tokens are ready to commit.

  Source: SpecInfer, arXiv:2305.09781, tree verification; for deterministic siblings the same law as the reference's
  sequential rejection (EAGLE.md section 6.3).
  """
  ways = {'default': walk, 'cuda': at_once, 'rocm': at_once}
  ways = {platform: functools.partial(way, choose=choose, max_depth=max_depth) for platform, way in ways.items()}
  return jax.lax.platform_dependent(tree, shown, **ways)


def walk(tree: DraftTree, shown: Any, *, choose: Callable, max_depth: int) -> Verdict:
  """`verify` from node to node: the target chooses only where it comes, for choosing reads a whole vocabulary."""
  num_nodes, max_path = tree.token.shape[0], max_depth + 1

  def is_walking(walk):
    node, num_visited, _, _ = walk
    return (node < num_nodes) & (num_visited < max_path)

  def visit(walk):
    node, num_visited, path_P, token_P = walk
    choice = choose(jax.tree.map(lambda x: x[..., node], shown), num_visited)
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


def at_once(tree: DraftTree, shown: Any, *, choose: Callable, max_depth: int) -> Verdict:
  """`verify` without a loop: a node is accepted if it and all its ancestors are what was chosen after their parents.

  The target chooses at every node. On a GPU that is a few kernels, where each condition of a walk would wait for the
  host.
  """
  num_nodes, max_path = tree.token.shape[0], max_depth + 1
  node_T, mask_TT = jnp.arange(num_nodes), ancestor_mask(tree.parent, max_depth=max_depth)
  choice_T = jax.vmap(choose, in_axes=(-1, 0))(shown, depth(mask_TT))
  is_twin_TT = (tree.parent[:, None] == tree.parent[None]) & (tree.token[:, None] == tree.token[None])
  is_first_T = ~(is_twin_TT & (node_T[None] < node_T[:, None])).any(axis=1)  # of equal siblings
  is_hit_T = is_first_T & (tree.token == jnp.take(choice_T, tree.parent, mode='clip')) | (node_T == 0)
  is_accepted_T = (is_hit_T[None] | ~mask_TT).all(axis=1)
  path_T = jnp.sort(jnp.where(is_accepted_T, node_T, num_nodes))  # parents stand before their children
  path_P = jnp.pad(path_T, (0, max_path), constant_values=num_nodes)[:max_path].astype(jnp.int32)
  token_P = jnp.take(choice_T, path_P, mode='fill', fill_value=NO_TOKEN)
  return Verdict(path_P, token_P, is_accepted_T.sum(dtype=jnp.int32) - 1)
