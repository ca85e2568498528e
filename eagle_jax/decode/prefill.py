"""Prefill: one target pass over the prompts, the first new token, and the first `DecodeState`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cache import behind, fill
from eagle_jax.decode.buckets import bucket, require_memory, slots_for
from eagle_jax.decode.commit import is_eos, take_nodes
from eagle_jax.decode.request import Options, at_least_one, integer_array, known_integers, require_valid_batch
from eagle_jax.decode.state import DecodeState, Limits, Params, Spec, Static
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of, to_device, warn_unless_entered
from eagle_jax.tree import NO_TOKEN

STATIC = 'spec', 'num_slots', 'num_new'  # static arguments of `run_prefill`


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
  """Run the target over padded prompts and draw each sequence's first token.

  Pure, and callable inside a user's own jit. If the target is on several devices, enter their mesh first, see
  `decode.build`. Compiles once for each (B, L, bucket of max_new_tokens, number of EOS
  slots); temperature, top_k, top_p, seed, row ids and EOS ids are traced.

  Args:
    params, spec: from `decode.build`.
    tokens_BL: [B, L] integers, prompts padded at the end.
    length_B: [B] integers, prompt lengths, 1 .. L.
    max_new_tokens: Python int, at least 1. The cache and the output are sized for its `bucket`: `result` has N = 24
      places for 17 tokens.
    temperature: 0 is greedy. This and the next three are each one number, or [B] with one a sequence.
    top_k: 0 keeps all.
    top_p: in (0, 1].
    seed: determines the text.
    row_ids: [B] i32, keys of each sequence's noise; default 0 .. B-1.
    eos_ids: any of these tokens ends a sequence; default the target's, () for none.

  Returns:
    A `DecodeState` for `decode_step` and `decode_loop`, with this policy or one whose paths are not longer.

  Raises:
    ValueError: arrays of another rank or not of integers, max_new_tokens below 1, or anything else that `generate`
      refuses, as far as the values are not traced.

  Example:
    >>> params, spec = eagle_jax.decode.build(target, drafter, policy=eagle_jax.Chain(3))
    >>> tokens_BL, length_B = eagle_jax.decode.pad_prompts([[1, 90, 18], [1, 26]], 3)
    >>> state = eagle_jax.decode.prefill(params, tokens_BL, length_B, spec=spec, max_new_tokens=16)
    >>> state.num_tokens.tolist()
    [1, 1]
  """
  sampling = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'seed': seed}
  row_ids, eos_ids = known_integers('row_ids', row_ids), known_integers('eos_ids', eos_ids)
  options = Options(at_least_one('max_new_tokens', max_new_tokens), row_ids=row_ids, eos_ids=eos_ids, **sampling)
  tokens_BL = integer_array('tokens_BL', tokens_BL, ndim=2)
  length_B = integer_array('length_B', length_B, ndim=1)
  if isinstance(spec.target, TransformerTarget):
    warn_unless_entered(mesh_of(params.target))
    require_valid_batch(spec.target.config, tokens_BL, length_B, options)
  prompts = tokens_BL.astype(np.int32), length_B.astype(np.int32)
  arguments, static = prepare(params, *prompts, spec=spec, sampling=Sampling.of(**sampling), **options.limits())
  return run_prefill(*arguments, **static)._replace(max_path=Static(spec.max_path))


def prepare(params: Params, tokens_BL, length_B, *, spec: Spec, max_new_tokens: int, sampling, row_ids, eos_ids):
  """Make the traced arguments of `run_prefill`, and its static ones with sizes in buckets. See `prefill`.

  Of the policy they depend only on the slots that it needs, so most policies share a compiled prefill.
  """
  batch, num_prompt = tokens_BL.shape
  num_new = bucket(max_new_tokens)
  row_id_B = to_device(np.arange(batch) if row_ids is None else row_ids, jnp.int32)
  eos_ids = spec.target.eos_ids if eos_ids is None else eos_ids
  limits = Limits.of(max_new_tokens, eos_ids)
  num_slots = slots_for(num_prompt, num_new, spec.max_path)
  require_memory(spec.target, batch, num_slots)
  static = {'spec': spec.for_prefill(), 'num_slots': num_slots, 'num_new': num_new}
  token_BL, length_B = to_device(tokens_BL, jnp.int32), to_device(length_B, jnp.int32)
  return (params._replace(policy=()), token_BL, length_B, row_id_B, sampling, limits), static


@functools.partial(jax.jit, static_argnames=STATIC)
def run_prefill(
  params: Params,
  tokens_BL,
  length_B,
  row_id_B,
  sampling: Sampling,
  limits: Limits,
  *,
  spec: Spec,
  num_slots: int,
  num_new: int,
) -> DecodeState:
  """Run the jitted part of `prefill`.

  `num_slots` must be enough for prompt, new tokens and one path, as `prepare` makes it: an update slice past the end
  would be clamped and silently overwrite the sequence's own prefix.
  """
  batch, num_prompt = tokens_BL.shape
  empty_cache = spec.target.init_cache(batch, 0)
  taps, entries = spec.target.forward(params.target, tokens_BL, *behind(empty_cache, num_prompt), empty_cache)
  newest = take_nodes(taps, (length_B - 1)[:, None])
  logits_VB = spec.target.logits(params.target, newest)[..., 0]
  no_child_B1 = jnp.full((batch, 1), NO_TOKEN)
  in_axes = (1, 0, sampling.vmap_axes(), 0, 0)
  root_B = jax.vmap(spec.chooser.choose, in_axes)(logits_VB, no_child_B1, sampling, row_id_B, length_B)

  next_BL = jnp.roll(tokens_BL, -1, axis=1).at[jnp.arange(batch), length_B - 1].set(root_B, mode='clip')
  one_B = jnp.ones(batch, jnp.int32)
  return DecodeState(
    cache=fill(entries, length_B, num_slots=num_slots),
    drafter=spec.drafter.start(params.drafter, next_BL, taps, length_B, num_slots, tokens_BL[:, 0]),
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
