"""Describe devices that need not be present, so that programs can be compiled for them."""

from typing import Any, NamedTuple

from jax.experimental import topologies


class _Gpu(NamedTuple):
  """A GPU, as XLA's own target configurations describe it (openxla/xla, xla/backends/gpu/target_config/specs)."""

  capability: str
  bandwidth: int  # bytes a second
  memory: int  # bytes, likewise below
  l2: int
  clock_ghz: float
  num_cores: int
  core: str  # of each core: FPUs, threads, and bytes of shared memory, of which a block may take some

  def config(self, name: str) -> str:
    """Format XLA's target configuration of this GPU."""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ {self.capability} }}
  memory_bandwidth: {self.bandwidth} device_memory_size: {self.memory} l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz} core_count: {self.num_cores} {self.core}
  threads_per_warp: 32 threads_per_block_limit: 1024
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 registers_per_block_limit: 65536 registers_per_core_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def _core(num_fpus: int, num_threads: int, shared: int) -> str:
  """Format a core's sizes; a block may take all shared memory but 1 KB, which the system keeps since Ampere."""
  block = shared - 1024 if shared > 65536 else shared
  return (
    f'fpus_per_core: {num_fpus} threads_per_core_limit: {num_threads} '
    f'shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}'
  )


_HOPPER = 'major: 9 feature_extension: ACCELERATED_FEATURES'
# XLA has no configurations of the T4 and the L4: these are from NVIDIA's data sheets.
_GPUS = {
  't4': _Gpu('major: 7 minor: 5', 320_064_000_000, 15_843_721_216, 2**22, 1.59, 40, _core(64, 1024, 65_536)),
  'a100': _Gpu('major: 8', 2_039_040_000_000, 85_100_068_864, 41_943_040, 1.41, 108, _core(64, 2048, 167_936)),
  'l4': _Gpu('major: 8 minor: 9', 300_096_000_000, 23_580_639_232, 3 * 2**24, 2.04, 58, _core(128, 1536, 102_400)),
  'h100': _Gpu(_HOPPER, 3_352_320_000_000, 84_942_979_072, 52_428_800, 1.98, 132, _core(128, 2048, 233_472)),
  'h200': _Gpu(_HOPPER, 4_800_000_000_000, 151_397_597_184, 52_428_800, 1.98, 132, _core(128, 2048, 233_472)),
}


def devices(topology: str) -> list[Any]:
  """Return described devices to lower and compile for.

  Args:
    topology: TPUs as named by `jax.experimental.topologies` ('v5e:2x2'), or GPUs of one host ('t4', 'a100', 'l4',
      'h100', 'h200:4').

  Raises:
    ValueError: the compiler is not installed (extra: tpu, or gpu), or does not know the topology.
  """
  name, _, count = topology.partition(':')
  try:
    if name not in _GPUS:
      return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    described = topologies.get_topology_desc(
      platform='cuda', target_config=_GPUS[name].config(name), topology=f'1x1x{int(count or 1)}'
    )
    return described.devices
  except (RuntimeError, NotImplementedError, ValueError) as error:
    raise ValueError(
      f'No topology {topology!r} ({error}). TPUs like v5e:2x2 need the extra "tpu"; GPUs "gpu": '
      f'{", ".join(_GPUS)}, or several, like h200:4.'
    ) from error
