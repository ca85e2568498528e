"""Examples to rows of fixed length: several sequences packed end to end, each blind to the others."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.train.features import Example


class Packed(NamedTuple):
  """L training rows. Row t of a sequence joins f_t with x_{t+1} and learns f_{t+1} (EAGLE.md section 7.2).

  It counts where f_{t+1} predicts an answer token: so the row before the answer, which the first draft step of a
  generation starts from, is trained too.
  """

  next_token: Any  # [L] i32
  feature: Any  # [L, D] float16
  next_feature: Any  # [L, D] float16, to be predicted
  position: Any  # [L] i32, in the sequence
  sequence: Any  # [L] i32, which sequence of the row; -1 for padding
  weight: Any  # [L] f32, 1 where the row counts


def pack(examples: Sequence[Example], *, num_rows: int) -> Packed:
  """Packs as many of the examples as fit into `num_rows`, in order; longer ones are cut."""
  width = examples[0].feature.shape[1]
  packed = Packed(
    np.zeros(num_rows, np.int32),
    np.zeros((num_rows, width), np.float16),
    np.zeros((num_rows, width), np.float16),
    np.zeros(num_rows, np.int32),
    np.full(num_rows, -1, np.int32),
    np.zeros(num_rows, np.float32),
  )
  start = 0
  for number, example in enumerate(examples):
    count = min(len(example.feature) - 1, num_rows - start)
    rows = slice(start, start + count)
    packed.next_token[rows] = example.token[1 : count + 1]
    packed.feature[rows] = example.feature[:count]
    packed.next_feature[rows] = example.feature[1 : count + 1]
    packed.position[rows] = np.arange(count)
    packed.sequence[rows] = number
    packed.weight[rows] = np.arange(count) + 1 >= example.num_prompt - 1
    start += count
  return packed


def epochs(examples: Sequence[Example], *, num_rows: int, seed: int) -> Iterator[Packed]:
  """Endless packed rows: every epoch in an order of its own, each sequence whole."""
  for epoch in range(1 << 30):
    order = np.random.default_rng((seed, epoch)).permutation(len(examples))
    chosen: list[Example] = []
    room = num_rows
    for index in order:
      need = len(examples[index].feature) - 1
      if need > room and chosen:
        yield pack(chosen, num_rows=num_rows)
        chosen, room = [], num_rows
      chosen.append(examples[index])
      room -= need
    yield pack(chosen, num_rows=num_rows)


def frequent_ids(examples: Sequence[Example], *, size: int, vocab_size: int, forced: Sequence[int] = ()) -> np.ndarray:
  """[U] i32, ascending: the `size` ids that the target's answers hold most often, the `forced` ones included.

  Source: FR-Spec, arXiv:2502.14856.
  """
  count_V = np.zeros(vocab_size, np.int64)
  for example in examples:
    np.add.at(count_V, example.token[example.num_prompt :], 1)
  count_V[list(forced)] = np.iinfo(np.int64).max
  return np.sort(np.argsort(-count_V, kind='stable')[:size]).astype(np.int32)
