"""The files that start launchers on clusters: they parse, and the Slurm script decodes with two local processes."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
from eagle_jax.weights import naming
from tiny_files import TINY, byte_metadata, random_tensors, write_gguf

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / 'launch' / 'cluster'
SCRIPTS = sorted(CLUSTER.glob('*.sh'))
# What the controllers refuse a file without, or silently wait for, by the kind of the file.
POD = 'spec.replicatedJobs.0.template.spec.template.spec'
REQUIRED = {
  'JobSet': (
    'apiVersion', 'metadata.name', 'spec.replicatedJobs.0.name', 'spec.replicatedJobs.0.template.spec.parallelism',
    'spec.replicatedJobs.0.template.spec.completions', f'{POD}.restartPolicy', f'{POD}.containers.0.name',
    f'{POD}.containers.0.image', f'{POD}.containers.0.command', f'{POD}.containers.0.resources.limits',
    f'{POD}.nodeSelector',
  ),
}  # fmt: skip
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
for i in 0 1; do
  SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 "$@" &
  echo $! >"$PIDS/$i"
done
wait "$(cat "$PIDS/0")" && wait "$(cat "$PIDS/1")"
"""
TRAINING = """
from eagle_jax.config import DrafterConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Recipe

TARGET = {target!r}
DRAFTER = DrafterConfig(vocab_size=259, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64)
DATA = {{'short': Data(num_shards=1, shard_size=16, num_rows=4, num_refill=2, max_prompt=16, max_new_tokens=24)}}
RECIPE = Recipe(num_steps=10**6, num_rows=2, num_places=64, chunk_places=32)
NUM_TRACED = 0
"""


def value_at(content: Any, path: str) -> Any:
  """Return the value at a dotted path; None if there is none."""
  for key in path.split('.'):
    if isinstance(content, list):
      content = content[int(key)] if int(key) < len(content) else None
    else:
      content = (content or {}).get(key)
  return content


def commands_in(content: Any) -> Iterator[list[str]]:
  """Yield the commands of all containers."""
  for child in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
    yield from commands_in(child)
  if isinstance(content, dict) and 'image' in content:
    yield content['command']


@pytest.mark.parametrize('path', sorted(CLUSTER.glob('*.yaml')), ids=lambda path: path.name)
def test_manifests_have_the_required_keys(path):
  yaml = pytest.importorskip('yaml')
  content = yaml.safe_load(path.read_text(encoding='utf-8'))
  assert [key for key in REQUIRED[content['kind']] if value_at(content, key) in (None, '', [], {})] == []
  for python, launcher, *flags in commands_in(content):
    assert python == 'python'
    assert (ROOT / launcher).is_file()
    assert '--cluster=auto' in flags


def test_a_missing_key_is_found():
  assert value_at({'spec': [{'name': ''}]}, 'spec.0.name') == ''
  assert value_at({'spec': []}, 'spec.0.name') is None


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path):
  checker = shutil.which('shellcheck', path=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
  if checker is None:
    pytest.skip('shellcheck is not there (extra: dev)')
  done = subprocess.run([checker, str(path)], capture_output=True, text=True)
  assert done.stdout == ''


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_error(path):
  assert 'set -euo pipefail' in path.read_text(encoding='utf-8')


def free_job() -> str:
  """Return the number of a Slurm job for which JAX chooses a port that is free."""
  for port in range(61440, 65536):
    with socket.socket() as free:
      try:
        free.bind(('localhost', port))
      except OSError:
        continue
      return str(port - 61440)
  raise RuntimeError('no port is free')


def started_script(name: str, *arguments: str, folder: Path, **environment: str) -> subprocess.Popen:
  """Start a script with the programs in a folder before all others; process numbers are written there."""
  for program in folder.iterdir():
    program.chmod(0o755)
  path = f'{folder}{os.pathsep}{os.environ["PATH"]}'
  known = os.environ | {'PATH': path, 'PIDS': str(folder), 'JAX_PLATFORMS': 'cpu'} | environment
  command = ['bash', str(CLUSTER / name), *arguments]
  pipe = subprocess.PIPE
  return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=known)


