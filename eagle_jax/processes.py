"""Several processes of one program, as on a TPU pod: each has devices of its own, and holds their parts of arrays.

All must do the same things in the same order: for what one of them leaves out, the others wait. JAX's own
`jax.distributed` joins them; a program that does not call it is a process alone.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def join(cluster: str) -> None:
  """Finds the other processes. Comes before anything else that JAX is asked for.

  Args:
    cluster: 'auto' where JAX knows the cluster (Cloud TPU, Slurm, Open MPI, Kubernetes), or 'HOST:PORT,NUMBER,INDEX':
      an address that the first process listens at, how many processes there are, and which of them this is.

  Raises:
    ValueError: it is neither, or JAX knows no cluster here.
  """
  address: dict[str, Any] = {}
  if cluster != 'auto':
    try:
      coordinator, number, index = cluster.split(',')
      address = {'coordinator_address': coordinator, 'num_processes': int(number), 'process_id': int(index)}
    except ValueError:
      raise ValueError(f"The cluster is {cluster!r}; 'auto' or HOST:PORT,NUMBER,INDEX is needed.") from None
  try:
    jax.distributed.initialize(**address)
  except ValueError as error:
    raise ValueError(f'The cluster {cluster!r} cannot be joined: {error} Give its HOST:PORT,NUMBER,INDEX.') from error


def is_lead() -> bool:
  """Whether this is the process that writes files and speaks to the user."""
  return jax.process_index() == 0


def lead_says(value: bool) -> bool:
  """The lead's value, in all: processes may see a folder at different moments."""
  return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def in_lead(run: Callable[..., Any], *args: Any, **how: Any) -> None:
  """Calls a function in the lead alone; the others wait until it is done, and find what it wrote."""
  if is_lead():
    run(*args, **how)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(getattr(run, '__name__', ''))


def write_once(path: Path, make: Callable[[], Any], write: Callable[[Path, Any], None]) -> None:
  """Where a file is missing, all make what it holds, and the lead writes it."""
  if not lead_says(path.exists()):
    in_lead(write, path, make())


def require_same(what: str, value: Any) -> None:
  """ValueError in every process if they came with different values, by their `repr`."""
  mine = np.uint32(zlib.crc32(repr(value).encode()))
  if len({*multihost_utils.process_allgather(mine).tolist()}) > 1:
    raise ValueError(f'{what} differs from process to process; all of them must come with the same.')
