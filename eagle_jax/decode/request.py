"""Convert a user's request to token ids, and refuse one that cannot be decoded, before any tracing."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TargetConfig, require_match
from eagle_jax.draft.drafter import Drafter
from eagle_jax.models.transformer import Target
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.trees import TreePolicy
from eagle_jax.sampling import Chooser, GumbelMax

MAX_TEMPERATURE = 1e6  # all tokens are about equally likely there; at 1e38, temperature x noise overflows
MIN_TOP_P = float(np.finfo(np.float32).tiny)  # smaller numbers may be flushed to 0, which keeps no token


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or a conversation


@dataclasses.dataclass(frozen=True)
class Options:
  """Keyword arguments shared by `generate`, `generate_each` and `stream`.

  Attributes:
    max_new_tokens: maximum number of new tokens for each prompt.
    temperature: of the softmax that tokens are drawn from; 0 is greedy.
    top_k: draw from the k likeliest tokens; 0 keeps all.
    top_p: then draw from the smallest set of them with this total probability; in (0, 1].
    seed: determines the text, together with `row_ids`.
    policy: 'auto', 'plain', or a policy object such as `DynamicTree()`.
    row_ids: keys of each sequence's noise; default 0, 1, ...
    eos_ids: tokens that end a sequence; default the target's, () for none.
    costs: measured costs for 'auto' and policies that need them; default those stored for this device and pair.
    chooser: the acceptance rule.
    stop: strings, or one, before the first of which each text ends; tokens end with the one that completes it. The host
      then looks at the text after every step.
  """

  max_new_tokens: int = 128
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  policy: str | TreePolicy = 'auto'
  row_ids: Sequence[int] | None = None
  eos_ids: Sequence[int] | None = None
  costs: Costs | None = None
  chooser: Chooser = GumbelMax()
  stop: str | Sequence[str] = ()

  def limits(self) -> dict[str, Any]:
    """Select the limits and noise keys, as keyword arguments of `prefill.prepare`."""
    return {name: getattr(self, name) for name in ('max_new_tokens', 'row_ids', 'eos_ids')}

  def sampling(self) -> dict[str, Any]:
    """Select the sampling parameters, as keyword arguments of `Sampling.of`."""
    return {name: getattr(self, name) for name in ('temperature', 'top_k', 'top_p', 'seed')}


def takes_options(function: Callable) -> Callable:
  """Let a function that takes `options: Options` be called with their fields as keywords, shown in its signature."""

  @functools.wraps(function)
  def called(*args: Any, **keywords: Any) -> Any:
    given = {name: keywords.pop(name) for name in fields if name in keywords}
    if unknown := sorted(keywords.keys() - own.keys()):
      raise TypeError(f'{function.__name__}() got unknown keywords {unknown}; it takes {[*own, *fields]}.')
    return function(*args, options=Options(**given), **keywords)

  fields = {field.name: field for field in dataclasses.fields(Options)}
  own = {name: x for name, x in inspect.signature(function).parameters.items() if name != 'options'}
  shown = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
    for name, field in fields.items()
  ]
  called.__signature__ = inspect.signature(function).replace(parameters=[*own.values(), *shown])  # type: ignore[attr-defined]
  return called


def token_ids(target: Target, prompts: Any) -> list[list[int]]:
  """Encode strings and chats with the target's tokenizer; convert lists or arrays of token ids to lists.

  Raises:
    ValueError: the prompts are none of these, mix text and ids, or there are none.
  """
  prompts = _to_list(prompts)
  if isinstance(prompts, str):
    raise ValueError(f'`prompts` must be a list, got the string {prompts!r}: pass [{prompts!r}] for one prompt.')
  if not hasattr(prompts, '__len__') or isinstance(prompts, (Mapping, Set)) or not len(prompts):
    raise ValueError(f'`prompts` must be a non-empty list of strings or of lists of token ids, got {prompts!r}.')
  prompts = [*prompts]
  is_text = [isinstance(prompt, str) or is_chat(prompt) for prompt in prompts]
  if any(is_text):
    if not all(is_text):
      raise ValueError(f'`prompts` must be all text or all lists of token ids, got both: {prompts!r:.80}.')
    if target.tokenizer is None:
      raise ValueError(
        f'Target {target.config.name!r} has no tokenizer, so prompts must be lists of token ids, got text.'
      )
    if '' in prompts:
      raise ValueError(f'Prompt {prompts.index("")} must have at least one character, got an empty string.')
    to_ids = target.tokenizer
    return [to_ids.encode_prompt(one) if isinstance(one, str) else to_ids.encode_chat(one) for one in prompts]
  if all(isinstance(prompt, Mapping) for prompt in prompts):
    raise ValueError(f'`prompts` must be a list of conversations, got one: pass [{prompts!r:.80}].')
  return [integers(f'Prompt {number}', tokens) for number, tokens in enumerate(prompts)]


def is_chat(prompt: Any) -> bool:
  """Return whether this is a list of chat messages, dicts with 'role' and 'content'."""
  return isinstance(prompt, (list, tuple)) and any(isinstance(message, Mapping) for message in prompt)


def stop_strings(target: Target, stop: Any) -> tuple[str, ...]:
  """Convert one stop string or several to a tuple; raise a ValueError if the text cannot be compared with them."""
  strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
  if not all(isinstance(string, str) and string for string in strings):
    raise ValueError(f"`stop` must be a list of strings that are not empty, such as ['\\n\\n'], got {stop!r:.80}.")
  if strings and target.tokenizer is None:
    raise ValueError(f'Target {target.config.name!r} has no tokenizer, so there is no text to stop at {stop!r:.80}.')
  return strings


def require_pair(target: Any, drafter: Any) -> None:
  """Raise a ValueError unless both are loaded models and the drafter fits the target."""
  if not isinstance(target, Target):
    raise ValueError(f'`target` must be a result of load_target(...), got {target!r:.80}.')
  if drafter is not None and not isinstance(drafter, Drafter):
    raise ValueError(f'`drafter` must be a result of load_drafter(..., target), or None, got {drafter!r:.80}.')
  if drafter is not None:
    require_match(drafter.config, target.config)


def require_valid(config: TargetConfig, ids: list[list[int]] | None, options: Options) -> None:
  """Raise a ValueError if prompts `ids` cannot be decoded with these options; None: whatever the prompts."""
  temperature, top_k, top_p, row_ids = options.temperature, options.top_k, options.top_p, options.row_ids
  max_new_tokens = at_least_one('max_new_tokens', options.max_new_tokens)
  for name in ('top_k', 'seed'):
    _integer(f'`{name}` must be', getattr(options, name))
  for name in ('temperature', 'top_p'):
    _number(name, getattr(options, name))
  if row_ids is not None and ids is not None and len(row_ids) != len(ids):
    raise ValueError(f'`row_ids` must hold one id for each of {len(ids)} prompts, got {len(row_ids)} ids.')
  largest = config.vocab_size - 1
  if outside := [token for token in options.eos_ids or () if not 0 <= token <= largest]:
    raise ValueError(f'`eos_ids` must be between 0 and {largest} (the vocabulary), got {outside[:5]}.')
  for number, tokens in enumerate(ids or ()):
    _require_prompt(f'Prompt {number}', tokens, config, max_new_tokens)
  if not 0 <= temperature <= MAX_TEMPERATURE:
    raise ValueError(f'`temperature` must be between 0 (greedy) and {MAX_TEMPERATURE:g}, got {temperature}.')
  if top_k < 0:
    raise ValueError(f'`top_k` must be an integer >= 0 (0 keeps all tokens), got {top_k}.')
  if not MIN_TOP_P <= top_p <= 1:
    raise ValueError(f'`top_p` must be between {MIN_TOP_P:.3g} and 1 (which keeps all tokens), got {top_p}.')


def _require_prompt(name: str, tokens: list[int], config: TargetConfig, max_new_tokens: int) -> None:
  """Raise a ValueError if a prompt is empty, holds ids outside the vocabulary, or leaves too little of the context."""
  if not tokens:
    raise ValueError(f'{name} must have at least one token, got none.')
  if outside := [token for token in tokens if not 0 <= token < config.vocab_size]:
    raise ValueError(f'{name} must hold ids between 0 and {config.vocab_size - 1} (the vocabulary), got {outside[:5]}.')
  if len(tokens) + max_new_tokens > config.max_context:
    raise ValueError(
      f'{name} and its new tokens must fit the context of {config.max_context} tokens, got {len(tokens)} + '
      f'max_new_tokens={max_new_tokens}. Shorten the prompt or lower max_new_tokens.'
    )


def require_valid_batch(config: TargetConfig, tokens_BL: Any, length_B: Any, options: Options) -> None:
  """Raise a ValueError if padded prompts cannot be decoded; see `prefill`. Of traced arrays only shapes are checked."""
  batch, num_prompt = tokens_BL.shape
  if not batch:
    raise ValueError(f'`tokens_BL` must hold at least one prompt, got the shape {tokens_BL.shape}.')
  if length_B.shape != (batch,):
    raise ValueError(
      f'`length_B` must hold one length for each of the {batch} prompts of tokens_BL, got {length_B.shape[0]}.'
    )
  for name, value in options.sampling().items():
    if _shape(value) not in ((), (batch,)):
      raise ValueError(
        f'`{name}` must be one number, or an array of one for each of {batch} prompts, got the shape {_shape(value)}.'
      )
  if options.row_ids is not None and _shape(options.row_ids) != (batch,):
    raise ValueError(
      f'`row_ids` must hold one id for each of {batch} prompts, got the shape {_shape(options.row_ids)}.'
    )
  ids = None
  if is_known(tokens_BL, length_B):
    lengths = length_B.tolist()
    if outside := [length for length in lengths if not 1 <= length <= num_prompt]:
      raise ValueError(f'`length_B` must be between 1 and {num_prompt}, the width of tokens_BL, got {outside[:5]}.')
    ids = [tokens[:length] for tokens, length in zip(tokens_BL.tolist(), lengths, strict=True)]
  known = {name: value for name, value in vars(options).items() if is_known(value)}
  by_sequence = {name: known.pop(name) for name in options.sampling() if np.ndim(known.get(name, 0))}
  for name, value_B in by_sequence.items():
    for value in np.unique(value_B):
      require_valid(config, None, Options(**{name: value}))
  require_valid(config, ids, Options(**known))


def _shape(values: Any) -> tuple[int, ...]:
  """Return the shape of an array, traced or not, or of a list of numbers, which may be traced."""
  return np.shape(values) if hasattr(values, 'shape') or is_known(values) else (len(values),)


def is_known(*values: Any) -> bool:
  """Return whether all arrays in these pytrees are known, none of them traced."""
  return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


def known_integers(name: str, values: Any) -> Any:
  """Convert values with `integers`, unless they are None or traced."""
  values = [*values] if isinstance(values, Iterator) else values
  return integers(name, values) if values is not None and is_known(values) else values


def integer_array(name: str, values: Any, *, ndim: int) -> Any:
  """Convert values to a NumPy array, unless they are a JAX array.

  Raises:
    ValueError: they are not integers, or have another number of dimensions than `ndim`.
  """
  array = values if isinstance(values, jax.Array) else np.asarray(values)
  if array.ndim != ndim or not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f'`{name}` must be integers with {ndim} dimensions, got {array.dtype}{[*array.shape]}.')
  return array


def _to_list(values: Any) -> Any:
  return values.tolist() if isinstance(values, (np.ndarray, jax.Array)) else values


def integers(name: str, values: Any) -> list[int]:
  """Convert a list or a one-dimensional array to Python integers; raise a ValueError for anything else."""
  values = _to_list(values)
  if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
    raise ValueError(f'{name} must be a list of integers, got {values!r}.')
  return [_integer(f'Each item of {name} must be', value) for value in values]


def _integer(must_be: str, value: Any) -> int:
  """Convert any kind of integer to Python's; raise a ValueError unless it is an integer of 32 bits."""
  try:
    integer = operator.index(value)
  except TypeError:
    raise ValueError(f'{must_be} an integer, got {value!r}.') from None
  if not -(2**31) <= integer < 2**31:
    raise ValueError(f'{must_be} an integer of 32 bits, got {value!r}.')
  return integer


def at_least_one(name: str, value: Any) -> int:
  """Convert any kind of integer to Python's; raise a ValueError unless it is an integer of at least 1."""
  if (integer := _integer(f'`{name}` must be', value)) < 1:
    raise ValueError(f'`{name}` must be at least 1, got {integer}.')
  return integer


def _number(name: str, value: Any) -> float:
  """Convert any kind of scalar to a Python float; raise a ValueError for anything else."""
  try:
    if isinstance(value, (str, bytes)) or np.ndim(value):
      raise TypeError
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f'`{name}` must be a number, got {value!r:.80}.') from None
