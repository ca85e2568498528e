"""Record on the host what each step drafted, verified and accepted: `generate(..., trace=True)`."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.decode.step import step
from eagle_jax.decode.verify import Verdict
from eagle_jax.sharding import to_host
from eagle_jax.tree import NO_TOKEN, DraftTree


class Cycle(NamedTuple):
  """One step of one sequence. Nodes stand in the order of `DraftTree`, the root first; unused ones are left out."""

  token: np.ndarray  # [n] i32
  parent: np.ndarray  # [n] i32, node id; NO_PARENT at the root
  log_q: np.ndarray  # [n] f32, drafter's log-probability of the path from the root, nats; 0 at the root
  log_p: np.ndarray  # [n] f32, target's given the path before the node, at temperature 1, no filters; 0 at the root
  rank: np.ndarray  # [n] i32, among siblings by `log_q`: 0 is the likeliest
  path: np.ndarray  # [n] i32, accepted node ids, root first
  bonus: int  # the target's own token after the path
  text_length: int  # tokens of the text, prompt included, when the step begins; the root is the last of them
  num_emitted: int  # of the path's tokens after the root and the bonus: fewer where an EOS or the limit cuts them


class Observed(NamedTuple):
  """The arrays that are fetched from the device after a step; see `DecodeState`, `DraftTree` and `Verdict`."""

  is_live: jax.Array  # [B] bool, before the step
  is_done: jax.Array  # [B] bool, after it
  tree: DraftTree  # [B, T] fields
  verdict: Verdict  # [B, ...] fields
  log_p: Any  # [B, T] f32, see `step.node_log_p`
  text_length: jax.Array  # [B] i32, before the step
  num_emitted: jax.Array  # [B] i32


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='state')
def traced_step(params: Params, state: DecodeState, *, spec: Spec) -> tuple[DecodeState, Observed]:
  """Run one `step`, and also return what it did. `spec.is_traced` is set; `state` is donated."""
  after, tree_pass, _ = step(params, state, spec=spec)
  return after, Observed(
    is_live=~state.is_done,
    is_done=after.is_done,
    tree=tree_pass.tree,
    verdict=tree_pass.verdict,
    log_p=tree_pass.log_p,
    text_length=state.cache.length + 1,
    num_emitted=after.num_tokens - state.num_tokens,
  )


def run_traced(run: Any, params: Params, state: DecodeState) -> tuple[DecodeState, list[list[Cycle]]]:
  """Decode until every sequence is done; also return the cycles of each.

  Args:
    run: `traced_step`, compiled.
    params: of the decode program.
    state: from prefill; donated.
  """
  trace: list[list[Cycle]] = [[] for _ in state.is_done]
  is_done_B = to_host(state.is_done)
  while not is_done_B.all():
    state, observed = run(params, state)
    seen = to_host(observed)
    for b in np.flatnonzero(seen.is_live):
      trace[b].append(cycle_of(jax.tree.map(lambda x_B, b=b: x_B[b], seen)))
    is_done_B = seen.is_done
  return state, trace


def cycle_of(seen: Any) -> Cycle:
  """Make the cycle of one sequence from its part of `Observed`, in NumPy."""
  is_used_T = seen.tree.token != NO_TOKEN
  id_T = np.cumsum(is_used_T, dtype=np.int32) - 1  # among used nodes
  token, parent, log_q, log_p = (x_T[is_used_T] for x_T in (*seen.tree, seen.log_p))
  parent[1:] = id_T[parent[1:]]
  return Cycle(
    token=token,
    parent=parent,
    log_q=log_q,
    log_p=log_p,
    rank=sibling_ranks(parent, log_q),
    path=id_T[seen.verdict.path[: seen.verdict.num_accepted + 1]],
    bonus=int(seen.verdict.token[seen.verdict.num_accepted]),
    text_length=int(seen.text_length),
    num_emitted=int(seen.num_emitted),
  )


def sibling_ranks(parent: np.ndarray, log_q: np.ndarray) -> np.ndarray:
  """Count each node's likelier siblings, [n] i32; of equal ones the first counts as likelier."""
  node = np.arange(len(parent))
  is_likelier = (log_q[None] > log_q[:, None]) | ((log_q[None] == log_q[:, None]) & (node[None] < node[:, None]))
  return ((parent[None] == parent[:, None]) & is_likelier).sum(axis=1, dtype=np.int32)
