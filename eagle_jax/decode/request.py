"""A request as users make it: turned into token ids, and refused if it cannot be decoded, before any tracing."""

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

MAX_TEMPERATURE = 1e6  # there all tokens are about as likely; at 1e38, temperature x noise overflows
MIN_TOP_P = float(np.finfo(np.float32).tiny)  # below, XLA may compute with 0, and 0 keeps no token


@dataclasses.dataclass(frozen=True)
class Options:
  """The keywords that `generate`, `generate_each` and `stream` share.

  Attributes:
    max_new_tokens: new tokens a prompt, at most.
    temperature: 0 is greedy.
    top_k: draw from the k likeliest tokens; 0 keeps all.
    top_p: then from the smallest set of them that holds this probability; in (0, 1].
    seed: fixes the text, together with `row_ids`.
    policy: 'auto', 'plain', or a policy object such as `DynamicTree()`.
    row_ids: key each sequence's noise; default 0, 1, ...
    eos_ids: tokens that end a sequence; default the target's, () for none.
    costs: measured ones, for 'auto' and policies that need them; default those stored for this device and pair.
    chooser: the acceptance rule.
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

  def limits(self) -> dict[str, Any]:
    """Pick what says when sequences end and what keys their noise: keywords of `prefill.prepare`."""
    return {name: getattr(self, name) for name in ('max_new_tokens', 'row_ids', 'eos_ids')}

  def sampling(self) -> dict[str, Any]:
    """Pick how tokens are drawn: keywords of `Sampling.of`."""
    return {name: getattr(self, name) for name in ('temperature', 'top_k', 'top_p', 'seed')}


def takes_options(function: Callable) -> Callable:
  """Let a function that takes `options: Options` be called with their fields as keywords, and say so in `help`."""

  @functools.wraps(function)
  def called(*args: Any, **keywords: Any) -> Any:
    given = {name: keywords.pop(name) for name in fields if name in keywords}
    if unknown := sorted(keywords.keys() - own.keys()):
      raise TypeError(f'{function.__name__}() got unknown keywords {unknown}; known are {[*own, *fields]}.')
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
  """Encode strings with the target's tokenizer; lists or arrays of token ids stay as they are.

  Raises:
    ValueError: they are neither, or there are none.
  """
  prompts = _listed(prompts)
  if isinstance(prompts, str):
    raise ValueError(f'prompts must be a list, got the string {prompts!r}: pass [{prompts!r}] for one prompt.')
  if not hasattr(prompts, '__len__') or isinstance(prompts, (Mapping, Set)) or not len(prompts):
    raise ValueError(f'prompts must be a list of one or more strings, or of lists of token ids; got {prompts!r}.')
  prompts = [*prompts]
  if any(isinstance(prompt, str) for prompt in prompts):
    if not all(isinstance(prompt, str) for prompt in prompts):
      raise ValueError('Texts and lists of token ids came mixed: give one kind.')
    if target.tokenizer is None:
      raise ValueError('Text prompts came, but this target has no tokenizer: pass lists of token ids.')
    if '' in prompts:
      raise ValueError(f'Prompt {prompts.index("")} is empty: give it at least one character.')
    return [target.tokenizer.encode_prompt(prompt) for prompt in prompts]
  return [integers(f'Prompt {row}', tokens) for row, tokens in enumerate(prompts)]


def require_pair(target: Any, drafter: Any) -> None:
  """Raise a ValueError unless both are loaded models, and the drafter is for this target."""
  if not isinstance(target, Target):
    raise ValueError(f'target must be what load_target(...) returns, got {target!r:.80}.')
  if drafter is not None and not isinstance(drafter, Drafter):
    raise ValueError(f'drafter must be what load_drafter(..., target) returns, or None; got {drafter!r:.80}.')
  if drafter is not None:
    require_match(drafter.config, target.config)


def require_valid(
  config: TargetConfig,
  ids: list[list[int]] | None,
  *,
  max_new_tokens,
  temperature=0.0,
  top_k=0,
  top_p=1.0,
  seed=0,
  row_ids=None,
  eos_ids=None,
) -> None:
  """Raise a ValueError if these cannot be decoded; see `Options`."""
  max_new_tokens = at_least_one('max_new_tokens', max_new_tokens)
  for name, value in (('top_k', top_k), ('seed', seed)):
    _integer(f'{name} is', value)
  for name, value in (('temperature', temperature), ('top_p', top_p)):
    _number(f'{name} is', value)
  if row_ids is not None and ids is not None and len(row_ids) != len(ids):
    raise ValueError(f'{len(row_ids)} row_ids came for {len(ids)} prompts; give one a prompt.')
  vocab_size, max_context = config.vocab_size, config.max_context
  if outside := [token for token in eos_ids or () if not 0 <= token < vocab_size]:
    raise ValueError(f'eos_ids holds {outside[:5]} outside the vocabulary of {vocab_size}: use 0 .. size-1.')
  for row, tokens in enumerate(ids or ()):
    if not tokens:
      raise ValueError(f'Prompt {row} is empty: give it at least one token.')
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
      raise ValueError(f'Prompt {row} holds ids {outside[:5]} outside the vocabulary of {vocab_size}: use 0 .. size-1.')
    if len(tokens) + max_new_tokens > max_context:
      raise ValueError(
        f'Prompt {row} has {len(tokens)} tokens; with max_new_tokens={max_new_tokens} that is beyond the context of '
        f'{max_context}. Shorten the prompt or lower max_new_tokens.'
      )
  if not 0 <= temperature <= MAX_TEMPERATURE:
    raise ValueError(f'temperature is {temperature}; a number >= 0 (greedy) and <= {MAX_TEMPERATURE:g} is needed.')
  if top_k < 0:
    raise ValueError(f'top_k is {top_k}; an integer >= 0 is needed (0 keeps all tokens).')
  if not MIN_TOP_P <= top_p <= 1:
    raise ValueError(f'top_p is {top_p}; a number in (0, 1] is needed (1 keeps all tokens), {MIN_TOP_P:.3g} at least.')


def require_valid_rows(
  config: TargetConfig, tokens_BL: Any, length_B: Any, *, max_new_tokens, row_ids, eos_ids, **how: Any
) -> None:
  """Raise a ValueError if padded prompts cannot be decoded; see `prefill`. What is traced cannot be checked."""
  batch, num_prompt = tokens_BL.shape
  if not batch:
    raise ValueError('tokens_BL has no rows; one prompt or more is needed.')
  if length_B.shape != (batch,):
    raise ValueError(f'length_B has {length_B.shape[0]} lengths for {batch} rows of tokens_BL; give one a row.')
  ids = None
  if is_known(tokens_BL, length_B):
    lengths = length_B.tolist()
    if outside := [length for length in lengths if not 1 <= length <= num_prompt]:
      raise ValueError(f'length_B holds {outside[:5]}; with tokens_BL {num_prompt} wide, 1 .. {num_prompt} is needed.')
    ids = [tokens[:length] for tokens, length in zip(tokens_BL.tolist(), lengths, strict=True)]
  known = {name: value for name, value in how.items() if is_known(value)}
  by_row = {name: known.pop(name) for name, value in [*known.items()] if np.ndim(value)}
  for name, value_B in by_row.items():
    if np.shape(value_B) != (batch,):
      raise ValueError(
        f'{name} has the shape {np.shape(value_B)}; one number, or one for each of {batch} rows, is needed.'
      )
    for value in np.unique(value_B):
      require_valid(config, None, max_new_tokens=max_new_tokens, **{name: value})
  known |= {name: value for name, value in (('row_ids', row_ids), ('eos_ids', eos_ids)) if is_known(value)}
  require_valid(config, ids, max_new_tokens=max_new_tokens, **known)


def is_known(*values: Any) -> bool:
  """Is none of the arrays in these pytrees traced?"""
  return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


def known_integers(name: str, values: Any) -> Any:
  """Check `integers`; what is None or traced stays as it is."""
  values = [*values] if isinstance(values, Iterator) else values
  return integers(name, values) if values is not None and is_known(values) else values


def integer_array(name: str, values: Any, *, ndim: int) -> Any:
  """Make an array, JAX's own as it is; raise a ValueError unless it holds integers in `ndim` dimensions."""
  array = values if isinstance(values, jax.Array) else np.asarray(values)
  if array.ndim != ndim or not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f'{name} is {array.dtype}{[*array.shape]}; integers in {ndim} dimensions are needed.')
  return array


