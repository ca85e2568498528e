"""Models by their names on the Hugging Face hub, fetched from a stand-in on 127.0.0.1."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from huggingface_hub import constants

import tiny_hub
from eagle_jax import hub
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.kinds import tensor_table
from eagle_jax.weights import huggingface
from eagle_jax.weights.load import assemble
from tiny_files import HF_CONFIG, TINY, TINY_DRAFTER, hf_folder, random_tensors


def files_of(folder) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def server(tmp_path, monkeypatch):
  """A hub with a target, in two commits and in shards, and beside it what nobody asked for."""
  with tiny_hub.serving() as server:
    monkeypatch.setattr(constants, 'ENDPOINT', server.url)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    url = f'{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', url)
    monkeypatch.chdir(tmp_path)
    whole = files_of(hf_folder(tmp_path / 'whole', HF_CONFIG))
    server.add('org/tiny', whole | {'generation_config.json': b'{"eos_token_id": 7}'}, revision='older')
    more = dict.fromkeys(('code.py', 'pytorch_model.bin', 'README.md', 'consolidated.safetensors'), b'')
    server.add('org/tiny', whole | more)
    server.add('org/shards', files_of(hf_folder(tmp_path / 'shards', HF_CONFIG, num_shards=3)) | more)
    yield server


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('name', ['org/tiny', 'org/shards'])
def test_a_target_is_fetched_once(server, tmp_path, name, monkeypatch):
  target = hub.load_target(name)
  assert target.config.name == name.removeprefix('org/')
  assert_same(target.params, hub.load_target(tmp_path / 'whole').params)
  weights = ['model.safetensors'] if name == 'org/tiny' else [f'model-{i}.safetensors' for i in range(3)]
  also = [] if name == 'org/tiny' else ['model.safetensors.index.json']
  assert sorted(server.sent) == sorted(['config.json', *weights, *also])
  server.sent.clear()
  assert_same(hub.load_target(name).params, target.params)
  assert server.sent == []
  server.shutdown()
  server.server_close()  # no hub is there any more
  assert_same(hub.load_target(name).params, target.params)
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  assert_same(hub.load_target(name).params, target.params)


def test_a_config_alone_is_read_without_weights(server):
  assert hub.read_target_config('org/tiny@older').eos_ids == (7,)
  assert sorted(server.sent) == ['config.json', 'generation_config.json']


@pytest.mark.parametrize('by_commit', [False, True])
def test_a_revision(server, by_commit):
  revision = server.repositories['org/tiny'].revisions['older'] if by_commit else 'older'
  config = hub.load_target(f'org/tiny@{revision}').config
  assert (config.name, config.eos_ids) == ('tiny', (7,))
  assert hub.load_target('org/tiny').config.eos_ids == (3, 4)


def test_a_folder_of_that_name_is_meant_first(server, tmp_path):
  (tmp_path / 'org').mkdir()
  (tmp_path / 'whole').rename(tmp_path / 'org' / 'tiny')
  assert hub.load_target('org/tiny').config.eos_ids == (3, 4)
  assert server.sent == []
  assert hub.load_target('org/tiny@older').config.eos_ids == (7,)


def head() -> Drafter:
  table = tensor_table(TINY_DRAFTER)
  return Drafter(TINY_DRAFTER, assemble(random_tensors(table).items(), table, 'float32'))


def test_a_drafter(server, tmp_path):
  target, drafter = hub.load_target('org/tiny'), head()
  hub.export_drafter(drafter, tmp_path / 'head', target, layout='safeailab')
  server.add('org/head', files_of(tmp_path / 'head') | {'pytorch_model.bin': b'damaged'})
  loaded = hub.load_drafter('org/head', target)
  assert loaded.config.name == 'head'
  assert_same(loaded.params, drafter.params)
  assert 'pytorch_model.bin' not in server.sent


def test_a_drafter_that_is_pickled_alone(server, tmp_path):
  torch = pytest.importorskip('torch')
  target, drafter = hub.load_target('org/tiny'), head()
  hub.export_drafter(drafter, tmp_path / 'head', target, layout='safeailab')
  tensors = dict(hub.folder.read_tensors(tmp_path / 'head'))
  torch.save({name: torch.tensor(x) for name, x in tensors.items()}, tmp_path / 'pytorch_model.bin')
  content = (tmp_path / 'head' / 'config.json').read_bytes()
  server.add('org/head', {'config.json': content, 'pytorch_model.bin': (tmp_path / 'pytorch_model.bin').read_bytes()})
  for _ in range(2):
    assert_same(hub.load_drafter('org/head', target).params, drafter.params)
  assert server.sent.count('pytorch_model.bin') == 1


@pytest.mark.parametrize('file', ['peagle_config.json', 'mask_embedding.pt'])
def test_files_without_which_a_drafter_is_read_wrongly(server, file):
  """Some writers put what config.json lacks into a file beside it."""
  server.add('org/head', {'config.json': b'{}', file: b'{}'})
  assert (huggingface.fetch_descriptions('org/head') / file).is_file()


def test_what_no_model_of_ours_is(server):
  """Each is found out before weights are fetched."""
  weights = {'model.safetensors': b'never read'}
  server.add('org/mamba', {'config.json': json.dumps(HF_CONFIG | {'model_type': 'mamba'}).encode()} | weights)
  server.add('org/gguf', {'tiny.Q4_K_M.gguf': b''})
  server.add('org/lora', {'adapter_config.json': b'{"base_model_name_or_path": "org/base"}'} | weights)
  config = json.dumps(HF_CONFIG).encode()
  server.add('org/pickled', {'config.json': config, 'pytorch_model.bin': b''})
  index = {'weight_map': {'model.norm.weight': '../../../escaped.safetensors'}}
  server.add('org/climbing', {'config.json': config, 'model.safetensors.index.json': json.dumps(index).encode()})
  for name, told in (
    ('mamba', "'mamba' is not supported"),
    ('gguf', 'hf download org/gguf FILE.gguf'),
    ('lora', "of 'org/base'"),
    ('pickled', 'org/pickled has no model.safetensors'),
    ('climbing', 'names of files beside it'),
  ):
    with pytest.raises(ValueError, match=told):
      hub.load_target(f'org/{name}')
  assert not {*server.sent} - {'config.json', 'adapter_config.json', 'model.safetensors.index.json'}


@pytest.mark.parametrize(
  ('name', 'told'),
  [
    ('org/nothing', 'it is not there, or needs a login'),
    ('org/hidden', 'it is not there, or needs a login'),
    ('org/gated', 'it is gated, so accept its terms'),
    ('org/closed', 'it is gated, so accept its terms'),
    ('org/tiny@never', "it has no revision 'never'.*hf download org/tiny --revision never"),
    ('org/broken', 'HfHubHTTPError: .*410'),
  ],
)
@pytest.mark.parametrize('load', ['target', 'drafter'])
def test_what_the_hub_does_not_give(server, load, name, told):
  files = server.repositories['org/tiny'].commits[server.repositories['org/tiny'].revisions['main']]
  server.add('org/hidden', files, is_hidden=True)
  server.add('org/gated', files, refusal=(401, 'GatedRepo'))
  server.add('org/closed', files, refusal=(403, 'GatedRepo'))
  server.add('org/broken', files, refusal=(410, 'Gone'))
  target = hub.load_target('whole')
  with pytest.raises(ValueError, match=told) as caught:
    hub.load_target(name) if load == 'target' else hub.load_drafter(name, target)
  assert f'no folder {name.partition("@")[0]!r} here' in str(caught.value)
  assert '\n' not in str(caught.value)


def test_without_a_hub(server, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(ValueError, match='HF_HUB_OFFLINE is set.*hf download org/tiny --local-dir FOLDER'):
    hub.load_target('org/tiny')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  server.shutdown()
  server.server_close()
  with pytest.raises(ValueError, match='ConnectError.*hf download org/tiny --local-dir FOLDER'):
    hub.load_target('org/tiny')


@pytest.mark.parametrize('name', ['org/tiny', 'org/shards'])
def test_nothing_half_fetched_is_loaded(server, name, monkeypatch):
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  server.cut.add('model.safetensors' if name == 'org/tiny' else 'model-1.safetensors')
  with pytest.raises(ValueError, match='cannot be fetched from the hub'):
    hub.load_target(name)
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(ValueError, match='HF_HUB_OFFLINE is set'):
    hub.load_target(name)
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  server.cut.clear()
  assert_same(hub.load_target(name).params, hub.load_target('whole').params)


@pytest.mark.parametrize(
  'name',
  ['../x', './org/tiny', '/org/tiny', 'org/../x', 'org/tiny/more', 'org//tiny', '~/tiny', 'org/tiny@', 'org/x@a/../b'],
)
def test_names_that_are_no_names_of_the_hub_ask_for_nothing(server, name):
  server.repositories.clear()
  for load in (hub.load_target, lambda name: hub.load_drafter(name, hub.load_target('whole'))):
    with pytest.raises(ValueError, match=f'Unknown .*{name}'):
      load(name)
  assert not huggingface.is_name(name)


def test_settings_come_from_the_environment(server, tmp_path):
  """A process of its own, since the library reads them once."""
  code = 'from eagle_jax import hub; print(hub.load_target("org/tiny").config.vocab_size)'
  home = {'HF_ENDPOINT': server.url, 'HF_HOME': str(tmp_path / 'home')}

  def load(**more):
    own = {name: value for name, value in os.environ.items() if not name.startswith('HF_')}
    command = [sys.executable, '-c', code]
    return subprocess.run(command, env=own | home | more, capture_output=True, text=True, check=False)

  assert load().stdout.strip() == str(TINY.vocab_size)
  assert (tmp_path / 'home' / 'hub' / 'models--org--tiny').is_dir()
  assert load(HF_HUB_OFFLINE='1').stdout.strip() == str(TINY.vocab_size)
