"""The registry of drafter kinds: what each is made of, by its config."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.config import BlockConfig, DrafterConfig, Eagle3Config, EagleTapsConfig, MedusaConfig, TargetConfig
from eagle_jax.draft.block import Block
from eagle_jax.draft.dflash import DFlash, DFlashConfig
from eagle_jax.draft.dflash_files import dflash_table, read_dflash
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.dspark import DSpark, DSparkConfig, dspark_table, read_dspark
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.draft.eagle_taps import EagleTaps
from eagle_jax.draft.heads import read_eagle, read_eagle3, read_medusa
from eagle_jax.draft.medusa import Medusa
from eagle_jax.draft.model import Model, ModelConfig, no_file
from eagle_jax.draft.ngram import Ngram, NgramConfig
from eagle_jax.draft.peagle import PEagle, PEagleConfig, peagle_table, read_peagle
from eagle_jax.draft.suffix import Suffix, SuffixConfig
from eagle_jax.draft.tables import block_table, eagle3_table, eagle_table, eagle_taps_table, medusa_table
from eagle_jax.weights.folder import naming_config
from eagle_jax.weights.load import flatten
from eagle_jax.weights.naming import Table


def _is_never_published(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> None:
  """Serve as `read_config` of a kind that no other engine writes."""


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of drafter. A new one is a network under `draft/` and a row of `KINDS`."""

  title: str  # as users read it
  config: type  # frozen dataclass; an instance says which kind a drafter is
  network: Callable[..., Any]  # (config, dtype) -> `interface.DraftNetwork`
  # What its file holds; the table of a kind without weights is empty.
  tensor_table: Callable[[Any], Table] = lambda config: Table({})
  # (folder, config.json of another engine, the target's config) -> config, or None if that is of another kind.
  read_config: Callable[[Path, Mapping[str, Any], TargetConfig], Any] = _is_never_published
  # What it takes from the target where it has none of its own: 'embed', 'head', and 'ids' to draft.
  borrows: frozenset[str] = frozenset()
  is_one_pass: bool = False  # whether all levels come of one pass, and none reads the outputs of the one before
  has_logits: bool = True  # so that a policy's `lookup` can raise some of them
  # Makes the config of a kind without weights, which is loaded by the kind's name; None of a kind with weights.
  for_target: Callable[[TargetConfig], Any] | None = None


_ALL = frozenset({'embed', 'head', 'ids'})  # that a drafter may borrow

# In the order in which they are asked whose a published folder is.
KINDS: dict[str, Kind] = {
  'medusa': Kind(
    'Medusa',
    MedusaConfig,
    Medusa,
    tensor_table=medusa_table,
    read_config=read_medusa,
    borrows=frozenset({'head', 'ids'}),
    is_one_pass=True,
  ),
  'dflash': Kind(
    'DFlash',
    DFlashConfig,
    DFlash,
    tensor_table=dflash_table,
    read_config=read_dflash,
    borrows=_ALL,
    is_one_pass=True,
  ),
  'dspark': Kind(
    'DSpark',
    DSparkConfig,
    DSpark,
    tensor_table=dspark_table,
    read_config=read_dspark,
    borrows=_ALL,
    is_one_pass=True,
  ),
  'p-eagle': Kind(
    'P-EAGLE',
    PEagleConfig,
    PEagle,
    tensor_table=peagle_table,
    read_config=read_peagle,
    borrows=frozenset({'embed', 'ids'}),
    is_one_pass=True,
  ),
  'eagle2': Kind(
    'EAGLE-1/2',
    DrafterConfig,
    Eagle,
    tensor_table=eagle_table,
    read_config=read_eagle,
    borrows=_ALL,
  ),
  'eagle2-taps': Kind(
    'EAGLE-2 with taps',
    EagleTapsConfig,
    EagleTaps,
    tensor_table=eagle_taps_table,
    borrows=_ALL,
  ),
  'block': Kind(
    'block',
    BlockConfig,
    Block,
    tensor_table=block_table,
    borrows=_ALL,
  ),
  'eagle3': Kind(
    'EAGLE-3',
    Eagle3Config,
    Eagle3,
    tensor_table=eagle3_table,
    read_config=read_eagle3,
    borrows=frozenset({'embed', 'ids'}),
  ),
  'model': Kind('a smaller model', ModelConfig, Model, tensor_table=no_file),
  'ngram': Kind('n-gram', NgramConfig, Ngram, has_logits=False, for_target=NgramConfig.for_target),
  'suffix': Kind('suffix', SuffixConfig, Suffix, has_logits=False, for_target=SuffixConfig.for_target),
}


def name_of_kind(config: Any) -> str:
  """Return the key in `KINDS` of the kind of drafter that a config describes."""
  return next(name for name, kind in KINDS.items() if type(config) is kind.config)


def kind_of(config: Any) -> Kind:
  """Return the kind of drafter that a config describes."""
  return KINDS[name_of_kind(config)]


def tensor_table(config: Any) -> Table:
  """Return the tensors that the file of a drafter must hold."""
  return kind_of(config).tensor_table(config)


def own_tensors(drafter: Drafter) -> dict[str, Any]:
  """Return a drafter's tensors by their names in its file, without what it holds of its target."""
  table = tensor_table(drafter.config)
  own = {entry.path[0] for entry in table.entries.values()} & drafter.params.keys()
  return flatten({name: drafter.params[name] for name in own}, table)


def read_drafter_config(folder: Path, content: Mapping[str, Any], target: TargetConfig) -> Any:
  """Read the drafter that a config.json describes: ours, which has "kind", or one that another engine wrote.

  Args:
    folder: where it lies, for messages.
    content: of its config.json.
    target: of the model that it is to draft for.

  Returns:
    A config of one of `KINDS`.

  Raises:
    ValueError: another kind of drafter, missing or unknown fields.
  """
  with naming_config(folder):
    if 'kind' in content:
      return _own_config(folder, content)
    for kind in KINDS.values():
      if (config := kind.read_config(folder, content, target)) is not None:
        return config
  telling = 'speculators_model_type', 'architectures', 'model_type'
  given = ', '.join(f'{name} {content[name]!r}' for name in telling if name in content)
  titles = ', '.join(kind.title for kind in KINDS.values())
  raise ValueError(f'{folder}: a drafter with {given} is not supported; {titles} are.')


def _own_config(folder: Path, content: Mapping[str, Any]) -> Any:
  if content['kind'] not in KINDS:
    raise ValueError(f'{folder}: drafter kind {content["kind"]!r} is not supported; one of {sorted(KINDS)} is.')
  form: Any = KINDS[content['kind']].config
  given = {name: value for name, value in content.items() if name != 'kind'}
  known = {field.name for field in dataclasses.fields(form)}
  if missing := sorted(known - given.keys() - getattr(form, 'MAY_LACK', frozenset())):
    of_kind = f'{folder}/config.json, of kind {content["kind"]!r},'
    raise ValueError(f'{of_kind} lacks {missing}: save the drafter again with save_drafter.')
  if unknown := sorted(given.keys() - known):
    raise ValueError(f'{folder}/config.json has unknown fields {unknown}; known are {sorted(known)}.')
  return form(**given)


def own_content(config: Any) -> dict[str, Any]:
  """Return the config.json of a drafter of ours: what `read_drafter_config` reads."""
  return {'kind': name_of_kind(config), **dataclasses.asdict(config)}
