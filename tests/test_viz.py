"""Pictures of traces: what stands in them, and how a browser shows the page."""

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('tokenizers')

import eagle_jax
import tiny
from eagle_jax import decode, viz
from eagle_jax.decode.record import Cycle, sibling_ranks
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.tree import NO_PARENT
from eagle_jax.viz.layout import HEIGHT, lay_out
from eagle_jax.viz.words import label, num_cells, word
from tiny_traces import A_CYCLE, BYTES, HOSTILE, random_cycle, trace_of

ROOT = Path(__file__).parents[1]
MAX_PAGE_BYTES = 300_000
INDENTED = """
a
├── b 0.60 ✓
│   ├── d 0.40 ✓
│   │   └── f (bonus)
│   └── e 0.03
└── c 0.30
""".strip()


class Scripts(HTMLParser):
  """A parser that collects the contents of scripts as a browser does."""

  def __init__(self):
    super().__init__()
    self.contents: list[str] = []

  def handle_starttag(self, tag, attrs):
    if tag == 'script':
      self.contents.append('')

  def handle_data(self, data):
    if self.lasttag == 'script' and self.contents:
      self.contents[-1] += data


def data_of(page: Path) -> dict:
  """Read the data of a page, which stand in the first of its two scripts."""
  parser = Scripts()
  parser.feed(page.read_text(encoding='utf-8'))
  assert len(parser.contents) == 2
  return json.loads(parser.contents[0].strip())


def said(text: dict) -> str:
  return text['start'] + ''.join(piece for cycle in text['cycles'] for piece in cycle['said'])


@pytest.fixture(scope='module')
def traced():
  """Answer prompts with a tiny pair, one of which ends at its first token; return the answers and the prompts."""
  target, prompts = tiny.target(tokenizer=BYTES), [[1, 2, 3], [40], [5, 6, 7, 8, 9, 10, 11]]
  first = decode.generate(target, None, prompts, max_new_tokens=1).tokens[1]
  return decode.generate(
    target, tiny.drafter(), prompts, max_new_tokens=24, policy=DynamicTree(3, 3, 3, 8), eos_ids=first, trace=True
  )


def test_a_cycle_is_an_indented_tree():
  assert str(viz.tree(A_CYCLE, BYTES)) == INDENTED
  assert repr(viz.tree(A_CYCLE)).splitlines()[1] == '├── 98 0.60 ✓'


def test_what_an_eos_cuts_off_is_marked():
  lines = str(viz.tree(A_CYCLE._replace(num_emitted=1), BYTES)).splitlines()
  assert [line.strip('│├└─ ') for line in lines[1:4]] == ['b 0.60 ✓', 'd 0.40 ✓, cut', 'f (bonus, cut)']
  assert viz.tree(A_CYCLE._replace(num_emitted=1)).svg.count(' cut"') == 4  # two nodes with their edges


def test_colours_change_nothing_else():
  coloured = viz.tree(A_CYCLE, BYTES).text(is_coloured=True)
  assert re.findall(r'\033\[(\d+)m(.*?)\033\[0m', coloured) == [
    ('32', 'b 0.60 ✓'), ('32', 'd 0.40 ✓'), ('33', 'f (bonus)'), ('2', 'e 0.03'),
  ]  # fmt: skip
  assert re.sub(r'\033\[\d+m', '', coloured) == INDENTED


