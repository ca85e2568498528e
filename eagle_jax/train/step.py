"""The training step of an EAGLE-1/2 head: one pure jitted function."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from eagle_jax.draft.eagle import Eagle
from eagle_jax.target.layers import head_logits
from eagle_jax.train import losses
from eagle_jax.train.data import Packed


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a drafter is trained. Static in the step."""

  num_steps: int
  num_rows: int = 1024  # packed rows a step
  learning_rate: float = 1e-3  # at its peak
  warmup_steps: int = 100
  regression_weight: float = 1.0
  cross_entropy_weight: float = 1.0
  feature_noise: float = 0.1  # half-width of the uniform noise on input features
  seed: int = 0

  def optimizer(self) -> optax.GradientTransformation:
    warmup = min(self.warmup_steps, self.num_steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, self.num_steps)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01))


class TrainState(NamedTuple):
  """What training changes."""

  params: Any  # the drafter's `fc` and `layer`
  optimizer: Any
  step: jax.Array  # [] i32


class Frozen(NamedTuple):
  """What training reads: the target's embedding, and the head rows of the ids that the loss looks at."""

  embed: jax.Array  # [V, D]
  head: jax.Array  # [U, D]


def predict(params, frozen: Frozen, feature_DL: jax.Array, packed: Packed, *, network: Eagle) -> jax.Array:
  """[D, L]: the drafter's outputs, which stand in for the next features, over packed sequences."""
  is_same_LL = packed.sequence[:, None] == packed.sequence[None, :]
  mask_LL = jnp.tri(len(packed.sequence), dtype=bool) & is_same_LL
  state = network.init(1, len(packed.sequence))
  out_D1L, _ = network.forward(
    {**params, 'embed': frozen.embed},
    packed.next_token[None],
    feature_DL[:, None],
    packed.position[None],
    mask_LL[None],
    state.cache.length,
    state.cache,
  )
  return out_D1L[:, 0]


def loss_and_metrics(params, frozen: Frozen, packed: Packed, key: jax.Array, *, network: Eagle, recipe: Recipe):
  """The weighted sum of losses, and what it is made of, with the share of rows whose best ids agree (`top1`)."""
  feature_DL, next_DL = (x.astype(jnp.float32).T for x in (packed.feature, packed.next_feature))
  noise_DL = jax.random.uniform(key, feature_DL.shape, minval=-recipe.feature_noise, maxval=recipe.feature_noise)
  out_DL = predict(params, frozen, feature_DL + noise_DL, packed, network=network)
  logits_UL, target_UL = head_logits(frozen.head, out_DL), head_logits(frozen.head, next_DL)
  agree_L = (jnp.argmax(logits_UL, axis=0) == jnp.argmax(target_UL, axis=0)).astype(jnp.float32)
  metrics = {
    'regression': losses.smooth_l1(out_DL, next_DL, packed.weight),
    'cross_entropy': losses.soft_cross_entropy(logits_UL, target_UL, packed.weight),
    'top1': losses.weighted_mean(agree_L, packed.weight),
  }
  loss = recipe.regression_weight * metrics['regression'] + recipe.cross_entropy_weight * metrics['cross_entropy']
  return loss, metrics


@functools.partial(jax.jit, static_argnames=('network', 'recipe'), donate_argnames='state')
def train_step(
  state: TrainState, frozen: Frozen, packed: Packed, *, network: Eagle, recipe: Recipe
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One step of the optimizer on one packed row. `state` is donated."""
  key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
  gradient_of = jax.grad(loss_and_metrics, has_aux=True)
  gradient, metrics = gradient_of(state.params, frozen, packed, key, network=network, recipe=recipe)
  with jax.numpy_dtype_promotion('standard'):  # optax mixes dtypes
    updates, optimizer = recipe.optimizer().update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
  return TrainState(params, optimizer, state.step + 1), metrics


@functools.partial(jax.jit, static_argnames='network')
def evaluate(params, frozen: Frozen, packed: Packed, *, network: Eagle) -> dict[str, jax.Array]:
  """Metrics without noise."""
  recipe = Recipe(num_steps=1, feature_noise=0.0)
  return loss_and_metrics(params, frozen, packed, jax.random.key(0), network=network, recipe=recipe)[1]
