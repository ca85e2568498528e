"""Several processes that share a mesh do what one does with a single device."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import forked
import several_processes
from eagle_jax import processes
from eagle_jax.device import device_name
from eagle_jax.sharding import is_shared, make_mesh, to_host

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize('cluster', ['here', 'localhost:1,2', 'localhost:1,two,0', ''])
def test_a_cluster_that_is_none(cluster):
  with pytest.raises(ValueError, match=f"'auto' or HOST:PORT,NUMBER,INDEX, got {cluster!r}"):
    processes.join(cluster)


def test_a_process_alone_leads_and_waits_for_nobody(tmp_path):
  assert processes.is_main_process()
  processes.require_same('Anything', object())
  processes.on_main((tmp_path / 'on_main').write_text, 'x')
  for content in ('first', 'second'):
    processes.write_once(tmp_path / 'once', lambda content=content: content, Path.write_text)
  assert (tmp_path / 'on_main').read_text() == 'x'
  assert (tmp_path / 'once').read_text() == 'first'
  assert not is_shared(None)
  assert not is_shared(make_mesh(jax.devices()[:1]))
  assert isinstance(to_host({'x': jax.numpy.ones(2)})['x'], np.ndarray)


def test_a_mesh_is_called_by_its_sizes():
  kind = device_name()
  assert not kind[0].isdigit()
  assert device_name(make_mesh(jax.devices()[:1])) == f'1x1x{kind}'


def clusters(number):
  """The flag of each of `number` processes, behind a port that is free."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  return [f'{address},{number},{index}' for index in range(number)]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """Return the results of this process, with one device, and of two with two each; and the folder of these."""
  folder, alone = tmp_path_factory.mktemp('together'), several_processes.found(tmp_path_factory.mktemp('alone'), None)
  script = Path(several_processes.__file__)
  with contextlib.ExitStack() as stack:
    running = [stack.enter_context(forked.start(script, str(folder), cluster)) for cluster in clusters(2)]
    done = [process.completed() for process in running]
  assert [each.returncode for each in done] == [0, 0], done
  return [alone, *(json.loads((folder / f'found_{index}.json').read_text()) for index in range(2))], folder


@pytest.mark.slow
def test_two_processes_decode_what_one_device_does(found):
  (alone, *together), _ = found
  assert [each['decoded'] for each in together] == [alone['decoded']] * 2
  assert sum(map(sum, alone['decoded']['batch'][1])) > 0
  assert alone['decoded']['refilled'] == alone['decoded']['batch']


@pytest.mark.slow
def test_two_processes_train_what_one_device_does(found):
  (alone, *together), folder = found
  texts, first, again = alone['trained']
  assert first == again
  for each in together:
    assert each['trained'][0] == texts
    assert each['trained'][1] == each['trained'][2] == pytest.approx(first, rel=1e-4)
  assert {path.name for path in (folder / 'run' / 'drafter').iterdir()} == {
    'config.json', 'model.safetensors', 'provenance.json',
  }  # fmt: skip
  assert len((folder / 'run' / 'held_out.csv').read_text().splitlines()) == 3


@pytest.mark.slow
def test_different_requests_are_refused_by_all(found):
  (alone, *together), _ = found
  assert alone['refused'] == ''
  assert all('The request differs' in each['refused'] for each in together)


def run_together(commands):
  """Run commands together; return what each printed."""
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  how = {'env': environment, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  running = [subprocess.Popen([sys.executable, *command], **how) for command in commands]
  printed = [process.communicate(timeout=600) for process in running]
  assert [process.returncode for process in running] == [0] * len(running), printed
  return [stdout for stdout, _ in printed]


@pytest.mark.slow
@pytest.mark.real
def test_the_launcher_in_two_processes(smollm2):
  flags = [str(ROOT / 'launch' / 'generate.py'), '--prompt=Why?', '--max_new_tokens=8', '--policy=chain']
  (alone,) = run_together([flags])
  printed = run_together([*flags, '--num_model=2', f'--cluster={cluster}'] for cluster in clusters(2))
  said = [[line for line in each.splitlines() if not line.startswith('[Gloo]')] for each in printed]
  assert said == [alone.splitlines(), []]  # Gloo, through which CPUs exchange, prints by itself
