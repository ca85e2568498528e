"""The order of an array's dimensions in memory."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from eagle_jax.kernels.dispatch import dispatch


def reference(x: jax.Array) -> jax.Array:
  """Return x. On a CPU the last dimension is innermost in memory anyway."""
  return x


def constrain_row_major(x: jax.Array) -> jax.Array:
  """Ask the compiler for row-major order: for an accelerator it would choose an order by the first readers it sees."""
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def row_major(x: jax.Array) -> jax.Array:
  """Keep the last dimension of an array innermost in memory.

  An array that a mesh splits would be gathered whole: there, call this through `sharding.on_each_device`.
  """
  return dispatch(x, default=constrain_row_major, cpu=reference)