def test_any_token_is_shown_as_text():
  """Every byte, and with it markup, half characters and special tokens: the SVG parses, and holds the words."""
  token = np.arange(259, dtype=np.int32)
  parent = np.where(token, token // 8, NO_PARENT)
  log_q = np.where(token, -1.0, 0.0).astype(np.float32)
  cycle = Cycle(token, parent, log_q, log_q, sibling_ranks(parent, log_q), np.array([0]), ord('<'), 1, 1)
  svg = ET.fromstring(viz.tree(cycle, BYTES).svg)
  shown = [text.text for text in svg.iter('{http://www.w3.org/2000/svg}text') if text.get('class') is None]
  assert len(shown) == 260
  for written in '<', '&', '"', r'\x00', r'\n', '␣', '<|end|>':
    assert written in shown
  assert all(text.isprintable() for text in shown)


def test_words_stand_as_they_do_inside_a_text():
  ids = BYTES.encode('😀é')
  assert [word(number, BYTES) for number in ids] == [BYTES.token(number) for number in ids]  # parts of characters
  assert [word(number, BYTES) for number in BYTES.encode(' a')] == [' ', 'a']
  assert word(97) == '97'
  assert [label(text) for text in ('  ', ' a b ', '', 'x' * 30)] == ['␣␣', 'a b', '∅', 'x' * 17 + '…']
  assert [num_cells(text) for text in ('abc', '日本', 'e\u0301')] == [3, 4, 1]


@pytest.mark.parametrize('seed', range(20))
def test_no_nodes_overlap(seed):
  rng = np.random.default_rng(seed)
  ids = rng.integers(33, 127, 20).tolist()
  cycle = random_cycle(rng, ids, 1, num_nodes=int(rng.integers(1, 60)), max_depth=int(rng.integers(1, 9)))
  layout = lay_out(cycle, ['x' * int(rng.integers(1, 19)) for _ in range(len(cycle.token) + 1)])
  boxes = [layout.box(node) for node in range(len(cycle.token) + 1)]
  for node, (left, top, width) in enumerate(boxes):
    assert 0 < left < left + width < layout.size[0]
    assert 0 < top < top + HEIGHT < layout.size[1]
    assert node == 0 or left > boxes[layout.parent[node]][0] + boxes[layout.parent[node]][2]
    for other_left, other_top, other_width in boxes[:node]:
      is_beside = left + width < other_left or other_left + other_width < left
      assert is_beside or abs(top - other_top) > HEIGHT


@pytest.mark.parametrize('prompt', [HOSTILE, HOSTILE + '\ud83d'], ids=['unicode', 'half a pair'])
def test_texts_and_prompts_are_escaped(tmp_path, prompt):
  ids = BYTES.encode(HOSTILE)
  viz.html(trace_of(ids), tmp_path / 'page.html', BYTES, prompts=prompt)
  (text,) = data_of(tmp_path / 'page.html')['texts']
  assert text['prompt'] == prompt
  assert said(text) == BYTES.decode(ids) == HOSTILE


def test_bytes_that_are_no_text_are_shown_as_decoded(tmp_path):
  ids = [97, 0xFF, 0xE2, 0x82, 98, 258, 0xF0, 0x9F]
  viz.html([trace_of(ids)], tmp_path / 'page.html', BYTES)
  assert said(data_of(tmp_path / 'page.html')['texts'][0]) == BYTES.decode(ids)


def test_the_text_of_a_page_is_the_decoded_text(tmp_path, traced):
  viz.html(traced.trace, tmp_path / 'page.html', BYTES, prompts=['one', 'two', 'three'])
  texts = data_of(tmp_path / 'page.html')['texts']
  assert [text['prompt'] for text in texts] == ['one', 'two', 'three']
  for text, cycles, decoded in zip(texts, traced.trace, traced.text, strict=True):
    assert len(text['cycles']) == len(cycles)
    assert said(text) == (decoded if cycles else '')  # without a cycle, the trace holds no token
  assert [] in traced.trace


def test_without_a_tokenizer_tokens_are_numbers(tmp_path):
  viz.html([A_CYCLE], tmp_path / 'page.html')
  assert said(data_of(tmp_path / 'page.html')['texts'][0]) == '97 98 100 102 '


def test_a_page_holds_what_a_cycle_did(tmp_path):
  viz.html([A_CYCLE], tmp_path / 'page.html', BYTES)
  data = data_of(tmp_path / 'page.html')
  (cycle,) = data['texts'][0]['cycles']
  assert [data['words'][place] for place in cycle['word']] == [[letter, letter] for letter in 'abcdef']
  assert cycle['q'] == [1, 0.6, 0.3, 0.4, 0.03]
  assert cycle['p'] == [1, 0.5, 0.25, 0.75, 0.001]
  for name in 'rank', 'path':
    assert cycle[name] == getattr(A_CYCLE, name).tolist()
  assert (cycle['parent'], cycle['emitted']) == ([NO_PARENT, 0, 0, 1, 1, 3], 3)


def test_a_target_that_overflows_leaves_a_page(tmp_path):
  viz.html([A_CYCLE._replace(log_p=np.full(5, np.nan))], tmp_path / 'page.html', BYTES)
  assert data_of(tmp_path / 'page.html')['texts'][0]['cycles'][0]['p'] == [None] * 5


@pytest.mark.parametrize('accepts', [True, False])
def test_pages_of_128_tokens_with_trees_of_60_nodes_are_small(tmp_path, accepts):
  ids = np.random.default_rng(0).integers(33, 127, 128).tolist()
  cycles = trace_of(ids, num_nodes=60, max_depth=6, accepts=accepts)
  assert accepts or len(cycles) == 127
  viz.html(cycles, tmp_path / 'page.html', BYTES, prompts='Why is the sky blue?')
  assert (tmp_path / 'page.html').stat().st_size < MAX_PAGE_BYTES


@pytest.mark.parametrize(
  ('trace', 'named'),
  [
    (None, 'NoneType'),
    ([], 'max_new_tokens'),
    ([[], []], 'max_new_tokens'),
    (A_CYCLE, 'Cycle'),
    ([A_CYCLE, 7], 'int'),
    ([[A_CYCLE], A_CYCLE], 'list'),
    ([[[A_CYCLE]]], 'list'),
    ('trace', 'str'),
  ],
)
def test_what_is_no_trace_is_refused(tmp_path, trace, named):
  with pytest.raises(ValueError, match=named):
    viz.html(trace, tmp_path / 'page.html')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('cycle', [None, [A_CYCLE], 'cycle', (1, 2)], ids=lambda cycle: type(cycle).__name__)
def test_what_is_no_cycle_is_refused(cycle):
  with pytest.raises(ValueError, match=rf'got {type(cycle).__name__}'):
    viz.tree(cycle)


@pytest.mark.parametrize('prompts', ['one', ['one'], ['one', 'two', 'three']])
def test_prompts_for_other_traces_are_refused(tmp_path, prompts):
  with pytest.raises(ValueError, match='2 traces'):
    viz.html([[A_CYCLE], [A_CYCLE]], tmp_path / 'page.html', prompts=prompts)


def test_a_page_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / 'file').touch()
  (tmp_path / 'folder').mkdir()
  for path in tmp_path / 'file' / 'page.html', tmp_path / 'folder':
    with pytest.raises(OSError, match=re.escape(str(path))):
      viz.html([A_CYCLE], path)
  assert {path.name for path in tmp_path.rglob('*')} == {'file', 'folder'}  # nothing is left behind


def test_what_the_page_is_made_of_goes_into_a_wheel():
  settings = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['tool']['setuptools']
  packed = {path for pattern in settings['package-data']['eagle_jax'] for path in (ROOT / 'eagle_jax').glob(pattern)}
  needed = {path for path in (ROOT / 'eagle_jax' / 'viz').iterdir() if path.is_file() and path.suffix != '.py'}
  assert needed
  assert needed <= packed


def test_pictures_are_reached_from_the_package():
  assert eagle_jax.viz.tree is viz.tree
