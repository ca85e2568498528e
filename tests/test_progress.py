"""Progress bars appear on a terminal, and nowhere else."""

import io
import sys

import pytest
from tqdm import tqdm

from eagle_jax import progress
from eagle_jax.weights import load, naming
from tiny_files import TINY, random_tensors


class Screen(io.StringIO):
  def __init__(self, is_terminal):
    super().__init__()
    self.is_terminal = is_terminal

  def isatty(self):
    return self.is_terminal


@pytest.mark.parametrize(
  ('is_terminal', 'is_silent', 'is_main', 'delay_s', 'is_shown'),
  [(True, False, True, 0, True), (False, False, True, 0, False), (True, True, True, 0, False),
   (True, False, False, 0, False), (True, False, True, 60, False)],
)  # fmt: skip
def test_loading_shows_a_bar_on_a_terminal(monkeypatch, is_terminal, is_silent, is_main, delay_s, is_shown):
  screen = Screen(is_terminal)
  monkeypatch.setattr(sys, 'stderr', screen)
  monkeypatch.setattr(progress, 'DELAY_S', delay_s)
  monkeypatch.setattr(progress, 'is_main_process', lambda: is_main)
  monkeypatch.setattr(progress, '_is_silent', False)
  monkeypatch.delitem(sys.modules, 'ipykernel', raising=False)
  progress.silence(is_silent)
  table = naming.hf_table(TINY)
  load.assemble(random_tensors(table).items(), table, 'float32', source='my_model')
  assert ('my_model' in screen.getvalue()) == is_shown


def test_a_bar_that_is_not_shown_passes_everything_on():
  assert list(progress.progress_bar([1, 2, 3], disable=True)) == [1, 2, 3]
  assert isinstance(progress.progress_bar(total=3, disable=True), tqdm)
