"""Run by `test_sharding` in a process of its own: a tiny pair decodes on meshes of eight forced CPU devices.

Prints one JSON object: what every case gave, and where the arrays lie.
"""

import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding

import quick
from eagle_jax import decode, hub
from eagle_jax.config import DrafterConfig, Eagle3Config, TargetConfig
from eagle_jax.decode import batching
from eagle_jax.decode.program import Program
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.eagle3 import Eagle3
from eagle_jax.kernels import attention, attention_tpu
from eagle_jax.models.transformer import TransformerTarget
from eagle_jax.policy.trees import Chain, DynamicTree
from eagle_jax.sharding import CACHE_AXES, is_shared, make_mesh, mesh_of, param_shardings, partition, use_mesh
from eagle_jax.weights import naming
from eagle_jax.weights.load import flatten
from eagle_jax.weights.safetensors import write_safetensors

SIZES = {'vocab_size': 16, 'width': 32, 'num_heads': 8, 'num_kv_heads': 4, 'head_dim': 8, 'ffn_width': 48}
TARGET = TargetConfig(**SIZES, num_layers=1, max_context=128)
DRAFTER = DrafterConfig(**SIZES)
EAGLE3 = Eagle3Config(**SIZES, target_width=32, taps=(0, 0, 0))
MESHES = {'none': None, '1x4': (4, 4), '2x4': (8, 4), '8x1': (8, 1)}  # data x model: (devices, num_model)
POLICIES = {'chain': Chain(2), 'dynamic': DynamicTree(width=3, fanout=3, max_depth=2, num_nodes=8, lookup=True)}
SAMPLING = {'greedy': {'temperature': 0.0}, 'sampled': {'temperature': 0.8, 'top_k': 12, 'seed': 5}}
BATCHES = (8, 1)
COVERED = '1x4'  # by 2x4, which splits a model alike; the dynamic policy alone decodes on it
FAMILIES = {
  'biased': {'qkv_bias': True, 'qk_norm': True, 'window': 4, 'mlp_bias': True},
  'grouped': {'num_kv_heads': 2, 'qkv_bias': True},  # fewer than devices a model: each head's weights are split
  'routed': {
    'num_experts': 4, 'experts_per_token': 2, 'expert_bias': True, 'has_sinks': True, 'qk_norm': True,
    'joint_qk_norm': True,
  },
}  # fmt: skip


def write_models(folder: Path) -> tuple[Path, Path, Path]:
  """A random target, a drafter and an EAGLE-3 head, as folders that the hub loads."""
  target = TransformerTarget(TARGET).init_params(jax.random.key(0))
  target['embed'] = jax.tree.map(lambda x: 50 * x, target['embed'])  # a text that depends on all of its tokens
  content = {
    'model_type': 'llama',
    'vocab_size': TARGET.vocab_size,
    'hidden_size': TARGET.width,
    'intermediate_size': TARGET.ffn_width,
    'num_attention_heads': TARGET.num_heads,
    'head_dim': TARGET.head_dim,
    'num_key_value_heads': TARGET.num_kv_heads,
    'num_hidden_layers': TARGET.num_layers,
    'max_position_embeddings': TARGET.max_context,
    'rms_norm_eps': TARGET.norm_eps,
  }
  (folder / 'target').mkdir()
  (folder / 'target' / 'config.json').write_text(json.dumps(content))
  write_safetensors(folder / 'target' / 'model.safetensors', flatten(target, naming.hf_table(TARGET)))
  hub.save_drafter(Drafter(DRAFTER, Eagle(DRAFTER).init_params(jax.random.key(1))), folder / 'drafter')
  head = {'head': {'weight': jax.random.normal(jax.random.key(2), (EAGLE3.vocab_size, EAGLE3.width))}}
  hub.save_drafter(Drafter(EAGLE3, Eagle3(EAGLE3).init_params(jax.random.key(3)) | head), folder / 'eagle3')
  return folder / 'target', folder / 'drafter', folder / 'eagle3'


@functools.cache
def family(name: str) -> tuple[TransformerTarget, dict]:
  """The network of a family, and parameters, all of them random."""
  network, rng = TransformerTarget(dataclasses.replace(TARGET, **FAMILIES[name])), np.random.default_rng(0)
  shapes = jax.eval_shape(network.init_params, jax.random.key(0))
  return network, jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), shapes)


