"""The decode loop: draft, target pass, verify, commit, all in one compiled program."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import NewRows
from eagle_jax.decode.commit import at_rows, commit
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.verify import Verdict, verify
from eagle_jax.draft.interface import Outlook
from eagle_jax.draft.ngram import Lookup
from eagle_jax.policy.trees import TreePolicy, level_starts
from eagle_jax.sampling import choose, perturbation
from eagle_jax.sharding import num_row_parts
from eagle_jax.tree import Candidates, DraftTree, ancestor_mask, depth, padded, rerank


def outlook(state: DecodeState, economy: Any, *, spec: Spec) -> Outlook:
  """What drafters may know: the noise that the target will add to its logits, which levels pay, and the text."""

  def noise(depth: int | jax.Array, token_UB: jax.Array) -> jax.Array:
    of_rows = jax.vmap(perturbation, (state.sampling.row_axes(), 0, 0, 1), out_axes=1)
    return of_rows(state.sampling, state.row_id, state.cache.length + depth, token_UB)

  def is_level_worth(depth: int | jax.Array, log_q_BW: jax.Array):
    return spec.policy.is_level_worth(economy, log_q_BW, ~state.is_done, depth=depth)

  return Outlook(noise, is_level_worth, Lookup(state.text, state.cache.length) if spec.policy.lookup else None)


def verify_rows(tree: DraftTree, logits_VBT: jax.Array, state: DecodeState, *, max_depth: int) -> Verdict:
  """`verify` of every row, by the target's own choices."""

  def verify_row(tree, logits_VT, sampling, row_id, length):
    def choose_after(logits_V, node_depth):
      return choose(logits_V, sampling, row_id, length + node_depth + 1)

    return verify(tree, logits_VT, choose_after, max_depth=max_depth)

  in_axes = (0, 1, state.sampling.row_axes(), 0, 0)
  return jax.vmap(verify_row, in_axes)(tree, logits_VBT, state.sampling, state.row_id, state.cache.length)


class Checked(NamedTuple):
  """What a target pass over trees decided, and what both caches may take along the accepted paths."""

  tree: DraftTree  # [B, T] fields
  verdict: Verdict
  rows: NewRows  # [B, G, P, K], of the target's cache
  shown: Any  # taps along the path


def num_rows(num_nodes: int, batch: int, *, min_rows: int = 1) -> int:
  """Rows that a target pass over trees of `num_nodes`, `batch` of them on a device, has for each: as many, or a few
  unused ones more.

  Matrix products are made in tiles, and a tile that is not full costs more than a full one: on two CPU cores, in a
  slow hour, 12 rows through SmolLM2's projections take 52 ms and 16 rows 37; 6 and 8 rows, 38 and 30 ms.
  """
  flat = max(batch * num_nodes, min_rows)
  tiled = 1 << (flat - 1).bit_length() if flat <= 16 else -(-flat // 16) * 16
  return num_nodes if tiled % batch else tiled // batch


def check(params: Params, state: DecodeState, candidates: Candidates, *, num_nodes: int, spec: Spec) -> Checked:
  """rerank -> target pass -> verify, for trees of `num_nodes`; the result has the shapes of the policy's largest."""
  max_depth = spec.policy.max_depth
  tree = jax.vmap(functools.partial(rerank, num_nodes=num_nodes))(candidates)
  batch = tree.token.shape[0]
  on_device = batch // num_row_parts(batch, jax.sharding.get_abstract_mesh())
  full = padded(tree, num_rows(num_nodes, on_device, min_rows=spec.min_rows))
  mask_BTT = jax.vmap(functools.partial(ancestor_mask, max_depth=max_depth))(full.parent)
  position_BT = state.cache.length[:, None] + jax.vmap(depth)(mask_BTT)
  taps, rows = spec.target.forward(params.target, full.token, position_BT, mask_BTT, state.cache)
  logits_VBT = spec.target.logits(params.target, taps)
  verdict = verify_rows(full, logits_VBT, state, max_depth=max_depth)
  shown = at_rows(taps, verdict.path)
  return Checked(padded(tree, spec.policy.num_nodes), verdict, rows.at(verdict.path), shown)


def num_drafted(candidates: Candidates, policy: TreePolicy) -> jax.Array:
  """[] i32, how many levels were drafted: those left out have no used node."""
  is_used_A = (candidates.log_q > -jnp.inf).any(axis=0)
  levels = itertools.pairwise(level_starts(policy))
  return sum((is_used_A[start:end].any().astype(jnp.int32) for start, end in levels), jnp.int32(0))


class Cycle(NamedTuple):
  """What one cycle came to, a row each."""

  state: DecodeState  # after it
  checked: Checked


def cycle(params: Params, state: DecodeState, *, spec: Spec) -> Cycle:
  """draft -> target pass -> verify -> commit; each live row gains 1 to max_depth + 1 tokens.

  Raises:
    ValueError: the state was prefilled for a policy with shorter paths.
  """
  if state.room is not None and state.room.max_path < spec.max_path:
    raise ValueError(
      f'The state has room for steps of {state.room.max_path} tokens, and {spec.policy.describe()} may take '
      f'{spec.max_path}: prefill with the policy whose paths are the longest.'
    )
  economy: Any = ()
  if params.economies:  # a batch goes through one program, so it weighs costs as its rows do in the mean
    economy = params.economies.at(num_slots=state.num_slots, temperature=state.sampling.temperature.mean())
  look = outlook(state, economy, spec=spec)
  candidates = spec.drafter.propose(params.drafter, state.drafter, state.root, spec.policy, look)
  sizes = [functools.partial(check, params, state, candidates, num_nodes=n, spec=spec) for n in spec.policy.sizes]
  is_live_B = ~state.is_done
  best = spec.policy.best_size(economy, candidates.log_q, is_live_B)
  checked = jax.lax.switch(best, sizes) if len(sizes) > 1 else sizes[0]()
  verdict = checked.verdict
  # A row of the drafter is (feature of a node, token after it): its one-token shift.
  followed = spec.drafter.follow(params.drafter, state.drafter, verdict.token, checked.shown)
  after = commit(state, verdict, checked.rows, followed, spec=spec)
  num_nodes = state.num_nodes + jnp.where(is_live_B, jnp.asarray(spec.policy.sizes, jnp.int32)[best], 0)
  num_levels = state.num_levels + jnp.where(is_live_B, num_drafted(candidates, spec.policy), 0)
  return Cycle(after._replace(num_nodes=num_nodes, num_levels=num_levels).constrained(), checked)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def decode_step(params: Params, state: DecodeState, *, spec: Spec) -> DecodeState:
  """One `cycle`. `state` is donated."""
  return cycle(params, state, spec=spec).state


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
  new_BN = jnp.take_along_axis(state.text, state.num_prompt[:, None] + index_1N, axis=1, mode='clip')
  tokens_BN = jnp.where(index_1N < state.num_tokens[:, None], new_BN, -1)
  num_accepted_BN = jnp.where(index_1N < state.num_passes[:, None], state.num_accepted, -1)
  return tokens_BN, state.num_tokens, num_accepted_BN
