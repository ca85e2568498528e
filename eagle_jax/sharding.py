"""Shard arrays over a mesh: one table of each array's logical axes, and one table of rules from those to mesh axes.

No other module names a mesh axis. There are two: 'data' splits the sequences of a batch; 'model' splits heads (or each
head, if there are too few), the feed-forward width and the vocabulary (Megatron-LM, arXiv:1909.08053).
"""

import contextlib
import functools
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

RULES = {
  'batch': 'data', 'heads': 'model', 'kv_heads': 'model', 'head_dim': 'model', 'ffn': 'model', 'vocab': 'model',
  'width': None, 'fc_out': 'model',
}  # fmt: skip

# The last two names of a parameter's path -> its logical axes; weights are [out, in]. All others are replicated.
PARAM_AXES: dict[tuple[str, ...], tuple[str | None, ...]] = {
  ('embed', 'weight'): ('vocab', 'width'),
  ('head', 'weight'): ('vocab', 'width'),
  ('qkv', 'weight'): ('kv_heads', None, 'head_dim', 'width'),
  ('qkv', 'bias'): ('kv_heads', None, 'head_dim'),
  ('attn', 'sinks'): ('kv_heads', None),
  ('o', 'weight'): ('width', 'heads'),
  ('gate_up', 'weight'): (None, 'ffn', 'width'),
  ('gate_up', 'bias'): (None, 'ffn'),
  ('down', 'weight'): ('width', 'ffn'),
  ('up', 'weight'): ('ffn', 'width'),
  # Every device holds a part of each expert, so none waits.
  ('expert_gate_up', 'weight'): (None, None, 'ffn', 'width'),
  ('expert_gate_up', 'bias'): (None, None, 'ffn'),
  ('expert_down', 'weight'): (None, 'width', 'ffn'),
  ('fc', 'weight'): ('fc_out', 'width'),
}
MESH_AXES = ('data', 'model')
CACHE_AXES = ('batch', 'kv_heads', None, None)


