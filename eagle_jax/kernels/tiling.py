"""Sizes that fill whole tiles: of a product, where a tile that is not full costs as much as a full one, and of a cache,
whose slots a kernel reads in blocks."""

import jax


def free_columns(platform: str | None = None) -> int:
  """Count the columns that a product has at no more cost than one.

  A TPU keeps a product of one column from its matrix unit.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'; None for the one that programs run on by default.
  """
  return 8 if (platform or jax.default_backend()) == 'tpu' else 1


def columns_per_sequence(num_nodes: int, batch: int, *, min_columns: int = 1) -> int:
  """Count the columns that a target pass has for each sequence: one a node, and where it pays a few unused ones more.

  Args:
    num_nodes: of each sequence's tree.
    batch: sequences on a device.
    min_columns: that the pass has at least, over all of them.
  """
  flat = max(batch * num_nodes, min_columns)
  tiled = 1 << (flat - 1).bit_length() if flat <= 16 else -(-flat // 16) * 16
  return num_nodes if tiled % batch else tiled // batch


def round_up_slots(num_slots: int) -> int:
  """Return so many slots of a cache, or the few more that make whole blocks: those that a TPU's kernel reads."""
  return num_slots if num_slots <= 512 else -(-num_slots // 128) * 128
