"""One decode step (draft, target pass, verify, commit) and the loop over it, each one compiled program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.cache import NewEntries
from eagle_jax.decode.commit import commit, take_nodes
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.verify import Verdict, verify
from eagle_jax.draft.interface import DraftContext
from eagle_jax.draft.lookup import TextLookup
from eagle_jax.policy.trees import TreePolicy, were_drafted
from eagle_jax.sharding import num_batch_shards
from eagle_jax.tree import NO_PARENT, NO_TOKEN, Candidates, DraftTree, ancestor_mask, depth, pad_nodes, rerank


def draft_context(state: DecodeState, arrays: Any, *, spec: Spec) -> DraftContext:
  """Collect the target's noise, the policy's rules and the text, for the drafter.

  Args:
    state: before the step.
    arrays: the policy's, as returned by `TreePolicy.at_step`.
    spec: static.
  """

  def noise(depth: int | jax.Array, token_UB: jax.Array) -> jax.Array:
    of_sequences = jax.vmap(spec.chooser.noise, (state.sampling.vmap_axes(), 0, 0, 1), out_axes=1)
    return of_sequences(state.sampling, state.row_id, state.cache.length + depth, token_UB)

  lookup = TextLookup(state.text, state.cache.length)
  return DraftContext.of(spec.policy, arrays, noise=noise, is_live_B=~state.is_done, lookup=lookup)


def verify_batch(tree: DraftTree, logits_VBT: jax.Array, state: DecodeState, *, spec: Spec) -> Verdict:
  """Verify every sequence's tree against the target's own choices."""

  def verify_one(tree, logits_VT, sampling, row_id, length):
    def choose_after(logits_V, child_T, node_depth):
      return spec.chooser.choose(logits_V, child_T, sampling, row_id, length + node_depth + 1)

    return verify(tree, logits_VT, choose_after, max_depth=spec.policy.max_depth)

  in_axes = (0, 1, state.sampling.vmap_axes(), 0, 0)
  return jax.vmap(verify_one, in_axes)(tree, logits_VBT, state.sampling, state.row_id, state.cache.length)


class TreePass(NamedTuple):
  """The result of a target pass over trees: verdicts, and cache entries and activations along the accepted paths."""

  tree: DraftTree  # [B, T] fields
  verdict: Verdict  # [B, ...] fields
  entries: NewEntries  # [B, G, P, K], for the target's cache
  taps: Any  # the target's activations along the paths, arrays [..., B, P]
  log_p: jax.Array | None = None  # [B, T] f32, see `node_log_p`; None unless the spec is traced


def node_log_p(tree: DraftTree, logits_VT: jax.Array) -> jax.Array:
  """Compute the target's log-probability of each node's token given the path before it: [T] f32; 0 at the root.

  For one sequence, at temperature 1 and without filters. Values of unused nodes are undefined.
  """
  parent_T = jnp.maximum(tree.parent, 0)
  log_z_T = jax.nn.logsumexp(logits_VT, axis=0)
  log_p_T = logits_VT[jnp.maximum(tree.token, 0), parent_T] - log_z_T[parent_T]
  return jnp.where(tree.parent == NO_PARENT, 0.0, log_p_T)


def verify_tree(params: Params, state: DecodeState, candidates: Candidates, *, num_nodes: int, spec: Spec) -> TreePass:
  """Rerank to trees of `num_nodes`, run the target and verify; the result is padded to the largest size."""
  max_depth = spec.policy.max_depth
  tree = jax.vmap(functools.partial(rerank, num_nodes=num_nodes))(candidates)
  batch = tree.token.shape[0]
  on_device = batch // num_batch_shards(batch, jax.sharding.get_abstract_mesh())
  full = pad_nodes(tree, spec.columns.per_sequence(num_nodes, on_device))
  mask_BTT = jax.vmap(functools.partial(ancestor_mask, max_depth=max_depth))(full.parent)
  position_BT = state.cache.length[:, None] + jax.vmap(depth)(mask_BTT)
  taps, entries = spec.target.forward(params.target, full.token, position_BT, mask_BTT, state.cache)
  logits_VBT = spec.target.logits(params.target, taps)
  verdict = verify_batch(full, logits_VBT, state, spec=spec)
  path_BP = verdict.path
  padded = pad_nodes(tree, spec.policy.num_nodes)
  tree_pass = TreePass(padded, verdict, entries.take(path_BP), take_nodes(taps, path_BP))
  if not spec.is_traced:
    return tree_pass
  log_p_BT = jax.vmap(node_log_p, in_axes=(0, 1))(tree, logits_VBT)
  return tree_pass._replace(log_p=jnp.pad(log_p_BT, ((0, 0), (0, spec.policy.num_nodes - num_nodes))))


def num_drafted(candidates: Candidates, policy: TreePolicy) -> jax.Array:
  """Count the levels that were drafted, [] i32."""
  return sum((one.astype(jnp.int32) for one in were_drafted(candidates, policy)), jnp.int32(0))


class Step(NamedTuple):
  """The result of one step."""

  state: DecodeState  # after the step
  tree_pass: TreePass
  candidates: Candidates  # [B, A] fields, with the scores that `TreePolicy.select` gave them


def step(params: Params, state: DecodeState, *, spec: Spec) -> Step:
  """Draft, run the target, verify, commit; each live sequence gains 1 to max_depth + 1 tokens.

  Raises:
    ValueError: the state was prefilled for a policy with shorter paths.
  """
  if state.max_path is not None and state.max_path.value < spec.max_path:
    raise ValueError(
      f'The state must have {spec.max_path} free slots, as many as a step of {spec.policy.describe()} may emit tokens, '
      f'got {state.max_path.value}: prefill with the policy that has the longest paths.'
    )
  policy, is_live_B = spec.policy, ~state.is_done
  # One decision for the whole batch, so costs are looked up at the mean temperature of its sequences.
  arrays = policy.at_step(params.policy, num_slots=state.num_slots, temperature=state.sampling.temperature.mean())
  context = draft_context(state, arrays, spec=spec)
  candidates = spec.drafter.propose(params.drafter, state.drafter, state.root, policy, context)
  size, score_BA = policy.select(arrays, candidates, is_live_B)
  candidates = candidates._replace(score=score_BA)
  forms = [functools.partial(verify_tree, params, state, candidates, num_nodes=n, spec=spec) for n in policy.sizes]
  tree_pass = jax.lax.switch(size, forms) if len(forms) > 1 else forms[0]()
  after = commit(params, state, tree_pass.verdict, tree_pass.entries, tree_pass.taps, spec=spec)
  num_nodes = state.num_nodes + jnp.where(is_live_B, jnp.asarray(policy.sizes, jnp.int32)[size], 0)
  num_levels = state.num_levels + jnp.where(is_live_B, num_drafted(candidates, policy), 0)
  return Step(after._replace(num_nodes=num_nodes, num_levels=num_levels).constrained(), tree_pass, candidates)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def decode_step(params: Params, state: DecodeState, *, spec: Spec) -> DecodeState:
  """Run one `step`. `state` is donated.

  Example:
    >>> params, spec = eagle_jax.decode.build(target, drafter, policy=eagle_jax.Chain(3))
    >>> tokens_BL, length_B = eagle_jax.decode.pad_prompts([[1, 90, 18], [1, 26]], 3)
    >>> state = eagle_jax.decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=16)
    >>> state = eagle_jax.decode.decode_step(params, state, spec=spec)
    >>> state.num_passes.tolist()
    [1, 1]
  """
  return step(params, state, spec=spec).state


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def decode_loop(params: Params, state: DecodeState, *, spec: Spec) -> DecodeState:
  """Run `decode_step` until every sequence is done, in one `lax.while_loop` on the device. `state` is donated.

  Example:
    >>> params, spec = eagle_jax.decode.build(target, drafter, policy=eagle_jax.Chain(3))
    >>> tokens_BL, length_B = eagle_jax.decode.pad_prompts([[1, 90, 18], [1, 26]], 3)
    >>> state = eagle_jax.decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=16)
    >>> state = eagle_jax.decode.decode_loop(params, state, spec=spec)
    >>> state.num_tokens.tolist()
    [16, 16]
  """
  return jax.lax.while_loop(
    lambda state: ~state.is_done.all(), lambda state: decode_step(params, state, spec=spec), state
  )


def result(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Read the new tokens from a state.

  Returns:
    tokens_BN: [B, N] i32, new tokens; NO_TOKEN past each sequence's length.
    length_B: [B] i32, number of new tokens of each sequence.
    num_accepted_BN: [B, N] i32, drafted tokens emitted by each target pass of the sequence; -1 past its last pass.

  Example:
    >>> params, spec = eagle_jax.decode.build(target, drafter, policy=eagle_jax.Chain(3))
    >>> tokens_BL, length_B = eagle_jax.decode.pad_prompts([[1, 90, 18], [1, 26]], 3)
    >>> state = eagle_jax.decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=16)
    >>> tokens_BN, length_B, num_accepted_BN = eagle_jax.decode.result(state)
    >>> tokens_BN.shape, length_B.tolist()
    ((2, 16), [1, 1])
  """
  num_new = state.num_accepted.shape[1]
  index_1N = jnp.arange(num_new)[None]
  new_BN = jnp.take_along_axis(state.text, state.num_prompt[:, None] + index_1N, axis=1, mode='clip')
  tokens_BN = jnp.where(index_1N < state.num_tokens[:, None], new_BN, NO_TOKEN)
  num_accepted_BN = jnp.where(index_1N < state.num_passes[:, None], state.num_accepted, -1)
  return tokens_BN, state.num_tokens, num_accepted_BN


def tau(num_new: int, num_passes: int, *, num_sequences: int) -> float:
  """Compute the mean number of new tokens a target pass; plain decoding gives exactly 1.

  Args:
    num_new: new tokens of all sequences.
    num_passes: target passes of all sequences without prefill; 0 gives 1.
    num_sequences: number of sequences, whose first tokens come from prefill and do not count.
  """
  return (num_new - num_sequences) / num_passes if num_passes else 1.0
