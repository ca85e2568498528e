"""Find the places that decoding reaches along recorded answers: the only ones that a second stage of training counts.

Decoding drafts from a few places of an answer, its roots, and from each it gets as far as the drafter is right. A
replay of the answer with the drafter that the stage begins with (`evaluate.trace`) says which places these are. A
root's chain counts where the drafter proposed a token that was accepted, and at the boundary, the first place where
none of its tokens was. The target ran over all of them when the answer was recorded, so it need not run again.

Source: Draft-OPD (arXiv:2605.29343), which replays the drafter from the places where it went wrong. It also learns
behind the boundary, from passes of the target over rejected tokens, with losses of its own for both sides. Here a chain
ends at the boundary, the losses are the recipe's, and the answers are replayed once, with the first weights.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.draft.drafter import Drafter
from eagle_jax.evaluate.example import Example
from eagle_jax.evaluate.features import with_features
from eagle_jax.evaluate.trace import FirstAnswer, first_answer, trace
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.processes import write_once
from eagle_jax.progress import progress_bar
from eagle_jax.sharding import to_host
from eagle_jax.train.report import TREES
from eagle_jax.train.step import Recipe
from eagle_jax.weights.safetensors import read_safetensors, write_safetensors

NOT_A_ROOT = -1
_CHUNK = 256  # examples whose features exist at one time where they are not stored


def require_first(recipe: Recipe, initial: Any) -> None:
  """Raise a ValueError if a recipe of the second stage has no drafter to begin with."""
  if recipe.second_stage and not initial:
    raise ValueError(
      'second_stage trains only at positions that decoding with the initial drafter reaches, so it needs one: pass a '
      'trained drafter with --initial, or train a first stage.'
    )


def replay_tree(num_steps: int) -> DynamicTree:
  """Return the policy of the replay: EAGLE-2's tree of 8 nodes, 4 deep, or as deep as `num_steps` reach."""
  small = TREES['small_tree_tau']
  return dataclasses.replace(small, max_depth=max(small.max_depth, num_steps))


def reached_places(num_accepted: Sequence[int], answer: FirstAnswer, *, num_places: int, max_depth: int) -> np.ndarray:
  """Return [num_places] i32: how many places further a chain gets from each root; `NOT_A_ROOT` at all others.

  Place t of `data.Packed` reads x_{t+1} and predicts x_{t+2}. Prefill emits the answer's first token, so the first root
  reads that one; a pass that accepts k tokens emits k + 1, and the next root lies as many places further.

  Args:
    num_accepted: of each pass, from `Traced`.
    answer: the answer that was traced. Chains end with it.
    num_places: of the whole text.
    max_depth: of the tree: a chain that was accepted whole has no boundary.
  """
  num_emitted = np.asarray(num_accepted, np.int32) + 1
  root = answer.num_prompt - 1 + np.cumsum(num_emitted) - num_emitted
  last = len(answer.token) - 3  # predicts the answer's last token
  num_reached_L = np.full(num_places, NOT_A_ROOT, np.int32)
  num_reached_L[root] = np.minimum(np.minimum(num_emitted - 1, max_depth - 1), last - root)
  return num_reached_L


def mark_reached(
  target: Target,
  drafter: Drafter,
  examples: Sequence[Example],
  folder: Path,
  *,
  num_steps: int,
  progress: bool = False,
) -> list[Example]:
  """Return the examples with `num_reached`, by a replay that is kept in `folder` for runs that are resumed.

  Only the first answer of a conversation is replayed, as in `trace`; later ones count nowhere.

  Args:
    target: the target that gave the answers; it computes the features that are not stored.
    drafter: the drafter that the stage begins with.
    examples: to train on.
    folder: of the run. The file's name says what was replayed, and with which weights.
    num_steps: of the objective; see `replay_tree`.
    progress: show a bar.

  Raises:
    ValueError: an example has no answer after a prompt, or all answers have one token, so nothing is ever drafted.
  """
  policy, found = replay_tree(num_steps), []
  path = folder / f'reached_{_fingerprint(policy, drafter, examples)}.safetensors'
  taps = drafter.config.tapped_layers(target.config.num_layers)

  def replay() -> dict[str, np.ndarray]:
    starts = progress_bar(range(0, len(examples), _CHUNK), desc='replay', unit='chunk', disable=not progress)
    for chunk in (examples[start : start + _CHUNK] for start in starts):
      traced = trace(target, drafter, with_features(target, chunk, taps), policy=policy)
      for example, counts in zip(chunk, traced.num_accepted, strict=True):
        sizes = {'num_places': len(example.token) - 1, 'max_depth': policy.max_depth}
        found.append(reached_places(counts, first_answer(example), **sizes))
    return {'num_reached': np.concatenate(found)}

  write_once(path, replay, write_safetensors)
  num_reached = dict(read_safetensors(path))['num_reached']
  if not (num_reached != NOT_A_ROOT).any():
    raise ValueError(
      f'Decoding drafts nothing along {len(examples)} answers of a single token, which prefill emits: a second stage '
      'needs longer ones.'
    )
  ends = np.cumsum([len(example.token) - 1 for example in examples])
  parts = np.split(num_reached, ends[:-1])
  return [example._replace(num_reached=part) for example, part in zip(examples, parts, strict=True)]


def _fingerprint(policy: DynamicTree, drafter: Drafter, examples: Sequence[Example]) -> str:
  """Return hex digits that differ if a replay would."""
  digest = hashlib.sha256(repr((policy, drafter.config)).encode())
  for example in examples:
    digest.update(repr((example.id, example.temperature, example.seed)).encode())
    digest.update(example.token.tobytes() + example.is_answer.tobytes())
  for x in jax.tree.leaves(to_host(drafter.params)):
    digest.update(np.asarray(x).tobytes())
  return digest.hexdigest()[:16]
