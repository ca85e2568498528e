"""Counter-based random bits: Threefry-2x32, as in `jax.random`, at any places of an array."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # of the rounds, four and four in turn
Key = Sequence[jax.Array] | jax.Array  # of two halves, [] u32


def reference(key_2: jax.Array, count_U: jax.Array) -> jax.Array:
  """Return what `jax.random.bits` has at these places: the two halves of a block, of the place's high and low bits."""
  high_U, low_U = jnp.split(threefry_2x32(key_2, jnp.concatenate([jnp.zeros_like(count_U), count_U])), 2)
  return high_U ^ low_U


def fold_in(key: Key, number: jax.Array) -> Key:
  """Return the key that `jax.random.fold_in` makes of a key and a number [] u32."""
  return encrypt(key, number)


def random_bits(key: Key, count_U: jax.Array) -> jax.Array:
  """Return [U] u32, the bits of `jax.random.bits` at these places, [U] u32, of an array."""
  high_U, low_U = encrypt(key, count_U)
  return high_U ^ low_U


@jax.jit
def encrypt(key: Key, low_U: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encrypt blocks of 64 bits, of which the high half is 0: 20 rounds, written out.

  On a CPU JAX's own is a loop of five times four rounds that writes its numbers after each, and takes over 3 % of a
  step that samples. These are one kernel, which also compiles in less time.

  Args:
    key: the two halves, [] u32.
    low_U: the low halves, [...] u32.

  Returns:
    The halves of each encrypted block, high and low, [...] u32.

  Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
  """
  keys = *key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
  high_U, low_U = jnp.full_like(low_U, keys[0]), low_U + keys[1]
  for number in range(5):
    for bits in ROTATIONS[number % 2]:
      high_U += low_U
      low_U = high_U ^ (low_U << bits | low_U >> (32 - bits))
    high_U += keys[(number + 1) % 3]
    low_U += keys[(number + 2) % 3] + jnp.uint32(number + 1)
  return high_U, low_U
