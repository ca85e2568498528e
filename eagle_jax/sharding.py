"""Which mesh axis holds what: logical axes of every array in one table, and one table of rules from them to the mesh.

Nothing else names a mesh axis. A mesh has up to two: 'data' splits batch rows, 'model' splits heads (or each of them,
where they are too few), the feed-forward width and the vocabulary (Megatron-LM, arXiv:1909.08053).
"""

import contextlib
import functools
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
  ('o', 'weight'): ('width', 'heads'),
  ('gate_up', 'weight'): (None, 'ffn', 'width'),  # of each expert too: all share every one, so no device waits
  ('down', 'weight'): ('width', 'ffn'),
  ('fc', 'weight'): ('fc_out', 'width'),
}
CACHE_AXES = ('batch', 'kv_heads', None, None)


def make_mesh(devices: Sequence[jax.Device] | None = None, *, num_model: int = 1) -> Mesh:
  """A ('data', 'model') mesh with `num_model` devices a model and the rest over batch rows.

  Raises:
    ValueError: the devices cannot be divided so.
  """
  devices = jax.devices() if devices is None else devices
  if num_model < 1 or len(devices) % num_model:
    raise ValueError(f'{len(devices)} devices cannot be split into models of {num_model}; choose a divisor.')
  grid = np.asarray(devices).reshape(-1, num_model)
  return Mesh(grid, ('data', 'model'), axis_types=(AxisType.Auto, AxisType.Auto))


def partition(axes: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
  """The spec of an array of these logical axes. A mesh axis splits the first of its dimensions that it divides."""
  names: list[str | None] = []
  for axis, size in zip(axes, shape, strict=True):
    name = RULES[axis] if axis else None
    names.append(name if name in mesh.shape and name not in names and size % mesh.shape[name] == 0 else None)
  return PartitionSpec(*names)


def num_devices(mesh: Mesh | None) -> int:
  """1 without a mesh."""
  return 1 if mesh is None else mesh.size


def row_axis_size(mesh: Any) -> int:
  """In how many parts a mesh splits batch rows that it divides; 1 without a mesh."""
  return 1 if mesh is None else mesh.shape.get(RULES['batch'], 1)


def num_row_parts(batch: int, mesh: Any) -> int:
  """In how many parts a mesh splits so many batch rows; 1 where it does not divide them."""
  size = row_axis_size(mesh)
  return 1 if batch % size else size


def require_whole_share(what: str, batch: int, mesh: Any) -> None:
  """ValueError where a mesh does not divide so many batch rows: each device would compute them all."""
  if batch % (size := row_axis_size(mesh)):
    raise ValueError(
      f'{what} is {batch}, and the mesh splits rows over {size} devices: a multiple of {size} is needed.'
    )


def param_sharding(path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Where one parameter lives; `path` is its keys in the nested dict. What has one entry a row lies as the rows."""
  axes = PARAM_AXES.get(tuple(path[-2:]), (None,) * len(shape))
  return NamedSharding(mesh, partition(axes[: len(shape)], shape, mesh))


def param_shardings(params: Any, mesh: Mesh | AbstractMesh) -> Any:
  """`param_sharding` of every leaf of nested dicts, or of what is made of them, such as an optimizer's state."""

  def sharding(path, leaf):
    return param_sharding([str(key.key) for key in path if hasattr(key, 'key')], leaf.shape, mesh)

  return jax.tree_util.tree_map_with_path(sharding, params)


def mesh_of(params: Any) -> Mesh | None:
  """The mesh that parameters live on, or None for a single device."""
  return getattr(getattr(jax.tree.leaves(params)[0], 'sharding', None), 'mesh', None)


def is_shared(mesh: Mesh | None) -> bool:
  """Whether several processes have devices in it: each then holds parts of the arrays there (see `processes`)."""
  return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def put(x: Any, sharding: NamedSharding) -> jax.Array:
  """An array that lies so. Of several processes, each comes with all of it, and puts the parts of its devices there."""
  if sharding.is_fully_addressable or _is_parted(x):
    return jax.device_put(x, sharding)
  whole = np.asarray(x)
  return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


def placed(x: Any, path: Sequence[str], mesh: Mesh | None) -> jax.Array:
  """A copy, where the parameter at `path` lives; without a mesh, on the default device."""
  return jnp.array(x) if mesh is None else put(x, param_sharding(path, x.shape, mesh))


def fetched(tree: Any) -> Any:
  """A pytree's arrays in NumPy, whole in every process."""
  parted = [x for x in jax.tree.leaves(tree) if _is_parted(x)]
  return jax.device_get(_joined(tree, mesh=parted[0].sharding.mesh) if parted else tree)


def _is_parted(x: Any) -> bool:
  return isinstance(x, jax.Array) and not x.is_fully_addressable


@functools.partial(jax.jit, static_argnames='mesh')
def _joined(tree: Any, *, mesh: Mesh) -> Any:
  return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def using(mesh: Mesh | None) -> Iterator[None]:
  """The context of compiling and running: the mesh, if there is one, and 32 bits whatever `jax_enable_x64` says."""
  with jax.enable_x64(False), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    yield


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
  """Inside a jit under `jax.set_mesh`, keeps an array on its mesh axes; without a mesh, does nothing."""
  mesh = jax.sharding.get_abstract_mesh()
  return x if mesh.empty else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def on_each_device(run: Callable[..., Any], arrays: Sequence[Any], axes: Sequence[Sequence[str | None]]) -> Any:
  """A function of each device's own part, for what the compiler cannot split. Without a mesh, of the whole.

  Args:
    run: arrays -> what has the first one's shapes, and lies as that does.
    arrays: what it takes, each an array or a pytree of arrays.
    axes: logical axes of each, of all leaves of a pytree.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return run(*arrays)
  specs = tuple(
    jax.tree.map(lambda x, names=names: partition(names, x.shape, mesh), tree)
    for names, tree in zip(axes, arrays, strict=True)
  )
  return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
