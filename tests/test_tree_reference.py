"""The tree of a random EAGLE drafter against the reference's algorithm (`topK_genrate`), anew in plain NumPy.

The reference takes the weights as a file has them; its forward, its cache (plain lists of rows) and its tree are here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from eagle_jax.config import DrafterConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.kinds import tensor_table
from eagle_jax.models.transformer import Taps
from eagle_jax.policy.trees import DynamicTree
from eagle_jax.tree import NO_PARENT, ancestor_mask, depth, rerank
from eagle_jax.weights.load import flatten

CONFIG = DrafterConfig(
  vocab_size=23, width=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=24, rope_theta=50.0, qkv_bias=True
)
PROMPT_LEN, NUM_SLOTS = 6, 64
NEAR_TIE = 1e-4  # seeds are chosen so that no decision is closer than this


def random_params(seed: int):
  """Every weight random, biases and norm scales too; `embed` and `head` stand for the target's."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(Eagle(CONFIG).init_params, jax.random.key(0))
  params = jax.tree.map(lambda x: rng.standard_normal(x.shape) * (x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3), shapes)
  params['layer']['mlp_norm']['scale'] += 1
  embed_VD, head_VD = rng.standard_normal((2, CONFIG.vocab_size, CONFIG.width))
  return {**params, 'embed': embed_VD, 'head': 0.7 * head_VD}


