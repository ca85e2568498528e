"""The page of a trace in headless Chromium: it loads without a complaint, steps by key and button, and can be read."""

from pathlib import Path

import pytest

pytest.importorskip('tokenizers')
pytest.importorskip('playwright', reason='needs playwright (extra: browser)')

from playwright.sync_api import sync_playwright

from eagle_jax import viz
from tiny_traces import BYTES, HOSTILE, trace_of

CHROMIUM = Path('/usr/bin/chromium')
SIZES, SCHEMES = ((1280, 800), (400, 800)), ('light', 'dark')
IDS = BYTES.encode(HOSTILE)
TRACE = trace_of(IDS, num_nodes=30, max_depth=8)
NUM_CYCLES = len(TRACE)
CONTRASTS = Path(__file__).with_name('contrasts.js').read_text(encoding='utf-8')

COLLISIONS = """tree => [...tree.querySelectorAll('.node')].flatMap(node => {
  const [box, , word, number] = [...node.children].map(part => part.getBBox());
  const end = number ? number.x : box.x + box.width;
  return word.x > box.x && word.x + word.width < end ? [] : [node.textContent];
})"""  # words that reach the number beside them, or the end of their node

pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def browser():
  if not CHROMIUM.exists():
    pytest.skip(f'needs {CHROMIUM} (Debian package chromium)')
  with sync_playwright() as started:
    chromium = started.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
    yield chromium
    chromium.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in SCHEMES], ids=str)
def page(request, browser, tmp_path):
  """Open the page of two prompts, one without a cycle; at the end, check that nothing was logged or fetched."""
  (width, height), scheme = request.param
  path = tmp_path / 'page.html'
  viz.html([[], TRACE], path, BYTES, prompts=['', HOSTILE])
  page = browser.new_page(viewport={'width': width, 'height': height}, color_scheme=scheme)
  complaints, requests = [], []
  page.on('console', lambda message: complaints.append(message.text))
  page.on('pageerror', lambda error: complaints.append(str(error)))
  page.on('request', lambda request: requests.append(request.url))
  page.goto(path.as_uri())
  yield page
  page.close()
  assert complaints == []
  assert [url for url in requests if not url.startswith('data:')] == [path.as_uri()]


def where(page) -> str:
  return page.locator('#where').inner_text()


def test_keys_and_buttons_step_through_the_cycles(page):
  assert where(page) == f'1 of {NUM_CYCLES}'  # of the first prompt that has cycles
  assert page.locator('#back').is_disabled()
  for step, place in (
    ('ArrowRight', 2), ('#next', 3), ('ArrowRight', 4), ('#back', 3), ('ArrowLeft', 2),
    ('End', NUM_CYCLES), ('ArrowLeft', NUM_CYCLES - 1), ('Home', 1), ('End', NUM_CYCLES),
  ):  # fmt: skip
    page.locator(step).click() if step.startswith('#') else page.keyboard.press(step)
    assert where(page) == f'{place} of {NUM_CYCLES}'
    assert page.locator('#strip [aria-current]').get_attribute('aria-label').startswith(f'Cycle {place}:')
  assert page.locator('#next').is_disabled()
  page.locator('#strip button').nth(1).click()
  assert where(page) == f'2 of {NUM_CYCLES}'
  page.locator('#choice').select_option('0')
  assert where(page) == 'no cycle'
  assert page.locator('#tree svg').count() == 0


def test_the_text_grows_to_the_decoded_one(page):
  prompt, start = page.locator('#said').evaluate('node => [...node.children].map(one => one.textContent)')[:2]
  assert (prompt, start) == (HOSTILE, HOSTILE[0])
  page.keyboard.press('End')
  assert page.locator('#said').evaluate('node => node.textContent') == HOSTILE + HOSTILE


def test_a_node_tells_its_probabilities(page):
  cycle = TRACE[0]
  node = page.locator('#tree .node').nth(3)
  node.scroll_into_view_if_needed()
  node.hover()
  told = page.locator('#tip').inner_text().split()
  assert chr(cycle.token[3]) in told[0]
  assert told[told.index('rank') + 1] == str(cycle.rank[3])
  assert {'drafter', 'target', 'path'} < {*told}
  box = page.locator('#tip').bounding_box()
  assert 0 <= box['x'] <= box['x'] + box['width'] <= page.viewport_size['width']
  assert 0 <= box['y'] <= box['y'] + box['height'] <= page.viewport_size['height']


def test_everything_can_be_read(page):
  page.keyboard.press('ArrowRight')
  assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
  least = page.evaluate(CONTRASTS)
  assert least['word'] >= 4.5
  assert least['number'] >= 3
  for text in '#where', '#what', '#key', '#said', '#tree text':
    assert page.locator(text).first.evaluate('node => parseFloat(getComputedStyle(node).fontSize)') >= 12
  page.keyboard.press('Home')
  for _ in TRACE:
    assert page.locator('#tree').evaluate(COLLISIONS) == []
    page.keyboard.press('ArrowRight')
