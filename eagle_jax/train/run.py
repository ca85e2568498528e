"""Run a whole training, from a configuration to a drafter: answers, training, provenance; or a dry run of it."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.config import DrafterConfig, TargetConfig, require_match
from eagle_jax.device import ran_on
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import kind_of
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import choose_taps
from eagle_jax.files import differences
from eagle_jax.hub import load_drafter, load_target, read_target_config
from eagle_jax.models.transformer import Target, TransformerTarget
from eagle_jax.processes import on_main, true_everywhere
from eagle_jax.progress import progress_bar
from eagle_jax.sharding import param_sharding, param_shardings, require_whole_share, use_mesh
from eagle_jax.train.checkpoint import run_lock, settle_settings
from eagle_jax.train.configuration import require_data
from eagle_jax.train.conversations import read_conversations
from eagle_jax.train.data import Packed, batch_shardings, read_vocabulary
from eagle_jax.train.loop import require_ready, require_trainable, train
from eagle_jax.train.reached import require_first
from eagle_jax.train.shards import Data, make_conversations, make_shards, read_shard, require_answerable, shard_path
from eagle_jax.train.step import Frozen, TrainState, train_step

log = logging.getLogger('eagle_jax')

_SETTINGS = 'settings.json'
MAX_HELD_OUT = 64  # conversations of each kind of data


def run(
  config: Mapping[str, Any],
  out: Path,
  *,
  shards: Path,
  prompts: str | None,
  initial: str | None = None,
  vocabulary: str | None = None,
  mesh: Mesh | None = None,
  report_every: int = 100,
  command: str = '',
) -> dict[str, float]:
  """Make the shards that are missing, then train, or resume the run in this folder.

  Args:
    config: TARGET (a name or path), DRAFTER, DATA (a `Data` for each folder of shards) and RECIPE; perhaps NUM_TRACED,
      held-out examples for the tree's tau. See `read_configuration`.
    out: run folder; of several processes, one that all of them see.
    shards: folder of the shards, which variants share that are of one dtype. Where some are missing, only one run at a
      time may use it.
    prompts: file of conversations; None lets the target ask itself.
    initial: drafter to begin with, a shipped name or a folder; None for a fresh one.
    vocabulary: file of the ids to draft, see `data.read_vocabulary`; None: see `loop.train`.
    mesh: where to run; None for a single device.
    report_every: steps between two evaluations, with a checkpoint each.
    command: for the provenance.

  Returns:
    Held-out metrics of the best step; see `loop.train`.

  Raises:
    ValueError: a DRAFTER for another TARGET, features stored for some DATA alone, a name in DATA that is not a plain
      folder name, too few conversations, a folder with another run in it or in use by one, an `initial` that is not
      what DRAFTER describes, a vocabulary that does not fit it; or as `train`. What can be known without answers is
      checked before the target gives any.
  """
  require_data(config['DATA'])
  require_first(config['RECIPE'], initial)
  require_trainable(config['DRAFTER'], config['RECIPE'].objective)
  ids = read_vocabulary(vocabulary, config['DRAFTER']) if vocabulary else None
  prompts_hash = hashlib.sha256(Path(prompts).read_bytes()).hexdigest() if prompts else None
  with run_lock(out):
    target = load_target(config['TARGET'], dtype=config['RECIPE'].dtype, mesh=mesh)
    require_match(config['DRAFTER'], target.config)
    first = first_weights(initial, target, config['DRAFTER']) if initial else None
    require_ready(target, config['DRAFTER'], config['RECIPE'], initial=first, ids=ids)
    is_made = true_everywhere(_is_made(shards, config['DATA']))
    with contextlib.nullcontext() if is_made else run_lock(shards):
      data = _gather(target, config, shards, prompts, prompts_hash)
    origin: dict[str, Any] = {'initial': initial, 'data': {name: repr(kind) for name, kind in config['DATA'].items()}}
    # Told only where prompts coincide: a run that began to train on them is not resumed with other batches unawares.
    origin |= {'num_withheld': data.num_withheld} if data.num_withheld else {}
    if any(data.not_used.values()):
      log.warning('Conversations left out or ended early, by reason: %s', json.dumps(data.not_used))
    return train(
      target,
      config['DRAFTER'],
      data.examples,
      data.held_out,
      config['RECIPE'],
      out,
      initial=first,
      ids=ids,
      origin=origin,
      provenance={'command': command, 'prompts_sha256': prompts_hash, **origin, **_provenance(config, data, mesh)},
      report_every=report_every,
      num_traced=config.get('NUM_TRACED', 16),
      progress=True,
    )


def first_weights(name: str, target: Target, config: Any) -> Drafter:
  """Load the drafter that training begins with: as DRAFTER describes, or an EAGLE-2 head that it adds to.

  Taps, slots, further layers and GRIFFIN's block have no effect yet on the tokens that are drafted first.

  Raises:
    ValueError: it is of another kind, has other sizes, or an embedding of its own.
  """
  drafter = load_drafter(name, target, dtype='float32')
  if getattr(drafter.config, 'own_embedding', False):
    raise ValueError(
      f'Drafter {name!r} has an embedding of its own, and training reads the one of the target: begin with another '
      '--initial or with none.'
    )
  ours, needed = kind_of(drafter.config), kind_of(config)
  free = {'name': config.name, 'draft_vocab_size': config.draft_vocab_size}
  is_plain = type(drafter.config) is DrafterConfig and drafter.config.is_plain
  if is_plain and isinstance(config, DrafterConfig):
    own = {name: x for name, x in vars(drafter.config).items() if name not in DrafterConfig.PLAIN}
    extended = type(config)(**vars(config) | own)
    drafter = Drafter(extended, needed.network(extended).extend(drafter.params, jax.random.key(0)))
  elif ours is not needed:
    raise ValueError(f'Drafter {name!r} is of kind {ours.title}; training begins with {needed.title}, or with none.')
  if wrong := differences(dataclasses.asdict(drafter.config) | free, dataclasses.asdict(config)):
    raise ValueError(
      f'Drafter {name!r} is not what DRAFTER describes: {wrong}. Give DRAFTER the values of the drafter, or begin with '
      'another --initial or with none.'
    )
  return drafter


class _Gathered(NamedTuple):
  """The examples of all kinds of data of a configuration."""

  examples: list[Example]
  held_out: list[Example]  # the last few of each kind
  not_used: dict[str, dict[str, int]]  # conversations refused or ended early, by kind and reason
  num_withheld: int = 0  # examples that are not trained on, since their prompt is held out


def _gather(
  target: Target, config: Mapping[str, Any], folder: Path, prompts: str | None, prompts_hash: str | None
) -> _Gathered:
  """Make the shards that are missing, one folder for each kind of data, and read them all."""
  gathered, num_layers = _Gathered([], [], {}), target.config.num_layers
  wanted = config['DRAFTER'].tapped_layers(num_layers)
  all_data = {name: with_taps(name, data, wanted, num_layers=num_layers) for name, data in config['DATA'].items()}
  for data in all_data.values():
    require_answerable(target, data, makes_prompts=not prompts)
  for name, data in all_data.items():  # before the first is answered
    settings = dataclasses.replace(data, num_shards=1)  # more shards may be added
    origin = {'target': config['TARGET'], 'prompts': prompts_hash, 'data': repr(settings)}
    origin |= {} if target.dtype == jnp.float32 else {'dtype': str(target.dtype)}  # older folders say none
    origin |= {'taps': [*data.taps]} if data.taps and data.stores_features else {}
    on_main(_forget_what_was_not_begun, folder / name)
    settle_settings(folder / name / _SETTINGS, origin)
  for name, data in all_data.items():
    own, refused = folder / name, collections.Counter[str]()
    source = read_conversations(prompts, refused) if prompts else make_conversations(target, own, data, refused)
    shards = make_shards(target, source, own, data, refused)
    paths = progress_bar(shards, total=data.num_shards, desc=f'shards: {name}', unit='shard')
    examples = [
      one._replace(feature=choose_taps(one.feature, data.taps, wanted)) if data.stores_features else one
      for path in paths
      for one in read_shard(path)
    ]
    num_held_out = max(1, min(MAX_HELD_OUT, len(examples) // 10))
    gathered.examples.extend(examples[:-num_held_out])
    gathered.held_out.extend(examples[-num_held_out:])
    gathered.not_used[name] = dict(refused)
  examples = _withhold(gathered.examples, gathered.held_out)
  return gathered._replace(examples=examples, num_withheld=len(gathered.examples) - len(examples))


def _withhold(examples: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
  """Leave out the examples whose first prompt is held out: kinds of data may read the same conversations."""

  def prompt(example: Example) -> bytes:
    return example.token[: np.argmax(example.is_answer)].tobytes()

  prompts = {prompt(example) for example in held_out}
  return [example for example in examples if prompt(example) not in prompts]


def with_taps(name: str, data: Data, wanted: tuple[int, ...], *, num_layers: int) -> Any:
  """Return the data with the layers that are stored: those it names, or else those that the drafter taps.

  Raises:
    ValueError: the drafter taps others, or the target has fewer.
  """
  stored = wanted if data.taps is None else data.taps
  if not all(0 <= layer <= num_layers for layer in stored):
    raise ValueError(f'DATA {name!r} stores the inputs of layers {stored}, and the target has {num_layers} layers.')
  if data.stores_features and not {*wanted} <= {*stored}:
    raise ValueError(
      f'DATA {name!r} stores the inputs of layers {stored}, and DRAFTER reads those of {wanted}: name all of them in '
      'Data(taps=...).'
    )
  return dataclasses.replace(data, taps=stored)


def _is_made(folder: Path, all_data: Mapping[str, Data]) -> bool:
  """Return whether no shard is missing."""
  paths = (shard_path(folder / name, number) for name, data in all_data.items() for number in range(data.num_shards))
  return all(path.exists() for path in paths)


def _forget_what_was_not_begun(folder: Path) -> None:
  """Remove the settings of a folder that holds nothing else, so that it may be made with others."""
  if [*folder.glob('*')] == [folder / _SETTINGS]:
    (folder / _SETTINGS).unlink()


def _provenance(config: Mapping[str, Any], data: _Gathered, mesh: Mesh | None) -> dict[str, Any]:
  """Return what a drafter was made with."""
  return {
    'commit': _commit(),
    'target': config['TARGET'],
    'recipe': repr(config['RECIPE']),
    'num_examples': len(data.examples),
    'num_answer_tokens': int(sum(example.is_answer.sum() for example in data.examples)),
    'not_used': data.not_used,
    **ran_on(mesh),
  }


def _commit() -> str | None:
  """Return the commit of the checkout that this code is in; None if it is in none."""
  command = ['git', '-C', str(Path(__file__).parent), 'rev-parse', 'HEAD']
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


def dry_run(config: Mapping[str, Any], mesh: Mesh) -> dict[str, int]:
  """Compile the training step from shapes alone, and return the memory it would take; no weights are allocated.

  Args:
    config: as for `run`; TARGET may also be a `TargetConfig`, and without DATA features are computed in the step.
    mesh: of the devices to compile for.

  Returns:
    Bytes a device: `arguments` (parameters, optimizer, batch), `temporaries`, `total`; `num_devices`; and
    `stored_per_token`, the bytes of features and taps that the shards hold for each token, of the DATA with the most.
  """
  target_config, drafter_config, recipe = config['TARGET'], config['DRAFTER'], config['RECIPE']
  if not isinstance(target_config, TargetConfig):
    target_config = read_target_config(target_config)
  require_match(drafter_config, target_config)
  require_trainable(drafter_config, recipe.objective)
  require_whole_share('num_rows', recipe.num_rows, mesh)
  dtype, num_layers = jnp.dtype(recipe.dtype), target_config.num_layers
  taps, data = drafter_config.tapped_layers(num_layers), config.get('DATA', {}).items()
  all_data = [with_taps(name, one, taps, num_layers=num_layers) for name, one in data]
  widths = [target_config.width * (1 + len(one.taps)) for one in all_data if one.stores_features]
  is_stored = bool(widths)
  num_stored = target_config.width * (1 + len(taps)) if is_stored else 0
  reader = TransformerTarget(target_config, dtype, taps)
  shapes = jax.eval_shape(functools.partial(_step_arguments, config, reader, num_stored))
  placed = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, _shardings(shapes, mesh)
  )
  network = kind_of(drafter_config).network(drafter_config, dtype)
  with use_mesh(mesh):
    static: dict[str, Any] = {'network': network, 'recipe': recipe, 'target': None if is_stored else reader}
    compiled = train_step.lower(*placed, **static).compile()
  memory: Any = compiled.memory_analysis()
  total = (
    memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  )
  return {
    'num_devices': mesh.size,
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'total': total,
    'stored_per_token': 2 * max(widths, default=0),
  }


def _step_arguments(
  config: Mapping[str, Any], reader: TransformerTarget, num_stored: int
) -> tuple[TrainState, Frozen, Packed]:
  """Make what `train_step` takes, of zeros and random weights; only its shapes are of use.

  Args:
    config: as for `dry_run`.
    reader: the target's network.
    num_stored: features and taps that are stored for each token; 0: they are computed in the step.
  """
  drafter, recipe = config['DRAFTER'], config['RECIPE']
  params = kind_of(drafter).network(drafter, jnp.float32).init_params(jax.random.key(0))
  state = TrainState(params, recipe.optimizer().init(params), jnp.int32(0))
  target = reader.init_params(jax.random.key(0))
  head_UD = jnp.zeros((drafter.num_ids, reader.config.width), reader.dtype)
  row_of_V = jnp.zeros(reader.config.vocab_size, jnp.int32)
  whole = target.get('head', target['embed'])['weight'] if recipe.objective.looks_outside else ()
  frozen = Frozen(target['embed']['weight'], head_UD, row_of_V, () if num_stored else target, whole)
  places = jnp.zeros((recipe.num_rows, recipe.num_places), jnp.int32)
  feature = jnp.zeros((*places.shape, num_stored), jnp.bfloat16)
  num_reached = places if recipe.second_stage else None
  return state, frozen, Packed(places, places, places, places, places, places.astype(jnp.float32), feature, num_reached)


def _shardings(arguments: tuple[TrainState, Frozen, Packed], mesh: Mesh) -> tuple[Any, Any, Any]:
  """Return the sharding of each array that `train_step` takes."""
  state, frozen, packed = arguments
  names = [name for name in ('embed', 'head', 'whole_head') if getattr(frozen, name) != ()]
  matrices = {name: param_sharding([name, 'weight'], getattr(frozen, name).shape, mesh) for name in names}
  frozen_shardings = param_shardings(frozen, mesh)._replace(**matrices)
  return param_shardings(state, mesh), frozen_shardings, batch_shardings(packed, mesh)
