"""Scans: a step for each element of an array, one after the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.kernels.dispatch import dispatch


def reference(carry: Any, x_d: jax.Array, *, step: Callable) -> tuple[Any, Any]:
  """Call the step for each element; return the last carry, and all outputs, stacked."""
  outputs = []
  for x in x_d:
    carry, y = step(carry, x)
    outputs.append(y)
  return carry, jax.tree.map(lambda *y: jnp.stack(y), *outputs)


def scan_loop(carry: Any, x_d: jax.Array, *, step: Callable) -> tuple[Any, Any]:
  """Scan in a loop, so that the program is small: XLA:CPU loads one in time that grows with the square of its size."""
  return jax.lax.scan(step, carry, x_d)


def scan_unrolled(carry: Any, x_d: jax.Array, *, step: Callable) -> tuple[Any, Any]:
  """Scan without a loop: a TPU then keeps as many weights as it can in fast memory from one step to the next."""
  return jax.lax.scan(step, carry, x_d, unroll=len(x_d))


def scan(step: Callable, carry: Any, x_d: jax.Array) -> tuple[Any, Any]:
  """Return the last carry, and the outputs of all steps, stacked: [d, ...] each.

  Args:
    step: (carry, element) -> (carry, output). The carry keeps its shapes, unless there is a single element.
    carry: a pytree of arrays.
    x_d: at least one element.
  """
  traced_once = jax.jit(step)
  if len(x_d) == 1:
    return reference(carry, x_d, step=traced_once)
  loop, unrolled = (functools.partial(form, step=traced_once) for form in (scan_loop, scan_unrolled))
  return dispatch(carry, x_d, default=unrolled, cpu=loop)
