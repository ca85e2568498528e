"""Turn verdicts into the next state: emit tokens, append to the caches, end sequences."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.cache import NewEntries, append
from eagle_jax.decode.state import DecodeState, Limits, Params, Spec
from eagle_jax.decode.verify import Verdict
from eagle_jax.kernels.argmax import NAN_SCORE


def is_eos(token: jax.Array, limits: Limits) -> jax.Array:
  """Compare tokens of any shape with the EOS ids; return bool of that shape. A choice among NaN also ends a sequence.

  NO_TOKEN matches an unused EOS slot, so the result is meaningful only for tokens that may be emitted.
  """
  return jnp.any(token[..., None] == limits.eos.reshape((1,) * token.ndim + (-1,)), axis=-1) | (token == NAN_SCORE)


def require_numbers(tokens: Sequence[int], target: Any) -> None:
  """Raise a ValueError if a sequence ended because its logits were NaN; on the host, so it costs the loop nothing."""
  if len(tokens) and tokens[-1] == NAN_SCORE:
    raise ValueError(
      f"The target computed logits of NaN in {getattr(target, 'dtype', 'its dtype')}: load it with dtype='float32' or "
      "'bfloat16', whose range is wider than float16's, or check its weights."
    )


def num_emitted(token_P: jax.Array, num_ready: jax.Array, num_left: jax.Array, limits: Limits) -> jax.Array:
  """Count how many of a sequence's `num_ready` tokens to emit, [] i32: up to and with an EOS, at most `num_left`."""
  first_eos = jnp.argmax(jnp.append(is_eos(token_P, limits), True))  # P if there is none
  return jnp.minimum(jnp.minimum(num_ready, first_eos + 1), num_left).astype(jnp.int32)


def commit(
  params: Params, state: DecodeState, verdict: Verdict, entries: NewEntries, taps: Any, *, spec: Spec
) -> DecodeState:
  """Emit each live sequence's accepted tokens and bonus, append their keys and values to both caches, end sequences.

  Args:
    params: of the decode program.
    state: before the step.
    verdict: of each sequence, [B, ...] fields.
    entries: keys and values along each path, [B, G, P, K], for the target's cache.
    taps: the target's activations along each path, arrays [..., B, P], for the drafter.
    spec: static.
  """
  num_left_B = state.limits.max_new_tokens - state.num_tokens
  emitted_B = jax.vmap(num_emitted, in_axes=(0, 0, 0, None))(
    verdict.token, verdict.num_accepted + 1, num_left_B, state.limits
  )
  emitted_B = jnp.where(state.is_done, 0, emitted_B)
  newest_B = jnp.take_along_axis(verdict.token, jnp.maximum(emitted_B - 1, 0)[:, None], axis=1, mode='clip')[:, 0]

  num_tokens_B = state.num_tokens + emitted_B
  is_over_B = (num_tokens_B >= state.limits.max_new_tokens) | is_eos(newest_B, state.limits)
  num_accepted_B1 = jnp.minimum(verdict.num_accepted, emitted_B)[:, None]  # an EOS in the path cuts the bonus too
  return state._replace(
    cache=append(state.cache, entries, emitted_B),
    # The drafter combines the target's activations at a node with the token after it.
    drafter=spec.drafter.update(params.drafter, state.drafter, verdict.token, taps, emitted_B),
    root=jnp.where(state.is_done, state.root, newest_B),
    text=write_at(state.text, verdict.token, state.cache.length + 1),
    num_tokens=num_tokens_B,
    num_accepted=write_at(state.num_accepted, num_accepted_B1, state.num_passes),
    num_passes=state.num_passes + (~state.is_done).astype(jnp.int32),
    is_done=state.is_done | is_over_B,
  )


def write_at(kept_BS: jax.Array, new_BP: jax.Array, start_B: jax.Array) -> jax.Array:
  """Write P numbers of each sequence at its own `start_B`: [B, S].

  A select over all places, since a compiler may run the update slices of many sequences one after the other.
  """
  index_BS = jnp.arange(kept_BS.shape[1])[None] - start_B[:, None]
  is_new_BS = (index_BS >= 0) & (index_BS < new_BP.shape[1])
  return jnp.where(is_new_BS, jnp.take_along_axis(new_BP, index_BS, axis=1, mode='clip'), kept_BS)


def take_nodes(taps: Any, node_BP: jax.Array) -> Any:
  """Gather taps [..., B, P] at these nodes from taps [..., B, T]."""

  def take(x):
    index = node_BP.reshape((1,) * (x.ndim - 2) + node_BP.shape)
    return jnp.take_along_axis(x, index, axis=-1, mode='clip')

  return jax.tree.map(take, taps)
