"""Verdict to next state: which tokens are emitted, what the caches keep, which rows end."""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.cache import NewRows, append
from eagle_jax.decode.state import DecodeState, Limits, Spec
from eagle_jax.decode.verify import Verdict


def is_eos(token: jax.Array, limits: Limits) -> jax.Array:
  """bool, of the tokens' shape. NO_TOKEN matches an unused EOS slot: ask of tokens that may be emitted alone."""
  return jnp.any(token[..., None] == limits.eos.reshape((1,) * token.ndim + (-1,)), axis=-1)


def num_emitted(token_P: jax.Array, num_ready: jax.Array, room: jax.Array, limits: Limits) -> jax.Array:
  """[] i32: how many of one row's `num_ready` tokens are emitted: up to an EOS, included, and no more than `room`."""
  first_eos = jnp.argmax(jnp.append(is_eos(token_P, limits), True))  # P if there is none
  return jnp.minimum(jnp.minimum(num_ready, first_eos + 1), room).astype(jnp.int32)


def commit(state: DecodeState, verdict: Verdict, rows: NewRows, followed: Any, *, spec: Spec) -> DecodeState:
  """Emits each live row's accepted tokens and bonus, appends their rows to both caches, ends rows.

  Args:
    state: before the step.
    verdict: a row each, [B, ...] fields.
    rows: what the target's cache takes along each row's path, [B, G, P, K].
    followed: what the drafter makes of the path.
    spec: static.
  """
  room_B = state.limits.max_new_tokens - state.num_tokens
  emitted_B = jax.vmap(num_emitted, in_axes=(0, 0, 0, None))(
    verdict.token, verdict.num_accepted + 1, room_B, state.limits
  )
  emitted_B = jnp.where(state.is_done, 0, emitted_B)
  newest_B = jnp.take_along_axis(verdict.token, jnp.maximum(emitted_B - 1, 0)[:, None], axis=1, mode='clip')[:, 0]

  num_tokens_B = state.num_tokens + emitted_B
  is_over_B = (num_tokens_B >= state.limits.max_new_tokens) | is_eos(newest_B, state.limits)
  num_accepted_B1 = jnp.minimum(verdict.num_accepted, emitted_B)[:, None]  # an EOS in the path cuts the bonus too
  return state._replace(
    cache=append(state.cache, rows, emitted_B),
    drafter=spec.drafter.absorb(state.drafter, followed, emitted_B),
    root=jnp.where(state.is_done, state.root, newest_B),
    text=written(state.text, verdict.token, state.cache.length + 1),
    num_tokens=num_tokens_B,
    num_accepted=written(state.num_accepted, num_accepted_B1, state.num_passes),
    num_passes=state.num_passes + (~state.is_done).astype(jnp.int32),
    is_done=state.is_done | is_over_B,
  )


def written(kept_BS: jax.Array, new_BP: jax.Array, start_B: jax.Array) -> jax.Array:
  """[B, S], with P numbers of each row written at its own `start`.

  Chosen place by place: update slices of many rows are a scatter, which XLA:TPU makes one row after the other.
  """
  index_BS = jnp.arange(kept_BS.shape[1])[None] - start_B[:, None]
  is_new_BS = (index_BS >= 0) & (index_BS < new_BP.shape[1])
  return jnp.where(is_new_BS, jnp.take_along_axis(new_BP, index_BS, axis=1, mode='clip'), kept_BS)


def at_rows(taps: Any, row_BP: jax.Array) -> Any:
  """Taps [..., B, P] of taps [..., B, T]: what the target showed at these of its rows."""

  def take(x):
    index = row_BP.reshape((1,) * (x.ndim - 2) + row_BP.shape)
    return jnp.take_along_axis(x, index, axis=-1, mode='clip')

  return jax.tree.map(take, taps)
