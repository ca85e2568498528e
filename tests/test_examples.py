"""Examples in docstrings run, and every public function has one."""

import dataclasses
import doctest
import inspect

import jax
import pytest

import eagle_jax
import tiny
from eagle_jax import decode, hub, viz
from tiny_files import HF_CONFIG, hf_folder
from tiny_traces import BYTES

CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
SIZES = {'vocab_size': 259}  # bytes, a word, two special tokens
WITHOUT = {'Answer', 'Chunk', 'Cycle', 'Generation', 'Costs', 'Drafter', 'GumbelMax', 'Target'}  # results of functions
PUBLIC = {
  name: getattr(module, name)
  for module, names in ((eagle_jax, eagle_jax.__all__), (decode, decode.__all__), (viz, viz.__all__))
  for name in names
  if not inspect.ismodule(getattr(module, name)) and name not in WITHOUT
} | {'export_drafter': hub.export_drafter}


@pytest.fixture(scope='module')
def names():
  """What examples may use beside what they make."""
  target = tiny.target(
    dataclasses.replace(tiny.TARGET, **SIZES), tokenizer=dataclasses.replace(BYTES, chat_template=CHAT)
  )
  drafter = tiny.drafter(dataclasses.replace(tiny.DRAFTER, **SIZES))
  return {'eagle_jax': eagle_jax, 'jax': jax, 'target': target, 'drafter': drafter}


@pytest.mark.parametrize('name', PUBLIC)
def test_the_example_of_a_docstring_runs(names, name, tmp_path, monkeypatch):
  (tmp_path / 'models').mkdir()
  hf_folder(tmp_path / 'models' / 'my_llama', HF_CONFIG)
  monkeypatch.chdir(tmp_path)
  example = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]), dict(names), name, None, None)
  assert example.examples
  said = []
  doctest.DocTestRunner(verbose=False).run(example, out=said.append)
  assert not said, ''.join(said)
