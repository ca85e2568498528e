"""The listing of `python -m eagle_jax`, in the repository and without launchers."""

import subprocess
import sys
from pathlib import Path

from eagle_jax.__main__ import overview
from eagle_jax.hub import known_drafters
from eagle_jax.weights.fetch import WHEELS

ROOT = Path(__file__).parents[1]


def test_the_module_lists_every_launcher():
  done = subprocess.run([sys.executable, '-m', 'eagle_jax'], capture_output=True, text=True, cwd=ROOT, check=True)
  lines = done.stdout.splitlines()
  launchers = {path.name for path in (ROOT / 'launch').glob('*.py') if '__main__' in path.read_text(encoding='utf-8')}
  listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith('  ') and '.py' in line}
  assert listed.keys() == launchers
  assert listed['cost.py'].startswith('Measure what a decoding step costs')
  assert all(name in done.stdout for name in (*WHEELS, *known_drafters()))


def test_notebooks_are_listed(tmp_path):
  (tmp_path / 'colab').mkdir()
  (tmp_path / 'colab' / 'trees.ipynb').touch()
  (tmp_path / 'some.py').write_text('"""Do something.\n\nWith care."""\nentry.run(main)\n', encoding='utf-8')
  (tmp_path / 'part.py').write_text('"""A part."""\n', encoding='utf-8')
  assert overview(tmp_path).endswith(f'  some.py  Do something.\n\nNotebooks in {tmp_path / "colab"}:\n  trees.ipynb')


def test_an_installed_package_says_that_launchers_are_elsewhere(tmp_path):
  page = overview(tmp_path / 'launch')
  assert f'none at {tmp_path / "launch"}' in page
  code = page[page.index('  import') :]
  compile('\n'.join(line[2:] for line in code.splitlines()), 'page', 'exec')
