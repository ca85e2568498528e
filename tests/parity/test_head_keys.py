"""Every key of published config.json files, one at a time: a head that loads equals its rendering, or an error names
the key. None may load and differ.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import torch
from torch_heads import (
  CONFIG,
  DRAFTED,
  HEADS,
  KV_HEADS,
  THETA,
  TOKENS,
  D,
  F,
  K,
  Switches,
  U,
  V,
  assert_close,
  drafted_outputs,
  eagle3_weights,
  eagle_weights,
  fused,
  our_outputs,
  told,
  weights,
)

import tiny
from eagle_jax import hub
from eagle_jax.models.transformer import Taps
from eagle_jax.weights import layouts
from eagle_jax.weights.safetensors import write_safetensors

pytestmark = pytest.mark.parity
N = 8  # layers of the target
TARGET = dataclasses.replace(tiny.TARGET, num_layers=N)


@dataclasses.dataclass(frozen=True)
class Writer:
  """A valid folder as one engine writes it."""

  content: dict
  weights: Callable[[], dict]  # canonical names
  names: dict = dataclasses.field(default_factory=dict)  # prefixes of canonical names -> the engine's
  taps: tuple[int, ...] = ()  # the target's layers whose inputs it reads
  switches: Switches = Switches()
  layer: str = ''  # where the keys of the layer stand


HF = {'torch_dtype': 'float32', 'transformers_version': '4.57.1', 'use_cache': True, 'initializer_range': 0.02}
MIDLAYER = {'layers.0.': 'midlayer.'}
FLAT3 = CONFIG | HF | {'draft_vocab_size': U, 'attention_bias': False, 'tie_word_embeddings': False}
SPECULATORS = {
  'auto_map': {'': 'config.Eagle3SpeculatorConfig'}, 'speculators_config': {'algorithm': 'eagle3'}, 'dtype': 'float32',
  'has_no_defaults_at_init': False,
}  # fmt: skip


def without(name: str) -> dict:
  return {key: value for key, value in eagle3_weights().items() if key != name}


def deepspec_weights() -> dict:
  ours = {'fc.weight': (D, 5 * D), 'lm_head.weight': (V, D)}
  head_norms = {f'layers.0.self_attn.{name}_norm.weight': (K,) for name in 'qk'}
  return {k: x for k, x in eagle3_weights().items() if k not in ('d2t', 't2d')} | weights(ours | head_norms)


def nested(*ids, **more) -> dict:
  return {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [*ids], 'use_aux_hidden_state': True} | more}


WRITERS = {
  'SafeAILab, EAGLE-2': Writer(CONFIG | HF | {'bias': True}, eagle_weights),
  'SGLang, EAGLE-2': Writer(
    CONFIG | HF | {'architectures': ['LlamaForCausalLMEagle']}, eagle_weights, {'layers.0.': 'model.layers.0.'}
  ),
  'speculators 0.3, EAGLE-2': Writer(
    SPECULATORS | {
      'architectures': ['EagleSpeculator'], 'speculators_model_type': 'eagle', 'speculators_version': '0.3.0',
      'fusion_bias': True, 'layernorms': False, 'transformer_layer_architecture': 'LlamaDecoderLayer',
      'transformer_layer_config': CONFIG | HF,
    },
    eagle_weights,
    {'layers.0.': 'transformer.', 'fc.': 'fusion_fc.'},
    layer='transformer_layer_config.',
  ),
  'SafeAILab': Writer(CONFIG | HF | {'draft_vocab_size': U}, eagle3_weights, MIDLAYER, (2, 4, 5)),
  'SpecForge': Writer(
    FLAT3 | {'architectures': ['LlamaForCausalLMEagle3'], 'sliding_window': 512, 'use_sliding_window': False}
    | {'max_window_layers': 36, 'rope_scaling': None} | nested(1, 3, 4),
    eagle3_weights, MIDLAYER, (2, 4, 5),
  ),
  'AngelSlim': Writer(
    FLAT3 | {'architectures': ['Eagle3LlamaForCausalLM'], 'modal_type': 'LLM', 'target_model_type': 'qwen3'},
    eagle3_weights, MIDLAYER, (2, 4, 5),
  ),
  'Model-Optimizer': Writer(
    FLAT3 | {'architectures': ['LlamaForCausalLMEagle3'], 'mlp_bias': False, 'pretraining_tp': 1} | nested(
      0, 3, 6, use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False,
      next_layer_regular=True, parallel_draft_step=1, parallel_draft_heads_num_layers=0,
    ),
    lambda: without('t2d'), {}, (1, 4, 7),
  ),
  'AutoModel': Writer(
    FLAT3 | {'architectures': ['LlamaEagle3DraftModel'], 'mlp_bias': False, 'layer_types': ['full_attention'] * N}
    | {'num_aux_hidden_states': 3, 'fc_norm': False, 'norm_output': False} | nested(1, 3, 4),
    lambda: without('t2d'), {'layers.0.': 'model.layers.0.', 'fc': 'model.fc', 'norm.': 'model.norm.'}, (2, 4, 5),
  ),
  'DeepSpec': Writer(
    CONFIG | HF | {
      'architectures': ['Qwen3Eagle3Model'], 'model_type': 'qwen3', 'head_dim': K, 'attention_bias': False,
      'target_layer_ids': [1, 2, 3, 4, 5], 'num_target_layers': N, 'ttt_length': 7, 'step_loss_decay': 0.8,
      'layer_types': ['full_attention'], 'sliding_window': None, 'use_sliding_window': False, 'max_window_layers': 36,
    },
    deepspec_weights, {}, (2, 3, 4, 5, 6),
  ),
  'speculators 0.4': Writer(
    SPECULATORS | {
      'architectures': ['Eagle3DraftModel'], 'speculators_model_type': 'eagle3', 'speculators_version': '0.4.0',
      'draft_vocab_size': U, 'norm_before_residual': True, 'embed_requires_grad': False, 'target_hidden_size': None,
      'eagle_aux_hidden_state_layer_ids': [2, 4, 7], 'transformer_layer_config': CONFIG | HF | {'mlp_bias': False},
    },
    eagle3_weights, {}, (2, 4, 7), Switches(norm_before_residual=True), 'transformer_layer_config.',
  ),
}  # fmt: skip
EAGLE3 = [name for name, writer in WRITERS.items() if writer.taps]
THREE_TAPS = [name for name in EAGLE3 if len(WRITERS[name].taps) == 3]


def changed(content: dict, changes: dict) -> dict:
  """With other values under paths such as `eagle_config.use_last_layernorm`; None takes the key away."""
  content = copy.deepcopy(content)
  for path, value in changes.items():
    *above, name = path.split('.')
    place = content
    for key in above:
      place[key] = place.get(key) or {}
      place = place[key]
    place[name] = value
    if value is None:
      del place[name]
  return content


@pytest.fixture(scope='module')
def target():
  return tiny.target(TARGET)


@pytest.fixture
def load(tmp_path, target):
  def load(name: str, changes: dict, w: dict | None = None):
    writer = WRITERS[name]
    w = writer.weights() if w is None else w

    def spelled(key):
      ours = next((prefix for prefix in writer.names if key.startswith(prefix)), '')
      return writer.names.get(ours, '') + key.removeprefix(ours)

    write_safetensors(tmp_path / 'model.safetensors', {spelled(key): x.numpy() for key, x in w.items()})
    (tmp_path / 'config.json').write_text(json.dumps(changed(writer.content, changes)))
    return hub.load_drafter(tmp_path, target)

  return load


def require_equal(target, drafter, w, switches, taps) -> None:
  """Outputs of a prefix and two drafted levels, and logits, against the rendering."""
  is_eagle3 = drafter.has_own_head
  assert drafter.config.tapped_layers(N) == taps
  seen = told((1 + len(taps), D, 1, len(TOKENS)))
  outputs, logits = our_outputs(target, drafter, TOKENS, Taps(*map(jnp.asarray, (seen[0], seen[1:]))), DRAFTED)
  rows = torch.tensor(seen[:, :, 0].transpose(0, 2, 1))
  embed = w.get('embed_tokens.weight', torch.tensor(np.asarray(target.params['embed']['weight'])))
  features = fused(w, rows[1:] if switches.is_fused else rows[:1], switches) if is_eagle3 else rows[0]
  theirs, read = drafted_outputs(w, embed, TOKENS, DRAFTED, features, switches, is_eagle3=is_eagle3)
  assert_close(outputs, theirs)
  assert_close(logits, read @ w.get('lm_head.weight', torch.tensor(np.asarray(target.head_VD))).T)


@pytest.mark.parametrize('name', WRITERS)
def test_a_valid_folder(target, load, name):
  writer, w = WRITERS[name], WRITERS[name].weights()
  require_equal(target, load(name, {}), w, writer.switches, writer.taps)


def same(a, b) -> bool:
  if a.config != b.config or jax.tree.structure(a.params) != jax.tree.structure(b.params):
    return False
  return all(map(np.array_equal, jax.tree.leaves(a.params), jax.tree.leaves(b.params)))


READ = {  # by some reader of heads
  'architectures', 'model_type', 'speculators_model_type', 'max_position_embeddings', 'attention_bias',
  'sliding_window', 'use_sliding_window', 'mlp_bias', 'target_layer_ids',
}  # fmt: skip


@pytest.mark.parametrize('name', WRITERS)
def test_keys_that_mean_nothing_change_nothing(load, name):
  plain = load(name, {})
  for key in layouts.IGNORED - READ:
    for place in {'', WRITERS[name].layer}:
      assert same(load(name, {place + key: 7}), plain), key


@pytest.mark.parametrize('name', WRITERS)
def test_neutral_values_change_nothing_and_others_are_refused(load, name):
  plain, place = load(name, {}), WRITERS[name].layer
  for key in layouts.NEUTRAL.keys() - READ:
    neutral = layouts.NEUTRAL[key]
    for value in neutral.values:
      assert same(load(name, {place + key: value}), plain), key
    is_read = key == 'qkv_bias' and not WRITERS[name].taps
    with pytest.raises(ValueError, match='q_proj.bias: missing' if is_read else key):
      load(name, {place + key: True if neutral.values == (False,) else 'other'})


@pytest.mark.parametrize('name', WRITERS)
@pytest.mark.parametrize('place', ['', 'layer:', 'layer:rope_scaling.', 'eagle_config.'])
def test_unknown_keys_are_refused(load, name, place):
  key = f'{place}brand_new_switch'.replace('layer:', WRITERS[name].layer)
  with pytest.raises(ValueError, match='brand_new_switch' if name in EAGLE3 or 'eagle_' not in key else 'eagle_config'):
    load(name, {key: True})


LINEAR = {'rope_type': 'linear', 'factor': 4.0}
LLAMA3 = {
  'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}  # fmt: skip


def by_llama3(frequency):
  turns = 64 * frequency / (2 * torch.pi)
  kept = ((turns - 1) / 3).clamp(0, 1)
  return frequency * (kept + (1 - kept) / 8)


def by_yarn(factor, original, *, fast=32, slow=1, truncate=True):
  def slowed(frequency):
    def pair(turns):
      return K * np.log(original / (2 * np.pi * turns)) / (2 * np.log(THETA))

    low, high = pair(fast), pair(slow)
    if truncate:
      low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, K - 1)
    slow_share = torch.tensor(np.clip((np.arange(K // 2) - low) / (high - low), 0, 1), dtype=torch.float32)
    return frequency * (slow_share / factor + 1 - slow_share)

  return slowed


def growth(factor, scale=1.0):
  return 0.1 * scale * float(np.log(factor)) + 1


def yarn(**more) -> dict:
  return {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 64} | more


YARN = {'slowed': by_yarn(4, 64), 'rope_factor': growth(4)}


def biases(*names: str) -> dict:
  sizes = {'q': HEADS * K, 'k': KV_HEADS * K, 'v': KV_HEADS * K, 'o': D}
  return weights({f'layers.0.self_attn.{name}_proj.bias': (sizes[name],) for name in names})


MLP_BIASES = weights({f'layers.0.mlp.{name}_proj.bias': (n,) for name, n in (('gate', F), ('up', F), ('down', D))})


def norms(*names: str, width: int = D) -> dict:
  return {f'{name}.weight': x + 1 for name, x in zip(names, told((len(names), width)), strict=True)}


def numbers(w: dict) -> dict:
  return {name: torch.as_tensor(x) for name, x in w.items() if x is not None}


TAPS = 'eagle_aux_hidden_state_layer_ids'
HEAD_NORMS = norms('layers.0.self_attn.q_norm', 'layers.0.self_attn.k_norm', width=K)
EVERY, FLAT = [*WRITERS], ['SpecForge', 'AngelSlim', 'SafeAILab', 'Model-Optimizer', 'AutoModel']
ONE_LAYER = ['Model-Optimizer', 'AutoModel']
MIDLAYERS = ['SpecForge', 'AngelSlim', 'SafeAILab']
V04, DEEPSPEC = ['speculators 0.4'], ['DeepSpec']
EAGLE2 = [name for name in WRITERS if name not in EAGLE3]

# Writers, changes of config.json below `layer:` or as they stand, more weights, and what the rendering does then.
SWITCHES: list[tuple[list[str], dict, dict, dict[str, Any]]] = [
  (EVERY, {'layer:rope_theta': 100.0}, {}, {'theta': 100.0}),
  (EVERY, {'layer:rope_theta': None}, {}, {'theta': 10_000.0}),
  (EVERY, {'layer:rope_scaling': LINEAR}, {}, {'slowed': lambda frequency: frequency / 4}),
  (EVERY, {'layer:rope_scaling': LLAMA3}, {}, {'slowed': by_llama3}),
  (EVERY, {'layer:rope_parameters': LLAMA3 | {'rope_theta': 50.0}}, {}, {'slowed': by_llama3, 'theta': 50.0}),
  (EVERY, {'layer:rope_scaling': {'rope_type': 'mrope', 'mrope_section': [2, 1, 1]}}, {}, {}),
  (EVERY, {'layer:rope_scaling': {'mrope_interleaved': True, 'mrope_section': [2, 1, 1]}}, {}, {}),
  (EVERY, {'layer:head_dim': K}, {}, {}),
  (FLAT, {'norm_before_residual': True}, {}, {'norm_before_residual': True}),
  (V04, {'norm_before_residual': False}, {}, {'norm_before_residual': False}),
  (MIDLAYERS + ONE_LAYER + V04, {'norm_output': True}, {}, {'norm_output': True}),
  (ONE_LAYER + V04, {'norm_output': False}, {}, {}),
  (THREE_TAPS, {'fc_norm': True}, norms('fc_norm.0', 'fc_norm.1', 'fc_norm.2'), {'fc_norm': True}),
  (FLAT[:4], {'use_aux_norm': True}, norms('aux_norm_low', 'aux_norm_mid', 'aux_norm_high'), {'fc_norm': True}),
  (THREE_TAPS, {'fc_norm': True, 'norm_output': True}, norms('fc_norm.0', 'fc_norm.1', 'fc_norm.2'),
   {'fc_norm': True, 'norm_output': True}),
  (MIDLAYERS, {'num_hidden_layers': 36}, {}, {}),
  (MIDLAYERS, {'layer_types': ['sliding_attention'], 'sliding_window': 2, 'use_sliding_window': True}, {}, {}),
  (MIDLAYERS, {'attention_bias': True, 'mlp_bias': True}, {}, {}),
  (EVERY, {'layer:rope_scaling': yarn()}, {}, YARN),
  (EVERY, {'layer:rope_parameters': yarn(factor=None, original_max_position_embeddings=None),
           'layer:max_position_embeddings': 256, 'layer:original_max_position_embeddings': 64}, {}, YARN),
  (EVERY, {'layer:rope_scaling': yarn(beta_fast=4, beta_slow=0.5, truncate=False, attention_factor=1.5)}, {},
   {'slowed': by_yarn(4, 64, fast=4, slow=0.5, truncate=False), 'rope_factor': 1.5}),
  (EVERY, {'layer:rope_scaling': yarn(mscale=2.0, mscale_all_dim=0.5)}, {},
   YARN | {'rope_factor': growth(4, 2.0) / growth(4, 0.5)}),
  (THREE_TAPS, {'norm_before_fc': True}, norms('input_norm', width=3 * D), {'norm_before_fc': True}),
  (ONE_LAYER, {'eagle_config.norm_before_fc': True}, norms('input_norm', width=3 * D), {'norm_before_fc': True}),
  (FLAT, {'bias': True}, weights({'fc.bias': (D,)}), {}),
  (ONE_LAYER + V04 + DEEPSPEC, {'layer:attention_bias': True}, biases('q', 'k', 'v', 'o'), {}),
  (EAGLE2 + ONE_LAYER + V04, {'layer:mlp_bias': True}, MLP_BIASES, {}),
  (DEEPSPEC, {'layer_types': ['sliding_attention'], 'sliding_window': 2, 'use_sliding_window': True}, {}, {}),
  (DEEPSPEC, {'target_layer_ids': [0, 3, 6]}, weights({'fc.weight': (D, 3 * D)}), {'taps': (1, 4, 7)}),
  (EAGLE2, {'layer:attention_bias': True}, biases('q', 'k', 'v', 'o'), {}),
  (V04, {'layer:model_type': 'qwen3', 'layer:head_dim': K}, HEAD_NORMS, {}),
  (V04, {'layer:model_type': None, 'layer:head_dim': K, 'speculators_version': '0.7.1.dev2'}, HEAD_NORMS, {}),
  (V04, {'layer:model_type': None, 'speculators_version': '0.6.0'}, {}, {}),
  (V04, {'layer:layer_types': ['sliding_attention'], 'layer:sliding_window': 2}, {}, {'window': 2}),
  (V04, {'layer:layer_types': ['sliding_attention'], 'layer:sliding_window': 3, 'norm_output': True}, {},
   {'window': 3, 'norm_output': True}),
  (V04, {'layer:layer_types': ['full_attention'], 'layer:sliding_window': 2}, {}, {}),
  (V04, {TAPS: [1, 8]}, weights({'fc.weight': (D, 2 * D)}), {'taps': (1, 8)}),
  (V04, {TAPS: [1, 2, 3, 4, 8], 'fc_norm': True},
   weights({'fc.weight': (D, 5 * D)}) | norms(*(f'fc_norm.{i}' for i in range(5))),
   {'taps': (1, 2, 3, 4, 8), 'fc_norm': True}),
  (['SpecForge', *ONE_LAYER], {f'eagle_config.{TAPS}': [0, 1, 3, 4, 6], 'num_aux_hidden_states': 5},
   weights({'fc.weight': (D, 5 * D)}), {'taps': (1, 2, 4, 5, 7)}),
  (['SpecForge', *ONE_LAYER], {f'eagle_config.{TAPS}': [5, 7, 8]}, {}, {'taps': (5, 7, 8)}),
  (['SpecForge', *ONE_LAYER], {'eagle_config.use_aux_hidden_state': False}, {'fc.weight': None},
   {'taps': (), 'is_fused': False}),
  # What speculators 0.9 writes.
  (V04, {'norm_before_fc': True, 'norm_output': True, 'fc_norm': False, 'layer:layer_types': ['sliding_attention'],
         'layer:sliding_window': 4, 'layer:model_type': 'qwen3', 'layer:head_dim': K, 'speculators_version': '0.9.0'},
   HEAD_NORMS | norms('input_norm', width=3 * D), {'norm_before_fc': True, 'norm_output': True, 'window': 4}),
  (EAGLE2[:2], {'layer_types': ['sliding_attention'], 'sliding_window': 2, 'use_sliding_window': True}, {}, {}),
  (EAGLE2[:2], {'qkv_bias': True}, biases('q', 'k', 'v'), {}),
  (EAGLE2, {'layer:tie_word_embeddings': True}, {}, {}),
  (EAGLE3, {'layer:tie_word_embeddings': True}, {}, {}),
]  # fmt: skip


def each(cases: list[tuple]) -> list[tuple]:
  return [(name, *case) for names, *case in cases for name in names]


def label(value):
  """A test's name that is the same in every process: of what is changed, the keys."""
  return value if isinstance(value, str) else ','.join(map(str, value))