def logits(name: str, mesh) -> tuple[np.ndarray, int]:
  """[V, B, L] of a family; the length of the longest sum over devices."""
  network, params = family(name)
  if mesh is not None:
    params = jax.device_put(params, param_shardings(params, mesh))
    assert params['layer_0']['attn']['qkv']['weight'].sharding.mesh == mesh
  token_BL = np.random.default_rng(0).integers(0, TARGET.vocab_size, (max(BATCHES), 12), dtype=np.int32)
  with use_mesh(mesh):
    program = jax.jit(lambda params: network.logits(params, network.read(params, token_BL))).lower(params).compile()
  sums = re.findall(r'= (.*) all-reduce', program.as_text())
  sizes = [math.prod(map(int, dims.split(','))) for shapes in sums for dims in re.findall(r'\[([\d,]+)\]', shapes)]
  return np.asarray(program(params)), max(sizes, default=0)


@functools.cache
def unsharded_logits(name: str) -> tuple[np.ndarray, int]:
  return logits(name, None)


def compared(name: str, mesh) -> tuple[float, int]:
  """Error of the logits on a mesh, relative to the largest of them, and the longest sum."""
  expected_VBL, _ = unsharded_logits(name)
  found_VBL, longest = logits(name, mesh)
  return float(abs(found_VBL - expected_VBL).max() / abs(expected_VBL).max()), longest


