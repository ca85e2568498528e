"""The choice between the forms of an operation, one for each kind of device."""

from collections.abc import Callable
from typing import Any

import jax


def dispatch(
  *arrays: Any,
  default: Callable,
  cpu: Callable | None = None,
  gpu: Callable | None = None,
  cuda: Callable | None = None,
  tpu: Callable | None = None,
) -> Any:
  """Run the form of an operation that is written for the device that the program is compiled for.

  The choice is made when the program is lowered: it holds the chosen form alone.

  Args:
    arrays: pytrees that every form takes. All forms return the same shapes and dtypes.
    default: the form for devices that have none of their own.
    cpu, tpu: forms for these.
    gpu: the form for GPUs of all makers.
    cuda: the form for NVIDIA's alone; there it stands before `gpu`.
  """
  of_platform = {'cpu': cpu, 'cuda': cuda or gpu, 'rocm': gpu, 'tpu': tpu}
  forms = {platform: form for platform, form in of_platform.items() if form is not None}
  return jax.lax.platform_dependent(*arrays, default=default, **forms) if forms else default(*arrays)


def dispatch_loop(*arrays: Any, sequential: Callable, parallel: Callable) -> Any:
  """Run the form whose loop ends by a condition, or the one that computes more and has no condition.

  On a GPU each condition waits for the host, and what is computed for nothing is a few kernels.

  Args:
    arrays: pytrees that both forms take.
    sequential: stops as soon as it can.
    parallel: has no loop.
  """
  return dispatch(*arrays, default=sequential, gpu=parallel)
