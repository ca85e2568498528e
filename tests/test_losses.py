"""The parts of the training loss: values against loops over ids, gradients against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.train import losses
from eagle_jax.train.data import Packed
from eagle_jax.train.rollout import chain_weights, expected_length_weights
from eagle_jax.train.step import Heads, Objective, Rows, distill

NUM_IDS, NUM_PLACES = 7, 3
RNG = np.random.default_rng(0)
LOG_P, LOG_Q = (jax.nn.log_softmax(jnp.float32(RNG.normal(size=(NUM_IDS, NUM_PLACES)) * 1.5), axis=0) for _ in range(2))
NOISE = jnp.float32(RNG.gumbel(size=(NUM_IDS, NUM_PLACES)))
MASS = jnp.float32([[1.0, 0.8, 0.3]])
PLACES = losses.Places(LOG_P, LOG_Q, MASS, NOISE)
OBJECTIVE = Objective(top_k=2)


def by_loop(name: str, place: int) -> float:
  """The loss at one place, by its definition."""
  log_p, log_q, noise = (np.float64(x)[:, place] for x in (LOG_P, LOG_Q, NOISE))
  p, q, mass = np.exp(log_p), np.exp(log_q), float(MASS[0, place])
  variation = 1 - sum(min(mass * p[i], q[i]) for i in range(NUM_IDS))
  if name == 'cross_entropy':
    return -sum(p * log_q)
  if name == 'top_k_cross_entropy':
    return -sum(p[i] * log_q[i] for i in sorted(range(NUM_IDS), key=lambda i: -p[i])[:2])
  if name == 'total_variation':
    return variation
  if name == 'lk_hybrid':
    share = np.exp(-3 * (1 - variation))
    return share * sum(p * (log_p - log_q)) + (1 - share) * variation
  assert name == 'perturbed_cross_entropy'
  drawn = max(range(NUM_IDS), key=lambda i: log_p[i] + noise[i])
  return np.log(sum(np.exp(log_q + noise))) - (log_q + noise)[drawn]


@pytest.mark.parametrize('name', losses.PARTS)
def test_a_part_is_what_its_definition_says(name):
  found = losses.PARTS[name](PLACES, OBJECTIVE)
  np.testing.assert_allclose(found, [by_loop(name, place) for place in range(NUM_PLACES)], rtol=1e-5)


@pytest.mark.parametrize('name', losses.PARTS)
def test_the_gradient_of_a_part_is_that_of_finite_differences(name):
  """By the drafter's logits; the share of lk_hybrid is held fixed, as its gradient stops there."""
  logits_UR = LOG_Q + jnp.float32(RNG.normal(size=(1, NUM_PLACES)))
  share_R = jnp.exp(-3 * (1 - losses.total_variation(jnp.exp(LOG_P) * MASS, LOG_Q)))

  def total(logits_UR, is_fixed=False):
    places = PLACES._replace(log_q_UR=jax.nn.log_softmax(logits_UR, axis=0))
    if is_fixed and name == 'lk_hybrid':
      divergence_R = losses.cross_entropy(places.log_q_UR, jnp.exp(LOG_P))
      variation_R = losses.PARTS['total_variation'](places, OBJECTIVE)
      return (share_R * divergence_R + (1 - share_R) * variation_R).sum()
    return losses.PARTS[name](places, OBJECTIVE).sum()

  found = jax.grad(total)(logits_UR)
  assert np.abs(found).max() > 0.01
  step = 1e-2
  for i in range(NUM_IDS):
    for place in range(NUM_PLACES):
      up, down = (total(logits_UR.at[i, place].add(sign * step), is_fixed=True) for sign in (1, -1))
      np.testing.assert_allclose(found[i, place], (up - down) / (2 * step), atol=2e-3)


def test_an_objective_weighs_parts_by_name():
  objective = Objective(regression=0.0, cross_entropy=0.5, lk_hybrid=2.0)
  expected = 0.5 * losses.PARTS['cross_entropy'](PLACES, objective) + 2 * losses.PARTS['lk_hybrid'](PLACES, objective)
  np.testing.assert_allclose(losses.weigh_parts(objective, PLACES), expected, rtol=1e-6)
  for name in losses.PARTS:
    with pytest.raises(ValueError, match=f"'{name}': -1"):
      Objective(**{name: -1})
  with pytest.raises(ValueError, match='nothing is learned'):
    Objective(regression=0.0, cross_entropy=0.0)


def test_the_noise_term_is_least_where_the_drafter_is_the_target():
  """On average over noise: its gradient by the drafter's logits vanishes at q = p, and nowhere near."""
  noise_UR = jnp.float32(np.random.default_rng(1).gumbel(size=(NUM_IDS, 40_000)))
  log_p_UR = jnp.broadcast_to(LOG_P[:, :1], noise_UR.shape)

  def mean(log_q_U):
    log_q_UR = jnp.broadcast_to(log_q_U[:, None], noise_UR.shape)
    return losses.perturbed_cross_entropy(log_p_UR, log_q_UR, noise_UR).mean()

  values = [float(mean(LOG_P[:, 0] + shift * jnp.arange(NUM_IDS, dtype=jnp.float32))) for shift in (-0.3, 0.0, 0.3)]
  assert values[1] < min(values[0], values[2]) - 0.01


