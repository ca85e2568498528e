"""Train a drafter on the target's own answers, in a loop that resumes bit for bit after being killed at any moment."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import require_recorded, with_features
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.processes import on_main
from eagle_jax.sharding import mesh_of, num_devices, param_shardings, put, require_whole_share, use_mesh
from eagle_jax.train.checkpoint import Checkpoints, run_lock, settle_settings
from eagle_jax.train.configuration import DRAFTERS
from eagle_jax.train.data import batches, frequent_ids, place
from eagle_jax.train.flops import step_flops
from eagle_jax.train.reached import mark_reached, require_first
from eagle_jax.train.report import BEST_BY, Meter, Outcome, Reports, evaluate_all, traced_taus
from eagle_jax.train.step import Frozen, Objective, Recipe, TrainState, train_step

NUM_SCALED = 1024  # examples, at most, that tell how large features are

log = logging.getLogger('eagle_jax')


def train(
  target: Target,
  config: Any,
  examples: Sequence[Example],
  held_out: Sequence[Example],
  recipe: Recipe,
  folder: Path,
  *,
  initial: Drafter | None = None,
  ids: np.ndarray | None = None,
  origin: Mapping[str, Any] | None = None,
  provenance: Mapping[str, Any] | None = None,
  report_every: int = 100,
  num_traced: int = 0,
  progress: bool = False,
) -> dict[str, float]:
  """Train a drafter, or resume the run in this folder; the best one so far is kept in `folder/drafter`.

  The best has the highest `chain_tau` of held-out answers. Weights to begin with are measured, too, as step 0.

  Args:
    target: frozen; on a mesh, the drafter is trained there: batch rows over 'data', matrices over 'model'.
    config: of the drafter: a `DrafterConfig`, `EagleTapsConfig`, `BlockConfig`, `Eagle3Config` or `MedusaConfig`.
    examples, held_out: the target's answers, for training and for metrics, with the taps that the drafter reads.
    recipe: optimizer and losses.
    folder: for checkpoints, metrics and the drafter.
    initial: weights to begin with, which a second stage needs; None for fresh ones.
    ids: [U] i32, the ids to draft; None: those of `initial`, if it has as many, else the most frequent of the answers.
    origin: what else decides the run, such as where its examples come from; of strings, numbers and dicts.
    provenance: goes into the drafter's folder, with step and metrics.
    report_every: steps between two evaluations with a checkpoint each; a kill loses no more than these.
    num_traced: held-out examples whose answers each evaluation decodes anew, for `traced_taus`.
    progress: show a bar.

  Returns:
    Held-out metrics of the best step: those of `evaluate_all`, and of `traced_taus` if anything is traced.

  Raises:
    ValueError: the folder is in use by another process, holds a run of another drafter, recipe or origin, or no whole
      checkpoint; there is nothing to learn from or to hold out; examples hold other taps; a second stage reaches
      nothing; training diverged; or as `require_ready`.
  """
  setup = _set_up(target, config, examples, held_out, recipe, initial=initial, ids=ids)
  outcome = Outcome(config, setup.vocabulary, folder / 'drafter', provenance or {})
  with run_lock(folder), use_mesh(setup.mesh), Checkpoints(folder / 'checkpoints', best_by=BEST_BY) as checkpoints:
    told = settings(config, recipe) | dict(origin or {}) | setup.ids_hash
    first = _first_state(setup, initial)
    state = _resume(first, checkpoints, folder / 'settings.json', told)
    if recipe.second_stage:
      drafter, num_steps = outcome.drafter(first.params), recipe.objective.num_steps
      reached = mark_reached(target, drafter, examples, folder, num_steps=num_steps, progress=progress)
      setup = dataclasses.replace(setup, examples=reached)
    measure = _held_out_metrics(setup, target, held_out, outcome, num_traced)
    with Meter(recipe, setup.flops_per_device, first=int(state.step), progress=progress) as meter:
      first_step = 0 if checkpoints.is_empty else int(state.step) + 1
      reports = Reports(folder, first_step, meter, measure, checkpoints, outcome)
      if checkpoints.is_empty and initial is not None:
        reports.judge(0, state)
      state = _run_steps(setup, state, meter, reports, report_every)
    best, metrics = checkpoints.restore_best(state)
    if best is not None:  # else the drafter stays as it was exported with the checkpoint
      outcome.save(best, metrics)  # again: a run killed between checkpoint and export has an older one
  return metrics


@dataclasses.dataclass(frozen=True)
class _Setup:
  """The arguments of a run, checked before anything is written, and what follows from them."""

  config: Any  # of the drafter
  recipe: Recipe
  examples: Sequence[Example]
  mesh: Mesh | None
  ids: np.ndarray | None  # [U] i32, the ids to draft if they were known before; see `require_ready`
  frozen: Frozen
  vocabulary: dict[str, jax.Array]  # see `frozen_inputs`
  taps: tuple[int, ...]  # layers of the target that the drafter reads
  reader: TransformerTarget | None  # computes features in the step; None where they are stored

  def network(self, dtype: str) -> Any:
    return kind_of(self.config).network(self.config, jnp.dtype(dtype))

  @property
  def static(self) -> dict[str, Any]:
    """The static arguments of `train_step` and `evaluate`."""
    return {'network': self.network(self.recipe.dtype), 'recipe': self.recipe, 'target': self.reader}

  @property
  def ids_hash(self) -> dict[str, str]:
    """The entry of the run's settings for ids that were known before; empty if there were none."""
    return {} if self.ids is None else {'ids': hashlib.sha256(self.ids.astype('<i4').tobytes()).hexdigest()}

  @property
  def flops_per_device(self) -> float:
    """FLOPs of a step on each device."""
    reader = None if self.reader is None else self.reader.config
    num_ids = self.frozen.head.shape[0]
    return step_flops(self.config, self.recipe, num_ids=num_ids, reader=reader) / num_devices(self.mesh)


