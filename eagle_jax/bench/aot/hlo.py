"""Read buffers, kernels and cycles from the listing of a program compiled for TPU or GPU (`Compiled.as_text`)."""

import math
import re
from typing import NamedTuple

_ITEM_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}
_SCALAR_BYTES = 8
_STANDS_STILL = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional'}
_COMPUTATION = re.compile(r'^%?([\w.-]+) \(.*?\{\n(.*?)^\}', re.M | re.S)
_INSTRUCTION = re.compile(r'^ +(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$', re.M)
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?')
_NAME = re.compile(r'%([\w.-]+)')
_CALLED = re.compile(r'calls=%?([\w.-]+)')
_TURNS = re.compile(r'body=%?([\w.-]+).*"known_trip_count":\{"n":"(\d+)"')
_ROWS = re.compile(r' (gather|dynamic-slice|dynamic-update-slice)\(')


class Buffer(NamedTuple):
  """An array among an instruction's operands or results."""

  num_bytes: int
  is_main: bool  # in main memory

  @classmethod
  def of(cls, dtype: str, lengths: str, layout: str) -> 'Buffer':
    """Parse its parts in the listing; a layout with S(1) or higher is in another memory."""
    size = math.prod(int(length) for length in lengths.split(',') if length)
    return cls(size * _ITEM_BYTES.get(dtype, 0), re.search(r'S\([1-9]', layout) is None)


def estimated_cycles(hlo: str) -> float:
  """Sum the compiler's estimates for the operations of a program's entry; NaN if there are none.

  Loops and custom kernels have no estimates, and asynchronous copies count no waiting time.
  """
  cycles = [int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', _entry(hlo))]
  return float(sum(cycles)) if cycles else math.nan


def num_kernels(hlo: str) -> int:
  """Count the operations that run one after the other; on a GPU each is a launch.

  The body of a loop counts as often as it is known to run; a loop whose trip count depends on data counts nothing.
  """
  bodies = dict(_COMPUTATION.findall(hlo))

  def within(body: str) -> int:
    number = 0
    for _, _, operation, rest in _INSTRUCTION.findall(body):
      if operation == 'while' and (turns := _TURNS.search(rest)):
        number += int(turns[2]) * within(bodies[turns[1]])
      number += operation not in _STANDS_STILL and not operation.endswith('-done')
    return number

  return within(_entry(hlo))


def bytes_moved(hlo: str) -> float:
  """Count the bytes that a program's entry moves over the main memory's bus.

  An array that is copied or sliced between memories moves once; other operations move their operands and results in
  main memory. An array that slices are gathered from or written to is left out, since only the slices move. Loops and
  branches are left out, since their bodies move little here.
  """
  on_rows = {name for name, body in _COMPUTATION.findall(hlo) if _ROWS.search(body)}
  buffers: dict[str, list[Buffer]] = {}
  total = 0
  for name, shape, operation, rest in _INSTRUCTION.findall(_entry(hlo)):
    results = buffers[name] = [Buffer.of(*parts) for parts in _ARRAY.findall(shape)]
    if operation in _STANDS_STILL or operation.endswith('-done'):
      continue
    if operation.endswith('-start'):  # results: what is copied, the copy, and a flag
      both = [buffer for buffer in results if buffer.num_bytes > _SCALAR_BYTES]
      total += min(both).num_bytes if len({buffer.is_main for buffer in both}) == 2 else 0
      continue
    operands = _NAME.findall(rest.split('), ')[0])
    touched = [*results, *(buffer for operand in operands for buffer in buffers.get(operand, []))]
    called = _CALLED.search(rest)
    if _ROWS.search(f' {operation}(') or (called and called[1] in on_rows):
      largest = max(buffer.num_bytes for buffer in touched)
      touched = [buffer for buffer in touched if buffer.num_bytes < largest]
    total += sum(buffer.num_bytes for buffer in touched if buffer.is_main)
  return float(total)


def _entry(hlo: str) -> str:
  return hlo[hlo.rindex('\nENTRY') :]
