"""The notebooks run from top to bottom, are the same in both of their forms, and say what they miss."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('tokenizers')
pytest.importorskip('jupytext', reason='needs the extra notebook')
pytest.importorskip('nbclient', reason='needs the extra notebook')
pytest.importorskip('ipywidgets', reason='needs the extra notebook')

import jupytext
import nbclient
import nbformat

import eagle_jax

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / 'launch' / 'colab'
PAGES = sorted(FOLDER.glob('*.md'))
SMALL = {  # parameters that keep a run short
  'in_your_pipeline': "MAX_NEW_TOKENS, QUESTIONS = 12, ('One?', 'Two?', 'Three?', 'Four?')",
  'quickstart': "MAX_NEW_TOKENS, QUESTIONS = 12, ('One?', 'Two?')",
  'train_a_drafter': 'NUM_QUESTIONS, MAX_NEW_TOKENS, NUM_STEPS = 24, 16, 2',
  'trees': "MAX_NEW_TOKENS, PASS, DEPTHS, QUESTIONS = 12, 1, (5,), ('One?', 'Two?')",
}


def read(page: Path) -> nbformat.NotebookNode:
  return nbformat.read(page.with_suffix('.ipynb'), as_version=4)


def contents(notebook) -> list[tuple]:
  return [(cell.cell_type, cell.source, cell.metadata.get('tags', [])) for cell in notebook.cells]


def tagged(notebook, tag: str) -> int:
  """Return the place of the one cell with this tag."""
  (place,) = [place for place, cell in enumerate(notebook.cells) if tag in cell.metadata.get('tags', [])]
  return place


def setup_of(notebook) -> str:
  return notebook.cells[tagged(notebook, 'setup')].source


def test_every_notebook_has_both_forms():
  assert PAGES
  assert [path.stem for path in sorted(FOLDER.glob('*.ipynb'))] == [page.stem for page in PAGES] == sorted(SMALL)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_both_forms_hold_the_same_and_no_output(page):
  notebook = read(page)
  assert contents(notebook) == contents(jupytext.read(page)), f'jupytext --sync {page.relative_to(ROOT)}'
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.outputs for cell in code] == [[]] * len(code)
  assert {cell.execution_count for cell in code} == {None}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_metadata_name_the_runtime(page):
  """A GPU where a drafter is trained; a CPU is enough for the others."""
  for metadata in read(page).metadata, jupytext.read(page).metadata:
    assert metadata['kernelspec']['name'] == 'python3'
    runtime = metadata.get('accelerator'), metadata.get('colab')
    assert runtime == (('GPU', {'gpuType': 'T4'}) if page.stem == 'train_a_drafter' else (None, None))


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_a_notebook_begins_with_what_it_needs(page):
  """One setup cell for all of them, first but for a choice of devices; a badge once there is an address to open."""
  notebook = read(page)
  assert setup_of(notebook) == setup_of(read(PAGES[0]))
  assert f'URL = {eagle_jax.__url__!r} ' in setup_of(notebook)
  place = tagged(notebook, 'setup')
  assert tagged(notebook, 'parameters') == place + 1
  assert [cell.metadata.get('tags') for cell in notebook.cells[1:place]] in ([], [['devices']])
  title = notebook.cells[0].source
  assert title.startswith('# ')
  assert ('colab.research.google.com' in title) == bool(eagle_jax.__url__)


@pytest.mark.skipif(bool(eagle_jax.__url__), reason='the cell would install')
def test_without_the_package_the_first_cell_says_what_to_do():
  program = "import sys\nsys.modules['eagle_jax'] = None\n" + setup_of(read(PAGES[0]))
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
  assert done.returncode == 1
  assert 'pip install -e ".[notebook]"' in done.stderr.splitlines()[-1]


def run(page: Path, folder: Path, monkeypatch, first: str = '') -> nbformat.NotebookNode:
  """Execute a notebook with small parameters, `first` in a cell of its own before all others; it must not complain."""
  notebook = read(page)
  notebook.cells[tagged(notebook, 'parameters')].source += f'\n{SMALL[page.stem]}'
  notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
  monkeypatch.setenv('PYTHONPATH', f'{ROOT}:{ROOT / "tests"}', prepend=':')
  resources = {'metadata': {'path': str(folder)}}
  nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3', resources=resources).execute()
  outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
  complaints = [output.text.strip() for output in outputs if output.get('name') == 'stderr']
  assert [text for text in complaints if text and not text.startswith('steps: ')] == []  # a progress bar is none
  assert any('image/png' in output.get('data', {}) or 'text/html' in output.get('data', {}) for output in outputs)
  return notebook


@pytest.mark.notebook
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_notebooks_run(page, tmp_path, monkeypatch):
  run(page, tmp_path, monkeypatch, 'import tiny_notebook')


@pytest.mark.notebook
@pytest.mark.real
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_notebooks_run_with_the_real_pair(page, tmp_path, monkeypatch, smollm2):
  run(page, tmp_path, monkeypatch)
