"""Pickled checkpoints: what PyTorch writes is read, and nothing in them is ever executed."""

import collections
import io
import json
import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax import hub
from eagle_jax.weights import folder
from eagle_jax.weights.pickled import read_pickled
from eagle_jax.weights.safetensors import read_safetensors


class Global:
  """An object that pickles as a name, whether or not anything has that name here."""

  def __init__(self, module: str, name: str):
    self.module, self.name = module, name

  def __call__(self, *_):
    """Look like something that can be called."""


class Call:
  """Pickles as the call of a name."""

  def __init__(self, function: Global, *args):
    self.function, self.args = function, args

  def __reduce__(self):
    return self.function, self.args


class Storage:
  def __init__(self, kind: str, key: str, size: int):
    self.pid = 'storage', Global('torch', kind), key, 'cpu', size


class Pickler(pickle._Pickler):
  """Protocol 2, as PyTorch's."""

  def persistent_id(self, obj):
    return obj.pid if isinstance(obj, Storage) else None

  def save(self, obj, save_persistent_id=True):
    if isinstance(obj, Global):
      self.write(b'c' + f'{obj.module}\n{obj.name}\n'.encode())
    else:
      super().save(obj, save_persistent_id)


def tensor(storage: Storage, shape, strides, offset=0) -> Call:
  function = Global('torch._utils', '_rebuild_tensor_v2')
  return Call(function, storage, offset, tuple(shape), tuple(strides), False, collections.OrderedDict())


def write(path, content, storages=(), *, compression=zipfile.ZIP_STORED, byteorder=b'little'):
  buffer = io.BytesIO()
  Pickler(buffer, protocol=2).dump(content)
  with zipfile.ZipFile(path, 'w', compression) as archive:
    archive.writestr('model/data.pkl', buffer.getvalue())
    archive.writestr('model/byteorder', byteorder)
    for key, array in dict(storages).items():
      archive.writestr(f'model/data/{key}', np.asarray(array).tobytes())
  return path


SIX = np.arange(6, dtype=np.float32)


def test_views_of_one_storage_are_read(tmp_path):
  storage = Storage('FloatStorage', '0', 6)
  content = {'whole': tensor(storage, (2, 3), (3, 1)), 'turned': tensor(storage, (3, 2), (1, 3))}
  content['tail'] = Call(Global('torch._utils', '_rebuild_parameter'), tensor(storage, (2,), (2,), 3), False, {})
  content['one'] = tensor(storage, (), (), 5)
  found = dict(read_pickled(write(tmp_path / 'a.bin', content, {'0': SIX})))
  assert [*found] == ['whole', 'turned', 'tail', 'one']
  np.testing.assert_array_equal(found['whole'], SIX.reshape(2, 3))
  np.testing.assert_array_equal(found['turned'], SIX.reshape(2, 3).T)
  np.testing.assert_array_equal(found['tail'], [3, 5])
  assert found['one'] == 5


@pytest.mark.parametrize(
  ('kind', 'dtype'),
  [
    ('HalfStorage', np.float16),
    ('BFloat16Storage', jnp.bfloat16),
    ('LongStorage', np.int64),
    ('BoolStorage', np.bool_),
  ],
)
def test_dtypes(tmp_path, kind, dtype):
  path = write(tmp_path / 'a.bin', {'x': tensor(Storage(kind, '0', 3), (3,), (1,))}, {'0': np.ones(3, dtype)})
  ((_, x),) = read_pickled(path)
  assert x.dtype == dtype
  assert x.tolist() == [1, 1, 1]


HARM = 'HARM' + '_DONE'


