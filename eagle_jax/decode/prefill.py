"""Prompt to the first `DecodeState`: one target pass over all prompt tokens, and the first new token."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cache import filled
from eagle_jax.decode.commit import at_rows, is_eos
from eagle_jax.decode.request import at_least_one, integer_array, known_integers, require_valid_rows
from eagle_jax.decode.state import DecodeState, Limits, Params, Room, Spec
from eagle_jax.draft.interface import DraftNetwork
from eagle_jax.models.interface import TargetNetwork
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.sampling import Sampling, choose

MIN_BUCKET = 16


def bucket(size: int) -> int:
  """The smallest of 16, 24, 32, 48, 64, 96, ... that holds `size`: at most a third of it is padding.

  Array sizes come from this list, so that a prompt of another length mostly finds its program compiled.
  """
  power = MIN_BUCKET
  while power < size:
    if power + power // 2 >= size:
      return power + power // 2
    power *= 2
  return power


def pad_prompts(prompts: Sequence[Sequence[int]], max_prompt: int) -> tuple[np.ndarray, np.ndarray]:
  """Prompts padded at the end to the bucket of `max_prompt`, [B, L] i32, and their lengths, [B] i32; in NumPy."""
  length_B = np.asarray([len(prompt) for prompt in prompts], np.int32)
  tokens_BL = np.zeros((len(prompts), bucket(max_prompt)), np.int32)
  for row_L, prompt in zip(tokens_BL, prompts, strict=True):
    row_L[: len(prompt)] = prompt
  return tokens_BL, length_B


def slots_for(num_prompt: int, num_new: int, spec: Spec) -> int:
  """Cache slots that hold a prompt, new tokens and one path."""
  return bucket(num_prompt + num_new + spec.max_path)


def prefill(
  params: Params,
  tokens_BL,
  length_B,
  *,
  spec: Spec,
  max_new_tokens: int,
  temperature=0.0,
  top_k=0,
  top_p=1.0,
  seed=0,
  row_ids=None,
  eos_ids=None,
) -> DecodeState:
  """Runs the target over padded prompts and draws each row's first token.

  Pure, and callable inside a jit of the user's own. Compiles once for each (B, L, bucket of max_new_tokens, number of
  EOS slots); temperature, top_k, top_p, seed, row ids and EOS ids are traced.

  Args:
    params, spec: from `decode.build`.
    tokens_BL: [B, L] integers, prompts padded at the end.
    length_B: [B] integers, prompt lengths, 1 .. L.
    max_new_tokens: Python int, at least 1. The room made in the cache and the output is its `bucket`: `result` has N =
      24 places for 17 tokens.
    temperature: 0 is greedy. This, like the next three, is one number, or [B], one a row.
    top_k: 0 keeps all.
    top_p: in (0, 1].
    seed: fixes the text.
    row_ids: [B] i32, key each row's noise; default 0 .. B-1.
    eos_ids: any of these tokens ends a row; default the target's, () for none.

  Returns:
    A `DecodeState` for `decode_step` and `decode_loop`, with this policy or one whose paths are no longer.

  Raises:
    ValueError: arrays of another rank or not of integers, max_new_tokens below 1; and, of values that are not traced,
      what `generate` refuses.
  """
  max_new_tokens = at_least_one('max_new_tokens', max_new_tokens)
  sampling = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'seed': seed}
  tokens_BL = integer_array('tokens_BL', tokens_BL, ndim=2)
  length_B = integer_array('length_B', length_B, ndim=1)
  ids = {'row_ids': known_integers('row_ids', row_ids), 'eos_ids': known_integers('eos_ids', eos_ids)}
  if isinstance(spec.target, TransformerTarget):
    require_valid_rows(spec.target.config, tokens_BL, length_B, max_new_tokens=max_new_tokens, **sampling, **ids)
  arguments, static = prepare(
    params,
    tokens_BL.astype(np.int32),
    length_B.astype(np.int32),
    spec=spec,
    max_new_tokens=max_new_tokens,
    sampling=Sampling.of(**sampling),
    **ids,
  )
  return run_prefill(*arguments, **static)._replace(room=Room(spec.max_path))


def prepare(params: Params, tokens_BL, length_B, *, spec: Spec, max_new_tokens: int, sampling, row_ids, eos_ids):
  """The arguments of `run_prefill`: traced ones, and static ones in buckets. See `prefill`.

  They hold nothing of the policy but the room that it needs: most policies share their prefill's program.
  """
  batch, num_prompt = tokens_BL.shape
  num_new = bucket(max_new_tokens)
  row_id_B = jnp.asarray(np.arange(batch) if row_ids is None else row_ids, jnp.int32)
  eos_ids = spec.target.eos_ids if eos_ids is None else eos_ids
  limits = Limits.of(max_new_tokens, eos_ids)
  num_slots = slots_for(num_prompt, num_new, spec)
  static = {'target': spec.target, 'drafter': spec.drafter, 'num_slots': num_slots, 'num_new': num_new}
  return (params._replace(economies=()), tokens_BL, length_B, row_id_B, sampling, limits), static


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'num_slots', 'num_new'))
def run_prefill(
  params: Params,
  tokens_BL,
  length_B,
  row_id_B,
  sampling: Sampling,
  limits: Limits,
  *,
  target: TargetNetwork,
  drafter: DraftNetwork,
  num_slots: int,
  num_new: int,
) -> DecodeState:
  """The program behind `prefill`.

  `num_slots` cache slots must hold prompt, new tokens and one path: an update slice past the end would be clamped, and
  overwrite the row's own prefix without a word. `prepare` makes that room.
  """
  batch, num_prompt = tokens_BL.shape
  position_BL = jnp.broadcast_to(jnp.arange(num_prompt), tokens_BL.shape)
  causal_BLL = jnp.broadcast_to(jnp.tri(num_prompt, dtype=bool), (batch, num_prompt, num_prompt))
  nothing = target.init_cache(batch, 0)
  taps, rows = target.forward(params.target, tokens_BL, position_BL, causal_BLL, nothing)
  newest = at_rows(taps, (length_B - 1)[:, None])
  logits_VB = target.logits(params.target, newest)[..., 0]
  root_B = jax.vmap(choose, in_axes=(1, sampling.row_axes(), 0, 0))(logits_VB, sampling, row_id_B, length_B)

  next_BL = jnp.roll(tokens_BL, -1, axis=1).at[jnp.arange(batch), length_B - 1].set(root_B, mode='clip')
  followed = drafter.follow(params.drafter, drafter.init(batch, 0), next_BL, taps)
  one_B = jnp.ones(batch, jnp.int32)
  return DecodeState(
    cache=filled(rows, length_B, num_slots=num_slots),
    drafter=drafter.absorb(drafter.init(batch, num_slots), followed, length_B),
    root=root_B,
    text=jnp.pad(tokens_BL, ((0, 0), (0, num_slots + 1 - num_prompt))).at[jnp.arange(batch), length_B].set(root_B),
    num_tokens=one_B,
    num_accepted=jnp.zeros((batch, num_new), jnp.int32),
    num_passes=0 * one_B,
    num_nodes=0 * one_B,
    num_levels=0 * one_B,
    is_done=is_eos(root_B, limits) | (limits.max_new_tokens <= 1),
    row_id=row_id_B,
    sampling=sampling,
    limits=limits,
  ).constrained()
