"""The decode loop: draft, target pass, verify, commit, all in one compiled program."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.commit import commit
from eagle_jax.sampling import choose
from eagle_jax.state import DecodeState, Params, Spec
from eagle_jax.tree import DraftTree, ancestor_mask, depth
from eagle_jax.verify import Verdict, verify


def verify_rows(tree: DraftTree, logits_VBT: jax.Array, state: DecodeState, *, max_depth: int) -> Verdict:
  """`verify` of every row, by the target's own choices; tokens are drawn only at nodes that the walk reaches."""

  def verify_row(tree, logits_VT, sampling, row_id, length):
    def choose_after(node, node_depth):
      return choose(logits_VT[:, node], sampling, row_id, length + node_depth + 1)

    return verify(tree, choose_after, max_depth=max_depth)

  in_axes = (0, 1, state.sampling.row_axes(), 0, 0)
  return jax.vmap(verify_row, in_axes)(tree, logits_VBT, state.sampling, state.row_id, state.cache.length)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def decode_step(params: Params, state: DecodeState, *, spec: Spec) -> DecodeState:
  """draft -> target pass -> verify -> commit; each live row gains 1 to max_depth + 1 tokens. `state` is donated."""
  max_depth = spec.policy.max_depth
  tree, drafter = spec.drafter.propose(params.drafter, state.drafter, state.root, spec.policy)
  mask_BTT = jax.vmap(functools.partial(ancestor_mask, max_depth=max_depth))(tree.parent)
  position_BT = state.cache.length[:, None] + jax.vmap(depth)(mask_BTT)
  taps, cache = spec.target.forward(params.target, tree.token, position_BT, mask_BTT, state.cache)
  logits_VBT = spec.target.logits(params.target, taps)
  verdict = verify_rows(tree, logits_VBT, state, max_depth=max_depth)
  return commit(params, state, verdict, taps, cache, drafter, spec=spec)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def decode_loop(params: Params, state: DecodeState, *, spec: Spec) -> DecodeState:
  """`decode_step` until every row is done: one `lax.while_loop`, no host in it. `state` is donated."""
  return jax.lax.while_loop(
    lambda state: ~state.is_done.all(), lambda state: decode_step(params, state, spec=spec), state
  )


def result(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What a state holds for its user.

  Returns:
    tokens_BN: [B, N] i32, new tokens; NO_TOKEN past each row's length.
    length_B: [B] i32, new tokens a row.
    num_accepted_BN: [B, N] i32, drafted tokens emitted by each target pass of the row; -1 past its last pass.
  """
  num_new = state.num_accepted.shape[1]
  index_1N = jnp.arange(num_new)[None]
  tokens_BN = jnp.where(index_1N < state.num_tokens[:, None], state.tokens[:, :num_new], -1)
  num_accepted_BN = jnp.where(index_1N < state.num_passes[:, None], state.num_accepted, -1)
  return tokens_BN, state.num_tokens, num_accepted_BN