def _listed(values: Any) -> Any:
  return values.tolist() if isinstance(values, (np.ndarray, jax.Array)) else values


def integers(name: str, values: Any) -> list[int]:
  """Make Python integers of a list or a one-dimensional array; raise a ValueError if it is something else."""
  values = _listed(values)
  if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
    raise ValueError(f'{name} is {values!r}; a list of integers is needed.')
  return [_integer(f'{name} holds', value) for value in values]


def _integer(what_is: str, value: Any) -> int:
  """Make a Python integer of any kind of integer; raise a ValueError unless 32 bits hold it."""
  try:
    integer = operator.index(value)
  except TypeError:
    raise ValueError(f'{what_is} {value!r}: an integer is needed.') from None
  if not -(2**31) <= integer < 2**31:
    raise ValueError(f'{what_is} {value!r}; an integer of 32 bits is needed.')
  return integer


def at_least_one(name: str, value: Any) -> int:
  """Make a Python integer of any kind of integer; raise a ValueError if it is none, or below 1."""
  if (integer := _integer(f'{name} is', value)) < 1:
    raise ValueError(f'{name} is {integer}; at least 1 is needed.')
  return integer


def _number(what_is: str, value: Any) -> float:
  """Make a Python float of any kind of scalar; raise a ValueError if it is none."""
  try:
    if isinstance(value, (str, bytes)) or np.ndim(value):
      raise TypeError
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f'{what_is} {value!r:.80}; a number is needed.') from None
