"""Training a drafter from the target's own answers: the smallest loop that ends in a useful one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import DrafterConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.target.transformer import Target
from eagle_jax.train.data import epochs, frequent_ids
from eagle_jax.train.features import Example
from eagle_jax.train.step import Frozen, Recipe, TrainState, evaluate, train_step


def train(
  target: Target,
  config: DrafterConfig,
  examples: Sequence[Example],
  held_out: Sequence[Example],
  recipe: Recipe,
  *,
  report: Callable[[int, Drafter, dict[str, float]], None],
  report_every: int,
) -> tuple[Drafter, dict[str, float]]:
  """Trains a fresh drafter.

  Args:
    target: frozen.
    config: of the drafter.
    examples, held_out: the target's answers, for training and for metrics.
    recipe: optimizer and losses.
    report: called with (step, drafter so far, metrics) every `report_every` steps and at the end.

  Returns:
    The drafter and its last metrics: of a training row (`train_`) and held-out, over the ids it drafts.
  """
  network = Eagle(config)
  embed_VD = target.params['embed']['weight']
  params = init_params(network, embed_VD, examples, seed=recipe.seed)
  state = TrainState(params, recipe.optimizer().init(params), jnp.int32(0))
  head_VD = target.params.get('head', target.params['embed'])['weight']
  num_ids, forced = config.draft_vocab_size or config.vocab_size, target.config.eos_ids
  ids_U = frequent_ids(examples, size=num_ids, vocab_size=config.vocab_size, forced=forced)
  frozen = Frozen(embed_VD, head_VD[ids_U])
  vocabulary = {} if config.draft_vocab_size is None else {'ids': jnp.asarray(ids_U)}
  metrics: dict[str, float] = {}
  for step, packed in zip(
    range(1, recipe.num_steps + 1), epochs(examples, num_rows=recipe.num_rows, seed=recipe.seed), strict=False
  ):
    state, train_metrics = train_step(state, frozen, packed, network=network, recipe=recipe)
    if step % report_every == 0 or step == recipe.num_steps:
      metrics = {f'train_{name}': float(value) for name, value in train_metrics.items()}
      metrics |= _held_out(state.params, frozen, held_out, network, recipe)
      report(step, Drafter(config, state.params | vocabulary), metrics)
  return Drafter(config, state.params | vocabulary), metrics


def init_params(network: Eagle, embed_VD: jax.Array, examples: Sequence[Example], *, seed: int):
  """Random weights that start from what is known: the next feature resembles the last one.

  `fc` hands on half the feature, the layer's branches start small, and embedding and feature are scaled to weigh the
  same: features are several times larger (17 times in SmolLM2-135M), and left alone the token would hardly count.
  """
  params = jax.jit(network.init_params)(jax.random.key(seed))
  embed_rms = jnp.sqrt(jnp.square(embed_VD.astype(jnp.float32)).mean())
  feature_rms = jnp.float32(np.sqrt(np.mean([np.square(e.feature.astype(np.float32)).mean() for e in examples])))
  width = network.config.width
  embedding_columns, feature_columns = jnp.split(params['fc']['weight'], 2, axis=1)
  params['fc']['weight'] = jnp.concatenate(
    [0.3 * embedding_columns / embed_rms, 0.3 * feature_columns / feature_rms + 0.5 * jnp.eye(width)], axis=1
  )
  params['layer']['attn']['o']['weight'] *= 0.1
  params['layer']['mlp']['down']['weight'] *= 0.1
  return params


def _held_out(params, frozen: Frozen, held_out, network: Eagle, recipe: Recipe) -> dict[str, float]:
  """Means over one pass, by rows that count."""
  rows = epochs(held_out, num_rows=recipe.num_rows, seed=0)
  total: dict[str, float] = {}
  count, seen = 0.0, 0
  while seen < len(held_out):
    packed = next(rows)
    weight = float(packed.weight.sum())
    for name, value in evaluate(params, frozen, packed, network=network).items():
      total[name] = total.get(name, 0.0) + float(value) * weight
    count, seen = count + weight, seen + int(packed.sequence.max()) + 1
  return {name: value / max(count, 1.0) for name, value in total.items()}
