"""The training step of an EAGLE head of any kind: one pure jitted function and its parts."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.kinds import kind_of
from eagle_jax.evaluate.features import split_taps
from eagle_jax.models.layers import apply_head
from eagle_jax.models.transformer import Taps, TransformerTarget
from eagle_jax.sampling import position_noise
from eagle_jax.sharding import constrain, param_shardings
from eagle_jax.train import losses
from eagle_jax.train.data import Packed
from eagle_jax.train.rollout import causal_mask, chain_weights, expected_length_weights, prefix_correct, rollout

NUM_CHAIN = 6  # steps of the chain whose agreement evaluation follows


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of a drafter, as weights of its parts.

  The defaults are EAGLE's two terms, which the reference (`eagle/train/main.py`) weighs 1 and 0.1; each field beyond
  them is another paper's.
  """

  regression: float = 1.0  # weight of the Huber loss to the target's features
  cross_entropy: float = 1.0  # weight of the soft cross-entropy to the target's distribution
  top_k: int = 10
  top_k_cross_entropy: float = 0.0  # weight of the same over the target's k best tokens alone (HASS, arXiv:2408.15766)
  total_variation: float = 0.0  # weights of other parts, see `losses.PARTS`
  lk_hybrid: float = 0.0
  perturbed_cross_entropy: float = 0.0
  lk_decay: float = 3.0
  counts_lost_mass: bool = False  # the target's probability outside the draft vocabulary is lost to the two LK parts
  skips_unknown: bool = False  # places whose likeliest token is outside do not count, as in EAGLE-3's trainers
  num_steps: int = 1  # steps on the drafter's own features (HASS; EAGLE-3's training-time test)
  step_decay: float = 1.0  # weight of each step relative to the one before
  length_floor: float | None = None  # weigh steps by `rollout.expected_length_weights` besides (D-PACE)
  is_detached: bool = True  # no gradient through the features handed from step to step
  reachable_top: int = 0  # a chain counts while the text is among the drafter's best so many (GRIFFIN); 0: always
  is_leaky: bool = False  # see `rollout.multistep_attention`; for comparison only

  def __post_init__(self):
    least = dict.fromkeys(('regression', *losses.PARTS, 'step_decay', 'reachable_top', 'lk_decay'), 0)
    least |= {'top_k': 1, 'num_steps': 1} | ({} if self.length_floor is None else {'length_floor': 0})
    if below := {name: bound for name, bound in least.items() if not getattr(self, name) >= bound}:
      given = {name: getattr(self, name) for name in below}
      raise ValueError(f'Objective: got {given}; at least {below} is needed.')
    if not self.regression + sum(getattr(self, name) for name in losses.PARTS) > 0:
      raise ValueError('Objective: all weights are 0, so nothing is learned; at least one must be positive.')

  @property
  def looks_outside(self) -> bool:
    """Whether the target's whole head is needed, at the cost of its logits of every place."""
    return self.counts_lost_mass or self.skips_unknown


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The batches, the objective and the optimizer of a training run; static in the step."""

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
  feature_noise: float = 0.1  # half-width of the uniform noise on features; taps, which EAGLE-3 reads, have none
  remat: bool = False  # recompute the layer in the backward pass: less memory, more time
  dtype: str = 'float32'  # of the target, and of the layer's work; its parameters, scores and losses are float32
  chunk_places: int = 256  # places a row whose logits exist at one time; divides num_places, or is no smaller
  second_stage: bool = False  # train on the places alone that decoding with the first weights reaches: `train.reached`
  seed: int = 0

  def __post_init__(self):
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'Recipe: seed is {self.seed}; a number from 0 to 2**31 - 1 is needed.')
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
    if self.objective.num_steps > self.num_places:
      raise ValueError(
        f'Recipe: num_places is {self.num_places}, and objective.num_steps {self.objective.num_steps}: a chain would '
        'be longer than a row.'
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
  """The arrays that a training step changes."""

  params: Any  # the drafter's own, as of its network's `init_params`, float32
  optimizer: Any
  step: jax.Array  # [] i32, steps done


class Frozen(NamedTuple):
  """The arrays of the target that a training step reads."""

  embed: jax.Array  # [V, D], the target's
  head: jax.Array  # [U, D], the target's rows of the ids that the loss looks at
  row_of: jax.Array  # [V] i32, which of those rows an id has; -1 for none
  target: Any  # the target's parameters where features are computed in the step, else ()
  whole_head: Any = ()  # [V, D], the target's, where an objective looks outside the draft vocabulary


def target_taps(frozen: Frozen, packed: Packed, target: TransformerTarget | None) -> Taps:
  """Return arrays [D, B, L]: the stored features and taps, or those of a pass of `target` over the packed texts."""
  if target is None:
    return split_taps(packed.feature, frozen.embed.shape[1])
  cache, mask_BLL = target.init_cache(packed.token.shape[0], 0), causal_mask(packed.sequence)
  return target.forward(frozen.target, packed.token, packed.position, mask_BLL, cache)[0]


class Rows(NamedTuple):
  """The values that the drafter's outputs are compared with, at each place."""

  target: jax.Array  # [D, B, L], the features to be predicted
  label: jax.Array  # [B, L] i32, the text's own token, as an index into the head's rows; -1 if it has none
  seed: jax.Array | None = None  # [B, L] i32, of the noise that the target draws with, if a part of the loss needs it