class Reference:
  """The reference's drafter for one row, in float64; rows are [position, key, value], as its past key values."""

  def __init__(self, params):
    self.params, self.rows = params, []
    self.saved = flatten({name: params[name] for name in ('fc', 'layer')}, tensor_table(CONFIG))

  def linear(self, x, name):
    return x @ self.saved[f'{name}.weight'].T + self.saved.get(f'{name}.bias', 0)

  def rope(self, x_HK, position):
    half = x_HK.shape[1] // 2
    angle = position / CONFIG.rope_theta ** (np.arange(half) / half)
    cos, sin = np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)
    turned_HK = np.concatenate([-x_HK[:, half:], x_HK[:, :half]], axis=1)
    return x_HK * cos + turned_HK * sin

  def forward(self, token, feature, position, seen):
    """Output of one row, and its own key-value row; it sees the rows `seen` and itself."""
    H, G, K = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    x = self.linear(np.concatenate([self.params['embed'][token], feature]), 'fc')
    q, k, v = (self.linear(x, f'layers.0.self_attn.{name}_proj').reshape(-1, K) for name in 'qkv')
    own = self.rope(k, position), v
    keys, values = (np.stack(kv) for kv in zip(*seen, own, strict=True))  # [rows, G, K]
    heads = []
    for h, q_K in enumerate(self.rope(q, position)):
      score = keys[:, h // (H // G)] @ q_K / np.sqrt(K)
      weight = np.exp(score - score.max())
      heads.append(weight @ values[:, h // (H // G)] / weight.sum())
    y = x + self.linear(np.concatenate(heads), 'layers.0.self_attn.o_proj')
    normed = y / np.sqrt(np.mean(y**2) + CONFIG.norm_eps) * self.saved['layers.0.post_attention_layernorm.weight']
    gate, up = (self.linear(normed, f'layers.0.mlp.{name}_proj') for name in ('gate', 'up'))
    return y + self.linear(gate / (1 + np.exp(-gate)) * up, 'layers.0.mlp.down_proj'), own

  def top_k(self, score, k):
    order = np.argsort(-score, kind='stable')
    if k < len(score):
      assert score[order[k - 1]] - score[order[k]] > NEAR_TIE, 'near tie: choose another seed'
    return score[order[:k]], order[:k]

  def children(self, out, noise_V, k):
    logits = self.params['head'] @ out + noise_V
    return self.top_k(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()), k)

  def draft(self, new_features, new_tokens, root, noise_dV, *, k, max_depth, num_nodes):
    """`topK_genrate`: absorbs the new rows, grows, reranks. Tokens, parents, depths and mask, the root first.

    Ours beside it: the noise of each depth is added to the logits; 0 for the reference's own tree.
    """
    for feature, token in zip(new_features, new_tokens, strict=True):
      last, own = self.forward(token, feature, len(self.rows), self.rows)
      self.rows.append(own)
    n = len(self.rows)
    score_k, token_k = self.children(last, noise_dV[0], k)
    pool = [(token, score, -1, 1) for token, score in zip(token_k, score_k, strict=True)]  # parent -1: the root
    frontier = [(i, last, ()) for i in range(k)]  # candidate, feature, drafted rows of its ancestors
    for level in range(max_depth - 1):
      outs = [self.forward(pool[i][0], f, n + level, [*self.rows, *above]) for i, f, above in frontier]
      first = len(pool)
      for (i, _, _), (out, _) in zip(frontier, outs, strict=True):
        for log_p, token in zip(*self.children(out, noise_dV[level + 1], k), strict=True):
          pool.append((token, pool[i][1] + log_p, i, level + 2))
      _, chosen = self.top_k(np.asarray([score for _, score, _, _ in pool[first:]]), k)
      frontier = [(first + c, outs[c // k][0], (*frontier[c // k][2], outs[c // k][1])) for c in chosen]
    _, kept = self.top_k(np.asarray([score for _, score, _, _ in pool]), num_nodes - 1)
    node_of = {-1: 0} | {candidate: 1 + node for node, candidate in enumerate(np.sort(kept))}
    kept_pool = [pool[candidate] for candidate in np.sort(kept)]
    token_T = [root, *(token for token, _, _, _ in kept_pool)]
    parent_T = [NO_PARENT, *(node_of[parent] for _, _, parent, _ in kept_pool)]
    depth_T = [0, *(d for _, _, _, d in kept_pool)]
    mask_TT = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
      mask_TT[node] |= mask_TT[parent_T[node]]
    return token_T, parent_T, depth_T, mask_TT, [0.0, *(score for _, score, _, _ in kept_pool)]


@pytest.mark.parametrize(
  ('k', 'max_depth', 'num_nodes', 'seed'), [(3, 1, 4, 0), (2, 3, 6, 1), (4, 4, 14, 2), (5, 6, 30, 3), (10, 6, 60, 4)]
)
@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_tree_is_the_references(k, max_depth, num_nodes, seed, temperature):
  """Two cycles: after the prompt, and after a path of one root and `a` accepted nodes, as commit hands it over."""
  policy, eagle = DynamicTree(k, k, max_depth, num_nodes), Eagle(CONFIG)
  params64 = random_params(seed)
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params64)
  params['ids'] = jnp.arange(CONFIG.vocab_size)
  reference, state = Reference(params64), None
  rng = np.random.default_rng(seed)
  noise_dVB = temperature * jax.random.gumbel(jax.random.key(seed), (max_depth, CONFIG.vocab_size, 2))
  start, update = jax.jit(eagle.start, static_argnames='num_slots'), jax.jit(eagle.update)

  def noise(depth, token_UB):
    return jnp.take_along_axis(noise_dVB[depth - 1], token_UB, axis=0)

  context = tiny.context(policy, batch=2, noise=noise)
  propose = jax.jit(functools.partial(eagle.propose, policy=policy, context=context))
  num_padded = PROMPT_LEN + 2
  for count in (PROMPT_LEN, min(3, max_depth + 1)):
    # Row 0 is under test; row 1 is another text of another length, to see that rows stay apart.
    feature_DBP = rng.standard_normal((CONFIG.width, 2, num_padded))
    token_BP = rng.integers(0, CONFIG.vocab_size, (2, num_padded)).astype(np.int32)
    count_B = jnp.asarray([count, count - 1])
    taps = Taps(jnp.asarray(feature_DBP, jnp.float32))
    if state is None:
      state = start(params, jnp.asarray(token_BP), taps, count_B, num_slots=NUM_SLOTS + 512, first_B=count_B)
    else:
      state = update(params, state, jnp.asarray(token_BP), taps, count_B)
    root_B = jnp.take_along_axis(jnp.asarray(token_BP), count_B[:, None] - 1, axis=1)[:, 0]
    tree = jax.vmap(functools.partial(rerank, num_nodes=num_nodes))(propose(params, state, root_B))
    root = int(token_BP[0, count - 1])
    sizes = {'k': k, 'max_depth': max_depth, 'num_nodes': num_nodes}
    expected = reference.draft(
      feature_DBP[:, 0, :count].T, token_BP[0, :count], root, np.asarray(noise_dVB[:, :, 0]), **sizes
    )
    token_T, parent_T, depth_T, mask_TT, log_q_T = expected
    np.testing.assert_array_equal(tree.token[0], token_T)
    np.testing.assert_array_equal(tree.parent[0], parent_T)
    np.testing.assert_allclose(tree.log_q[0], log_q_T, atol=NEAR_TIE / 4)
    mask = ancestor_mask(tree.parent[0], max_depth=max_depth)
    np.testing.assert_array_equal(mask, mask_TT)
    np.testing.assert_array_equal(depth(mask), depth_T)