@pytest.mark.parametrize(
  'content',
  [
    {'x': Call(Global('os', 'putenv'), HARM, '1')},
    {'x': Call(Global('builtins', 'exec'), f'import os; os.environ["{HARM}"] = "1"')},
    Call(Global('builtins', 'getattr'), Global('os', 'environ'), 'clear'),
    {'x': Call(Global('collections', 'OrderedDict.fromkeys'), [1])},
    {'x': Call(Global('torch', 'load'), 'y')},
    {'x': Call(Global('numpy.core.multiarray', '_reconstruct'), ())},
  ],
)
def test_nothing_is_executed(tmp_path, content):
  with pytest.raises(ValueError, match='asks for .* Nothing of it was executed'):
    list(read_pickled(write(tmp_path / 'a.bin', content)))
  assert HARM not in os.environ


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ([1], 'a list'),
    ({'x': 3}, "'x' is a int"),
    ({3: tensor(Storage('FloatStorage', '0', 6), (6,), (1,))}, '3 is a _Tensor'),
    ({'x': tensor(Storage('FloatStorage', '0', 6), (7,), (1,))}, 'beyond its 6 numbers'),
    ({'x': tensor(Storage('FloatStorage', '0', 6), (2, 3), (4, 1))}, 'beyond its 6 numbers'),
    ({'x': tensor(Storage('FloatStorage', '0', 6), (3,), (-1,), 5)}, 'with strides'),
    ({'x': tensor(Storage('FloatStorage', '0', 6), (3,), (1, 1))}, 'with strides'),
    ({'x': tensor(Storage('FloatStorage', '0', 600), (600,), (1,))}, '24 bytes, not 600 x 4'),
    ({'x': tensor(Storage('FloatStorage', '9', 6), (6,), (1,))}, 'data/9'),
    ({'x': Call(Global('torch', 'FloatStorage'), 3)}, 'cannot be read'),
  ],
)
def test_what_does_not_fit_is_refused(tmp_path, content, message):
  with pytest.raises(ValueError, match=message):
    list(read_pickled(write(tmp_path / 'a.bin', content, {'0': SIX})))


def test_a_drafter_is_loaded_from_a_pickled_file(tmp_path):
  target, drafter = tiny.target(), tiny.drafter()
  hub.save_drafter(drafter, tmp_path)
  arrays = dict(read_safetensors(tmp_path / 'model.safetensors'))
  (tmp_path / 'model.safetensors').unlink()
  content = {}
  for key, (name, array) in enumerate(arrays.items()):
    strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
    content[name] = tensor(Storage('FloatStorage', str(key), array.size), array.shape, strides)
  write(tmp_path / 'pytorch_model.bin', content, {str(key): array for key, array in enumerate(arrays.values())})
  loaded = hub.load_drafter(tmp_path, target)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, drafter.params)


def test_damaged_files_are_refused(tmp_path):
  whole = {'x': tensor(Storage('FloatStorage', '0', 6), (6,), (1,))}
  path = write(tmp_path / 'a.bin', whole, {'0': SIX})
  for name, content in {'cut': path.read_bytes()[:-30], 'legacy': pickle.dumps({}), 'empty': b''}.items():
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f'{name} cannot be read'):
      list(read_pickled(tmp_path / name))
  with pytest.raises(ValueError, match='big-endian'):
    list(read_pickled(write(tmp_path / 'b.bin', whole, {'0': SIX}, byteorder=b'big')))
  with pytest.raises(ValueError, match='compressed'):
    list(read_pickled(write(tmp_path / 'c.bin', whole, {'0': SIX}, compression=zipfile.ZIP_DEFLATED)))
  with pytest.raises(ValueError, match='No checkpoint at'):
    list(read_pickled(tmp_path / 'none.bin'))


@pytest.mark.parity
def test_what_pytorch_writes_is_read(tmp_path):
  torch = pytest.importorskip('torch')
  module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
  state = module.state_dict() | {'d2t': torch.arange(5), 't2d': torch.ones(3, dtype=torch.bool)}
  state |= {'own': torch.nn.Parameter(torch.ones(2, 2).half().T)}
  torch.save(state, tmp_path / 'model.bin')
  found = dict(read_pickled(tmp_path / 'model.bin'))
  assert [*found] == [*state]
  for name, array in found.items():
    assert array.dtype.name == str(state[name].dtype).removeprefix('torch.')
    np.testing.assert_array_equal(array.astype(np.float64), state[name].detach().double().numpy())


def test_shards_are_read_as_their_index_says(tmp_path):
  for number, names in enumerate((['a', 'b'], ['b', 'c'])):
    content = {name: tensor(Storage('FloatStorage', '0', 6), (2,), (1,), number) for name in names}
    write(tmp_path / f'pytorch_model-{number}.bin', content, {'0': SIX})
  weight_map = {'a': 'pytorch_model-0.bin', 'b': 'pytorch_model-1.bin', 'c': 'pytorch_model-1.bin'}
  (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': weight_map}))
  found = list(folder.read_tensors(tmp_path))
  assert [(name, x.tolist()) for name, x in found] == [('a', [0, 1]), ('b', [1, 2]), ('c', [1, 2])]
  assert folder.read_names(tmp_path) == {'a', 'b', 'c'}
  (tmp_path / 'pytorch_model-1.bin').unlink()
  with pytest.raises(ValueError, match=r"lacks \['pytorch_model-1.bin'\], of 2 files"):
    list(folder.read_tensors(tmp_path))
