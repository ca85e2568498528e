"""Run the drafter over whole texts, step after step on its own outputs, as in drafting.

Step 1 reads the target's features and taps. At step s place t reads, instead of f_t, the output of place t - 1 at step
s - 1: the feature that a chain drafted from place t - s + 1 would have there. Places keep their tokens, positions and
targets at every step (HASS, arXiv:2408.15766). Of heads that draft all depths in one pass, a step is a head.
"""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.draft.kinds import kind_of
from eagle_jax.draft.medusa import Medusa
from eagle_jax.kernels.attention import MASK_VALUE, compute_scores, weighted_values
from eagle_jax.models.layers import AttentionFn
from eagle_jax.models.transformer import Taps
from eagle_jax.train.data import Packed


def causal_mask(sequence_BL: jax.Array, *, age: int = 0, window: int | None = None) -> jax.Array:
  """Return [B, L, L] bool: whether the second place is of the same text and at least `age` places before the first.

  With a window, it must also be among the last `window` places up to the first, as the places of a text are contiguous.
  """
  num_places = sequence_BL.shape[1]
  is_same_BLL = sequence_BL[:, :, None] == sequence_BL[:, None, :]
  is_before_LL = jnp.tri(num_places, k=-age, dtype=bool)
  if window is not None:
    is_before_LL &= ~jnp.tri(num_places, k=-window, dtype=bool)
  return is_same_BLL & is_before_LL[None]


def multistep_attention(
  memory: tuple, sequence_BL: jax.Array, *, window: int | None = None, is_leaky: bool = False
) -> AttentionFn:
  """Return the attention of the step after those in `memory`, over what decoding would have in its cache.

  Place t of step s attends to step 1 up to place t - s + 1, then to one place of each later step: t - s + 2 of step 2,
  ..., itself of step s. So besides the causal scores of step 1 there are s - 1 diagonals, or as many as a window shows.

  Args:
    memory: keys and values [B, G, L, K] of the earlier steps.
    sequence_BL: [B, L] i32, the text that each place belongs to; no text attends to another.
    window: how many places each attends to, itself included; None: all before it.
    is_leaky: masked places stay in the denominator with score 0, as in the trainers released with HASS; for comparison.
  """

  def attend(q_BGJLK, k_BGLK, v_BGLK):
    steps = (*memory, (k_BGLK, v_BGLK))
    (keys_BGLK, values_BGLK), age, num_rows = steps[0], len(memory), sequence_BL.shape[1]
    visible_BLL = causal_mask(sequence_BL, age=age, window=window)
    num_diagonals = age if window is None else min(age, window)
    # Place t - d of step s - d, moved to place t.
    diagonals = [jax.tree.map(lambda x, d=d: jnp.roll(x, d, axis=2), steps[age - d]) for d in range(num_diagonals)]
    hidden = 0.0 if is_leaky and age else MASK_VALUE
    score_BGJLS = jnp.where(visible_BLL[:, None, None], compute_scores(q_BGJLK, keys_BGLK), hidden)
    weight_BGJLS = jax.nn.softmax(jnp.concatenate([score_BGJLS, *(own_scores(q_BGJLK, k) for k, _ in diagonals)], -1))
    if is_leaky:
      seen_BLS = jnp.pad(visible_BLL, ((0, 0), (0, 0), (0, num_diagonals)), constant_values=True)
      weight_BGJLS = jnp.where(seen_BLS[:, None, None], weight_BGJLS, 0)
    out_BGJLK = weighted_values(weight_BGJLS[..., :num_rows], values_BGLK)
    for i, (_, v_BGLK) in enumerate(diagonals):
      own_BGJLK = weight_BGJLS[..., num_rows + i, None] * v_BGLK[:, :, None].astype(jnp.float32)
      out_BGJLK += own_BGJLK.astype(v_BGLK.dtype)
    return out_BGJLK, steps

  return attend


def own_scores(q_BGJLK: jax.Array, k_BGLK: jax.Array) -> jax.Array:
  """Return [B, G, J, L, 1] f32: the score of each place's query with its own key."""
  product_BGJLK = q_BGJLK.astype(jnp.float32) * k_BGLK[:, :, None].astype(jnp.float32)
  return product_BGJLK.sum(axis=-1, keepdims=True) * (q_BGJLK.shape[-1] ** -0.5)


