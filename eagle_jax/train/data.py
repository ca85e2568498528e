"""Pack examples into batches: texts end to end, none attending to another, in an order that a seed fixes."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from eagle_jax.evaluate.example import Example
from eagle_jax.files import parse_json
from eagle_jax.sharding import partition, put

_LOOK_AHEAD = 64  # examples among which one is sought that fits the room left in a row


class Packed(NamedTuple):
  """B rows of L places. Place t of a text joins f_t with x_{t+1} and learns f_{t+1}, which predicts x_{t+2}.

  It counts where x_{t+2} is an answer's token. So the place before the answer, which the first draft step of a
  generation starts from, is trained too; the reference leaves it out ("Training" in draft/README.md). The last place of
  a text has nothing to learn.
  """

  token: Any  # [B, L] i32, x_t
  next_token: Any  # [B, L] i32, x_{t+1}
  label: Any  # [B, L] i32, x_{t+2}; -1 where there is none
  position: Any  # [B, L] i32, t
  sequence: Any  # [B, L] i32, which text of the row; -1 for padding
  weight: Any  # [B, L] f32, how much the place counts
  feature: Any  # [B, L, D] bf16, f_t; D is 0 where features are computed in the training step
  num_reached: Any = None  # [B, L] i32, see `train.reached`; None: chains begin at every place that counts


def pack(rows: Sequence[Sequence[Example]], *, num_places: int, prompt_weight: float = 0.0) -> Packed:
  """Pack each list of examples into one packed row; what does not fit into `num_places` is cut.

  Args:
    rows: B lists of examples.
    num_places: L.
    prompt_weight: how much places count that predict a prompt's token; an answer's count 1.
  """
  shape = len(rows), num_places
  width = rows[0][0].feature.shape[1]
  packed = Packed(
    token=np.zeros(shape, np.int32),
    next_token=np.zeros(shape, np.int32),
    label=np.full(shape, -1, np.int32),
    position=np.zeros(shape, np.int32),
    sequence=np.full(shape, -1, np.int32),
    weight=np.zeros(shape, np.float32),
    feature=np.zeros((*shape, width), jnp.bfloat16),
    num_reached=None if rows[0][0].num_reached is None else np.full(shape, -1, np.int32),
  )
  for b, row in enumerate(rows):
    start = 0
    for number, example in enumerate(row):
      count = min(len(example.token) - 1, num_places - start)
      places, taught = slice(start, start + count), slice(start, start + count - 1)
      packed.token[b, places] = example.token[:count]
      packed.next_token[b, places] = example.token[1 : count + 1]
      packed.label[b, taught] = example.token[2 : count + 1]
      packed.position[b, places] = np.arange(count)
      packed.sequence[b, places] = number
      packed.weight[b, taught] = np.where(example.is_answer[2 : count + 1], 1, prompt_weight)
      packed.feature[b, places] = example.feature[:count]
      if example.num_reached is not None:
        packed.num_reached[b, places] = example.num_reached[:count]
      start += count
  return packed


def plan(num_places_of: Sequence[int], *, num_places: int, seed: int, epoch: int) -> list[list[int]]:
  """Return the indices of the examples in each packed row of an epoch: each example once, whole, in random order."""
  order = iter(np.random.default_rng((seed, epoch)).permutation(len(num_places_of)).tolist())
  near = list(itertools.islice(order, _LOOK_AHEAD))
  rows: list[list[int]] = []
  while near:
    row, room, fit = [], num_places, near[0]
    while fit is not None:
      near.remove(fit)
      near.extend(itertools.islice(order, 1))
      row.append(fit)
      room -= num_places_of[fit]
      fit = next((i for i in near if num_places_of[i] <= room), None)
    rows.append(row)
  return rows


def batches(
  examples: Sequence[Example],
  *,
  num_rows: int,
  num_places: int,
  seed: int,
  prompt_weight: float = 0.0,
  first: int = 0,
  num_epochs: int | None = None,
) -> Iterator[Packed]:
  """Yield batches of `num_rows` packed rows, from batch number `first` on, where a resumed run begins.

  A batch may end one epoch and begin the next; without end if `num_epochs` is None, else the last one is filled up with
  rows that do not count.
  """
  lengths = [len(example.token) - 1 for example in examples]
  epochs = itertools.count() if num_epochs is None else range(num_epochs)
  plans = (plan(lengths, num_places=num_places, seed=seed, epoch=epoch) for epoch in epochs)
  rows = itertools.islice(itertools.chain.from_iterable(plans), first * num_rows, None)
  while chosen := list(itertools.islice(rows, num_rows)):
    filled = [[examples[i] for i in row] for row in chosen]
    packed = pack(filled + [filled[0]] * (num_rows - len(filled)), num_places=num_places, prompt_weight=prompt_weight)
    packed.weight[len(filled) :] = 0
    yield packed


def batch_shardings(packed: Packed, mesh: Mesh) -> Packed:
  """Return the sharding of each array of a batch: its first axis over the batch axis of the mesh."""
  return jax.tree.map(
    lambda x: NamedSharding(mesh, partition(('batch',) + (None,) * (x.ndim - 1), x.shape, mesh)), packed
  )


def place(packed: Packed, mesh: Mesh | None) -> Packed:
  """Place a batch on the mesh."""
  return packed if mesh is None else jax.tree.map(put, packed, batch_shardings(packed, mesh))


def read_vocabulary(path: str | Path, config: Any) -> np.ndarray:
  """Read the ids that a drafter of this config is to draft, [U] i32, from a JSON file: {"ids": [...]}.

  Raises:
    ValueError: the config drafts all ids, or the file holds no such list, or not as many distinct ids of the target as
      the config drafts.
  """
  if config.draft_vocab_size is None:
    raise ValueError('--vocabulary needs draft_vocab_size in DRAFTER: this drafter drafts all ids.')
  content = parse_json(Path(path).expanduser().read_bytes(), str(path))
  ids = content.get('ids') if isinstance(content, dict) else None
  if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
    raise ValueError(f'{path} holds no {{"ids": [...]}} of integers: write the target ids to be drafted there.')
  if outside := [one for one in ids if not 0 <= one < config.vocab_size]:
    raise ValueError(f'{path} holds the id {outside[0]}; the target has those below {config.vocab_size}.')
  if len({*ids}) < len(ids) or len(ids) != config.draft_vocab_size:
    raise ValueError(
      f'{path} holds {len(ids)} ids, {len({*ids})} of them distinct; as many distinct ones as draft_vocab_size, '
      f'{config.draft_vocab_size}, are needed.'
    )
  return np.asarray(ids, np.int32)


def frequent_ids(examples: Sequence[Example], *, size: int, vocab_size: int, forced: Sequence[int] = ()) -> np.ndarray:
  """Return [U] i32: the `forced` ids, then those most frequent in the target's answers, `size` in all.

  Source: FR-Spec, arXiv:2502.14856.
  """
  count_V = np.zeros(vocab_size, np.int64)
  for example in examples:
    np.add.at(count_V, example.token[example.is_answer], 1)
  count_V[list(forced)] = np.iinfo(np.int64).max
  return np.argsort(-count_V, kind='stable')[:size].astype(np.int32)
