"""Place the nodes of a cycle in a picture: a level to the right of its parents, likelier siblings above."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from eagle_jax.decode.record import Cycle
from eagle_jax.tree import NO_PARENT
from eagle_jax.viz.words import num_cells

# In pixels: line spacing, height of a node, gap between levels, outer margin, padding beside a word, its baseline.
LINE, HEIGHT, GAP, MARGIN, PADDING, BASELINE = 27, 21, 30, 14, 9, 15
CELL, NUMBER = 7.25, 24  # width of a letter in a font of 12 pixels, and of a probability


class Layout(NamedTuple):
  """The places of all nodes in the cycle's order, and of the bonus behind them, the accepted path's last child."""

  parent: list[int]
  depth: list[int]
  line: list[int]  # a leaf takes one, a first child its parent's
  left: list[int]  # by depth, pixels
  width: list[int]  # by depth, pixels

  @property
  def size(self) -> tuple[int, int]:
    """Width and height of the picture, pixels."""
    return self.left[-1] + self.width[-1] + MARGIN, 2 * MARGIN + max(self.line) * LINE + HEIGHT

  def box(self, node: int) -> tuple[int, int, int]:
    """Left edge, top edge and width of a node, pixels; all are HEIGHT high."""
    depth = self.depth[node]
    return self.left[depth], MARGIN + self.line[node] * LINE, self.width[depth]

  def curve(self, node: int) -> str:
    """SVG path from a node's parent to the node."""
    (from_left, from_top, from_width), (left, top, _) = self.box(self.parent[node]), self.box(node)
    right, start, end = from_left + from_width, from_top + HEIGHT // 2, top + HEIGHT // 2
    bend = left - GAP // 2  # parents of one level end where its column ends, whatever their words
    return f'M{right} {start}C{bend} {start} {bend} {end} {left} {end}'


def require_cycle(cycle: object) -> None:
  """Raise a ValueError if this is not one cycle of a trace."""
  if not isinstance(cycle, Cycle):
    raise ValueError(
      f'A cycle of a trace is needed, got {type(cycle).__name__}: with out = generate(..., trace=True), '
      'out.trace[i][j] is that of prompt i and target pass j.'
    )


def children(cycle: Cycle) -> list[list[int]]:
  """List each node's children, likeliest first; the bonus, numbered behind all nodes, is the path's last child."""
  below: list[list[int]] = [[] for _ in range(len(cycle.token) + 1)]
  for node in sorted(range(len(cycle.token)), key=lambda node: cycle.rank[node]):
    if cycle.parent[node] != NO_PARENT:
      below[cycle.parent[node]].append(node)
  below[cycle.path[-1]].append(len(cycle.token))
  return below


def lay_out(cycle: Cycle, labels: Sequence[str]) -> Layout:
  """Place the nodes of a cycle, and the bonus behind them, with room for their labels."""
  parent = [*cycle.parent.tolist(), int(cycle.path[-1])]
  depth, line, num_lines = [0] * len(parent), [0] * len(parent), 0
  for node in range(1, len(parent)):
    depth[node] = depth[parent[node]] + 1
  below, waiting = children(cycle), [0]
  while waiting:  # depth first
    node = waiting.pop()
    if node and node != below[parent[node]][0]:
      num_lines += 1
    line[node] = num_lines
    waiting += reversed(below[node])
  cells = [0] * (max(depth) + 1)
  for at, text in zip(depth, labels, strict=True):
    cells[at] = max(cells[at], num_cells(text))
  width = [math.ceil(2 * PADDING + CELL * num + (NUMBER if at else 0)) for at, num in enumerate(cells)]
  left = [MARGIN + sum(width[:at]) + at * GAP for at in range(len(width))]
  return Layout(parent, depth, line, left, width)