def rollout(
  params: Any,
  taps: Taps,
  packed: Packed,
  *,
  network: Any,
  num_steps: int,
  is_detached: bool = True,
  is_leaky: bool = False,
  remat: bool = False,
) -> jax.Array:
  """Return [D, num_steps, B, L]: the predicted next features of every step.

  Args:
    params: the drafter's, with the target's `embed`.
    taps: the target's features [D, B, L], perhaps with noise, and the inputs of the layers that the drafter taps.
    packed: texts.
    network: the drafter.
    num_steps: 1 is EAGLE; later ones read the drafter's own outputs, or are further heads.
    is_detached: no gradient through the features that a step reads from the one before.
    is_leaky: see `multistep_attention`.
    remat: recompute each step in the backward pass, so that only one step's scores are alive at a time.
  """
  if kind_of(network.config).is_one_pass:
    return heads_by_place(network, params, taps.feature, num_steps)

  how: Any = {'window': network.config.as_layer().window, 'is_leaky': is_leaky}

  def step(params, memories, read_DBL):
    attentions = [multistep_attention(memory, packed.sequence, **how) for memory in memories]
    return network.apply_layers(params, packed.next_token, read_DBL, packed.position, attentions)

  run = jax.checkpoint(step) if remat else step
  outs, memories, read_DBL = [], ((),) * network.num_layers, network.fuse_taps(params, taps)
  for _ in range(num_steps):
    out_DBL, memories = run(params, memories, read_DBL)
    outs.append(out_DBL)
    before_DBL = jnp.roll(jax.lax.stop_gradient(out_DBL) if is_detached else out_DBL, 1, axis=2)
    read_DBL = network.next_feature(params, before_DBL)
  return jnp.stack(outs, axis=1)


def heads_by_place(network: Medusa, params: Any, feature_DBL: jax.Array, num_heads: int) -> jax.Array:
  """Return [D, d, B, L]: what head d makes of place t - d, which predicts what place t is to."""
  out_DdR = network.read(params, feature_DBL.reshape(len(feature_DBL), -1), num_heads)
  out_dDBL = out_DdR.swapaxes(0, 1).reshape(num_heads, *feature_DBL.shape)
  return jnp.stack([jnp.roll(out_DBL, head, axis=2) for head, out_DBL in enumerate(out_dDBL)], axis=1)


def chain_weights(packed: Packed, num_steps: int) -> jax.Array:
  """Return [d, B, L] f32, the weight of each place at each of `num_steps` steps.

  It is the place's own if its chain began at a place of the same text with a weight above 0, else 0. In a second stage
  it is also 0 where decoding does not begin a chain, or does not get so far along it; see `train.reached`.
  """
  weight_BL, steps = packed.weight, []
  for age in range(num_steps):
    is_same_BL = packed.sequence == jnp.roll(packed.sequence, age, axis=1)
    is_later_1L = jnp.arange(packed.sequence.shape[1])[None] >= age
    counts_BL = is_same_BL & is_later_1L & (jnp.roll(weight_BL, age, axis=1) > 0)
    if packed.num_reached is not None:
      counts_BL &= jnp.roll(packed.num_reached, age, axis=1) >= age
    steps.append(jnp.where(counts_BL, weight_BL, 0))
  return jnp.stack(steps)


def expected_length_weights(q_dBL: jax.Array, counted_dBL: jax.Array, *, floor: float) -> jax.Array:
  """Return [d, B, L] f32, how much the expected length of the chain through each place depends on it, 1 on average.

  With s = (1 - floor) q + floor, step k of a chain weighs the sum over j >= k of s_1 ... s_j: the gradient of the
  expected accepted length by log s_k. Divided by a fixed number, what it is where all of a text is certain. Source:
  D-PACE, arXiv:2605.18810.

  Args:
    q_dBL: the drafter's probability of the text's own token at each step.
    counted_dBL: `chain_weights`; a chain ends where they do.
    floor: keeps places that are hard today from being given up.
  """
  num_steps = len(q_dBL)
  by_chain = jnp.stack([jnp.roll(x_BL, -age, axis=1) for age, x_BL in enumerate((1 - floor) * q_dBL + floor)])
  is_counted = jnp.stack([jnp.roll(x_BL, -age, axis=1) for age, x_BL in enumerate(counted_dBL)]) > 0
  reached = jnp.where(is_counted, jnp.cumprod(by_chain, axis=0), 0)
  weight = jnp.cumsum(reached[::-1], axis=0)[::-1] * (2 / (num_steps + 1))
  return jnp.stack([jnp.roll(x_BL, age, axis=1) for age, x_BL in enumerate(weight)])


def prefix_correct(is_hit_dBL: jax.Array) -> jax.Array:
  """Return [d, B, L] bool: whether the chain that ends at step s of a place followed the text at every earlier step.

  Decoding gets to depth s only along accepted nodes (GRIFFIN, arXiv:2502.11018).

  Args:
    is_hit_dBL: whether the text's own token was among the drafter's best at each step.
  """
  reach_BL, steps = jnp.ones_like(is_hit_dBL[0]), []
  for is_hit_BL in is_hit_dBL:
    steps.append(reach_BL)
    reach_BL = jnp.roll(reach_BL & is_hit_BL, 1, axis=1)
  return jnp.stack(steps)
