"""The house: imports point to lower floors only, and a few things have one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'eagle_jax'
FLOORS = {
  'config': 0, 'text': 0, 'files': 0, 'sharding': 0, 'processes': 0, 'device': 0, 'progress': 0,
  'kernels': 1,
  'tree': 2, 'cache': 2, 'sampling': 2, 'lossy': 2,
  'models': 3, 'policy': 3,
  'weights': 4,
  'draft': 5,
  'decode': 6,
  'evaluate': 7, 'hub': 7, 'viz': 7,
  'train': 8, 'bench': 8,
  '__main__': 9,
}  # fmt: skip
# Within a package: in data order, each module may import those before it.
ORDER = {
  'kernels': (
    '__init__', 'dispatch', 'layout', 'scan', 'random', 'argmax', 'top_k', 'write_kv', 'einsum',
    'ordering', 'cpu', 'norm', 'tiling', 'matmul', 'int4', 'int8', 'attention_tpu', 'attention_gpu', 'attention',
  ),
  'models': ('__init__', 'families', 'interface', 'layers', 'transformer', 'rounded'),
  'policy': (
    '__init__', 'trees', 'tuned', 'adaptive', 'rate', 'ddd', 'svip', 'sure_mass', 'gap', 'cape', 'c2t', 'calibrated',
    'pooled', 'kinds', 'costs', 'cost_store',
  ),
  'draft': (
    '__init__', 'lookup', 'interface', 'plain', 'expand', 'ngram', 'suffix', 'griffin', 'eagle', 'eagle_taps', 'eagle3',
    'one_pass', 'medusa', 'block', 'dflash', 'drafter', 'model', 'tables', 'heads', 'peagle', 'dflash_files', 'dspark',
    'kinds', 'export',
  ),
  'decode': (
    'request', 'buckets', 'verify', 'state', 'commit', 'prefill', 'step', 'record', 'auto', 'build', 'program',
    'batching', 'generate', '__init__',
  ),
  'evaluate': (
    '__init__', 'example', 'features', 'guesses', 'answered', 'trace', 'positions', 'classifier', 'acceptance',
    'calibration', 'random_pairs',
  ),
  'viz': ('words', 'layout', 'picture', 'page', '__init__'),
}  # fmt: skip
MODULES = sorted(path for path in PACKAGE.rglob('*.py') if path != PACKAGE / '__init__.py')
BACKENDS = frozenset({'cpu', 'gpu', 'tpu', 'cuda', 'rocm'})
COMPILERS = 'XLA:CPU', 'XLA:GPU', 'XLA:TPU'
CHOOSES_BY_BACKEND = frozenset({'platform_dependent', 'default_backend'})
TAKES_MESH_AXES = frozenset({'PartitionSpec', 'make_mesh', 'create_device_mesh', 'axis_name', 'axis_names'})


def _name(path: Path) -> str:
  return str(path.relative_to(ROOT))


def _imports(tree: ast.Module) -> Iterator[str]:
  """Full dotted names of what a file imports, wherever in it; `from a import b` gives both a and a.b."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'line {node.lineno}: import by full name'
      yield node.module or ''
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def _parse(path: Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'))


def _room(path: Path) -> str:
  """The entry of eagle_jax/ that a file belongs to."""
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def upward_imports(tree: ast.Module, room: str) -> list[str]:
  """The imports of a file in `room` that do not point to a lower or the same floor, or that go by the top level."""
  wrong = []
  for name in _imports(tree):
    parts = name.split('.')
    if parts[0] != 'eagle_jax' or len(parts) < 2:
      continue
    if parts[1] not in FLOORS or FLOORS[parts[1]] > FLOORS[room]:
      wrong.append(name)
  return wrong


@pytest.mark.parametrize('path', MODULES, ids=_name)
def test_every_room_has_a_floor(path):
  assert _room(path) in FLOORS, f'{_name(path)}: give {_room(path)!r} a floor in {Path(__file__).name}'


@pytest.mark.parametrize('path', MODULES, ids=_name)
def test_imports_point_down(path):
  assert upward_imports(_parse(path), _room(path)) == []


def test_an_upward_import_is_found():
  tree = ast.parse('from eagle_jax import cache, decode\nimport eagle_jax.draft.expand\nimport jax')
  assert upward_imports(tree, 'models') == ['eagle_jax.decode', 'eagle_jax.draft.expand']


def backward_imports(tree: ast.Module, path: Path) -> list[str]:
  """The imports of a file in an ordered package that point to itself or to a later module of the package."""
  room, order = _room(path), ORDER[_room(path)]
  earlier = order[: order.index(path.stem)]
  inside = {name.split('.')[2] for name in _imports(tree) if name.startswith(f'eagle_jax.{room}.')}
  return sorted(name for name in inside if name in order and name not in earlier)


@pytest.mark.parametrize('path', [path for path in MODULES if _room(path) in ORDER], ids=_name)
def test_modules_of_a_package_stand_in_data_order(path):
  assert path.stem in ORDER[_room(path)], f'{_name(path)}: give it a place in ORDER in {Path(__file__).name}'
  assert backward_imports(_parse(path), path) == []


def test_a_backward_import_is_found():
  tree = ast.parse('from eagle_jax.decode.verify import verify\nfrom eagle_jax.decode.step import decode_step')
  assert backward_imports(tree, PACKAGE / 'decode' / 'state.py') == ['step']


@pytest.mark.parametrize('path', MODULES, ids=_name)
def test_library_reads_no_flag_and_no_torch(path):
  banned = ('torch', 'absl.flags', 'absl.app')
  assert [name for name in _imports(_parse(path)) if name in banned or name.startswith('torch.')] == []


@pytest.mark.parametrize('path', MODULES, ids=_name)
def test_no_cycle_through_the_top_level(path):
  """The public names are for users; inside, a module is imported where it lives."""
  tree = _parse(path)
  assert not any(isinstance(node, ast.Import) and any(a.name == 'eagle_jax' for a in node.names) for node in tree.body)


def mesh_words(tree: ast.Module) -> set[str]:
  """Find what a file uses, imports or passes that takes the name of a mesh axis."""
  words = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Name):
      words.add(node.id)
    elif isinstance(node, ast.Attribute):
      words.add(node.attr)
    elif isinstance(node, ast.keyword):
      words.add(node.arg)
    elif isinstance(node, ast.alias):
      words.add(node.name)
  return words & TAKES_MESH_AXES


