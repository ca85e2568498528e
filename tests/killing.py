"""Kills a training run at random moments, and compares what it ends with to an undisturbed run's.

python tests/killing.py --num_kills=10 launch/train.py --config=... --prompts=...

Give the command without --out: each of the two runs gets a folder of its own.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

COMPARED = ('drafter/model.safetensors', 'held_out.csv')


def run_to_the_end(command: list[str], environment: Mapping[str, str] | None = None) -> float:
  """Seconds that it took."""
  start = time.perf_counter()
  subprocess.run(command, check=True, env=environment)
  return time.perf_counter() - start


def run_killed(
  command: list[str], num_kills: int, seconds: float, environment: Mapping[str, str] | None = None, seed: int = 0
) -> int:
  """Starts the command again and again, kills it after a random time below 0.6 x `seconds`, then lets it end.

  Returns:
    How often it was killed before it ended by itself.
  """
  rng, killed = random.Random(seed), 0
  for _ in range(num_kills):
    process = subprocess.Popen(command, env=environment)
    try:
      process.wait(timeout=rng.uniform(0, 0.6 * seconds))
      break
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.wait()
      killed += 1
  run_to_the_end(command, environment)
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
    seconds = run_to_the_end([sys.executable, *command, f'--out={whole}'])
    killed = run_killed([sys.executable, *command, f'--out={disturbed}'], options.num_kills, seconds)
    is_same = same(whole, disturbed)
  sys.stdout.write(f'undisturbed {seconds:.0f} s; killed {killed} times; {"the same" if is_same else "DIFFERENT"}\n')
  return 0 if is_same else 1


if __name__ == '__main__':
  sys.exit(main())
