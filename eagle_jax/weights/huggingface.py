"""Fetches models by the names that they have on the Hugging Face hub, into the hub's own cache.

Nothing but data is fetched: what describes the model, its tokenizer and its weights. `HF_HOME`, `HF_HUB_OFFLINE`,
`HF_ENDPOINT` and the login of `hf auth login` mean what they mean to transformers.
"""

import logging
import re
from collections.abc import Collection
from pathlib import Path

from eagle_jax.weights.folder import MEDUSA, PICKLED, WHOLE, named_shards

log = logging.getLogger('eagle_jax')

_NAME = re.compile(r'(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?', re.ASCII)
_DESCRIPTIONS = (
  'config.json', 'generation_config.json', 'adapter_config.json', 'hf_quant_config.json', 'draft_vocabulary.json',
  'tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
  'vocab.json', 'merges.txt', 'chat_template.jinja', 'chat_template.json', 'model.safetensors.index.json',
  'peagle_config.json', 'mask_embedding.pt',  # of drafters, which are read wrongly without them
)  # fmt: skip


def is_name(name: str) -> bool:
  """Return whether this can be a name on the hub: `org/name`, or `org/name@revision`."""
  return _NAME.fullmatch(name) is not None and '..' not in name


def short_name(name: str) -> str:
  """Return a model's name without its owner and revision, as a folder of it would be called."""
  return name.partition('@')[0].rpartition('/')[2]


def fetch_descriptions(name: str) -> Path:
  """Fetch what describes a model, without its weights, and return the folder: that of one commit, in the hub's cache.

  Without a network, what the cache holds of the revision is taken.

  Args:
    name: `org/name`, or `org/name@revision` with a branch, a tag or a commit.

  Raises:
    ValueError: the hub does not have it or does not give it; or no hub can be reached, and the cache lacks it.
  """
  folder = _fetch(name, _DESCRIPTIONS)
  if not any((folder / known).is_file() for known in ('config.json', 'adapter_config.json')):
    raise ValueError(
      f'{name} has no config.json on the hub, which a model needs. If it holds GGUF files, run `hf download '
      f'{_repository(name)} FILE.gguf`, and pass the path of that file.'
    )
  log.info('%s: commit %s on the hub', name, folder.name)
  return folder


def fetch_weights(name: str, folder: Path, *, is_head: bool = False) -> None:
  """Fetch weights into the folder that `fetch_descriptions` made: model.safetensors, or the shards of its index.

  Args:
    name: as given there.
    folder: what it returned.
    is_head: whether pytorch_model.bin or a file of Medusa's heads will do where there are none of these.

  Raises:
    ValueError: as `fetch_descriptions`; or the repository has no such files.
  """
  shards = [path.name for path in named_shards(folder)]
  of_heads = (PICKLED, *MEDUSA) if is_head else ()

  def is_complete() -> bool:
    ways = [[WHOLE], *([shards] if shards else []), *([file] for file in of_heads)]
    return any(all((folder / file).is_file() for file in files) for files in ways)

  commit = f'{_repository(name)}@{folder.name}'
  if not is_complete():
    _fetch(commit, (WHOLE, *shards))
  if not is_complete() and is_head:
    _fetch(commit, of_heads)
  if not is_complete():
    raise ValueError(
      f'{name} has no {" or ".join((WHOLE, *of_heads))} on the hub, whole or in shards, and other '
      f'weights are not fetched by name: run `hf download {_repository(name)} --local-dir FOLDER`, and pass the folder.'
    )


def _repository(name: str) -> str:
  return name.partition('@')[0]


def _fetch(name: str, files: Collection[str]) -> Path:
  """Fetch those of the files that the repository has, and return the folder of the commit."""
  import huggingface_hub  # it reads its settings from the environment once, and takes a while

  repository, _, revision = name.partition('@')
  try:
    folder = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=[*files])
  except Exception as error:  # its own, and those of the library that it talks through
    options = f' --revision {revision}' if revision else ''
    raise ValueError(
      f'There is no folder {repository!r} here, and it cannot be fetched from the hub: {_reason(error, revision)}. '
      f'Run `hf download {repository}{options} --local-dir FOLDER` where that works, and pass the folder.'
    ) from error
  return Path(folder)


def _reason(error: Exception, revision: str) -> str:
  """Say in one line why the hub did not give a model."""
  from huggingface_hub import constants, errors

  if isinstance(error, errors.GatedRepoError):
    return 'it is gated, so accept its terms on its page there, and log in with `hf auth login`'
  if isinstance(error, errors.RepositoryNotFoundError):
    return 'it is not there, or needs a login with `hf auth login`'
  if isinstance(error, errors.RevisionNotFoundError):
    return f'it has no revision {revision!r}'
  if isinstance(error, errors.LocalEntryNotFoundError):
    if constants.HF_HUB_OFFLINE:
      return f'HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not hold all of it'
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
  lines = str(error).split('\n')
  return f'{type(error).__name__}: {lines[0]}'