@pytest.mark.parametrize('path', [path for path in MODULES if _room(path) != 'sharding'], ids=_name)
def test_mesh_axes_are_named_in_one_place(path):
  assert mesh_words(_parse(path)) == set()


def test_a_mesh_axis_is_found():
  tree = ast.parse("from jax.sharding import PartitionSpec as P\njax.lax.psum(x, axis_name='data')\n")
  assert mesh_words(tree) == {'PartitionSpec', 'axis_name'}


def backend_words(tree: ast.Module) -> set[str]:
  """Find the words of a file that name a backend, and its uses of functions that choose by it."""
  words = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      words |= {node.value} & BACKENDS
    elif isinstance(node, ast.keyword) and node.arg:
      words |= {node.arg} & BACKENDS
    elif isinstance(node, ast.Name | ast.Attribute):
      words |= {node.id if isinstance(node, ast.Name) else node.attr} & CHOOSES_BY_BACKEND
  return words


KNOWS_BACKENDS = PACKAGE / 'kernels', PACKAGE / 'device.py', PACKAGE / 'bench' / 'aot'


@pytest.mark.parametrize(
  'path', [path for path in MODULES if not any(map(path.is_relative_to, KNOWS_BACKENDS))], ids=_name
)
def test_backends_are_named_in_one_place(path):
  """In kernels/, where an operation has a form for each; device.py says what the devices at hand can do."""
  assert backend_words(_parse(path)) == set()
  assert [name for name in COMPILERS if name in path.read_text(encoding='utf-8')] == []


def test_a_backend_is_found():
  tree = ast.parse("jax.lax.platform_dependent(x, cpu=f)\nif jax.default_backend() == 'tpu': pass")
  assert backend_words(tree) == {'platform_dependent', 'cpu', 'default_backend', 'tpu'}


@pytest.mark.parametrize('path', sorted((ROOT / 'launch').glob('*.py')), ids=_name)
def test_launchers_are_short(path):
  assert len(path.read_text(encoding='utf-8').splitlines()) < 60


def imported_tests(tree: ast.Module) -> list[str]:
  return [name for name in _imports(tree) if name.startswith('test_')]


@pytest.mark.parametrize('path', sorted((ROOT / 'tests').rglob('*.py')), ids=_name)
def test_nothing_imports_a_test_module(path):
  assert imported_tests(_parse(path)) == []


def test_an_import_of_a_test_module_is_found():
  assert imported_tests(ast.parse('import tiny\nimport test_tree')) == ['test_tree']


def num_lines(function: ast.FunctionDef) -> int:
  """Lines of a function without its docstring, from `def` on."""
  is_documented = ast.get_docstring(function) is not None
  docstring = (function.body[0].end_lineno or 0) - function.body[0].lineno + 1 if is_documented else 0
  return (function.end_lineno or 0) - function.lineno + 1 - docstring


@pytest.mark.parametrize('path', MODULES, ids=_name)
def test_functions_are_short(path):
  functions = [node for node in ast.walk(_parse(path)) if isinstance(node, ast.FunctionDef)]
  assert {node.name: num_lines(node) for node in functions if num_lines(node) > 60} == {}


def test_lines_of_a_function_are_counted():
  (function,) = ast.parse('def f():\n  """One.\n\n  Two.\n  """\n  x = 1\n  return x').body
  assert num_lines(function) == 3
