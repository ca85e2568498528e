"""transformers' Llama in PyTorch, of a target's shape."""

import numpy as np
import torch
import transformers

from eagle_jax.config import TargetConfig
from eagle_jax.models.transformer import Target
from eagle_jax.weights import naming
from eagle_jax.weights.load import flatten


def llama(config: TargetConfig, **options):
  """Untrained. `options` are more fields of transformers' LlamaConfig."""
  return transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config.vocab_size,
      hidden_size=config.width,
      intermediate_size=config.ffn_width,
      num_hidden_layers=config.num_layers,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      max_position_embeddings=config.max_context,
      rms_norm_eps=config.norm_eps,
      rope_parameters={'rope_type': 'default', 'rope_theta': config.rope_theta},
      tie_word_embeddings=config.tied_head,
      **options,
    )
  ).eval()


def llama_of(target: Target, **options):
  """With the target's weights, float32."""
  model = llama(target.config, **options)
  tensors = flatten(target.params, naming.hf_table(target.config))
  state = {name: torch.tensor(np.asarray(array, np.float32)) for name, array in tensors.items()}
  state.setdefault('lm_head.weight', state['model.embed_tokens.weight'])
  model.load_state_dict(state)
  return model
