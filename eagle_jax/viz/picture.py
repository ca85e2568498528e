"""Draw one cycle: SVG in a notebook, an indented tree in a terminal."""

import dataclasses
import math
from html import escape
from pathlib import Path
from typing import Any

from eagle_jax.decode.record import Cycle
from eagle_jax.viz.layout import BASELINE, HEIGHT, PADDING, children, lay_out, require_cycle
from eagle_jax.viz.words import label, word

STYLE = Path(__file__).with_name('tree.css')
_GREEN, _YELLOW, _FAINT, _END = '\033[32m', '\033[33m', '\033[2m', '\033[0m'
_UNLIKELY = 0.05  # paths this unlikely are printed faintly


def tree(cycle: Cycle, tokenizer: Any = None) -> 'Picture':
  """Draw one cycle: what was drafted, which path the target accepted, and its bonus.

  Args:
    cycle: `generate(..., trace=True).trace[i][j]`, of prompt i and target pass j.
    tokenizer: `target.tokenizer`; without one, tokens are shown as numbers.

  Returns:
    A picture that notebooks show; `str` of it is an indented tree, `.svg` a file's content.

  Raises:
    ValueError: `cycle` is not a cycle of a trace.

  Example:
    >>> out = eagle_jax.generate(target, drafter, ['Why is the sky blue?'], max_new_tokens=16, trace=True)
    >>> eagle_jax.viz.tree(out.trace[0][0], target.tokenizer).svg[:4]
    '<svg'
  """
  require_cycle(cycle)
  return Picture(cycle, [word(int(token), tokenizer) for token in (*cycle.token, cycle.bonus)])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Picture:
  """A drawn cycle."""

  cycle: Cycle
  words: list[str]  # of the nodes, and the bonus behind them

  def __repr__(self) -> str:
    return self.text()

  def _repr_html_(self) -> str:
    return f'<div style="overflow-x:auto">{self.svg}</div>'

  def text(self, *, is_coloured: bool = False) -> str:
    """Return an indented tree: the drafter's probability of each path, and a mark at each accepted node.

    Args:
      is_coloured: accepted nodes in green, the bonus in yellow, unlikely paths faint, as terminals do it.
    """
    below, lines = children(self.cycle), [label(self.words[0])]

    def add(node: int, indent: str) -> None:
      for child in below[node]:
        is_last = child == below[node][-1]
        lines.append(f'{indent}{"└── " if is_last else "├── "}{self._line(child, is_coloured)}')
        add(child, indent + ('    ' if is_last else '│   '))

    add(0, '')
    return '\n'.join(lines)

  def _line(self, node: int, is_coloured: bool) -> str:
    word, cut = label(self.words[node]), '' if self._is_emitted(node) else ', cut'
    if node == self._bonus:
      line, colour = f'{word} (bonus{cut})', _YELLOW
    else:
      probability, is_accepted = math.exp(self.cycle.log_q[node]), node in self.cycle.path
      line = f'{word} {probability:.2f}' + (f' ✓{cut}' if is_accepted else '')
      colour = _GREEN if is_accepted else _FAINT if probability < _UNLIKELY else ''
    return f'{colour}{line}{_END}' if is_coloured and colour else line

  @property
  def _bonus(self) -> int:
    return len(self.words) - 1

  def _is_emitted(self, node: int) -> bool:
    """Return False for an accepted node or a bonus that an EOS or the limit cut off the text."""
    settled = [*self.cycle.path[1:].tolist(), self._bonus]
    return node not in settled or settled.index(node) < self.cycle.num_emitted

  @property
  def svg(self) -> str:
    """The picture as SVG that stands alone."""
    layout = lay_out(self.cycle, [label(word) for word in self.words])
    width, height = layout.size
    kinds = [self._kind(node) for node in range(len(self.words))]
    drawn = sorted(range(1, len(kinds)), key=lambda node: kinds[node] != 'drafted')  # the path above all others
    edges = [f'<path class="edge {kinds[node]}" d="{layout.curve(node)}"/>' for node in drawn]
    nodes = [self._node(node, kind, *layout.box(node)) for node, kind in enumerate(kinds)]
    return (
      f'<svg xmlns="http://www.w3.org/2000/svg" class="eagle-tree" viewBox="0 0 {width} {height}" width="{width}" '
      f'height="{height}" role="img"><style>{STYLE.read_text(encoding="utf-8")}</style>'
      f'<rect class="paper" width="{width}" height="{height}" rx="8"/>{"".join(edges + nodes)}</svg>'
    )

  def _kind(self, node: int) -> str:
    """Return the classes of a node in tree.css."""
    kind = 'bonus' if node == self._bonus else 'accepted' if node in self.cycle.path else 'drafted'
    return kind if self._is_emitted(node) else f'{kind} cut'

  def _node(self, node: int, kind: str, left: int, top: int, width: int) -> str:
    is_drafted = 0 < node < self._bonus
    probability = math.exp(self.cycle.log_q[node]) if is_drafted else 1.0
    box = f'x="{left}" y="{top}" width="{width}" height="{HEIGHT}" rx="6"'
    number = f'<text class="number" x="{left + width - PADDING}" y="{top + BASELINE}">{short(probability)}</text>'
    return (
      f'<g class="node {kind}"><title>{escape(self._title(node))}</title>'
      f'<rect {box}/><rect class="shade" {box} fill-opacity="{shade(probability):.2f}"/>'
      f'<text x="{left + PADDING}" y="{top + BASELINE}">{escape(label(self.words[node]))}</text>'
      f'{number if is_drafted else ""}</g>'
    )

  def _title(self, node: int) -> str:
    """Return the text that a node shows under the pointer."""
    cycle, word = self.cycle, self.words[node]
    if node == self._bonus:
      return f'"{word}": bonus, the target\'s own token'
    if node == 0:
      return f'"{word}": root, the newest token of the text'
    drafter, target = math.exp(cycle.log_q[node] - cycle.log_q[cycle.parent[node]]), math.exp(cycle.log_p[node])
    return f'"{word}": drafter {drafter:.3f}, target {target:.3f}, rank {cycle.rank[node]}'


def shade(probability: float) -> float:
  """Return the opacity of a node; the square root keeps the likely ones of deep levels apart."""
  return 0.04 + 0.45 * math.sqrt(probability)


def short(probability: float) -> str:
  """Write a probability in three characters."""
  return '1.0' if probability >= 0.995 else f'{probability:.2f}'[1:]
