"""Our Llama against transformers' in PyTorch, float32: tiny random ones of several shapes, then the real SmolLM2."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch')

import torch
from torch_llama import llama, llama_of

from eagle_jax.config import TargetConfig
from eagle_jax.models.transformer import Transformer
from eagle_jax.weights import naming
from eagle_jax.weights.load import assemble

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4  # of the largest |logit|

SMALL = TargetConfig(
  vocab_size=101, width=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, ffn_width=80, max_context=64,
  norm_eps=1e-5, rope_theta=5000.0,
)  # fmt: skip
SHAPES = {
  'multi-head': {'num_kv_heads': 4},
  'grouped': {},
  'multi-query': {'num_kv_heads': 1},
  'three-to-one': {'num_heads': 6, 'head_dim': 8},
  'heads wider than the model': {'head_dim': 20},
  'another eps and theta': {'norm_eps': 1e-2, 'rope_theta': 100_000.0},
}


def reference_model(config: TargetConfig):
  """transformers' Llama of these shapes, every weight random, norm scales too."""
  torch.manual_seed(0)
  model = llama(config, attn_implementation='eager')
  for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
  return model


def reference_logits(model, token_BL: np.ndarray) -> np.ndarray:
  """[B, L, V] f32."""
  with torch.no_grad():
    return model(torch.from_numpy(token_BL).long()).logits.numpy()


def our_logits(config: TargetConfig, params, token_BL: np.ndarray) -> np.ndarray:
  """[B, L, V] f32."""
  score = jax.jit(lambda params, token_BL: Transformer(config).apply({'params': params}, token_BL, method='score'))
  return np.moveaxis(np.asarray(score(params, jnp.asarray(token_BL))), 0, -1)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
  assert ours.shape == theirs.shape
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES.keys())
def test_tiny_llamas(shape, tied):
  config = dataclasses.replace(SMALL, tied_head=tied, **shape)
  model = reference_model(config)
  tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
  params = assemble(tensors.items(), naming.hf_table(config), jnp.float32)
  token_BL = np.random.default_rng(0).integers(0, config.vocab_size, (2, 17), dtype=np.int32)
  assert relative_error(our_logits(config, params, token_BL), reference_logits(model, token_BL)) <= TOLERANCE


@pytest.mark.real
def test_smollm2(smollm2):
  """The GGUF's q and k rows turned back, its RoPE base and its norms: one wrong and the logits part."""
  config = smollm2.config
  model = llama_of(smollm2, attn_implementation='eager')
  token_BL = np.asarray([smollm2.tokenizer.encode_prompt('Explain why the sky is blue.')], np.int32)
  theirs = reference_logits(model, token_BL)
  assert relative_error(our_logits(config, smollm2.params, token_BL), theirs) <= TOLERANCE
  # Weights that are read wrongly agree with themselves; the real ones also answer the question.
  assert smollm2.tokenizer.decode([int(theirs[0, -1].argmax())]).strip() == 'The'
