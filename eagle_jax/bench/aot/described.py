"""Describe devices that need not be present, so that programs can be compiled for them."""

from typing import Any

from jax.experimental import topologies

# As XLA's own target configurations describe them (openxla/xla, xla/backends/gpu/target_config/specs).
_GPU_BYTES = {  # a second, and in all
  'h100': (3_352_320_000_000, 84_942_979_072),
  'h200': (4_800_000_000_000, 151_397_597_184),
}
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def devices(topology: str) -> list[Any]:
  """Return described devices to lower and compile for.

  Args:
    topology: TPUs as named by `jax.experimental.topologies` ('v5e:2x2'), or GPUs of one host ('h100', 'h200:4').

  Raises:
    ValueError: the compiler is not installed (extra: tpu, or gpu), or does not know the topology.
  """
  name, _, count = topology.partition(':')
  try:
    if name not in _GPU_BYTES:
      return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    bandwidth, memory = _GPU_BYTES[name]
    config = _HOPPER.format(bandwidth=bandwidth, memory=memory, name=name)
    described = topologies.get_topology_desc(platform='cuda', target_config=config, topology=f'1x1x{int(count or 1)}')
    return described.devices
  except (RuntimeError, NotImplementedError, ValueError) as error:
    raise ValueError(
      f'No topology {topology!r} ({error}). TPUs like v5e:2x2 need the extra "tpu"; GPUs like h100 or h200:4 "gpu".'
    ) from error