class Heads(NamedTuple):
  """The heads that turn the rows of `Rows` and the drafter's outputs into logits."""

  target: jax.Array  # [U, D]
  drafter: jax.Array  # [U, D], the target's for kinds that borrow it; [d, U, D] where each step has its own
  row_of: jax.Array  # [V] i32; see `Frozen`
  whole: Any = ()  # [V, D], the target's, or ()


class Ranks(NamedTuple):
  """Ranks of tokens among the drafter's logits, 0 for the largest."""

  best: jax.Array  # [d, B, L] i32, of the target's likeliest token among the drafted ids
  label: jax.Array  # [d, B, L] i32, of the text's own token


class Distilled(NamedTuple):
  """Measurements beside the loss, at each step and place."""

  cross_entropy: jax.Array  # [d, B, L] f32, the plain one
  ranks: Ranks
  label_q: jax.Array  # [d, B, L] f32, the drafter's probability of the text's own token
  is_known: jax.Array  # [d, B, L] bool, whether the place counts; see `Objective.skips_unknown`


def distill(objective: Objective, heads: Heads, out_DdBL: jax.Array, rows: Rows) -> tuple[jax.Array, Distilled]:
  """Return, for each place, the weighted sum of the parts of the loss, [d, B, L] f32, and what is `Distilled`.

  With a draft vocabulary the target's distribution is renormalised over its ids, at every place; EAGLE-3's trainers
  leave out places whose best id is another one (`eagle/traineagle3/cnets.py` of the reference).
  """
  width, num_steps, *shape = out_DdBL.shape
  feature_DR = rows.target.reshape(rows.target.shape[0], -1).astype(heads.target.dtype)
  score_UR = apply_head(heads.target, feature_DR)
  log_p_UR = jax.nn.log_softmax(score_UR, axis=0)
  mass_1R, is_known_R = _known(objective, heads, feature_DR, score_UR)
  noise_UR = None if rows.seed is None else _noise(rows.seed.reshape(-1), len(score_UR))
  best_R, label_R = jnp.argmax(log_p_UR, axis=0).astype(jnp.int32), rows.label.reshape(-1)
  steps = []
  for step in range(num_steps):
    head_UD = heads.drafter[step] if heads.drafter.ndim == 3 else heads.drafter
    logits_UR = apply_head(head_UD, out_DdBL[:, step].reshape(width, -1))
    log_q_UR = jax.nn.log_softmax(logits_UR, axis=0)
    loss_R = losses.weigh_parts(objective, losses.Places(log_p_UR, log_q_UR, mass_1R, noise_UR))
    plain_R = losses.cross_entropy(log_q_UR, jnp.exp(log_p_UR))
    ranks = losses.rank_of(logits_UR, best_R), losses.rank_of(logits_UR, label_R)
    log_q_R = jnp.take_along_axis(log_q_UR, jnp.maximum(label_R, 0)[None], axis=0)[0]
    steps.append((loss_R, plain_R, *ranks, jnp.where(label_R < 0, 0, jnp.exp(log_q_R)), is_known_R))
  loss, plain, best, label, q, is_known = (jnp.stack(x).reshape(num_steps, *shape) for x in zip(*steps, strict=True))
  return loss, Distilled(plain, Ranks(best, label), q, is_known)