def make_mesh(devices: Sequence[jax.Device] | None = None, *, num_model: int = 1) -> Mesh:
  """Make a ('data', 'model') mesh in which `num_model` devices share one model and the rest split the batch.

  Args:
    devices: one or more; default all.
    num_model: devices that share one copy of the model; it must divide their number.

  Raises:
    ValueError: there is no device, or `num_model` does not divide their number.

  Example:
    >>> mesh = eagle_jax.make_mesh(jax.devices()[:1], num_model=1)
    >>> dict(mesh.shape)
    {'data': 1, 'model': 1}
  """
  flat = np.ravel(np.asarray(jax.devices() if devices is None else devices, object))
  if not len(flat):
    raise ValueError('`devices` must hold at least one device, such as jax.devices(), got none.')
  if not isinstance(num_model, numbers.Integral) or num_model < 1 or len(flat) % num_model:
    raise ValueError(f'`num_model` must divide the number of devices, {len(flat)}, got {num_model!r}.')
  return Mesh(flat.reshape(-1, int(num_model)), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def require_mesh(mesh: Any) -> None:
  """Raise a ValueError unless this is None or a mesh as `make_mesh` makes it, of one axis or both."""
  if mesh is None:
    return
  axes = set(mesh.axis_names) if isinstance(mesh, Mesh) else set()
  if not axes or not axes.issubset(MESH_AXES) or set(mesh.axis_types) != {AxisType.Auto}:
    raise ValueError(
      f'`mesh` must be a result of make_mesh(...), whose axes are {MESH_AXES} and of type Auto, or None, got '
      f'{mesh!r:.120}.'
    )


def warn_unless_entered(mesh: Mesh | None) -> None:
  """Warn if arrays are spread over several devices of a mesh that no `jax.set_mesh` has entered."""
  if num_devices(mesh) > 1 and jax.sharding.get_abstract_mesh().empty:
    warnings.warn(
      f"The target's parameters lie on {num_devices(mesh)} devices, but their mesh was not entered: every device holds "
      'the whole cache, and a TPU refuses some kernels. Put the calls into `with jax.set_mesh(mesh):`.',
      stacklevel=3,
    )


def partition(axes: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
  """Make the spec of an array with these logical axes. A mesh axis splits the first dimension that it divides."""
  names: list[str | None] = []
  for axis, size in zip(axes, shape, strict=True):
    name = RULES[axis] if axis else None
    names.append(name if name in mesh.shape and name not in names and size % mesh.shape[name] == 0 else None)
  return PartitionSpec(*names)


def num_devices(mesh: Mesh | None) -> int:
  """Count the devices of a mesh; 1 without a mesh."""
  return 1 if mesh is None else mesh.size


def batch_axis_size(mesh: Any) -> int:
  """Return the size of the mesh axis that splits the batch; 1 without a mesh."""
  return 1 if mesh is None else mesh.shape.get(RULES['batch'], 1)


def num_batch_shards(batch: int, mesh: Any) -> int:
  """Count the shards that a mesh splits `batch` sequences into; 1 if it does not divide them."""
  size = batch_axis_size(mesh)
  return 1 if batch % size else size


def require_whole_share(what: str, batch: int, mesh: Any) -> None:
  """Raise a ValueError if the mesh does not divide `batch` sequences, since each device would then compute them all."""
  if batch % (size := batch_axis_size(mesh)):
    raise ValueError(f'{what} must be a multiple of {size}, the devices that split the batch, got {batch}.')


def param_sharding(path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Return the sharding of one parameter, given its keys in the nested dict.

  A vector of scales follows its matrix, and so does each of several stacked matrices.
  """
  axes = PARAM_AXES.get(tuple(path[-2:]), (None,) * len(shape))
  stacked = (None,) * (len(shape) - len(axes))
  return NamedSharding(mesh, partition((*stacked, *axes[: len(shape)]), shape, mesh))


def param_shardings(params: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Apply `param_sharding` to every leaf of nested dicts, or of a tree that contains them, such as optimizer state."""

  def sharding(path, leaf):
    return param_sharding([str(key.key) for key in path if hasattr(key, 'key')], leaf.shape, mesh)

  return jax.tree_util.tree_map_with_path(sharding, params)


def mesh_of(params: Any) -> Mesh | None:
  """Return the mesh of sharded parameters, or None for a single device."""
  return getattr(getattr(jax.tree.leaves(params)[0], 'sharding', None), 'mesh', None)


def is_shared(mesh: Mesh | None) -> bool:
  """Return whether several processes share the mesh, so that each holds only parts of its arrays; see `processes`."""
  return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def put(x: Any, sharding: NamedSharding) -> jax.Array:
  """Place an array with a sharding. With several processes, each passes the whole array and places its own parts."""
  if sharding.is_fully_addressable or _is_distributed(x):
    return jax.device_put(x, sharding)
  whole = np.asarray(x)
  return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


def place_param(x: Any, path: Sequence[str], mesh: Mesh | None) -> jax.Array:
  """Copy an array to where the parameter at `path` lives; without a mesh, to the default device."""
  if mesh is None:
    return jnp.array(x) if isinstance(x, jax.Array) else jax.device_put(x, may_alias=False)
  return put(x, param_sharding(path, x.shape, mesh))


def to_device(x: Any, dtype: Any) -> jax.Array:
  """Place numbers or a NumPy array explicitly, which `jax.transfer_guard` allows; JAX's own arrays are only cast."""
  is_ours = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
  return jax.device_put(np.asarray(x, dtype)) if is_ours else jnp.asarray(x, dtype)


def to_host(tree: Any) -> Any:
  """Fetch a pytree's arrays as NumPy, whole in every process."""
  distributed = [x for x in jax.tree.leaves(tree) if _is_distributed(x)]
  return jax.device_get(_replicate(tree, mesh=distributed[0].sharding.mesh) if distributed else tree)


def _is_distributed(x: Any) -> bool:
  return isinstance(x, jax.Array) and not x.is_fully_addressable


@functools.partial(jax.jit, static_argnames='mesh')
def _replicate(tree: Any, *, mesh: Mesh) -> Any:
  return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
  """Enter the context for compiling and running: the mesh, if there is one, and 32 bits despite `jax_enable_x64`."""
  with jax.enable_x64(False), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    yield


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
  """Constrain an array to its mesh axes inside a jit under `jax.set_mesh`; do nothing without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return x if mesh.empty else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def on_each_device(run: Callable[..., Any], arrays: Sequence[Any], axes: Sequence[Sequence[str | None]]) -> Any:
  """Run a function that the compiler cannot partition on each device's own part; without a mesh, on the whole arrays.

  Args:
    run: arrays -> a result with the shapes and the sharding of the first array.
    arrays: its arguments, each an array or a pytree of arrays.
    axes: logical axes of each argument, shared by all leaves of a pytree.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return run(*arrays)
  specs = tuple(
    jax.tree.map(lambda x, names=names: partition(names, x.shape, mesh), tree)
    for names, tree in zip(axes, arrays, strict=True)
  )
  return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