def run_script(name: str, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
  """Run a script as `started_script` starts it."""
  with started_script(name, *arguments, folder=folder, **environment) as script:
    stdout, stderr = script.communicate(timeout=600)
  return subprocess.CompletedProcess(script.args, script.returncode, stdout, stderr)


def byte_level_target(folder: Path, max_context: int) -> Path:
  """Write a tiny target with a tokenizer of bytes."""
  config = dataclasses.replace(TINY, vocab_size=259, eos_ids=(258, 257), max_context=max_context)
  tensors = random_tensors(naming.gguf_table(config))
  return write_gguf(folder / 'bytes.gguf', tensors, config=config, extra=byte_metadata(eos_token_id=None))


@pytest.mark.slow
def test_the_slurm_script_decodes_with_two_processes(tmp_path):
  """Both processes find each other by Slurm's variables; the text is that of a single process."""
  programs = tmp_path / 'programs'
  programs.mkdir()
  (programs / 'srun').write_text(SRUN, encoding='utf-8')
  flags = ['--drafter=', '--prompt=abc', '--max_new_tokens=8', '--json', f'--target={byte_level_target(tmp_path, 128)}']
  with forked.start(ROOT / 'launch' / 'generate.py', *flags) as process:
    alone = process.completed()
  assert alone.returncode == 0, alone.stderr
  together = run_script(
    'slurm.sh', 'launch/generate.py', *flags, '--num_model=2', folder=programs, PYTHON=sys.executable,
    SLURM_JOB_ID=free_job(),
  )  # fmt: skip
  assert together.returncode == 0, together.stderr
  (printed,) = [line for line in together.stdout.splitlines() if line.startswith('{')]
  assert json.loads(printed)['tokens'] == json.loads(alone.stdout)['tokens']


@pytest.mark.slow
def test_the_slurm_script_trains_until_a_process_dies(tmp_path):
  """Both share each batch; when one is killed, the other ends with one line, and so does the script."""
  programs, out = tmp_path / 'programs', tmp_path / 'run'
  programs.mkdir()
  (programs / 'srun').write_text(SRUN, encoding='utf-8')
  (tmp_path / 'training.py').write_text(TRAINING.format(target=str(byte_level_target(tmp_path, 128))), encoding='utf-8')
  (tmp_path / 'prompts.txt').write_text('\n'.join(f'prompt {n}' for n in range(40)), encoding='utf-8')
  flags = [f'--config={tmp_path / "training.py"}', f'--prompts={tmp_path / "prompts.txt"}', f'--out={out}']
  with started_script(
    'slurm.sh', 'launch/train.py', *flags, '--report_every=100', folder=programs, PYTHON=sys.executable,
    SLURM_JOB_ID=free_job(),
  ) as script:  # fmt: skip
    while not any(path.name.isdigit() for path in (out / 'checkpoints').glob('*')):  # one is whole, and it goes on
      assert script.poll() is None, script.communicate()
      time.sleep(0.2)
    os.kill(int((programs / '1').read_text(encoding='utf-8')), signal.SIGKILL)
    _, stderr = script.communicate(timeout=120)
  assert script.returncode == 2, stderr
  (line,) = [line for line in stderr.splitlines() if line.startswith('error: ')]
  assert line.startswith('error: this process cannot go on')
  assert 'Traceback' not in stderr


@pytest.mark.slow
def test_a_process_ends_with_one_line_when_another_dies(tmp_path):
  flags = ['--drafter=', '--prompt=abc', '--max_new_tokens=8000', f'--target={byte_level_target(tmp_path, 8192)}']
  address = f'localhost:{61440 + int(free_job())}'
  options = {'cwd': ROOT, 'env': os.environ | {'JAX_PLATFORMS': 'cpu'}, 'text': True}
  first, other = (
    subprocess.Popen(
      [sys.executable, 'launch/generate.py', *flags, '--num_model=2', f'--cluster={address},2,{index}'],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )
    for index in range(2)
  )  # fmt: skip
  while '[Gloo]' in (line := first.stdout.readline()) or not line:  # it is connected, and has begun to print
    assert first.poll() is None
  other.kill()
  _, stderr = first.communicate(timeout=60)
  other.communicate()
  assert first.returncode == 2, stderr
  assert stderr.splitlines()[-1].startswith('error: this process cannot go on')
  assert 'Traceback' not in stderr


@pytest.mark.parametrize('name', ['gpus.sh', 'slurm.sh'])
def test_a_script_s_own_command_is_a_launcher_s(name, tmp_path):
  (tmp_path / 'srun').write_text('#!/usr/bin/env bash\nwhile [[ $1 == -* ]]; do shift; done\n"$@"\n', encoding='utf-8')
  done = run_script(name, folder=tmp_path, PYTHON='echo')
  launcher, *flags = done.stdout.split()
  assert (ROOT / launcher).is_file()
  assert any(flag.startswith('--num_model=') for flag in flags)
  assert ('--cluster=auto' in flags) == (name == 'slurm.sh')


def test_a_tpu_is_deleted_whatever_its_command_does(tmp_path):
  (tmp_path / 'gcloud').write_text('#!/usr/bin/env bash\necho "$4" "$@" >&2\n[[ $* != *venv/bin/python* ]]\n')
  done = run_script('tpu_vm.sh', folder=tmp_path, PROJECT='p', ZONE='z')
  lines = done.stderr.splitlines()
  assert [line.split()[0] for line in lines] == ['create', 'scp', 'ssh', 'ssh', 'delete']
  assert '--cluster=auto' in lines[3]
  assert r'Explain\ why\ the\ sky\ is\ blue.' in lines[3]
  assert all('--project=p --zone=z' in line for line in lines)
  assert done.returncode == 1


def test_a_tpu_needs_a_project(tmp_path):
  done = run_script('tpu_vm.sh', folder=tmp_path, ZONE='z')
  assert done.returncode != 0
  assert 'PROJECT' in done.stderr
