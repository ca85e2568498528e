"""The training step of an EAGLE-1/2 head: one pure jitted function and its parts."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from eagle_jax.draft.eagle import Eagle
from eagle_jax.models.layers import apply_head
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.sharding import constrain, param_shardings
from eagle_jax.train import losses
from eagle_jax.train.data import Packed
from eagle_jax.train.rollout import causal_mask, chain_weights, prefix_correct, rollout

NUM_CHAIN = 6  # steps of the chain whose agreement evaluation follows


@dataclasses.dataclass(frozen=True)
class Objective:
  """What the drafter learns. The defaults are EAGLE's two terms, which the reference (`eagle/train/main.py`) weighs 1
  and 0.1; each field beyond them is another paper's.
  """

  regression: float = 1.0  # weight of the Huber loss to the target's features
  cross_entropy: float = 1.0  # weight of the soft cross-entropy to the target's distribution
  top_k: int = 10
  top_k_cross_entropy: float = 0.0  # weight of the same over the target's k best tokens alone (HASS, arXiv:2408.15766)
  num_steps: int = 1  # steps on the drafter's own features (HASS; EAGLE-3's training-time test)
  step_decay: float = 1.0  # weight of each step relative to the one before
  is_detached: bool = True  # no gradient through the features handed from step to step
  reachable_top: int = 0  # a chain counts while the text is among the drafter's best so many (GRIFFIN); 0: always
  is_leaky: bool = False  # see `rollout.multistep_attention`; for comparison only

  def __post_init__(self):
    least = {'regression': 0, 'cross_entropy': 0, 'top_k': 1, 'top_k_cross_entropy': 0, 'num_steps': 1}
    least |= {'step_decay': 0, 'reachable_top': 0}
    if below := {name: bound for name, bound in least.items() if not getattr(self, name) >= bound}:
      given = {name: getattr(self, name) for name in below}
      raise ValueError(f'Objective: got {given}; at least {below} is needed.')
    if not self.regression + self.cross_entropy + self.top_k_cross_entropy > 0:
      raise ValueError('Objective: all weights are 0, so nothing is learned; at least one must be positive.')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a drafter is trained; static in the step."""

  num_steps: int  # batches; an update takes `num_accumulated` of them
  num_rows: int = 4  # packed rows a step: the global batch
  num_places: int = 512  # tokens a packed row
  objective: Objective = Objective()
  learning_rate: float = 1e-3  # at its peak
  warmup_steps: int = 100
  weight_decay: float = 0.01
  clip_norm: float = 0.5
  num_accumulated: int = 1  # gradients averaged before one update
  prompt_weight: float = 0.0  # how much a prompt's tokens count; an answer's count 1
  feature_noise: float = 0.1  # half-width of the uniform noise on input features
  remat: bool = False  # recompute the layer in the backward pass: less memory, more time
  dtype: str = 'float32'  # of the target, and of the layer's work; its parameters, scores and losses are float32
  chunk_places: int = 256  # places a row whose logits exist at one time; divides num_places, or is no smaller
  seed: int = 0

  def __post_init__(self):
    counts = ('num_steps', 'num_rows', 'num_places', 'num_accumulated', 'chunk_places')
    if bad := {name: getattr(self, name) for name in counts if getattr(self, name) < 1}:
      raise ValueError(f'Recipe: these must be at least 1: {bad}.')
    least = ('learning_rate', 'warmup_steps', 'weight_decay', 'prompt_weight', 'feature_noise')
    if bad := {name: getattr(self, name) for name in least if not 0 <= getattr(self, name) < math.inf}:
      raise ValueError(f'Recipe: these must be finite, and at least 0: {bad}.')
    if not self.clip_norm > 0:
      raise ValueError(f'Recipe: clip_norm is {self.clip_norm}; a number above 0 is needed, inf for no clipping.')
    if self.dtype not in ('float32', 'bfloat16'):  # gradients of float16 vanish
      raise ValueError(f"Recipe: dtype is {self.dtype!r}; 'float32' or 'bfloat16' is needed.")
    if self.num_places > self.chunk_places and self.num_places % self.chunk_places:
      raise ValueError(
        f'Recipe: num_places is {self.num_places} and chunk_places {self.chunk_places}; chunk_places must divide '
        'num_places, or be no smaller.'
      )
    if self.num_steps % self.num_accumulated:
      raise ValueError(
        f'Recipe: num_accumulated is {self.num_accumulated}; a divisor of num_steps, {self.num_steps}, is needed: '
        'the last update takes as many batches as the others.'
      )

  def optimizer(self) -> optax.GradientTransformation:
    """Return AdamW with warm-up, cosine decay and clipping by norm, on mean gradients; its schedule counts updates."""
    num_updates = self.num_steps // self.num_accumulated
    warmup = min(self.warmup_steps // self.num_accumulated, num_updates // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, num_updates)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=self.weight_decay)
    chain = optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)
    if self.num_accumulated == 1:
      return chain
    return optax.MultiSteps(chain, self.num_accumulated).gradient_transformation()