@pytest.mark.parametrize(('name', 'changes', 'more', 'switches'), each(SWITCHES), ids=label)
def test_a_switch_does_what_its_rendering_does(target, load, name, changes, more, switches):
  writer = WRITERS[name]
  w = numbers(writer.weights() | more)
  taps = switches.get('taps', writer.taps)
  switches = {name: value for name, value in switches.items() if name != 'taps'}
  drafter = load(name, {path.replace('layer:', writer.layer): value for path, value in changes.items()}, w)
  for old, new in zip(('low', 'mid', 'high'), range(3), strict=True):
    if f'aux_norm_{old}.weight' in w:
      w[f'fc_norm.{new}.weight'] = w[f'aux_norm_{old}.weight']
  require_equal(target, drafter, w, dataclasses.replace(writer.switches, **switches), taps)


REFUSED: list[tuple[list[str], dict, str]] = [
  (MIDLAYERS, {'norm_output': False}, 'norm_output'),
  (EAGLE3, {'fc_norm': True}, 'fc_norm.0.weight: missing'),
  (FLAT, {'fc_norm': True, 'use_aux_norm': False}, 'use_aux_norm'),
  (ONE_LAYER, {'norm_output': False, 'parallel_drafting': True}, 'parallel_drafting'),
  (V04, {'norm_before_residual': None}, 'norm_before_residual'),
  (V04, {'layer:model_type': None, 'speculators_version': None}, 'model_type'),
  (V04, {'layer:num_hidden_layers': 2}, 'num_hidden_layers'),
  (ONE_LAYER + DEEPSPEC, {'num_hidden_layers': 2}, 'num_hidden_layers'),
  (EVERY, {'layer:rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, 'rope_scaling'),
  (EVERY, {'layer:rope_scaling': {'rope_type': 'longrope', 'factor': 2.0}}, 'rope_scaling'),
  (EVERY, {'layer:rope_scaling': LINEAR, 'layer:rope_parameters': LLAMA3}, 'rope_parameters'),
  (EVERY, {'layer:rope_parameters': {'full_attention': LINEAR, 'sliding_attention': LLAMA3}}, 'rope_parameters'),
  (EVERY, {'layer:rope_scaling': LINEAR | {'partial_rotary_factor': 0.5}}, 'partial_rotary_factor'),
  (EVERY, {'layer:rope_scaling': LINEAR | {'beta_fast': 2}}, 'beta_fast'),
  (EVERY, {'architectures': ['Eagle3DeepseekV2ForCausalLM']}, 'architectures'),
  (EAGLE3, {'num_aux_hidden_states': 7}, 'num_aux_hidden_states'),
  (EAGLE3, {'num_target_layers': 40}, 'num_target_layers'),
  (THREE_TAPS, {'truncated_vocab_size': U + 1}, 'truncated_vocab_size'),
  (EAGLE3, {'bias': True}, 'fc.bias: missing'),
  (EAGLE3, {'norm_before_fc': True}, 'input_norm.weight: missing'),
  (EAGLE3, {'norm_before_fc': True, 'fc_norm': True}, 'norm_before_fc.* and .*fc_norm'),
  (ONE_LAYER, {'norm_before_fc': True, 'eagle_config.norm_before_fc': False}, 'norm_before_fc'),
  (ONE_LAYER, {'layer_types': ['sliding_attention'], 'sliding_window': 2}, 'layer_types'),
  (ONE_LAYER + V04 + DEEPSPEC, {'layer:attention_bias': True}, 'o_proj.bias: missing'),
  (EAGLE2 + ONE_LAYER + V04, {'layer:mlp_bias': True}, 'up_proj.bias: missing'),
  (THREE_TAPS, {'target_layer_ids': [1, 2, 3]}, 'target_layer_ids'),
  (DEEPSPEC, {'target_layer_ids': [1, N - 1]}, 'target_layer_ids'),
  (DEEPSPEC, {'target_layer_ids': [-1, 2]}, 'target_layer_ids'),
  (DEEPSPEC, {'target_layer_ids': None}, 'target_layer_ids'),
  (DEEPSPEC, {TAPS: [1, 2, 3]}, TAPS),
  (DEEPSPEC, {'architectures': ['Gemma4Eagle3Model']}, 'architectures'),
  (V04, {'layer:layer_types': ['sliding_attention']}, 'layer_types'),
  (V04, {'layer:layer_types': ['chunked_attention'], 'layer:sliding_window': 2}, 'layer_types'),
  (V04, {'layer:use_sliding_window': True, 'layer:sliding_window': 2}, 'use_sliding_window'),
  (V04, {'layer:model_type': 'qwen3', 'layer:head_dim': K}, 'q_norm.weight: missing'),
  (V04, {'layer:model_type': 'gpt_oss'}, 'model_type'),
  (V04, {TAPS: [1, 2, 9]}, 'reads the inputs of layers'),
  (EVERY, {'layer:rope_scaling': yarn(mscale=2.0)}, 'mscale'),
  (EAGLE2[:2], {'bias': False}, 'fc.bias: not expected'),
  (EAGLE2[:2], {'attention_bias': True}, 'o_proj.bias: missing'),
  (EAGLE2[2:], {'fusion_bias': False}, 'fc.bias: not expected'),
  (EAGLE2[2:], {'layernorms': True}, 'layernorms'),
  (EAGLE2[2:], {'transformer_layer_architecture': 'MistralDecoderLayer'}, 'transformer_layer_architecture'),
  (EAGLE2[2:], {'layer:layer_types': ['sliding_attention'], 'layer:sliding_window': 2}, 'layer_types'),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'changes', 'key'), each(REFUSED), ids=label)
def test_what_is_not_supported_is_refused_by_name(load, name, changes, key):
  with pytest.raises(ValueError, match=key):
    load(name, {path.replace('layer:', WRITERS[name].layer): value for path, value in changes.items()})


FLAGS = [
  (EAGLE3, ['norm_output', 'norm_before_residual', 'norm_before_fc', 'fc_norm', 'use_aux_norm', 'bias']),
  (EAGLE3, ['embed_requires_grad', 'eagle_config.use_aux_hidden_state', 'eagle_config.norm_before_fc']),
  (ONE_LAYER + V04 + EAGLE2, ['layer:attention_bias', 'layer:mlp_bias']),
  (EAGLE2[:2], ['bias', 'qkv_bias']),
  (EAGLE2[2:], ['fusion_bias']),
]


@pytest.mark.parametrize(('name', 'keys'), each(FLAGS), ids=label)
def test_a_text_is_no_switch(load, name, keys):
  for key in keys:
    key = key.replace('layer:', WRITERS[name].layer)
    with pytest.raises(ValueError, match=f"{key.split('.')[-1]} (must be true or false, got|is) 'false'"):
      load(name, {key: 'false'})


class TestDraftVocabulary:
  """d2t holds offsets, t2d marks the same ids; what does not fit is refused, for it would draft other tokens."""

  @pytest.fixture
  def ids(self):
    return eagle3_weights()['d2t'] + torch.arange(U)

  def refused(self, load, w, message, name='SpecForge'):
    with pytest.raises(ValueError, match=message):
      load(name, {}, w)

  def test_marks_that_contradict(self, load):
    w = eagle3_weights()
    self.refused(load, w | {'d2t': torch.zeros(U, dtype=torch.int64)}, 'd2t and t2d contradict each other')
    self.refused(load, w | {'t2d': w['t2d'][:-1]}, 'd2t and t2d contradict each other')

  def test_absolute_ids(self, load, ids):
    w = eagle3_weights()
    self.refused(load, w | {'d2t': ids}, 'd2t .*numbers may be ids themselves')
    for number, message in ((V - 1, 'outside'), (60, 'd2t increases from entry to entry')):
      absolute = torch.arange(U) * 2
      absolute[-1] = number
      self.refused(load, without('t2d') | {'d2t': absolute}, message, 'Model-Optimizer')

  def test_repeated_ids(self, load):
    offsets = -torch.arange(U)
    self.refused(load, without('t2d') | {'d2t': offsets}, 'd2t names ids more than once, such as 0', 'Model-Optimizer')

  def test_the_whole_vocabulary(self, load):
    w = eagle3_weights() | {'lm_head.weight': torch.randn(V, D)}
    w |= {'d2t': torch.zeros(V, dtype=torch.int64), 't2d': torch.ones(V, dtype=torch.bool)}
    drafter = load('SpecForge', {'draft_vocab_size': V}, w)
    assert drafter.config.draft_vocab_size is None
    w['d2t'][3] = 1
    with pytest.raises(ValueError, match='d2t names ids of a draft vocabulary'):
      load('SpecForge', {'draft_vocab_size': V}, w)


@pytest.mark.parametrize('name', WRITERS)
def test_an_embedding_of_its_own_is_kept(target, load, name):
  writer, w = WRITERS[name], WRITERS[name].weights()
  embed = torch.tensor(np.asarray(target.params['embed']['weight']))
  shared = load(name, {}, w | {'embed_tokens.weight': embed})
  assert same(shared, load(name, {}, w))
  w['embed_tokens.weight'] = embed.flip(0)
  drafter = load(name, {}, w)
  assert drafter.config.own_embedding
  require_equal(target, drafter, w, writer.switches, writer.taps)


@pytest.mark.parametrize(
  ('ids', 'inputs'),
  [
    ([1, 3, 4], (2, 4, 5)),  # what SpecForge, Model-Optimizer and others take by default: outputs
    ([2, 4, 5], (2, 4, 5)),  # the usual inputs
    ([0, 3, 6], (1, 4, 7)),
  ],
)
def test_how_nested_taps_are_counted(load, ids, inputs):
  drafter = load('SpecForge', {'eagle_config.eagle_aux_hidden_state_layer_ids': ids})
  assert drafter.config.tapped_layers(N) == inputs


def test_taps_that_contradict(load):
  with pytest.raises(ValueError, match='eagle_aux_hidden_state_layer_ids'):
    load('SpecForge', {'eagle_aux_hidden_state_layer_ids': [1, 3, 4]})
