"""Let the target answer prompts by plain decoding of many sequences (see `decode.batching`), and record its features.

A `Recorder` stands in for a drafter: it drafts nothing, and keeps the features of committed tokens that a drafter would
encode.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.cache import pad_slots
from eagle_jax.config import TargetConfig
from eagle_jax.decode.batching import Batcher, Request
from eagle_jax.decode.commit import require_numbers
from eagle_jax.decode.program import Program
from eagle_jax.decode.state import DecodeState, Params, Spec
from eagle_jax.draft.plain import NoDrafter
from eagle_jax.evaluate.features import join_taps
from eagle_jax.kernels.write_kv import write
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Plain
from eagle_jax.sampling import Sampling
from eagle_jax.sharding import mesh_of
from eagle_jax.train.conversations import Conversation, Message, SkipExample, counting, text_before


class Recording(NamedTuple):
  """The features of each sequence's committed tokens, followed by what is tapped."""

  feature: jax.Array  # [B, 1, S, (1 + k) D] f32, laid out as one head of a cache; see `evaluate.example`
  length: jax.Array  # [B] i32


@dataclasses.dataclass(frozen=True)
class Recorder(NoDrafter):
  """A drafter that drafts nothing and records features and taps, or nothing."""

  is_on: bool

  def start(self, params, token_BL, taps, length_B, num_slots: int, first_B) -> Recording:
    return Recording(pad_slots(self._features(taps), num_slots), length_B)

  def update(self, params, state: Recording, token_BP, taps, count_B) -> Recording:
    return Recording(write(state.feature, self._features(taps), state.length), state.length + count_B)

  def _features(self, taps) -> jax.Array:
    joined_DBL = join_taps(taps) if self.is_on else taps.feature[:0]
    return joined_DBL.transpose(1, 2, 0)[:, None].astype(jnp.float32)


class Answer(NamedTuple):
  """The target's answer to one request."""

  request: Request
  token: np.ndarray  # [n] i32, ends with the EOS if there was one
  feature: np.ndarray  # [num_prompt + n - 1, (1 + k) D] bf16; the newest token has none: no pass saw it


def require_room(config: TargetConfig, *, num_rows: int, num_refill: int, max_prompt: int, max_new_tokens: int) -> None:
  """Raise a ValueError if `num_refill` is above `num_rows`, or a text would exceed the target's context."""
  if not 1 <= num_refill <= num_rows:
    raise ValueError(f'`num_refill` must be between 1 and num_rows, {num_rows}; got {num_refill}.')
  if max_prompt + max_new_tokens > config.max_context:
    raise ValueError(
      f'max_prompt {max_prompt} + max_new_tokens {max_new_tokens} exceeds the context of {config.max_context}. Lower '
      'one of them.'
    )


