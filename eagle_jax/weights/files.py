"""Writing files so that a reader never sees half of one, and telling what they say otherwise."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


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
