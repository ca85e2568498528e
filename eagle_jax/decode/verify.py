"""Verification: find the path of the drafted tree that agrees with the target's own choices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.kernels.dispatch import dispatch_loop
from eagle_jax.tree import NO_TOKEN, DraftTree, ancestor_mask, depth


class Verdict(NamedTuple):
  """The path and the tokens that one target pass decided for one sequence."""

  path: jax.Array  # [P] i32, accepted node ids, root first; T where unused
  token: jax.Array  # [P] i32, the target's choice after each node of the path, the bonus last; NO_TOKEN where unused
  num_accepted: jax.Array  # [] i32, drafted tokens accepted: 0 .. P-1


def verify(tree: DraftTree, outputs: Any, choose: Callable, *, max_depth: int) -> Verdict:
  """Follow the target's own choices from the root for as long as the tree holds them.

  For one sequence; batch with `jax.vmap`. Lossless for any tree: the path to every visited node is a prefix of the
  target's own text, and the token after it is the target's choice.

  Args:
    tree: drafted nodes.
    outputs: the target's outputs at each node: its logits, [V, T], or any pytree of arrays [.., T].
    choose: (outputs at a node, [T] i32 tokens of the node's children, NO_TOKEN elsewhere, depth) -> [] i32, the
      target's token after a node that is `depth` edges below the root.
    max_depth: edges on the longest path, static; P = max_depth + 1.

  Returns:
    A `Verdict`; its `num_accepted + 1` tokens are ready to commit.

  Source: SpecInfer, arXiv:2305.09781, tree verification; for deterministic siblings the same law as the sequential
  rejection of EAGLE's `evaluate_posterior` (utils.py).
  """
  sequential, parallel = (
    functools.partial(form, choose=choose, max_depth=max_depth) for form in (verify_sequential, verify_parallel)
  )
  return dispatch_loop(tree, outputs, sequential=sequential, parallel=parallel)


def verify_sequential(tree: DraftTree, outputs: Any, *, choose: Callable, max_depth: int) -> Verdict:
  """Verify node by node: the target chooses only at nodes it reaches, since each choice reads a whole vocabulary."""
  num_nodes, max_path = tree.token.shape[0], max_depth + 1

  def is_in_tree(visited):
    node, num_visited, _, _ = visited
    return (node < num_nodes) & (num_visited < max_path)

  def visit(visited):
    node, num_visited, path_P, token_P = visited
    is_child_T = tree.parent == node
    child_T = jnp.where(is_child_T, tree.token, NO_TOKEN)
    choice = choose(jax.tree.map(lambda x: x[..., node], outputs), child_T, num_visited)
    is_hit_T = is_child_T & (tree.token == choice)
    child = jnp.where(is_hit_T.any(), jnp.argmax(is_hit_T).astype(jnp.int32), num_nodes)
    return child, num_visited + 1, path_P.at[num_visited].set(node), token_P.at[num_visited].set(choice)

  start = (
    jnp.int32(0),
    jnp.int32(0),
    jnp.full(max_path, num_nodes, jnp.int32),
    jnp.full(max_path, NO_TOKEN, jnp.int32),
  )
  _, num_visited, path_P, token_P = jax.lax.while_loop(is_in_tree, visit, start)
  return Verdict(path_P, token_P, num_visited - 1)


def verify_parallel(tree: DraftTree, outputs: Any, *, choose: Callable, max_depth: int) -> Verdict:
  """Verify without a loop: accept a node if it and all its ancestors hold the target's choices after their parents.

  The target chooses at every node, which computes more, but no step waits for a condition.
  """
  num_nodes, max_path = tree.token.shape[0], max_depth + 1
  node_T, mask_TT = jnp.arange(num_nodes), ancestor_mask(tree.parent, max_depth=max_depth)
  child_TT = jnp.where(tree.parent[None] == node_T[:, None], tree.token[None], NO_TOKEN)
  choice_T = jax.vmap(choose, in_axes=(-1, 0, 0))(outputs, child_TT, depth(mask_TT))
  is_twin_TT = (tree.parent[:, None] == tree.parent[None]) & (tree.token[:, None] == tree.token[None])
  is_first_T = ~(is_twin_TT & (node_T[None] < node_T[:, None])).any(axis=1)  # of equal siblings
  is_hit_T = is_first_T & (tree.token == jnp.take(choice_T, tree.parent, mode='clip')) | (node_T == 0)
  is_accepted_T = (is_hit_T[None] | ~mask_TT).all(axis=1)
  path_T = jnp.sort(jnp.where(is_accepted_T, node_T, num_nodes))  # parents come before their children
  path_P = jnp.pad(path_T, (0, max_path), constant_values=num_nodes)[:max_path].astype(jnp.int32)
  token_P = jnp.take(choice_T, path_P, mode='fill', fill_value=NO_TOKEN)
  return Verdict(path_P, token_P, is_accepted_T.sum(dtype=jnp.int32) - 1)
