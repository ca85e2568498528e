"""Write files so that a reader never sees half of one; the cache folder; how two sets of settings differ."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
  """$EAGLE_JAX_CACHE, else $XDG_CACHE_HOME/eagle_jax, else ~/.cache/eagle_jax."""
  if own := os.environ.get('EAGLE_JAX_CACHE'):
    return Path(own)
  return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'eagle_jax'


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Yields a temporary name beside `path`; the file written there takes its place if the block succeeds."""
  path.parent.mkdir(parents=True, exist_ok=True)
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
  os.close(descriptor)
  temporary = Path(name)
  try:
    yield temporary
    temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Every name with another value, and both values; '' if there is none."""
  names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
  return '; '.join(f'{name} {then.get(name)!r}, not {now.get(name)!r}' for name in names)