class TrainState(NamedTuple):
  """What a training step changes."""

  params: Any  # the drafter's `fc` and `layer`, float32
  optimizer: Any
  step: jax.Array  # [] i32, steps done


class Frozen(NamedTuple):
  """What a training step reads."""

  embed: jax.Array  # [V, D], the target's
  head: jax.Array  # [U, D], the target's rows of the ids that the loss looks at
  row_of: jax.Array  # [V] i32, which of those rows an id has; -1 for none
  target: Any  # the target's parameters where features are computed in the step, else ()


def target_features(frozen: Frozen, packed: Packed, target: TransformerTarget | None) -> jax.Array:
  """Return [D, B, L]: the stored features, or those of a pass of `target` over the packed texts."""
  if target is None:
    return packed.feature.transpose(2, 0, 1)
  cache, mask_BLL = target.init_cache(packed.token.shape[0], 0), causal_mask(packed.sequence)
  return target.forward(frozen.target, packed.token, packed.position, mask_BLL, cache)[0].feature


class Rows(NamedTuple):
  """What the losses compare the drafter's outputs with, at each place."""

  target: jax.Array  # [D, B, L], the features to be predicted
  label: jax.Array  # [B, L] i32, the text's own token, as an index into the head's rows; -1 if it has none


class Ranks(NamedTuple):
  """How many ids the drafter ranks above ..."""

  best: jax.Array  # [d, B, L] i32, ... the target's favourite among them
  label: jax.Array  # [d, B, L] i32, ... the text's own token


def distill(objective: Objective, head_UD: jax.Array, out_DdBL: jax.Array, rows: Rows):
  """Return, for each place, the weighted sum of cross-entropies [d, B, L], and (the plain cross-entropy, `Ranks`).

  With a draft vocabulary the target's distribution is renormalised over its ids, at every place; EAGLE-3's trainers
  leave out places whose best id is another one (`eagle/traineagle3/cnets.py` of the reference).
  """
  width, num_steps, *shape = out_DdBL.shape
  p_UR = jax.nn.softmax(apply_head(head_UD, rows.target.reshape(width, -1).astype(head_UD.dtype)), axis=0)
  weight_UR = objective.cross_entropy * p_UR
  if objective.top_k_cross_entropy:
    weight_UR += objective.top_k_cross_entropy * losses.top_k_of(p_UR, objective.top_k)
  best_R, label_R = jnp.argmax(p_UR, axis=0).astype(jnp.int32), rows.label.reshape(-1)
  steps = []
  for step in range(num_steps):
    logits_UR = apply_head(head_UD, out_DdBL[:, step].reshape(width, -1))
    log_q_UR = jax.nn.log_softmax(logits_UR, axis=0)
    loss_R, plain_R = losses.cross_entropy(log_q_UR, weight_UR), losses.cross_entropy(log_q_UR, p_UR)
    steps.append((loss_R, plain_R, losses.rank_of(logits_UR, best_R), losses.rank_of(logits_UR, label_R)))
  loss, plain, best, label = (jnp.stack(x).reshape(num_steps, *shape) for x in zip(*steps, strict=True))
  return loss, (plain, Ranks(best, label))


