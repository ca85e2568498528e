"""The pages that people read: what they name exists, their commands parse, and the README's code runs."""

import ast
import contextlib
import dataclasses
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
import tiny
from eagle_jax import decode, hub
from eagle_jax.draft import kinds
from eagle_jax.models import families
from eagle_jax.weights import naming
from eagle_jax.weights.safetensors import write_safetensors
from tiny_files import TINY, random_tensors

ROOT = Path(__file__).parents[1]
PACKAGE, README = ROOT / 'eagle_jax', ROOT / 'README.md'
FOLDERS = ('eagle_jax', 'configs', 'launch', 'tests', '.ci')
PAGES = [README, *sorted(page for name in FOLDERS for page in (ROOT / name).rglob('*.md'))]
SOURCES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob('*.py'))
SMALL = dataclasses.replace(tiny.TARGET, num_layers=1)
WRITTEN = ('report.md', 'page.md')  # by launchers and tests
ELSEWHERE = ('eagle/', 'runs/')  # the reference's files, and what a run writes
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PARSE_FLAGS = """
import json, runpy, sys
from pathlib import Path
from absl import flags
sys.path.insert(0, 'launch')
FLAGS, modules = flags.FLAGS, set(sys.modules)
known = set(FLAGS)
for launcher, commands in json.load(sys.stdin).items():
  runpy.run_path(f'launch/{launcher}.py', run_name='launcher')
  for command in commands:
    FLAGS.unparse_flags()
    try:
      wrong = FLAGS([launcher, *command])[1:]
    except flags.Error as error:
      wrong = error
    if wrong:
      print(launcher, *command, '->', wrong)
  FLAGS.remove_flag_values([name for name in FLAGS if name not in known])
  for name in set(sys.modules) - modules:  # launchers' own define flags when they are imported
    if Path(getattr(sys.modules[name], '__file__', None) or '').parent.name == 'launch':
      del sys.modules[name]
"""


def _name(path: Path) -> str:
  return str(path.relative_to(ROOT))


def text_of(page: Path) -> str:
  return page.read_text(encoding='utf-8')


def blocks(page: Path, language: str) -> list[str]:
  """Fenced blocks of a language."""
  return [body for kind, body in FENCE.findall(text_of(page)) if kind == language]


def prose(page: Path) -> str:
  return FENCE.sub('', text_of(page))


def spans(page: Path) -> list[str]:
  """Inline code."""
  return re.findall(r'`([^`\n]+)`', prose(page))