def _set_up(
  target: Target,
  config: Any,
  examples: Sequence[Example],
  held_out: Sequence[Example],
  recipe: Recipe,
  *,
  initial: Drafter | None,
  ids: np.ndarray | None,
) -> _Setup:
  """Check the arguments of `train` against each other, and take what is needed of the target."""
  ids = require_ready(target, config, recipe, initial=initial, ids=ids)
  _require_lessons(examples, held_out, recipe)
  taps = require_recorded(target, config, [*examples, *held_out], may_lack=True)
  frozen, vocabulary = frozen_inputs(target, config, examples, objective=recipe.objective, ids=ids)
  reader = None if examples[0].feature.shape[1] else TransformerTarget(target.config, frozen.embed.dtype, taps)
  return _Setup(config, recipe, examples, mesh_of(target.params), ids, frozen, vocabulary, taps, reader)


def require_ready(
  target: Target, config: Any, recipe: Recipe, *, initial: Drafter | None, ids: np.ndarray | None
) -> np.ndarray | None:
  """Check the arguments of `train` that are there before any answers; return the ids to draft, [U] i32, if known.

  Raises:
    ValueError: the weights to begin with are quantised; a second stage has none; the mesh does not divide the recipe's
      rows; a head of its own is to draft other ids than it has learned; the draft vocabulary is too small; or as
      `require_trainable`.
  """
  if initial is not None:
    initial.require_exact()
  require_first(recipe, initial)
  require_whole_share('num_rows', recipe.num_rows, mesh_of(target.params))
  known = _learned_ids(config, initial, ids)
  require_trainable(config, recipe.objective)
  if known is None and config.draft_vocab_size is not None:
    _forced_ids(target, config)
  return known


def _first_state(setup: _Setup, initial: Drafter | None) -> TrainState:
  """Return the state before the first step: with the weights of `initial`, if any."""
  network, seed = setup.network('float32'), setup.recipe.seed
  params = initial.params if initial else initial_params(network, setup.frozen, setup.examples, seed)
  own = jax.eval_shape(network.init_params, jax.random.key(0))  # without the draft vocabulary
  return begin({name: params[name] for name in own}, setup.recipe, setup.mesh)


def _resume(state: TrainState, checkpoints: Checkpoints, path: Path, given: dict[str, Any]) -> TrainState:
  """Return the state of the newest checkpoint, or the given one if there is none; the settings must be the run's."""
  if checkpoints.is_empty:  # as good as not begun: one that failed may be tried with other settings
    on_main(path.unlink, missing_ok=True)
  settle_settings(path, given)
  return state if checkpoints.is_empty else checkpoints.restore(state)