def loss_and_metrics(params, frozen: Frozen, packed: Packed, key, *, network: Eagle, target, recipe: Recipe):
  """Return the loss and metrics of each step s: `cross_entropy_s`, `regression_s`, `top1_s` (agreement with the
  target's best of the drafted ids), ...

  `chain_s` is the share of places whose chain, drafted greedily from step 0 to s, equals the text.
  """
  objective = recipe.objective
  feature_DBL = jax.lax.stop_gradient(target_features(frozen, packed, target)).astype(jnp.float32)
  next_DBL = jnp.roll(feature_DBL, -1, axis=2)
  half = recipe.feature_noise
  noisy_DBL = feature_DBL + jax.random.uniform(key, feature_DBL.shape, minval=-half, maxval=half)
  read = {**jax.tree.map(lambda x: x.astype(network.dtype), params), 'embed': frozen.embed}
  out_DdBL = rollout(
    read,
    noisy_DBL.astype(network.dtype),
    packed,
    network=network,
    num_steps=objective.num_steps,
    is_detached=objective.is_detached,
    is_leaky=objective.is_leaky,
    remat=recipe.remat,
  )
  out_DdBL = constrain(out_DdBL, ('width', None, 'batch', None))

  rows = Rows(next_DBL, jnp.where(packed.label < 0, -1, frozen.row_of[packed.label]))
  by_rows = losses.by_chunks(functools.partial(distill, objective), max(1, recipe.num_places // recipe.chunk_places))
  entropy_dBL, (plain_dBL, ranks) = by_rows(frozen.head, out_DdBL, rows)
  regression_dBL = losses.regression(out_DdBL, next_DBL[:, None])

  counted_dBL = weight_dBL = chain_weights(packed, objective.num_steps)
  is_followed_dBL = prefix_correct(ranks.label == 0)
  if objective.reachable_top:
    weight_dBL = jnp.where(prefix_correct(ranks.label < objective.reachable_top), counted_dBL, 0)
  decay_d = objective.step_decay ** jnp.arange(objective.num_steps, dtype=jnp.float32)
  row_dBL = objective.regression * regression_dBL + entropy_dBL
  loss = losses.weighted_mean((row_dBL * weight_dBL).sum(axis=(1, 2)) / weight_dBL[0].sum().clip(1), decay_d)

  means = {
    'cross_entropy': plain_dBL,
    'regression': regression_dBL,
    'chain': is_followed_dBL & (ranks.label == 0),
  } | {f'top{n}': ranks.best < n for n in (1, 2, 3)}
  metrics = {
    f'{name}_{step}': losses.weighted_mean(x_dBL[step].astype(jnp.float32), counted_dBL[step])
    for name, x_dBL in means.items()
    for step in range(objective.num_steps)
  }
  return loss, {'loss': loss, **metrics}


@functools.partial(jax.jit, static_argnames=('network', 'target', 'recipe'), donate_argnames='state')
def train_step(
  state: TrainState,
  frozen: Frozen,
  packed: Packed,
  *,
  network: Eagle,
  recipe: Recipe,
  target: TransformerTarget | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Take one optimizer step on one batch. `state` is donated.

  Args:
    state: of the step before.
    frozen: what is read.
    packed: the batch.
    network: the drafter.
    recipe: losses and optimizer.
    target: computes the features; None where they are stored.

  Returns:
    The next state, and metrics of the batch, [] f32 each; see `loss_and_metrics`.
  """
  key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
  gradient_of = jax.grad(loss_and_metrics, has_aux=True)
  gradient, metrics = gradient_of(state.params, frozen, packed, key, network=network, target=target, recipe=recipe)
  with jax.numpy_dtype_promotion('standard'):  # optax mixes dtypes
    updates, optimizer = recipe.optimizer().update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
  after = TrainState(params, optimizer, state.step + 1)
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:  # what a step returns lies as what it took, so one program runs them all
    after = jax.lax.with_sharding_constraint(after, param_shardings(after, mesh))
  return after, metrics | {'gradient_norm': optax.tree.norm(gradient)}


@functools.partial(jax.jit, static_argnames=('network', 'target', 'recipe'))
def evaluate(
  params, frozen: Frozen, packed: Packed, *, network: Eagle, recipe: Recipe, target: TransformerTarget | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Return the metrics of a batch without noise, for `NUM_CHAIN` steps, and the number of places behind each."""
  objective = dataclasses.replace(recipe.objective, num_steps=NUM_CHAIN, is_leaky=False)
  plain = dataclasses.replace(recipe, objective=objective, feature_noise=0.0)
  metrics = loss_and_metrics(params, frozen, packed, jax.random.key(0), network=network, target=target, recipe=plain)[1]
  weight_d = chain_weights(packed, NUM_CHAIN).sum(axis=(1, 2))
  return metrics, {name: weight_d[0 if name == 'loss' else int(name.rpartition('_')[2])] for name in metrics}
