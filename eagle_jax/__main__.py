"""List what is at hand: commands, notebooks, known names and folders.

python -m eagle_jax
"""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

from eagle_jax.evaluate import random_pairs
from eagle_jax.files import cache_folder
from eagle_jax.hub import known_drafters
from eagle_jax.weights.fetch import WHEELS

LAUNCH = Path(__file__).parents[1] / 'launch'


def overview(launch: Path = LAUNCH) -> str:
  """Describe the commands in a folder, and what the library knows by name."""
  lines = ['Targets:  ' + _choices(WHEELS), '          a .gguf file, a Hugging Face folder, or org/name on its hub']
  lines += ['Drafters: ' + _choices(known_drafters()), '          a folder of ours or another engine, org/name']
  lines += ['Shapes:   ' + _choices(random_pairs.NAMES) + ' (launch/cost.py --random_shape)']
  lines += [f'Cache:    {cache_folder()} (EAGLE_JAX_CACHE names another)', '']
  commands = [path for path in sorted(launch.glob('*.py')) if 'entry.run(' in path.read_text(encoding='utf-8')]
  if not commands:
    return '\n'.join([
      *lines,
      f'Commands: none at {launch}. They are part of the repository, not of an installed package. In Python:',
      '  import eagle_jax',
      f'  target = eagle_jax.load_target({next(iter(WHEELS))!r})',
      f'  drafter = eagle_jax.load_drafter({known_drafters()[0]!r}, target)',
      "  print(eagle_jax.generate(target, drafter, ['Why is the sky blue?']).text[0])",
    ])  # fmt: skip
  width = max(len(path.name) for path in commands)
  lines += [f'Commands in {launch}, each with --help:']
  lines += [f'  {path.name:{width}}  {_first_line(path)}' for path in commands]
  if notebooks := sorted((launch / 'colab').glob('*.ipynb')):
    lines += ['', f'Notebooks in {launch / "colab"}:', *(f'  {path.name}' for path in notebooks)]
  return '\n'.join(lines)


def _choices(names: Iterable[str]) -> str:
  return ', '.join(sorted(names))


def _first_line(path: Path) -> str:
  return (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').partition('\n')[0]


if __name__ == '__main__':
  sys.stdout.write(overview() + '\n')