def _known(objective: Objective, heads: Heads, feature_DR: jax.Array, score_UR: jax.Array) -> tuple[Any, jax.Array]:
  """Return the target's probability of the draft vocabulary, or 1 if that is not asked for; and [R] bool."""
  mass_1R: Any = 1.0
  is_known_R = jnp.ones(score_UR.shape[1:], bool)
  if objective.looks_outside:
    score_VR = apply_head(heads.whole, feature_DR)
    if objective.counts_lost_mass:
      of_U, of_V = (jax.nn.logsumexp(score, axis=0, keepdims=True) for score in (score_UR, score_VR))
      mass_1R = jnp.exp(of_U - of_V)
    if objective.skips_unknown:
      is_known_R = heads.row_of[jnp.argmax(score_VR, axis=0)] >= 0
  return mass_1R, is_known_R


def _noise(seed_R: jax.Array, num_ids: int) -> jax.Array:
  """Return [U, R] f32, noise as the target adds to its logits at temperature 1, of a seed for each place."""
  zero = jnp.int32(0)
  return jax.vmap(position_noise, in_axes=(0, None, None, None), out_axes=1)(seed_R, zero, zero, jnp.arange(num_ids))


def loss_and_metrics(params, frozen: Frozen, packed: Packed, key, *, network: Eagle, target, recipe: Recipe):
  """Return the loss, [] f32, and metrics of each step s, `NAME_s`, [] f32 each.

  `cross_entropy_s` and `regression_s` are parts of the loss. `top1_s`, `top2_s` and `top3_s` are shares of places where
  the target's likeliest drafted id is among the drafter's best 1, 2 or 3. `chain_s` is the share of places whose chain,
  drafted greedily from step 0 to s, equals the text.
  """
  objective = recipe.objective
  taps = jax.lax.stop_gradient(target_taps(frozen, packed, target))
  read = {**jax.tree.map(lambda x: x.astype(network.dtype), params), 'embed': frozen.embed}
  out_DdBL = roll_out_noisy(read, taps, packed, key, network=network, recipe=recipe)
  rows = rows_of(taps.feature.astype(jnp.float32), frozen, packed, key, objective)
  loss_dBL, distilled = score_by_chunks(read, out_DdBL, frozen, rows, network=network, recipe=recipe)

  means = {'cross_entropy': distilled.cross_entropy}
  if 'head' not in read:
    # Of GRIFFIN's two vectors the second is the feature that the next step reads.
    means['regression'] = losses.regression(out_DdBL[-network.config.width :], rows.target[:, None])
    loss_dBL += objective.regression * means['regression']
  ranks = distilled.ranks
  means['chain'] = prefix_correct(ranks.label == 0) & (ranks.label == 0)
  means |= {f'top{n}': ranks.best < n for n in (1, 2, 3)}

  counted_dBL = chain_weights(packed, objective.num_steps)
  weight_dBL = place_weights(objective, counted_dBL, distilled)
  decay_d = objective.step_decay ** jnp.arange(objective.num_steps, dtype=jnp.float32)
  loss = losses.weighted_mean((loss_dBL * weight_dBL).sum(axis=(1, 2)) / counted_dBL[0].sum().clip(1), decay_d)
  metrics = {
    f'{name}_{step}': losses.weighted_mean(x_dBL[step].astype(jnp.float32), counted_dBL[step])
    for name, x_dBL in means.items()
    for step in range(objective.num_steps)
  }
  return loss, {'loss': loss, **metrics}


