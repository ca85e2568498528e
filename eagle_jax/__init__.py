"""EAGLE-2 speculative decoding in JAX: draft a tree, verify it in one target pass, commit what agrees, in one program.

Names carry shapes; one letter is one dimension, everywhere:

    B batch (sequences)    L tokens in this call    S cache slots     T tree nodes, root included
    W frontier width   C children per node      A candidates before rerank     P path slots, max_depth + 1
    D model width      H query heads   G kv heads   J query heads a kv head   K head dim   F ffn width
    Q queries, key and value of a kv head (J + 2)
    V target vocab     U draft vocab   R columns of activations (B x T)   N new tokens
    M new entries not yet in the cache    Z tree sizes of a target pass    d depths    E experts
    X, Y knots of measured tables         n, 1 any number, one

`p` is the target and `q` the drafter. Read in this order: tree, cache, sampling, models/layers, models/transformer,
policy/trees, policy/adaptive, policy/costs, draft/interface, draft/lookup, draft/expand, draft/eagle, draft/eagle3,
decode/verify, decode/commit, decode/prefill, decode/step, decode/generate.
"""

from eagle_jax import decode, viz
from eagle_jax.decode import Generation, generate, stream
from eagle_jax.device import package_version
from eagle_jax.draft.drafter import Drafter
from eagle_jax.hub import load_drafter, load_target, save_drafter
from eagle_jax.lossy import TypicalAcceptance
from eagle_jax.models.transformer import Target
from eagle_jax.policy.adaptive import Adaptive
from eagle_jax.policy.c2t import C2T
from eagle_jax.policy.calibrated import CalibratedTree
from eagle_jax.policy.cape import CaPE
from eagle_jax.policy.costs import Costs
from eagle_jax.policy.ddd import DDD
from eagle_jax.policy.gap import GapTree
from eagle_jax.policy.pooled import PooledTree
from eagle_jax.policy.rate import RateTree
from eagle_jax.policy.sure_mass import SureMass
from eagle_jax.policy.svip import SVIP
from eagle_jax.policy.trees import Chain, DynamicTree, Plain, StaticTree
from eagle_jax.sampling import GumbelMax
from eagle_jax.sharding import make_mesh

__version__ = package_version('eagle_jax') or 'unknown'

__url__ = ''  # of the repository, once it has one that notebooks can install from

__all__ = [
  'C2T', 'DDD', 'SVIP', 'Adaptive', 'CaPE', 'CalibratedTree', 'Chain', 'Costs', 'Drafter', 'DynamicTree', 'GapTree',
  'Generation', 'GumbelMax', 'Plain', 'PooledTree', 'RateTree', 'StaticTree', 'SureMass', 'Target',
  'TypicalAcceptance', 'decode', 'generate', 'load_drafter', 'load_target', 'make_mesh', 'save_drafter', 'stream',
  'viz',
]  # fmt: skip