def _held_out_metrics(
  setup: _Setup, target: Target, held_out: Sequence[Example], outcome: Outcome, num_traced: int
) -> Callable[[TrainState], dict[str, float]]:
  """Return a function from a state to its held-out metrics: `evaluate_all`'s, and `traced_taus` of `num_traced`."""
  static = setup.static
  some = held_out[:: max(1, len(held_out) // max(num_traced, 1))][:num_traced]  # of all kinds
  traced = with_features(target, some, setup.taps)

  def measure(state: TrainState) -> dict[str, float]:
    metrics = evaluate_all(state.params, setup.frozen, held_out, setup.mesh, **static)
    return metrics | (traced_taus(target, outcome.drafter(state.params), traced) if traced else {})

  return measure


def _run_steps(setup: _Setup, state: TrainState, meter: Meter, reports: Reports, report_every: int) -> TrainState:
  """Take the steps that are left, and report every `report_every` steps and after the last one."""
  recipe, static, first = setup.recipe, setup.static, int(state.step)
  sizes = {'num_rows': recipe.num_rows, 'num_places': recipe.num_places}
  stream = batches(setup.examples, **sizes, seed=recipe.seed, prompt_weight=recipe.prompt_weight, first=first)
  for step in range(first + 1, recipe.num_steps + 1):
    packed = next(stream)
    state, train_metrics = train_step(state, setup.frozen, place(packed, setup.mesh), **static)
    meter.count(packed)
    if step % report_every == 0 or step == recipe.num_steps:
      reports.report(step, state, train_metrics)
  return state


def _require_lessons(examples: Sequence[Example], held_out: Sequence[Example], recipe: Recipe) -> None:
  """Raise a ValueError if there is nothing to train on or to hold out; warn if some answers do not fit.

  Prompts may be trained on; held-out metrics are of answers alone.
  """
  for name, some, prompt_weight in (('train on', examples, recipe.prompt_weight), ('hold out', held_out, 0)):
    is_answer = [one.is_answer[2:] for one in some]
    count, kept = (sum(int(row[:end].sum()) for row in is_answer) for end in (None, recipe.num_places - 1))
    if not some or not (kept or prompt_weight):
      raise ValueError(
        f'Of {len(some)} texts to {name}, {count} tokens are answers, none of them among the first '
        f'{recipe.num_places}, num_places: give more text, or longer rows.'
      )
    if kept < count:
      log.warning(
        '%d of %d answer tokens to %s lie beyond num_places, %d', count - kept, count, name, recipe.num_places
      )


def require_trainable(config: Any, objective: Objective) -> None:
  """Raise a ValueError unless a drafter of this config can be trained, and learns from this objective.

  A head that predicts no features cannot learn them, all of Medusa's heads must learn, and an embedding of its own
  stands still.
  """
  if type(config) not in DRAFTERS:
    raise ValueError(
      f'A drafter with a {type(config).__name__} cannot be trained: give it one of '
      f'{", ".join(one.__name__ for one in DRAFTERS)}.'
    )
  if getattr(config, 'own_embedding', False):
    raise ValueError(
      f'Drafter {config.name!r} has own_embedding=True, and training reads the embedding of the target: set '
      'own_embedding=False, and begin with a drafter that has none of its own.'
    )
  kind, title = kind_of(config), kind_of(config).title
  shapes = jax.eval_shape(kind.network(config, jnp.float32).init_params, jax.random.key(0))
  if objective.regression and 'head' in shapes:
    raise ValueError(
      f'Objective: regression is {objective.regression}, and a drafter of kind {title} with a head of its own predicts '
      'no features: set regression=0.'
    )
  if kind.is_one_pass and objective.num_steps != config.max_depth:
    raise ValueError(
      f'Objective: num_steps must be {config.max_depth}, the heads of this drafter of kind {title}, got '
      f'{objective.num_steps}.'
    )


def settings(config: Any, recipe: Recipe) -> dict[str, Any]:
  """Return all settings of a run by dotted names."""
  fields = {'drafter': dataclasses.asdict(config), 'recipe': dataclasses.asdict(recipe)}
  for name, usual in getattr(config, 'PLAIN', {}).items():
    if fields['drafter'][name] == usual:  # older folders say none
      del fields['drafter'][name]
  fields['objective'] = fields['recipe'].pop('objective')
  if not recipe.second_stage:
    del fields['recipe']['second_stage']  # older folders say none
  return {f'{part}.{name}': value for part, values in fields.items() for name, value in values.items()}


def frozen_inputs(
  target: Target,
  config: Any,
  examples: Sequence[Example],
  *,
  objective: Objective = Objective(),  # noqa: B008 frozen
  ids: np.ndarray | None = None,
) -> tuple[Frozen, dict[str, jax.Array]]:
  """Return what training reads of the target, and the draft vocabulary: `ids`, or nothing if every id is drafted.

  Without `ids` the vocabulary is that of the most frequent ids of the answers.
  """
  embed_VD, vocab_size = target.params['embed']['weight'], config.vocab_size
  reader = () if examples[0].feature.shape[1] else target.params
  whole: Any = _for_logits(target, target.head_VD) if objective.looks_outside or config.draft_vocab_size is None else ()
  if config.draft_vocab_size is None:
    return Frozen(embed_VD, whole, jnp.arange(vocab_size), reader, whole if objective.looks_outside else ()), {}
  ids_U = ids
  if ids_U is None:
    forced = _forced_ids(target, config)
    ids_U = frequent_ids(examples, size=config.draft_vocab_size, vocab_size=vocab_size, forced=forced)
  index_V = np.full(vocab_size, -1, np.int32)
  index_V[ids_U] = np.arange(len(ids_U))
  head_UD = _for_logits(target, target.head_of(ids_U))
  return Frozen(embed_VD, head_UD, jnp.asarray(index_V), reader, whole), {'ids': jnp.asarray(ids_U)}


def _forced_ids(target: Target, config: Any) -> list[int]:
  """Return the ids that every draft vocabulary of the target holds; raise a ValueError if there is no room for them."""
  forced = sorted({*target.config.eos_ids, *(target.tokenizer.essential_ids if target.tokenizer else ())})
  if len(forced) > config.draft_vocab_size:
    raise ValueError(
      f'draft_vocab_size is {config.draft_vocab_size}, and every vocabulary for {target.config.name!r} holds '
      f'{len(forced)} ids, special tokens and digits: raise it, or name the ids with --vocabulary.'
    )
  return forced


def _for_logits(target: Target, head_UD: Any) -> Any:
  """Return the head that gives the target's logits, which some targets divide by a number."""
  divisor = target.config.logit_divisor
  return head_UD if divisor == 1 else jax.tree.map(lambda x: (x / divisor).astype(x.dtype), head_UD)


def _learned_ids(config: Any, initial: Drafter | None, ids: np.ndarray | None) -> np.ndarray | None:
  """Return the ids to draft, if they are known: those given, or those that the first weights have learned.

  Raises:
    ValueError: a head of its own would have to draft ids that it has not learned.
  """
  if initial is None:
    return ids
  learned = initial.params.get('ids')
  own = None if learned is None or len(learned) != config.draft_vocab_size else np.asarray(learned, np.int32)
  is_same = initial.config.num_ids == config.num_ids and (ids is None or (own is not None and np.array_equal(own, ids)))
  if initial.has_own_head and not is_same:
    raise ValueError(
      f'Drafter {initial.config.name!r} has a head of its own for {initial.config.num_ids} ids: train on with those, '
      'or begin with none.'
    )
  return own if ids is None else ids


def initial_params(network: Any, frozen: Frozen, examples: Sequence[Example], seed: int) -> dict[str, Any]:
  """Initialise float32 weights at random, around what is known: the next feature resembles the last one.

  Heads of its own begin as the target's, if they are as wide, and the rest of EAGLE-3 at random. Medusa's blocks begin
  without effect, and so do further layers of EAGLE-2. Its `fc` hands on half the feature, the first layer's branches
  start small, and embedding and feature are scaled to weigh the same: features are several times larger (17 times in
  SmolLM2-135M), and left alone the token would hardly count. Normed features that are not at hand are taken to have
  size 1; of many, some are asked.
  """
  params = jax.jit(network.init_params)(jax.random.key(seed))
  if 'head' in params:
    shape = params['head']['weight'].shape  # perhaps of several
    if shape[-2:] == frozen.head.shape:
      params['head'] = {'weight': jnp.broadcast_to(frozen.head.astype(jnp.float32), shape)}
    return params
  if kind_of(network.config).is_one_pass:
    return params
  embed_rms, width = jnp.sqrt(jnp.square(frozen.embed.astype(jnp.float32)).mean()), network.config.width
  some = [example.feature[:, :width] for example in examples[:: 1 + len(examples) // NUM_SCALED]]
  squares = [np.square(feature.astype(np.float32)).mean() for feature in some if feature.size]
  feature_rms = jnp.float32(np.sqrt(np.mean(squares))) if squares else jnp.float32(1)
  embedding_columns, feature_columns = jnp.split(params['fc']['weight'], 2, axis=1)
  params['fc']['weight'] = jnp.concatenate(
    [0.3 * embedding_columns / embed_rms, 0.3 * feature_columns / feature_rms + 0.5 * jnp.eye(width)],
    axis=1,
  )
  params['layer']['attn']['o']['weight'] *= 0.1
  params['layer']['mlp']['down']['weight'] *= 0.1
  return params


def begin(params: dict[str, Any], recipe: Recipe, mesh: Mesh | None) -> TrainState:
  """Return the state before the first step, placed on the mesh."""
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)  # a copy: the state is donated
  state = TrainState(params, recipe.optimizer().init(params), jnp.int32(0))
  return state if mesh is None else jax.tree.map(put, state, param_shardings(state, mesh))
