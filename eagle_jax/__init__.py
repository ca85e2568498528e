"""EAGLE-2 speculative decoding in JAX: draft a tree, check it in one target pass, keep what agrees, all in one program.

Names carry shapes; one letter is one dimension, everywhere:

    B batch rows       L tokens in this call    S cache slots     T tree nodes, root included
    W frontier width   C children per node      A candidates before rerank     P path slots, max_depth + 1
    D model width      H query heads   G kv heads   J query heads a kv head   K head dim   F ffn width
    Q a kv head's queries, its key, its value (J + 2)
    V target vocab     U draft vocab   R rows of work (B x T, one column each)   N new tokens
    M new rows beside the cache        Z sizes of a target pass     d depths      E experts
    X, Y values measured at            n, 1 any number, one

`p` is the target and `q` the drafter. Read in this order: tree, cache, sampling, models/layers,
models/transformer, policy/adaptive, policy/trees, policy/costs, draft/ngram, draft/expand, draft/eagle, draft/eagle3,
decode/verify, decode/commit, decode/prefill, decode/step, decode/generate.
"""

from eagle_jax import decode
from eagle_jax.decode.stored import keep_programs
from eagle_jax.draft.drafter import Drafter
from eagle_jax.hub import load_drafter, load_target, save_drafter
from eagle_jax.models.transformer import Target
from eagle_jax.policy.trees import Adaptive, Chain, DynamicTree, StaticTree

__all__ = [
  'Adaptive', 'Chain', 'Drafter', 'DynamicTree', 'StaticTree', 'Target', 'decode', 'keep_programs', 'load_drafter',
  'load_target', 'save_drafter',
]  # fmt: skip