def heads_and_rows(num_ids: int, seed: int | None = None):
  """Heads over the first ids of nine, and places whose features are random."""
  rng = np.random.default_rng(5)
  whole_VD = jnp.float32(rng.normal(size=(9, 4)))
  row_of = jnp.where(jnp.arange(9) < num_ids, jnp.arange(9), -1)
  out_DdBL, target_DBL = (jnp.float32(rng.normal(size=shape)) for shape in ((4, 2, 1, 6), (4, 1, 6)))
  seed_BL = None if seed is None else jnp.arange(seed, seed + 6, dtype=jnp.int32)[None]
  rows = Rows(target_DBL, jnp.int32(rng.integers(-1, num_ids, (1, 6))), seed_BL)
  return Heads(whole_VD[:num_ids], whole_VD[:num_ids], row_of, whole_VD), out_DdBL, rows


def test_what_lies_outside_the_draft_vocabulary_is_lost_or_left_out():
  heads, out_DdBL, rows = heads_and_rows(5)
  objective = Objective(regression=0.0, cross_entropy=0.0, total_variation=1.0)
  p_VR = jax.nn.softmax(heads.whole @ rows.target[:, 0], axis=0)
  mass_R = p_VR[:5].sum(axis=0)
  q_UR = jax.nn.softmax(heads.drafter @ out_DdBL[:, 1, 0], axis=0)
  for counts, scale_1R in ((False, 1 / mass_R[None]), (True, jnp.ones((1, 6)))):
    loss_dBL, distilled = distill(Objective(**{**vars(objective), 'counts_lost_mass': counts}), heads, out_DdBL, rows)
    expected = 1 - jnp.minimum(p_VR[:5] * scale_1R, q_UR).sum(axis=0)
    np.testing.assert_allclose(loss_dBL[1, 0], expected, rtol=1e-5, atol=1e-6)
    assert distilled.is_known.all()
  _, distilled = distill(Objective(**{**vars(objective), 'skips_unknown': True}), heads, out_DdBL, rows)
  is_known = jnp.argmax(p_VR, axis=0) < 5
  assert 0 < is_known.sum() < 6
  np.testing.assert_array_equal(distilled.is_known[1, 0], is_known)


def test_places_have_noise_of_their_own_which_all_steps_share():
  objective = Objective(regression=0.0, cross_entropy=0.0, perturbed_cross_entropy=1.0)
  heads, out_DdBL, rows = heads_and_rows(9, seed=3)
  same_DdBL = jnp.repeat(out_DdBL[:, :1, :, :1], 2, axis=1).repeat(6, axis=3)  # one output, one target, everywhere
  loss_dBL = distill(objective, heads, same_DdBL, rows._replace(target=rows.target[..., :1].repeat(6, axis=2)))[0]
  assert len(np.unique(loss_dBL[0])) == 6
  np.testing.assert_array_equal(loss_dBL[0], loss_dBL[1])


@pytest.mark.parametrize('is_frozen', [True, False])
def test_a_head_learns_unless_it_is_frozen(is_frozen):
  heads, out_DdBL, rows = heads_and_rows(5)
  weight_dBL = jnp.float32(np.random.default_rng(2).uniform(size=(2, 1, 6)))

  def total(head_UD, out_DdBL, function):
    return (function(heads._replace(drafter=head_UD), out_DdBL, rows)[0] * weight_dBL).sum()

  def plain(heads, out_DdBL, rows):
    return distill(Objective(), heads, out_DdBL, rows)

  chunked = losses.by_chunks(plain, 3, is_frozen=is_frozen)
  np.testing.assert_allclose(total(heads.drafter, out_DdBL, chunked), total(heads.drafter, out_DdBL, plain), rtol=1e-5)
  by = (1,) if is_frozen else (0, 1)
  found, expected = (jax.grad(total, argnums=by)(heads.drafter, out_DdBL, f) for f in (chunked, plain))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_steps_weigh_what_the_expected_length_of_a_chain_owes_them():
  """Of a text of five places in a row of six, against a loop over chains."""
  weight_BL = np.array([[0, 1, 1, 1, 1, 0]], np.float32)
  zeros = np.zeros((1, 6), np.int32)
  packed = Packed(zeros, zeros, zeros, zeros, np.array([[0, 0, 0, 0, 0, 1]]), weight_BL, None)
  counted = chain_weights(packed, 3)
  q = np.random.default_rng(3).uniform(size=(3, 1, 6))
  found = expected_length_weights(jnp.float32(q), counted, floor=0.5)
  for start in range(1, 5):
    smooth = [0.5 * q[step, 0, start + step] + 0.5 for step in range(3) if start + step < 5]
    for step in range(len(smooth)):
      owed = sum(np.prod(smooth[: end + 1]) for end in range(step, len(smooth)))
      np.testing.assert_allclose(found[step, 0, start + step], owed / 2, rtol=1e-5)