def anchors(page: Path) -> set[str]:
  """Return the names of headings in links, as GitHub spells them."""
  headings = re.findall(r'^#+ (.*)$', prose(page), re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def commands(page: Path) -> list[list[str]]:
  """Every command of a page's bash blocks, indented lines and inline code, as words."""
  lines = [line for block in blocks(page, 'bash') for line in re.sub(r'\\\n', ' ', block).splitlines()]
  lines += [line.strip() for line in prose(page).splitlines() if re.match(r' {4}[A-Z_=\w ]*python ', line)]
  lines += [span for span in spans(page) if re.match(r'(python|pip|pytest|bash) ', span)]
  found = []
  for line in lines:
    for part in line.split('&&'):
      words = shlex.split(part, comments=True)
      while words and re.match(r'[A-Z_]+=', words[0]):  # of the environment
        words.pop(0)
      if words:
        found.append(words)
  return found


def is_there(name: str, page: Path) -> bool:
  """Return whether a file or folder of this name exists for a page or source."""
  return any((base / name).exists() for base in (page.parent, ROOT, PACKAGE))


def missing_files(page: Path) -> list[str]:
  """Files and folders that a page names in inline code, and that are nowhere."""
  missing = []
  for span in spans(page):
    is_path = re.fullmatch(r'[\w.\-/]+(\.py|/)|[\w.\-]+(/[\w.\-]+)+\.\w+', span)
    if not is_path or span.startswith(ELSEWHERE):
      continue
    if not is_there(span, page) and not any(path.name == span for path in SOURCES):
      missing.append(span)
  return missing


def missing_names(page: Path) -> list[str]:
  """Dotted names of the package that cannot be reached."""
  missing = []
  for dotted in sorted(set(re.findall(r'\beagle_jax(?:\.[A-Za-z_]\w*)+', text_of(page)))):
    try:
      importlib.import_module(dotted)
    except ImportError:
      module, _, name = dotted.rpartition('.')
      with contextlib.suppress(ImportError):
        if hasattr(importlib.import_module(module), name):
          continue
      missing.append(dotted)
  return missing


def wrong_commands(page: Path) -> list[str]:
  """Find commands that are none of ours, or that name an extra or a file that is not there."""
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['optional-dependencies']
  wrong = []
  for words in commands(page):
    if words[0] == 'pip':
      (named,) = re.findall(r'\[([\w,]+)\]', ' '.join(words))
      is_right = set(named.split(',')) <= extras.keys()
    else:
      paths = [
        word.partition('=')[2] or word for word in words if re.search(r'(^|=)(launch|configs|tests|\.ci)/', word)
      ]
      is_right = words[0] in ('python', 'pytest', 'bash') and all((ROOT / path).exists() for path in paths)
    if not is_right:
      wrong.append(' '.join(words))
  return wrong


def test_the_readme_is_short():
  assert len(text_of(README).splitlines()) <= 220


@pytest.mark.parametrize('page', PAGES, ids=_name)
def test_links_lead_somewhere(page):
  links = re.findall(r'\]\(([^)\s]+)\)', prose(page))
  for link in links:
    if link.startswith('https://'):
      continue
    file, _, anchor = link.partition('#')
    path = page.parent / file if file else page
    assert path.exists(), link
    assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize('page', PAGES, ids=_name)
def test_what_a_page_names_exists(page):
  assert missing_files(page) == []
  assert missing_names(page) == []
  assert wrong_commands(page) == []


@pytest.mark.parametrize('path', SOURCES, ids=_name)
def test_sources_cite_pages_that_exist(path):
  cited = re.findall(r'\b[\w/]+\.md\b', text_of(path))
  assert [page for page in cited if page not in WRITTEN and not is_there(page, path)] == []


@pytest.mark.parametrize('path', [path for path in SOURCES if PACKAGE in path.parents], ids=_name)
def test_timings_stand_on_pages(path):
  """Code gives reasons; measured times belong in kernels/README.md or bench/RESULTS.md."""
  assert re.findall(r'.*\b\d[\d.,]* (?:ms|us|ns|million cycles)\b.*', text_of(path)) == []


def test_what_does_not_exist_is_found(tmp_path):
  page = tmp_path / 'page.md'
  page.write_text('`decode/none.py`, `nowhere/`, `eagle_jax.decode.none` and `bash .ci/none`', encoding='utf-8')
  assert missing_files(page) == ['decode/none.py', 'nowhere/']
  assert missing_names(page) == ['eagle_jax.decode.none']
  assert wrong_commands(page) == ['bash .ci/none']


def flags_of_launchers() -> set[str]:
  """Collect the flags that launchers define, with `no` before booleans."""
  names = set()
  for path in (ROOT / 'launch').glob('*.py'):
    for node in ast.walk(ast.parse(text_of(path))):
      if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        continue
      if node.func.attr.startswith('DEFINE_') and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        names |= {name, f'no{name}'} if node.func.attr in ('DEFINE_bool', 'DEFINE_switch') else {name}
  return names


@pytest.mark.parametrize('page', PAGES, ids=_name)
def test_flags_exist(page):
  named = {flag for span in spans(page) for flag in re.findall(r'^--(\w+)', span)}
  assert named - flags_of_launchers() - {'help'} == set()


def test_launchers_take_the_commands_of_all_pages():
  by_launcher = {}
  for page in PAGES:
    for words in commands(page):
      if words[0] == 'python' and words[1].startswith('launch/'):
        by_launcher.setdefault(Path(words[1]).stem, []).append(words[2:])
  assert by_launcher.keys() >= {'generate', 'bench', 'cost', 'train', 'convert', 'compile_cost'}
  done = subprocess.run(
    [sys.executable, '-c', PARSE_FLAGS],
    input=json.dumps(by_launcher), capture_output=True, text=True, cwd=ROOT, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout == ''


class Letters:
  """A tokenizer whose ids are printable characters."""

  special_ids = frozenset[int]()

  def encode_prompt(self, text):
    return [ord(letter) - 32 for letter in text]

  def decode(self, ids):
    return ''.join(chr(32 + number) for number in ids)

  def is_raw_byte(self, number):
    return False


ASKED = [Letters().encode_prompt('Why is the sky blue?'), [1, 90, 18], [1, 26]]


@pytest.fixture(scope='module')
def readme():
  """Run the README's Python from top to bottom with a tiny pair; return what it defined and printed."""
  target, drafter = tiny.target(SMALL, tokenizer=Letters()), tiny.drafter()
  make_mesh, names, registries = eagle_jax.make_mesh, {'__name__': 'readme'}, (families.FAMILIES, kinds.KINDS)
  before = [{*registry} for registry in registries]
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
    patch.setattr(eagle_jax, 'load_target', lambda name, *, dtype='float32', mesh=None: target)
    patch.setattr(eagle_jax, 'load_drafter', lambda name, target, *, dtype=None: drafter)
    patch.setattr(eagle_jax, 'make_mesh', lambda *, num_model: make_mesh())  # of the one device here
    for block in blocks(README, 'python'):
      exec(compile(block, 'README.md', 'exec'), names)
  plain = decode.generate(target, None, ASKED, max_new_tokens=64).tokens
  yield names | {'target': target, 'drafter': drafter, 'printed': printed.getvalue(), 'plain': plain}
  for registry, known in zip(registries, before, strict=True):
    for name in registry.keys() - known:
      del registry[name]


def test_the_readme_decodes(readme):
  assert len(readme['out'].text) == len(readme['prompts'])
  assert readme['printed'].endswith(Letters().decode(readme['plain'][0]))
  assert np.asarray(readme['tokens_BN']).tolist() == [tokens[:32] for tokens in readme['plain'][1:]]


def test_the_readme_s_drafter_is_lossless(readme):
  policy = eagle_jax.Chain(3)
  drafted = readme['Repeat']().propose({}, (), jnp.array([5, 7]), policy, tiny.context(policy, batch=2))
  assert drafted.token.tolist() == [[5] * 4, [7] * 4]
  drafter = hub.load_drafter('repeat', readme['target'])
  assert drafter.config.name == 'repeat'  # by which measured costs are found
  out = decode.generate(readme['target'], drafter, [ASKED[1]], max_new_tokens=16, policy=policy)
  assert out.tokens == [readme['plain'][1][:16]]
  assert out.stats['levels_per_pass'] == 3
  with pytest.raises(ValueError, match=r'dynamic.*\(1, 1, 3\).*got tokens \(1, 1, 1\)'):
    decode.generate(readme['target'], drafter, [ASKED[1]], policy=eagle_jax.DynamicTree(3, 3, 3, 8))


def test_the_readme_s_policy_stops_early(readme):
  sizes = {'width': 3, 'fanout': 3, 'max_depth': 3, 'num_nodes': 4}
  for least, num_levels in ((0.0, 3), (1.1, 1)):  # no frontier has a probability above 1
    policy = readme['Cautious'](**sizes, least=least)
    out = decode.generate(readme['target'], readme['drafter'], [ASKED[1]], max_new_tokens=16, policy=policy)
    assert out.tokens == [readme['plain'][1][:16]]
    assert out.stats['levels_per_pass'] == num_levels
    assert out.stats['policy'].startswith('Cautious(')


def test_the_readme_s_family_loads(readme, tmp_path):
  config = dataclasses.replace(TINY, qkv_bias=True, name=tmp_path.name)
  content = {
    'model_type': 'my_model', 'vocab_size': config.vocab_size, 'hidden_size': config.width,
    'intermediate_size': config.ffn_width, 'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads, 'num_hidden_layers': config.num_layers,
    'rms_norm_eps': config.norm_eps, 'rope_theta': config.rope_theta, 'eos_token_id': [*config.eos_ids],
    'max_position_embeddings': config.max_context,
  }  # fmt: skip
  (tmp_path / 'config.json').write_text(json.dumps(content), encoding='utf-8')
  tensors = random_tensors(naming.hf_table(config))
  write_safetensors(tmp_path / 'model.safetensors', tensors)
  loaded = hub.load_target(tmp_path)
  assert loaded.config == config
  assert 'model.layers.0.self_attn.q_proj.bias' in tensors


@pytest.mark.real
def test_the_readme_s_picture_is_real(smollm2):
  drafter = hub.load_drafter('smollm2-135m-eagle2', smollm2)
  sizes, prompt = {'width': 4, 'fanout': 4, 'max_depth': 5, 'num_nodes': 16}, 'Explain why the sky is blue.'
  policy = eagle_jax.DynamicTree(**sizes)
  out = decode.generate(smollm2, drafter, [prompt], max_new_tokens=32, policy=policy, trace=True)
  number = r'\d*\.\d+'
  drawn = eagle_jax.viz.tree(out.trace[0][4], smollm2.tokenizer).svg
  kept = (PACKAGE / 'assets' / 'tree.svg').read_text(encoding='utf-8')
  assert re.split(number, drawn) == re.split(number, kept)
  probabilities = [[float(x) for x in re.findall(number, svg)] for svg in (drawn, kept)]
  assert probabilities[0] == pytest.approx(probabilities[1], abs=0.011)
