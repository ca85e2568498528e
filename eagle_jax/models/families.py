"""The families of models that can be loaded: what each adds to a plain Llama decoder, in a folder or a GGUF file."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
  """What a family adds to a plain Llama decoder, by its name, `model_type` in config.json. The rest is in the file."""

  needed: tuple[str, ...] = ()  # keys of config.json that must be there
  holds: frozenset[str] = frozenset()  # keys that mean something to it and nothing to every Llama
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what absent keys mean, where not as in a Llama
  rope_kinds: tuple[str, ...] = ('default', 'mrope', 'linear', 'dynamic', 'yarn', 'longrope', 'llama3')
  qkv_bias: bool = False
  qk_norm: bool = False
  joint_qk_norm: bool = False
  has_input_norms: bool = True
  has_output_norms: bool = False
  norm_in_float32: bool = False
  norm_offset: float = 0.0
  scales_embedding: bool = False  # by the root of the width
  activation: str = 'silu'
  has_sinks: bool = False
  experts: str | None = None  # whose names the tensors of routed experts bear, see `weights.naming`
  is_fused: bool = False  # files hold queries, keys and values as one tensor, and gate and up
  gguf: str | None = None  # the architecture in GGUF files; None: they cannot be read
  permuted_qk: bool = False  # GGUF stores q and k for interleaved RoPE; `weights.naming.gguf_table` turns them back


_WINDOWS = frozenset({'sliding_window', 'use_sliding_window', 'layer_types'})
_BIASES = frozenset({'attention_bias', 'mlp_bias'})
_MULTIPLIERS = frozenset({'embedding_multiplier', 'attention_multiplier', 'residual_multiplier', 'logits_scaling'})
_QWEN_WINDOWS = _WINDOWS | {'max_window_layers'}
_ABSENT_IN_QWEN = {'sliding_window': 4096, 'max_window_layers': 28}
_GEMMA_KEYS = frozenset({
  'attention_bias', 'sliding_window', 'layer_types', 'sliding_window_pattern', 'rope_local_base_freq',
  'query_pre_attn_scalar', 'final_logit_softcapping',
})  # fmt: skip
_GPT_OSS_YARN = {
  'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False,
  'original_max_position_embeddings': 4096,
}  # fmt: skip
FAMILIES = {
  'llama': Family(holds=_BIASES, gguf='llama', permuted_qk=True),
  'mistral': Family(('num_key_value_heads',), holds=frozenset({'sliding_window'}), absent={'sliding_window': 4096}),
  'mixtral': Family(
    ('num_key_value_heads', 'num_local_experts', 'num_experts_per_tok'),
    holds=frozenset({'sliding_window'}),
    absent={'rope_theta': 1_000_000.0},
    experts='mixtral',
  ),
  'qwen2': Family(('num_key_value_heads',), holds=_QWEN_WINDOWS, qkv_bias=True, gguf='qwen2', absent=_ABSENT_IN_QWEN),
  'qwen3': Family(
    ('num_key_value_heads', 'head_dim'),
    holds=_QWEN_WINDOWS | {'attention_bias'},
    qk_norm=True,
    gguf='qwen3',
    absent=_ABSENT_IN_QWEN,
  ),
  'qwen3_moe': Family(
    ('num_key_value_heads', 'moe_intermediate_size', 'num_experts_per_tok'),
    holds=_WINDOWS - {'layer_types'} | {'attention_bias', 'norm_topk_prob', 'decoder_sparse_step', 'mlp_only_layers'},
    absent={'sliding_window': 4096, 'decoder_sparse_step': 1},
    gguf='qwen3moe',
    qk_norm=True,
    experts='qwen3_moe',
  ),
  'smollm3': Family(
    ('num_key_value_heads',),
    holds=_WINDOWS | _BIASES | {'no_rope_layers'},
    absent={'rope_theta': 2_000_000.0, 'no_rope_layer_interval': 4, 'tie_word_embeddings': True},
    gguf='smollm3',
    permuted_qk=True,
  ),
  'gemma3_text': Family(
    ('num_key_value_heads', 'head_dim', 'query_pre_attn_scalar'),
    holds=_GEMMA_KEYS,
    absent={
      'rope_theta': 1_000_000.0,
      'rope_local_base_freq': 10_000.0,
      'sliding_window': 4096,
      'sliding_window_pattern': 6,
      'tie_word_embeddings': True,
    },
    qk_norm=True,
    has_output_norms=True,
    norm_in_float32=True,
    norm_offset=1.0,
    scales_embedding=True,
    activation='gelu_tanh',
    gguf='gemma3',
  ),
  'gpt_oss': Family(
    ('num_key_value_heads', 'head_dim', 'num_local_experts', 'num_experts_per_tok'),
    holds=frozenset({'attention_bias', 'sliding_window', 'layer_types', 'sliding_window_pattern', 'swiglu_limit'}),
    absent={
      'rope_theta': 150_000.0,
      'sliding_window': 128,
      'sliding_window_pattern': 2,
      'attention_bias': True,
      'swiglu_limit': 7.0,
      'swiglu_alpha': 1.702,
      'rope_parameters': _GPT_OSS_YARN,
    },
    norm_in_float32=True,
    has_sinks=True,
    experts='gpt_oss',
    gguf='gpt-oss',
  ),
  'olmo2': Family(
    holds=frozenset({'attention_bias'}),
    qk_norm=True,
    joint_qk_norm=True,
    has_input_norms=False,
    has_output_norms=True,
    norm_in_float32=True,
    gguf='olmo2',
  ),
  'granite': Family(holds=_BIASES | _MULTIPLIERS, gguf='granite', permuted_qk=True),
  'phi3': Family(
    holds=frozenset({'sliding_window', 'partial_rotary_factor'}),
    absent={'original_max_position_embeddings': 4096},
    rope_kinds=('default', 'longrope'),
    is_fused=True,
    gguf='phi3',
  ),
}
