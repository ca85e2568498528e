"""Kill a training run at random moments, and compare its result with an undisturbed run's.

python tests/killing.py --num_kills=10 launch/train.py --config=... --prompts=...

Give the command without --out: each of the two runs gets a folder of its own.
"""

import argparse
import functools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

COMPARED = ('drafter/model.safetensors', 'held_out.csv')


class Process(Protocol):
  """What `subprocess.Popen` and `forked.Forked` have in common."""

  def __enter__(self) -> Self: ...
  def __exit__(self, *_) -> None: ...
  def wait(self, timeout: float = ...) -> int: ...
  def kill(self) -> None: ...


def run_to_the_end(start: Callable[[], Process]) -> float:
  """Seconds that it took."""
  begun = time.perf_counter()
  with start() as process:
    if code := process.wait():
      raise RuntimeError(f'the run ended with exit code {code}')
  return time.perf_counter() - begun


def run_killed(start: Callable[[], Process], num_kills: int, seconds: float, seed: int = 0) -> int:
  """Starts a run again and again, kills it after a random time below 0.6 x `seconds`, then lets it end.

  Returns:
    How often it was killed before it ended by itself.
  """
  rng, killed = random.Random(seed), 0
  for _ in range(num_kills):
    with start() as process:
      try:
        process.wait(timeout=rng.uniform(0, 0.6 * seconds))
        break
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        killed += 1
  run_to_the_end(start)
  return killed


def same(a: Path, b: Path) -> bool:
  """Do two run folders hold the same drafter and the same held-out metrics, bit for bit?"""
  return all((a / name).read_bytes() == (b / name).read_bytes() for name in COMPARED)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--num_kills', type=int, default=10)
  options, command = parser.parse_known_args()
  with tempfile.TemporaryDirectory() as folder:
    whole, disturbed = Path(folder, 'whole'), Path(folder, 'disturbed')
    into = {
      out: functools.partial(subprocess.Popen, [sys.executable, *command, f'--out={out}']) for out in (whole, disturbed)
    }
    seconds = run_to_the_end(into[whole])
    killed = run_killed(into[disturbed], options.num_kills, seconds)
    is_same = same(whole, disturbed)
  sys.stdout.write(f'undisturbed {seconds:.0f} s; killed {killed} times; {"the same" if is_same else "DIFFERENT"}\n')
  return 0 if is_same else 1


if __name__ == '__main__':
  sys.exit(main())
