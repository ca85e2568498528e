"""Sizes in whole tiles: of products, where a partial tile costs as much as a full one, and of caches read in blocks."""

import dataclasses

import jax

from eagle_jax.kernels import cpu


@dataclasses.dataclass(frozen=True)
class Columns:
  """The rule for how many columns a product should have on a device."""

  least: int = 1  # fewer cost as much as these
  any_until: int = 0  # up to this number every count is fast; larger ones are rounded up to whole tiles

  @classmethod
  def of(cls, platform: str | None = None) -> 'Columns':
    """Return those of 'cpu', 'gpu' or 'tpu'; None: of the platform that programs run on by default.

    XLA:TPU does not use the matrix unit for a single column. The kernels of `cpu.cc` have a form for each count.
    """
    if (platform or jax.default_backend()) == 'tpu':
      return cls(least=8)
    return cls(any_until=cpu.MAX_COLUMNS if platform is None and cpu.library() else 0)

  def per_sequence(self, num_nodes: int, batch: int) -> int:
    """Count the columns that a target pass has for each sequence: one a node, and where it pays a few unused ones more.

    Args:
      num_nodes: of each sequence's tree.
      batch: sequences on a device.
    """
    flat = max(batch * num_nodes, self.least)
    if flat <= self.any_until:
      return num_nodes
    tiled = 1 << (flat - 1).bit_length() if flat <= 16 else -(-flat // 16) * 16
    return num_nodes if tiled % batch else tiled // batch


def round_up_slots(num_slots: int) -> int:
  """Round the slots of a cache up to whole blocks, as a TPU's kernel reads them; up to 512 are one block."""
  return num_slots if num_slots <= 512 else -(-num_slots // 128) * 128