class Answerer:
  """A runner of any number of requests, `num_rows` at a time, with programs that are compiled once."""

  def __init__(
    self,
    target: Target,
    *,
    num_rows: int,
    num_refill: int,
    max_prompt: int,
    max_new_tokens: int,
    seed: int = 0,
    records_features: bool = True,
    taps: Sequence[int] = (),
  ):
    """
    Args:
      target: answers.
      num_rows: sequences decoded together.
      num_refill: finished sequences that are replaced together.
      max_prompt, max_new_tokens: tokens, at most; fix the size of the cache.
      seed: of the noise, with the request's id.
      records_features: if not, features have width 0.
      taps: layers whose inputs are recorded too, k of them.

    Raises:
      ValueError: as `require_room`.
    """
    sizes = {'num_rows': num_rows, 'num_refill': num_refill}
    require_room(target.config, **sizes, max_prompt=max_prompt, max_new_tokens=max_new_tokens)
    self.target, self.max_prompt = target, max_prompt
    network = dataclasses.replace(target.network, tapped_layers=tuple(taps) if records_features else ())
    self._batcher = Batcher(
      Params(target.params, ()),
      Spec(network, Recorder(records_features), Plain()),
      mesh_of(target.params),
      batch_size=num_rows,
      num_refill=num_refill,
      max_prompt=max_prompt,
      max_new_tokens=max_new_tokens,
      num_new=max_new_tokens,
      sampling=Sampling.of(seed=seed)._replace(temperature=jnp.zeros(num_rows)),
      eos_ids=target.config.eos_ids,
    )

  def answer(self, requests: Iterable[Request]) -> Iterator[Answer]:
    """Yield the answers as they finish. An answer depends on its request and the seed alone.

    Raises:
      ValueError: a prompt is empty or longer than `max_prompt`.
    """
    requests = [*requests]
    for request in requests:
      if not 1 <= len(request.token) <= self.max_prompt:
        raise ValueError(f'Request {request.id} has {len(request.token)} tokens; 1 to {self.max_prompt} are needed.')
    for number, (text_S, num_seen, feature_SD) in self._batcher.run(requests, _RECORDED):
      request = requests[number]
      token_N = text_S[len(request.token) : num_seen + 1].copy()
      require_numbers(token_N, self.target)
      yield Answer(request, token_N, feature_SD[:num_seen].copy())


@jax.jit
def _recorded(state: DecodeState, row_n: jax.Array) -> tuple[jax.Array, ...]:
  """Return text, number of tokens in the cache, and features in bfloat16, of some sequences."""
  return state.text[row_n], state.cache.length[row_n], state.drafter.feature[row_n, 0].astype(jnp.bfloat16)


_RECORDED = Program(_recorded)


def synthesize(
  answerer: Answerer,
  numbers: Iterable[int],
  refused: collections.Counter[str],
  *,
  num_turns: int = 1,
  temperature: float = 1.0,
) -> list[Conversation]:
  """Let the target make up conversations, the user's messages too (Magpie, arXiv:2406.08464).

  It is prompted with the chat template's opening of a user's turn; what it writes up to its end of turn is the message.
  Its answers in between are left out of the conversation.

  Args:
    answerer: its target talks to itself; has a tokenizer with a chat template.
    numbers: one a conversation; the number and the answerer's seed decide it.
    refused: counts the conversations in which a message is empty or cut short, or a prompt too long.
    num_turns: user's messages a conversation.
    temperature: above 0, since all conversations start alike.
  """
  said: dict[int, list[Message]] = {number: [] for number in numbers}
  for role in (['user', 'assistant'] * num_turns)[:-1]:
    said = _another_message(answerer, said, role, refused, temperature)
  return [Conversation(tuple(message['content'] for message in said[n] if message['role'] == 'user')) for n in said]


def _another_message(
  answerer: Answerer, said: dict[int, list[Message]], role: str, refused: collections.Counter[str], temperature: float
) -> dict[int, list[Message]]:
  """Extend each conversation by one message; those that cannot be extended are dropped and counted."""
  target, requests, longer = answerer.target, [], {}
  for number, messages in said.items():
    with counting(refused):
      token = target.tokenizer.encode(text_before(target.tokenizer, messages))
      if len(token) > answerer.max_prompt:
        raise SkipExample('self-synthesis: a prompt is too long')
      requests.append(Request(~number, token, temperature))  # an id, so a noise, that no answer to a prompt has
  for answer in sorted(answerer.answer(requests), key=lambda answer: ~answer.request.id):
    with counting(refused):
      number = ~answer.request.id
      longer[number] = [*said[number], {'role': role, 'content': _whole_text(target, answer)}]
  return longer


def _whole_text(target: Target, answer: Answer) -> str:
  *token, end = answer.token.tolist()
  if end not in target.config.eos_ids:
    raise SkipExample('self-synthesis: a message was cut short')
  if not (text := target.tokenizer.decode(token).strip()):
    raise SkipExample('self-synthesis: an empty message')
  return text
