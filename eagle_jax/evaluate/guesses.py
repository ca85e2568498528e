"""Compare a drafter's first choices with the target's at every place of a text, in one pass over it for each depth.

At place t the drafter reads the target's activations of token t and the embedding of token t + 1, and guesses token
t + 2. The target's layers run once for a text, so many forms of a drafter are compared at the cost of their own passes.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import cache as kv_cache
from eagle_jax.decode.buckets import pad_prompts
from eagle_jax.draft.eagle import Eagle
from eagle_jax.models.transformer import Taps, Target, TransformerTarget
from eagle_jax.sharding import mesh_of, to_host, use_mesh


class TextPass(NamedTuple):
  """A pass of the target over one text of n tokens, padded to L."""

  token: np.ndarray  # [1, L] i32
  num_tokens: int  # n
  feature: jax.Array  # [D, 1, L]
  residual: dict[int, jax.Array]  # [D, 1, L] each, inputs of layers by number; see `Taps.residual`
  choice: np.ndarray  # [L] i32, the target's likeliest token after each

  def taps(self, layers: Iterable[int]) -> Taps:
    """Select what a drafter that taps these layers would see."""
    return Taps(self.feature, tuple(self.residual[layer] for layer in layers))


def read_text(target: Target, token_n: Sequence[int], *, layers: Iterable[int], max_tokens: int) -> TextPass:
  """Run the target over a text, padded to the bucket of `max_tokens`, and keep the inputs of `layers`."""
  token_1L, _ = pad_prompts([[*token_n]], max_tokens)
  layers = tuple(sorted(set(layers)))
  network = dataclasses.replace(target.network, tapped_layers=layers)
  with use_mesh(mesh_of(target.params)):
    taps, choice_L = _read(target.params, token_1L, network=network)
  return TextPass(
    token_1L, len(token_n), taps.feature, dict(zip(layers, taps.residual, strict=True)), to_host(choice_L)
  )


@functools.partial(jax.jit, static_argnames='network')
def _read(params: Any, token_1L: jax.Array, *, network: TransformerTarget) -> tuple[Taps, jax.Array]:
  taps = network.read(params, token_1L)
  return taps, jnp.argmax(network.logits(params, taps)[:, 0], axis=0).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames='network')
def guess(params: Any, token_BL: jax.Array, taps: Any, *, network: Eagle) -> jax.Array:
  """Find the drafter's likeliest tokens of depths 1 and 2 at every place of whole texts: [2, B, L] i32.

  Depth 1 reads the target's activations. Depth 2 at place t is that of a chain drafted from place t - 1: it reads the
  drafter's own output there, and attends to depth 1 up to place t - 1 and to itself.

  Args:
    params: the drafter's, as `decode.build` makes them.
    token_BL: [B, L] i32, the texts.
    taps: the target's activations [..., B, L] over them.
    network: static.
  """
  batch, length = token_BL.shape
  next_BL = jnp.roll(token_BL, -1, axis=1)
  position_BL = jnp.broadcast_to(jnp.arange(length), token_BL.shape)
  empty = kv_cache.init(network.config, num_layers=network.num_layers, batch=batch, num_slots=0, dtype=network.dtype)

  def run(feature_DBL: jax.Array, mask_LM: jax.Array, earlier: Any) -> tuple[jax.Array, Any]:
    mask_BLM = jnp.broadcast_to(mask_LM, (batch, *mask_LM.shape))
    return network.forward(params, next_BL, feature_DBL, position_BL, mask_BLM, empty, earlier)

  def best_token(out_DBL: jax.Array) -> jax.Array:
    children = network.top_children(params, out_DBL, lambda token_UB: jnp.zeros(token_UB.shape), 1)
    return children.token[..., 0]

  first_DBL, memory = run(network.fuse_taps(params, taps), jnp.tri(length, dtype=bool), None)
  before_LL = jnp.tri(length, k=-1, dtype=bool)
  own_DBL = jnp.roll(network.next_feature(params, first_DBL), 1, axis=2)
  second_DBL, _ = run(own_DBL, jnp.concatenate([before_LL, jnp.eye(length, dtype=bool)], axis=1), memory)
  return jnp.stack([best_token(first_DBL), best_token(second_DBL)])


class Agreement(NamedTuple):
  """The shares of places where a drafter's first choice is the target's; NaN where there is nothing to count."""

  first: float  # share of all places
  answers: float  # of the places before an answer's tokens
  second: float  # at depth 2, of the places where depth 1 was right and the text goes on so
  num_second: int  # number of those places


def agreement(
  params: Any, network: Eagle, read: TextPass, taps: Taps, is_answer_n: np.ndarray | None = None
) -> Agreement:
  """Compare guesses along a text with the target's choices.

  Args:
    params, network: the drafter's, as in `guess`.
    read: the target's pass.
    taps: what the drafter reads of it.
    is_answer_n: [n] bool, tokens that the target wrote; None: it wrote none.
  """
  guess_2L = to_host(guess(params, read.token, taps, network=network))[:, 0]
  end = read.num_tokens - 2  # places whose guessed token is in the text
  text, choice = read.token[0, 2 : end + 2], read.choice[1 : end + 1]
  is_first, is_second = guess_2L[:, :end] == choice
  is_tried = np.append(False, (is_first & (choice == text))[:-1])[:end]
  is_answer = np.zeros(end, bool) if is_answer_n is None else is_answer_n[2:]
  return Agreement(_mean(is_first), _mean(is_first[is_answer]), _mean(is_second[is_tried]), int(is_tried.sum()))


def _mean(is_right: np.ndarray) -> float:
  return float(is_right.mean()) if is_right.size else float('nan')
