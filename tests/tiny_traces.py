"""Traces that were made up: one of five nodes by hand, and random ones of a given text."""

import numpy as np

from eagle_jax.decode.record import Cycle, sibling_ranks
from eagle_jax.text import Tokenizer
from eagle_jax.tree import NO_PARENT
from tiny_files import byte_metadata

BYTES = Tokenizer.from_gguf(byte_metadata(), eos_ids=(258,))  # a byte's id is its value
HOSTILE = '</script><script>alert("1")</script><!-- \'&amp;\' \\u003c "DATA" 😀 שלום \u202egnp.exe \x00\x07\t\n日本'
A_CYCLE = Cycle(
  token=np.frombuffer(b'abcde', np.uint8).astype(np.int32),
  parent=np.array([NO_PARENT, 0, 0, 1, 1]),
  log_q=np.log(np.array([1, 0.6, 0.3, 0.4, 0.03], np.float32)),
  log_p=np.log(np.array([1, 0.5, 0.25, 0.75, 0.001], np.float32)),
  rank=np.array([0, 0, 1, 0, 1]),
  path=np.array([0, 1, 3]),
  bonus=ord('f'),
  text_length=4,
  num_emitted=3,
)


def random_tree(rng, num_nodes: int, max_depth: int) -> tuple[np.ndarray, list[list[int]]]:
  """Make a random tree: its parents, and the nodes from the root to each node."""
  parents, paths = [NO_PARENT], [[0]]
  while len(parents) < num_nodes:
    parent = int(rng.integers(len(parents)))
    if len(paths[parent]) <= max_depth:
      paths.append([*paths[parent], len(parents)])
      parents.append(parent)
  return np.array(parents), paths


def random_cycle(rng, ids, place: int, *, num_nodes=12, max_depth=4, accepts=True) -> Cycle:
  """Make a cycle behind `ids[:place]` that accepts as much of the rest as a random path of its tree can hold."""
  parent, paths = random_tree(rng, num_nodes, max_depth)
  path = paths[int(rng.integers(num_nodes))] if accepts else [0]
  path = path[: len(ids) - place]
  token = rng.integers(33, 127, num_nodes, dtype=np.int32)
  token[path] = ids[place - 1 : place - 1 + len(path)]
  log_q = np.zeros(num_nodes, np.float32)
  for node in range(1, num_nodes):
    log_q[node] = log_q[parent[node]] + np.log(rng.uniform(0.01, 0.9))
  log_p = np.log(rng.uniform(1e-9, 1, num_nodes)).astype(np.float32)
  bonus, rank = ids[place + len(path) - 1], sibling_ranks(parent, log_q)
  return Cycle(token, parent, log_q, log_p, rank, np.array(path), bonus, place, num_emitted=len(path))


def trace_of(ids, **how) -> list[Cycle]:
  """Make cycles that emit these ids; the first is the prefill's."""
  rng, place, cycles = np.random.default_rng(0), 1, []
  while place < len(ids):
    cycles.append(random_cycle(rng, ids, place, **how))
    place += cycles[-1].num_emitted
  return cycles
