"""Scripts in processes of their own that need not import JAX again: most of a short one's time.

`start` asks a server for them, which has imported what our scripts import and forks for each. A fork runs the script
as Python would: its arguments, environment, output and exit code are its own. What hangs on the interpreter's start
(closed streams, the encoding of output) needs a new interpreter instead.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
LONGEST_S = 600  # a process that takes longer is ended by a signal
IMPORTED = (
  'eagle_jax', 'eagle_jax.bench.doctor', 'eagle_jax.bench.plots', 'eagle_jax.bench.run', 'eagle_jax.bench.tune',
  'eagle_jax.train.run', 'absl.app', 'absl.flags', 'gguf', 'tokenizers', 'jinja2', 'tqdm',
)  # fmt: skip


class Forked:
  """A started script; `with` makes sure that it has ended."""

  def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
    self.args = [*command]
    self._folder = tempfile.TemporaryDirectory()
    self.stdout, self.stderr = (Path(self._folder.name, name) for name in ('out', 'err'))
    self.pid = ask('fork', self.args, {**environment}, str(self.stdout), str(self.stderr))
    self.returncode: int | None = None

  def __enter__(self) -> 'Forked':
    return self

  def __exit__(self, *_):
    if self.returncode is None:
      self.kill()
      self.wait()
    self._folder.cleanup()

  def kill(self) -> None:
    os.kill(self.pid, signal.SIGKILL)

  def wait(self, timeout: float = LONGEST_S) -> int:
    """The exit code; `subprocess.TimeoutExpired` if there is none after this many seconds."""
    if self.returncode is None:
      self.returncode = ask('wait', self.pid, timeout)
    if self.returncode is None:
      raise subprocess.TimeoutExpired(self.args, timeout)
    return self.returncode

  def completed(self) -> subprocess.CompletedProcess:
    """Wait for the end, and return what was printed too."""
    code, said = self.wait(), [path.read_text(encoding='utf-8') for path in (self.stdout, self.stderr)]
    return subprocess.CompletedProcess(self.args, code, *said)


def start(script: str | Path, *arguments: str, **environment: str) -> Forked:
  """Run a script of ours with arguments, and with these variables besides those of this process."""
  return Forked([str(script), *arguments], {**os.environ, 'JAX_PLATFORMS': 'cpu', **environment})


@functools.cache
def server() -> subprocess.Popen:
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
  return subprocess.Popen([sys.executable, __file__], env=environment, **pipes)


def ask(*request):
  server().stdin.write(json.dumps(request) + '\n')
  server().stdin.flush()
  return json.loads(server().stdout.readline())


def fork(command: list[str], environment: dict[str, str], stdout: str, stderr: str) -> int:
  """The process's number, in the server; the new process never returns from here."""
  if number := os.fork():
    return number
  signal.alarm(LONGEST_S)
  for stream, path in enumerate((os.devnull, stdout, stderr)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
  os.environ.clear()
  os.environ.update(environment)
  # JAX has read its variables already. Of these, the folder of compiled programs may be another one.
  jax.config.update('jax_compilation_cache_dir', environment.get('JAX_COMPILATION_CACHE_DIR'))
  sys.argv[:] = command
  sys.path[0] = str(Path(command[0]).parent)
  runpy.run_path(command[0], run_name='__main__')
  sys.exit()


def wait(number: int, seconds: float) -> int | None:
  end = time.monotonic() + seconds
  while (found := os.waitpid(number, os.WNOHANG))[0] == 0:
    if time.monotonic() > end:
      return None
    time.sleep(0.01)
  return os.waitstatus_to_exitcode(found[1])


def serve() -> None:
  for name in IMPORTED:
    with contextlib.suppress(ImportError):  # of an extra that is not here
      importlib.import_module(name)
  gc.freeze()
  for line in sys.stdin:
    name, *arguments = json.loads(line)
    sys.stdout.write(json.dumps({'fork': fork, 'wait': wait}[name](*arguments)) + '\n')
    sys.stdout.flush()


if __name__ == '__main__':
  serve()
