"""Numbers read from a program's listing, of one short enough to count by hand."""

import math

from eagle_jax.bench.aot.hlo import bytes_moved, estimated_cycles, num_kernels

LISTING = """HloModule step

%looks_up (table: bf16[1000,8], row: s32[4]) -> bf16[4,8] {
  %table = bf16[1000,8]{1,0} parameter(0)
  %row = s32[4]{0} parameter(1)
  ROOT %gather = bf16[4,8]{1,0} gather(%table, %row), slice_sizes={1,8}
}

%adds (a: f32[16], b: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[16]{0} parameter(1)
  ROOT %add = f32[16]{0} add(%a, %b)
}

ENTRY %main (weights: f32[64,16], table: bf16[1000,8], row: s32[4]) -> f32[16] {
  %weights = f32[64,16]{1,0:T(8,128)} parameter(0)
  %table = bf16[1000,8]{1,0:T(8,128)(2,1)} parameter(1)
  %row = s32[4]{0:T(128)} parameter(2)
  %start = (f32[64,16]{1,0:T(8,128)S(1)}, f32[64,16]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %done = f32[64,16]{1,0:T(8,128)S(1)} copy-done(%start)
  %piece-start = ((f32[64,16]{1,0:T(8,128)}), f32[8,16]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%weights), slice={[0:8], [0:16]}
  %piece = f32[8,16]{1,0:T(8,128)S(1)} slice-done(%piece-start)
  %rows = bf16[4,8]{1,0:T(8,128)S(1)} fusion(%table, %row), kind=kCustom, calls=%looks_up, backend_config={"estimated_cycles":"30"}
  %fast = f32[16]{0:T(128)S(1)} fusion(%done, %piece), kind=kLoop, calls=%adds, backend_config={"estimated_cycles":"5"}
  ROOT %out = f32[16]{0:T(128)} fusion(%fast, %fast), kind=kLoop, calls=%adds, backend_config={"estimated_cycles":"7"}
}
"""  # noqa: E501


def test_bytes_over_the_bus():
  whole_copy, slice_copy, row_ids, result = 4 * 64 * 16, 4 * 8 * 16, 4 * 4, 4 * 16
  assert bytes_moved(LISTING) == whole_copy + slice_copy + row_ids + result


def test_without_fast_memory_every_operand_moves():
  slow = LISTING.replace('S(1)', '')
  looked_up, row_ids, fast = 2 * 4 * 8, 4 * 4, 4 * (64 * 16 + 8 * 16 + 16)
  assert bytes_moved(slow) == looked_up + row_ids + fast + 3 * 4 * 16


def test_cycles():
  assert estimated_cycles(LISTING) == 42
  assert math.isnan(estimated_cycles(LISTING.replace('estimated', 'other')))


def test_kernels():
  assert num_kernels(LISTING) == 2 + 3  # what is copied ahead, and the fusions


def test_kernels_of_a_loop_count_as_often_as_it_turns():
  loop = '%looped = f32[16]{0} while(%fast), condition=%any, body=%adds'
  counted = LISTING.replace('  ROOT %out', f'  {loop}, backend_config={{"known_trip_count":{{"n":"7"}}}}\n  ROOT %out')
  assert num_kernels(counted) == 2 + 3 + 7
  assert num_kernels(LISTING.replace('  ROOT %out', f'  {loop}\n  ROOT %out')) == 2 + 3
