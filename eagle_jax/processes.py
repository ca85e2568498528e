"""Several processes that run one program, as on a TPU pod: each has its own devices and holds their shards.

All of them must make the same calls in the same order, or the others hang. `jax.distributed` connects them; a program
that never calls it is a single process.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def join(cluster: str) -> None:
  """Connect to the other processes. Must run before any other JAX call.

  Args:
    cluster: 'auto' where JAX detects the cluster (Cloud TPU, Slurm, Open MPI, Kubernetes), or 'HOST:PORT,NUMBER,INDEX':
      the address that the first process listens on, the number of processes, and the index of this one.

  Raises:
    ValueError: it is neither, or JAX detects no cluster here.
  """
  address: dict[str, Any] = {}
  if cluster != 'auto':
    try:
      coordinator, number, index = cluster.split(',')
      address = {'coordinator_address': coordinator, 'num_processes': int(number), 'process_id': int(index)}
    except ValueError:
      raise ValueError(f"The cluster must be 'auto' or HOST:PORT,NUMBER,INDEX, got {cluster!r}.") from None
  try:
    jax.distributed.initialize(**address)
  except ValueError as error:
    raise ValueError(f'The cluster {cluster!r} cannot be joined: {error} Give its HOST:PORT,NUMBER,INDEX.') from error


def is_main_process() -> bool:
  """Return whether this is the process that writes files and prints."""
  return jax.process_index() == 0


def true_everywhere(value: bool) -> bool:
  """Return whether the value is true in every process."""
  return bool(np.all(multihost_utils.process_allgather(np.bool_(value))))


def on_main(run: Callable[..., Any], *args: Any, **how: Any) -> None:
  """Call a function in the main process alone; the others wait until it returns, so they see what it wrote."""
  if is_main_process():
    run(*args, **how)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(getattr(run, '__name__', ''))


def write_once(path: Path, make: Callable[[], Any], write: Callable[[Path, Any], None]) -> None:
  """If the file is missing, compute its content in every process and write it in the main one.

  The main process decides, since they may look at a folder at different moments.
  """
  if not multihost_utils.broadcast_one_to_all(np.bool_(path.exists())):
    on_main(write, path, make())


def require_same(what: str, value: Any) -> None:
  """Raise a ValueError in every process if their values differ, compared by `repr`."""
  mine = np.uint32(zlib.crc32(repr(value).encode()))
  if len({*multihost_utils.process_allgather(mine).tolist()}) > 1:
    raise ValueError(f'{what} differs between processes; all of them must pass the same.')
