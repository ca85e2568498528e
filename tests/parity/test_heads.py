"""Heads in the layouts that others publish, against a rendering of the equations in draft/README.md in PyTorch.

The rendering runs whole sequences anew and knows neither caches nor trees.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import torch
from torch_heads import (
  CONFIG,
  DRAFTED,
  TOKENS,
  D,
  Switches,
  U,
  V,
  assert_close,
  drafted_outputs,
  eagle3_weights,
  eagle_weights,
  fused,
  griffin_weights,
  our_outputs,
  told,
  weights,
)

import tiny
from eagle_jax import decode, hub
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.weights.safetensors import write_safetensors

pytestmark = pytest.mark.parity
TARGET = dataclasses.replace(tiny.TARGET, num_layers=6)


# Layouts.


def safeailab(w, folder, kind):
  rename = {name: name.replace('layers.0.', 'midlayer.') if kind == 3 else name for name in w}
  torch.save({rename[name]: x for name, x in w.items()}, folder / 'pytorch_model.bin')
  return CONFIG | ({'draft_vocab_size': U} if kind == 3 else {})


def sglang(w, folder, kind):
  prefix = 'model.layers.0.' if kind == 2 else 'midlayer.'
  write_safetensors(
    folder / 'model.safetensors', {name.replace('layers.0.', prefix): x.numpy() for name, x in w.items()}
  )
  extra = {'draft_vocab_size': U, 'architectures': ['LlamaForCausalLMEagle3']}
  return CONFIG | (extra | {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [0, 2, 3]}} if kind == 3 else {})


def speculators(w, folder, kind):
  write_safetensors(folder / 'model.safetensors', {name: x.numpy() for name, x in w.items()})
  return {
    'architectures': ['Eagle3Speculator'], 'speculators_model_type': 'eagle3', 'draft_vocab_size': U,
    'transformer_layer_config': CONFIG, 'norm_before_residual': True, 'eagle_aux_hidden_state_layer_ids': [0, 2, 5],
    'target_hidden_size': None, 'speculators_config': {'algorithm': 'eagle3'},
  }  # fmt: skip


def load(folder, content, target):
  (folder / 'config.json').write_text(json.dumps(content))
  return hub.load_drafter(folder, target)


@pytest.fixture(scope='module')
def target():
  return tiny.target(TARGET)


@pytest.mark.parametrize(
  ('layout', 'w', 'content'),
  [
    (safeailab, eagle_weights(), {}),
    (safeailab, eagle_weights(qkv_bias=True), {'qkv_bias': True}),
    (sglang, eagle_weights(), {}),
    (sglang, eagle_weights(qkv_bias=True), {'qkv_bias': True}),
    (safeailab, griffin_weights(), {}),
    (safeailab, griffin_weights(), {'bias': False}),  # which its reference gives no meaning
  ],
)
def test_eagle_heads(target, tmp_path, layout, w, content):
  drafter = load(tmp_path, layout(w, tmp_path, 2) | content, target)
  feature = told((D, 1, len(TOKENS)))
  outputs, logits = our_outputs(target, drafter, TOKENS, Taps(jnp.asarray(feature)), DRAFTED)
  embed, f = torch.tensor(np.asarray(target.params['embed']['weight'])), torch.tensor(feature[:, 0].T)
  theirs, read = drafted_outputs(w, embed, TOKENS, DRAFTED, f, Switches(), is_eagle3=False)
  assert_close(outputs, theirs)
  assert_close(logits, read @ torch.tensor(np.asarray(target.head_VD)).T)


@pytest.mark.parametrize(
  ('layout', 'taps'),
  [(safeailab, (2, 3, 3)), (sglang, (1, 3, 4)), (speculators, (0, 2, 5))],
  ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_eagle3_heads(target, tmp_path, layout, taps):
  w = eagle3_weights()
  drafter = load(tmp_path, layout(w, tmp_path, 3), target)
  assert drafter.config.tapped_layers(TARGET.num_layers) == taps
  residual = told((3, D, 1, len(TOKENS)))
  shown = Taps(jnp.zeros((D, 1, len(TOKENS))), tuple(map(jnp.asarray, residual)))
  outputs, logits = our_outputs(target, drafter, TOKENS, shown, DRAFTED)
  embed = torch.tensor(np.asarray(target.params['embed']['weight']))
  switches = Switches(norm_before_residual=layout is speculators)
  h = fused(w, torch.tensor(residual[:, :, 0].transpose(0, 2, 1)), switches)
  theirs, read = drafted_outputs(w, embed, TOKENS, DRAFTED, h, switches, is_eagle3=True)
  assert_close(outputs, theirs)
  assert_close(logits, read @ w['lm_head.weight'].T)


@pytest.mark.parametrize('layout', [safeailab, sglang, speculators])
def test_text_with_an_eagle3_head_is_plain(target, tmp_path, layout):
  drafter = load(tmp_path, layout(eagle3_weights(), tmp_path, 3), target)
  how = {'max_new_tokens': 24, 'temperature': 1.0, 'seed': 2, 'eos_ids': ()}
  plain = decode.generate(target, None, [[1, 2, 3], [4]], **how)
  out = decode.generate(target, drafter, [[1, 2, 3], [4]], policy=DynamicTree(3, 3, 3, 8), **how)
  assert out.tokens == plain.tokens
  assert out.stats['tau'] > 1
  ours = tmp_path / 'ours'
  hub.save_drafter(drafter, ours)
  again = hub.load_drafter(ours, target)
  assert dataclasses.replace(again.config, name=drafter.config.name) == drafter.config
  jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


def medusa_logits(w, feature, num_heads, num_layers):
  logits = []
  for head in range(num_heads):
    x = feature
    for layer in range(num_layers):
      name = f'{head}.{layer}.linear'
      x = x + torch.nn.functional.silu(x @ w[f'{name}.weight'].T + w[f'{name}.bias'])
    logits.append(x @ w[f'{head}.{num_layers}.weight'].T)
  return torch.stack(logits)


@pytest.mark.parametrize('num_layers', [0, 1, 2])
def test_medusa_heads(target, tmp_path, num_layers):
  shapes = {f'{head}.{num_layers}.weight': (V, D) for head in range(5)}
  for head, layer in itertools.product(range(5), range(num_layers)):
    shapes |= {f'{head}.{layer}.linear.weight': (D, D), f'{head}.{layer}.linear.bias': (D,)}
  w = weights(shapes)
  torch.save(w, tmp_path / 'medusa_lm_head.pt')
  content = {'base_model_name_or_path': 'a', 'medusa_num_heads': 2, 'medusa_num_layers': num_layers}
  params, spec = decode.build(target, load(tmp_path, content, target), policy=DynamicTree(2, 2, 5, 4))
  feature = told((D, 3))
  network = spec.drafter
  ours_Ud3 = network.score(params.drafter, network.read(params.drafter, jnp.asarray(feature), 5))
  assert_close(np.asarray(ours_Ud3).transpose(1, 2, 0), medusa_logits(w, torch.tensor(feature.T), 5, num_layers))


def test_taps_are_what_enters_a_layer(target):
  """The first layer's input is the embedding; and tapping changes no logits."""
  _, spec = decode.build(target, None, policy='plain')
  tapped = dataclasses.replace(spec.target, tapped_layers=(0, 5))
  token_BL = jnp.asarray([[3, 8, 1]])
  taps = tapped.read(target.params, token_BL)
  np.testing.assert_array_equal(taps.residual[0][:, 0].T, target.params['embed']['weight'][token_BL[0]])
  np.testing.assert_array_equal(taps.feature, spec.target.read(target.params, token_BL).feature)
  assert not np.array_equal(taps.residual[1], taps.feature)
