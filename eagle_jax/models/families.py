"""The families of models that can be loaded: what each adds to a plain Llama decoder, in a folder or a GGUF file."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
  """What a family's name makes of a plain Llama decoder: `model_type` in config.json, the architecture in GGUF.

  The rest is in the file. A GGUF file says no more of a family than `qkv_bias`, `qk_norm` and `permuted_qk`.
  """

  needed: tuple[str, ...] = ()  # keys of config.json that must be there: absent, they mean a number of the family's own
  rope_theta: float = 10_000.0  # what an absent base means in config.json
  qkv_bias: bool = False
  qk_norm: bool = False
  is_windowed: bool = False  # `sliding_window` holds, for every layer
  window: int | None = None  # what an absent `sliding_window` means
  is_routed: bool = False
  has_biases: bool = False  # `attention_bias` holds: of queries, keys, values and the output
  is_in_gguf: bool = False  # whether GGUF files of it can be read
  permuted_qk: bool = False  # GGUF stores q and k for interleaved RoPE; `weights.naming.gguf_table` turns them back


FAMILIES = {
  'llama': Family(has_biases=True, is_in_gguf=True, permuted_qk=True),
  'mistral': Family(('num_key_value_heads',), is_windowed=True, window=4096),
  'mixtral': Family(
    ('num_key_value_heads', 'num_local_experts', 'num_experts_per_tok'),
    rope_theta=1_000_000.0,
    is_windowed=True,
    is_routed=True,
  ),
  'qwen2': Family(('num_key_value_heads',), qkv_bias=True, is_in_gguf=True),
  'qwen3': Family(('num_key_value_heads', 'head_dim'), qk_norm=True, has_biases=True, is_in_gguf=True),
}