def roll_out_noisy(params: Any, taps: Taps, packed: Packed, key, *, network: Eagle, recipe: Recipe) -> jax.Array:
  """Return [D, d, B, L], the drafter's outputs at each step, on features with the recipe's noise."""
  feature_DBL, half = taps.feature.astype(jnp.float32), recipe.feature_noise
  noisy_DBL = feature_DBL + jax.random.uniform(key, feature_DBL.shape, minval=-half, maxval=half)
  out_DdBL = rollout(
    params,
    taps._replace(feature=noisy_DBL.astype(network.dtype)),
    packed,
    network=network,
    num_steps=recipe.objective.num_steps,
    is_detached=recipe.objective.is_detached,
    is_leaky=recipe.objective.is_leaky,
    remat=recipe.remat,
  )
  return constrain(out_DdBL, ('width', None, 'batch', None))


def rows_of(feature_DBL: jax.Array, frozen: Frozen, packed: Packed, key, objective: Objective) -> Rows:
  """Return what each place is to predict: the next feature and the next token of its text."""
  rows = Rows(jnp.roll(feature_DBL, -1, axis=2), jnp.where(packed.label < 0, -1, frozen.row_of[packed.label]))
  if objective.perturbed_cross_entropy:
    rows = rows._replace(seed=jax.random.bits(jax.random.fold_in(key, 1), packed.label.shape).astype(jnp.int32))
  return rows


def score_by_chunks(
  params: Any, out_DdBL: jax.Array, frozen: Frozen, rows: Rows, *, network: Eagle, recipe: Recipe
) -> tuple[jax.Array, Distilled]:
  """Return what `distill` does, of the drafter's outputs at each step, `recipe.chunk_places` of a row at a time."""
  own_head = params['head']['weight'] if 'head' in params else None
  heads = Heads(frozen.head, frozen.head if own_head is None else own_head, frozen.row_of, frozen.whole_head)
  num_chunks = max(1, recipe.num_places // recipe.chunk_places)
  distill_chunks = losses.by_chunks(
    functools.partial(distill, recipe.objective), num_chunks, is_frozen=own_head is None
  )
  scored = [network.pre_head(params, out_DBL.reshape(len(out_DBL), -1)) for out_DBL in jnp.unstack(out_DdBL, axis=1)]
  scored_DdBL = jnp.stack([x_DR.reshape(-1, *rows.label.shape) for x_DR in scored], axis=1)
  return distill_chunks(heads, constrain(scored_DdBL, ('width', None, 'batch', None)), rows)


def place_weights(objective: Objective, counted_dBL: jax.Array, distilled: Distilled) -> jax.Array:
  """Return [d, B, L] f32, how much each place counts in the loss: `counted_dBL`, as the objective changes it."""
  weight_dBL = jnp.where(distilled.is_known, counted_dBL, 0)
  if objective.reachable_top:
    weight_dBL = jnp.where(prefix_correct(distilled.ranks.label < objective.reachable_top), weight_dBL, 0)
  if objective.length_floor is not None:
    weight_dBL *= expected_length_weights(distilled.label_q, counted_dBL, floor=objective.length_floor)
  return weight_dBL


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


def chain_length(config: Any) -> int:
  """Return how many steps of a drafter's chain are evaluated: `NUM_CHAIN`, or as many as it has heads."""
  return min(NUM_CHAIN, config.max_depth) if kind_of(config).is_one_pass else NUM_CHAIN


@functools.partial(jax.jit, static_argnames=('network', 'target', 'recipe'))
def evaluate(
  params, frozen: Frozen, packed: Packed, *, network: Eagle, recipe: Recipe, target: TransformerTarget | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Return the metrics of a batch without noise, for `chain_length` steps, and the number of places behind each."""
  num_steps = chain_length(network.config)
  objective = dataclasses.replace(recipe.objective, num_steps=num_steps, is_leaky=False)
  plain = dataclasses.replace(recipe, objective=objective, feature_noise=0.0)
  metrics = loss_and_metrics(params, frozen, packed, jax.random.key(0), network=network, target=target, recipe=plain)[1]
  weight_d = chain_weights(packed, num_steps).sum(axis=(1, 2))
  return metrics, {name: weight_d[0 if name == 'loss' else int(name.rpartition('_')[2])] for name in metrics}