def kernel(mesh) -> tuple[float, int]:
  """Return the error of the interpreted TPU attention kernel, each device with its own heads; count collectives."""
  rng = np.random.default_rng(0)
  given = [rng.standard_normal((8, 4, *rows, 8), np.float32) for rows in ((2, 3), (3,), (3,), (16,), (16,))]
  mask_BTM = np.broadcast_to(np.tri(3, dtype=bool), (8, 3, 3))

  def attend(q, k, v, keys, values, *, form=attention.reference):
    return form(attention.Operands(q, k, v, jnp.asarray(mask_BTM), keys, values, jnp.arange(8)))

  placed = [
    jax.device_put(x, NamedSharding(mesh, partition((*CACHE_AXES[:2], *(None,) * (x.ndim - 2)), x.shape, mesh)))
    for x in given
  ]
  in_kernel = functools.partial(attention.attend_in_kernel, kernel=attention_tpu)
  interpreted = mock.patch.object(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
  with use_mesh(mesh), interpreted:
    program = jax.jit(functools.partial(attend, form=in_kernel)).lower(*placed).compile()
  found, expected = program(*placed), attend(*map(jnp.asarray, given))
  assert found.sharding.shard_shape(found.shape) == placed[0].sharding.shard_shape(found.shape)
  exchanges = re.findall(r' (all-gather|all-reduce|all-to-all|collective-permute)\(', program.as_text())
  return float(abs(np.asarray(found) - expected).max()), len(exchanges)


def weights(drafter):
  """Matrices of the layer."""
  layer = drafter.params['layer']
  return [layer[part][name]['weight'] for part, name in (('attn', 'qkv'), ('attn', 'o'), ('mlp', 'down'))]


def layout(state) -> dict[str, list[int]]:
  """Shape of each array's share, by name; scalars left out."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): leaf.sharding.shard_shape(leaf.shape) for path, leaf in leaves if leaf.ndim}


def moved(target, drafter, prompts) -> tuple[dict[str, list[int]], list[str], int]:
  """Layout of a state, the arrays that two steps leave elsewhere, and the number of programs that these take."""
  params, spec = decode.build(target, drafter, policy=POLICIES['chain'])
  state = decode.prefill(params, *decode.pad_prompts(prompts, max(map(len, prompts))), spec=spec, max_new_tokens=16)
  shares, before = layout(state), shardings(state)
  decode.decode_step.clear_cache()
  for _ in range(2):
    state = decode.decode_step(params, state, spec=spec)
  after = shardings(state)
  elsewhere = [name for name, place in before.items() if place != after[name]]
  return shares, elsewhere, decode.decode_step._cache_size()


def shardings(state) -> dict[str, NamedSharding]:
  """Where each array is, by name."""
  return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def refilled(*args, **how) -> tuple[decode.Generation, list[int]]:
  """Return the tokens of refilled sequences, and how many programs insert and advance rows."""
  with (
    mock.patch.object(batching, '_INSERT', Program(batching.insert)) as insert,
    mock.patch.object(batching, '_ADVANCE', Program(batching.advance)) as advance,
  ):
    given = decode.generate(*args, **how)
  return given, [len(program._compiled) for program in (insert, advance)]


def streamed(target, drafter, prompt, **request) -> list[list[list[int]]]:
  """Tokens and accepted counts of a batch of one, decoded step by step."""
  first, *chunks = decode.stream(target, drafter, prompt, **request)
  tokens = first.tokens + [token for chunk in chunks for token in chunk.tokens]
  return [[tokens], [[chunk.num_accepted for chunk in chunks]]]


def main() -> None:
  quick.trace_one_form()
  jax.config.update('jax_num_cpu_devices', 8)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, TARGET.vocab_size, 3 + row).tolist() for row in range(max(BATCHES))]
  cases, places, moves, families, kernels, programs = {}, {}, {}, {}, {}, {}
  with tempfile.TemporaryDirectory() as folder:
    target_folder, drafter_folder, eagle3_folder = write_models(Path(folder))
    for mesh_name, sizes in MESHES.items():
      mesh = None if sizes is None else make_mesh(jax.devices()[: sizes[0]], num_model=sizes[1])
      if mesh is not None:
        families[mesh_name] = {name: compared(name, mesh) for name in FAMILIES}
        kernels[mesh_name] = kernel(mesh)
      target = hub.load_target(target_folder, mesh=mesh)
      drafter = hub.load_drafter(drafter_folder, target)
      assert mesh_of(target.params) == mesh_of(drafter.params) == mesh
      assert not is_shared(mesh)
      leaves = jax.tree_util.tree_leaves_with_path({'target': target.params, 'drafter': drafter.params})
      places[mesh_name] = {
        '/'.join(str(key.key) for key in path): [leaf.shape, leaf.sharding.shard_shape(leaf.shape)]
        for path, leaf in leaves
      }
      for policy_name, policy in POLICIES.items():
        if mesh_name == COVERED and policy_name != 'dynamic':
          continue
        for batch in BATCHES if mesh else BATCHES[:1]:  # a batch of one gives the first row of all
          for sampling_name, sampling in SAMPLING.items():
            request = {'max_new_tokens': 16, 'policy': policy, **sampling}
            if batch == 1 and policy_name == 'chain' and sampling_name == 'greedy':
              found = streamed(target, drafter, prompts[0], **request)
            else:
              given = decode.generate(target, drafter, prompts[:batch], **request)
              found = [given.tokens, given.num_accepted]
            cases.setdefault(f'{policy_name} {batch} {sampling_name}', {})[mesh_name] = found
      if mesh_name == COVERED:
        continue
      request = {'max_new_tokens': 16, 'policy': POLICIES['dynamic'], **SAMPLING['sampled']}
      eagle3 = hub.load_drafter(eagle3_folder, target)
      given = decode.generate(target, eagle3, prompts, **request)
      cases.setdefault('eagle3 8 sampled', {})[mesh_name] = [given.tokens, given.num_accepted]
      small = hub.load_drafter(drafter_folder, target, dtype='int8')
      given = decode.generate(target, small, prompts, **request)
      cases.setdefault('quantised 8 sampled', {})[mesh_name] = [given.tokens, given.num_accepted]
      if mesh is None:
        continue
      given, programs[mesh_name] = refilled(target, drafter, prompts, batch_size=4, **request)
      cases.setdefault('refilled 8 sampled', {})[mesh_name] = [given.tokens, given.num_accepted]
      for exact, rounded in zip(*map(weights, (drafter, small)), strict=True):
        assert rounded.value.sharding.shard_shape(rounded.shape) == exact.sharding.shard_shape(exact.shape)
      with jax.set_mesh(mesh):
        moves[mesh_name] = moved(target, drafter, prompts)
  found = {'cases': cases, 'places': places, 'moves': moves, 'programs': programs}
  json.dump(found | {'families': families, 'kernels': kernels}, sys.stdout)


if __name__ == '__main__':
  main()
