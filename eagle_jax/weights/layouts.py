"""Keys of config.json files of targets and draft heads: which mean nothing, and what the rest change.

A reader takes what it uses out of a file through `Keys`. Each key that is left must be in `IGNORED`, or in `NEUTRAL`
with a value that changes nothing. Anything else is an error that names the key: a switch that is passed over may show
in no tensor, and a head that is read wrongly shows in no text either, it only drafts worse.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Keys that mean nothing to the network, whatever their value.
IGNORED = frozenset({
  # Where it comes from.
  'architectures', 'auto_map', 'model_type', '_name_or_path', 'name_or_path', 'model_name', 'transformers_version',
  'torch_dtype', 'dtype', 'speculators_version', 'speculators_config', 'speculators_model_type',
  'has_no_defaults_at_init', 'base_model_ep_plan', 'base_model_tp_plan', 'base_model_pp_plan', '_torchspec_version',
  'unsloth_fixed', 'unsloth_version', '_attn_implementation', '_attn_implementation_autoset',
  '_attn_implementation_internal', 'attn_implementation', 'target_model_type', 'target_text_model_type', 'producer',
  # Training.
  'initializer_range', 'attention_dropout', 'resid_pdrop', 'embd_pdrop', 'hidden_dropout', 'hidden_dropout_prob',
  'num_anchors', 'max_anchors', 'ttt_length', 'step_loss_decay', 'num_depths', 'down_sample_ratio',
  'down_sample_ratio_min', 'router_aux_loss_coef', 'router_jitter_noise', 'output_router_logits', 'load_balance_coeff',
  'enable_sp_ulysses', 'reuse_target_lm_head',
  # Running.
  'use_cache', 'cache_implementation', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'unk_token_id', 'sep_token_id',
  'decoder_start_token_id', 'max_position_embeddings', 'original_max_position_embeddings', 'is_llama_config',
  'ignore_keys_at_rope_validation', 'num_jacobi_passes', 'proposal_methods', 'use_grouped_mm', 'mrope_section',
  'mrope_interleaved',
  # Every file of these writers holds the head's own rows, and an EAGLE-1/2 head reads the target's.
  'tie_word_embeddings',
  # Fields that transformers gives every config.
  'id2label', 'label2id', 'num_labels', 'problem_type', 'finetuning_task', 'return_dict', 'return_dict_in_generate',
  'output_hidden_states', 'output_attentions', 'output_scores', 'torchscript', 'use_bfloat16', 'tf_legacy_loss',
  'pruned_heads', 'chunk_size_feed_forward', 'is_encoder_decoder', 'is_decoder', 'cross_attention_hidden_size',
  'add_cross_attention', 'tie_encoder_decoder', 'max_length', 'min_length', 'do_sample', 'early_stopping', 'num_beams',
  'num_beam_groups', 'diversity_penalty', 'temperature', 'top_k', 'top_p', 'typical_p', 'repetition_penalty',
  'length_penalty', 'no_repeat_ngram_size', 'encoder_no_repeat_ngram_size', 'bad_words_ids', 'num_return_sequences',
  'forced_bos_token_id', 'forced_eos_token_id', 'remove_invalid_values', 'exponential_decay_length_penalty',
  'suppress_tokens', 'begin_suppress_tokens', 'prefix', 'tokenizer_class', 'task_specific_params',
  # Residue of a target.
  'pretraining_tp', 'max_window_layers', '_sliding_window_pattern', 'experts_per_token', 'initial_context_length',
  'use_mrope', 'modal_type', 'image_token_id', 'video_token_id', 'audio_token_id', 'vision_start_token_id',
  'vision_end_token_id', 'vision_token_id',
})  # fmt: skip


class Neutral(NamedTuple):
  """A key that may be present with a value that changes nothing."""

  values: tuple[Any, ...]
  changes: str  # what any other value would change


_OFF = (False,)
NEUTRAL: dict[str, Neutral] = {
  'hidden_act': Neutral(('silu', 'swish'), 'the activation of the feed-forward network'),
  'mlp_bias': Neutral(_OFF, 'biases of the feed-forward network'),
  'attention_bias': Neutral(_OFF, 'biases of queries, keys and values, and of the output'),
  'qkv_bias': Neutral(_OFF, 'biases of queries, keys and values'),
  'sliding_window': Neutral((), 'how far attention sees'),
  'use_sliding_window': Neutral(_OFF, 'how far attention sees'),
  'partial_rotary_factor': Neutral((1,), 'how much of each head RoPE turns'),
  'rope_interleaved': Neutral(_OFF, 'which numbers of a head RoPE turns together'),
  'logit_scale': Neutral((1,), 'the logits'),
  'lm_head_bias': Neutral(_OFF, 'a bias of the logits'),
  'use_bidirectional_attention': Neutral(_OFF, 'what each token sees'),
  'attn_logit_softcapping': Neutral((), 'the scores of attention'),
  'final_logit_softcapping': Neutral((), 'the logits'),
  'use_qk_norm': Neutral(_OFF, 'norms of queries and keys'),
  'shared_expert_intermediate_size': Neutral((0,), 'the feed-forward network: a shared expert'),
  'num_experts': Neutral((0,), 'the feed-forward network: routed experts'),
  'num_local_experts': Neutral((0,), 'the feed-forward network: routed experts'),
  'n_routed_experts': Neutral((0,), 'the feed-forward network: routed experts'),
  'full_attn_mod': Neutral((1,), 'attention'),
  'interpolate_factor': Neutral((1,), 'RoPE'),
  'quantization_config': Neutral(({},), 'the weights: they are quantised. Use the unquantised checkpoint'),
  'additional_fc': Neutral(_OFF, 'the layers before attention'),
  'parallel_drafting': Neutral(_OFF, 'how it drafts: all tokens in one pass (P-EAGLE)'),
  'eagle_decoder_type': Neutral(('llama',), 'the kind of its layer'),
  'hot_vocab_size': Neutral((), 'the ids that it drafts, which a token map beside it names'),
  'target_layer_ids': Neutral((), 'the layers of the target that it reads, as DeepSpec counts them'),
  # Model-Optimizer's switches.
  'next_layer_regular': Neutral((True,), 'the layers after the first'),
  'use_input_layernorm_in_first_layer': Neutral((True,), "the norm of the layer's input"),
  'use_last_layernorm': Neutral((True,), 'the norm before the head'),
  'use_mtp_layernorm': Neutral(_OFF, 'norms before fc'),
  'parallel_draft_step': Neutral((1,), 'how it drafts: several tokens in one pass'),
  'parallel_draft_heads_num_layers': Neutral((0, 1), 'how it drafts: with several heads'),
  'num_eagle_features': Neutral((1,), 'the features that it reads'),
}


class Keys(Mapping[str, Any]):
  """A JSON object that remembers what was read of it. A key whose value is null counts as absent."""

  def __init__(self, content: Mapping[str, Any], *, prefix: str = ''):
    self.content = {name: value for name, value in content.items() if value is not None}
    self._prefix = prefix
    self._read: set[str] = set()
    self._nested: dict[str, Keys] = {}

  def __getitem__(self, name: str) -> Any:
    self._read.add(name)
    return self.content[name]

  def __contains__(self, name: object) -> bool:
    return name in self.content

  def __iter__(self) -> Iterator[str]:
    return iter(self.content)

  def __len__(self) -> int:
    return len(self.content)

  def flag(self, name: str, default: bool = False) -> bool:
    """Return a switch.

    Raises:
      ValueError: its value is neither true nor false: of a text, no one knows which it is taken for.
    """
    value = self.get(name, default)
    if not isinstance(value, bool):
      raise ValueError(f'{self._prefix}{name} must be true or false, got {value!r}.')
    return value

  def nested(self, name: str) -> 'Keys':
    """Return the object under a key, an empty one where there is none.

    Raises:
      ValueError: something else stands there.
    """
    if name not in self._nested:
      value = self.get(name, {})
      if not isinstance(value, Mapping):
        raise ValueError(f'{self._prefix}{name} must be an object, got {value!r}.')
      self._nested[name] = Keys(value, prefix=f'{self._prefix}{name}.')
    return self._nested[name]

  def adopt(self, name: str, keys: 'Keys') -> None:
    """Take other keys for the object under a key: those that a reader uses in its place."""
    self._nested[name] = keys

  def unread(self) -> set[str]:
    """Return the names of keys that no reader used."""
    return self.content.keys() - self._read

  def _faults(self) -> Iterator[str]:
    for name in self.unread() - IGNORED:
      path, value = f'{self._prefix}{name}', self.content[name]
      if name not in NEUTRAL:
        yield f'{path} {value!r}: not known here. Remove the key if it means nothing to the network.'
      elif not any(value == neutral for neutral in NEUTRAL[name].values):
        yield f'{path} {value!r}: not supported; it would change {NEUTRAL[name].changes}.'
    for nested in self._nested.values():
      yield from nested._faults()

  def require_known(self, folder: Path, what: str) -> None:
    """Raise ValueError if a key that was not read may change the network; all are listed. `what` says of what."""
    if faults := sorted(self._faults()):
      raise ValueError(f'{folder}/config.json describes {what}:\n  ' + '\n  '.join(faults))
