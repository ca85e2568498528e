"""The training loss in PyTorch, written from the papers: to compare numbers in a test, and speed by hand.

python tests/parity/torch_training.py [num_steps]   # tokens a second of both, on the CPU
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from eagle_jax.config import DrafterConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.kinds import tensor_table
from eagle_jax.train.data import Packed
from eagle_jax.train.loop import begin
from eagle_jax.train.step import Frozen, Objective, Recipe, train_step
from eagle_jax.weights.load import flatten


class TorchHead(torch.nn.Module):
  """fc and one Llama layer without its first norm, weights [out, in] as ours are saved; rows are [L, D]."""

  def __init__(self, params, config: DrafterConfig):
    super().__init__()
    self.config = config
    saved = flatten(params, tensor_table(config))

    def weight(name):
      return torch.nn.Parameter(torch.from_numpy(np.array(saved[f'{name}.weight'])))

    self.fc = weight('fc')
    for name in 'qkvo':
      setattr(self, name, weight(f'layers.0.self_attn.{name}_proj'))
    for name in ('gate', 'up', 'down'):
      setattr(self, name, weight(f'layers.0.mlp.{name}_proj'))
    self.norm = weight('layers.0.post_attention_layernorm')

  def rotate(self, x_HLK, position_L):
    half = self.config.head_dim // 2
    frequency = self.config.rope_theta ** (-torch.arange(half) / half)
    angle = position_L[:, None] * frequency[None]
    cos, sin = angle.cos(), angle.sin()
    low, high = x_HLK[..., :half], x_HLK[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

  def forward(self, embedding_LD, feature_LD, position_L, sequence_L, memory):
    """Outputs [L, D] of the step after those in `memory`, and the memory with its own keys and values."""
    c, length = self.config, len(position_L)
    x = F.linear(torch.cat([embedding_LD, feature_LD], -1), self.fc)

    def heads(w, n):
      return F.linear(x, w).view(length, n, c.head_dim).transpose(0, 1)

    q = self.rotate(heads(self.q, c.num_heads), position_L)
    k = self.rotate(heads(self.k, c.num_kv_heads), position_L)
    v = heads(self.v, c.num_kv_heads)
    groups = c.num_heads // c.num_kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    memory, age = [*memory, (k, v)], len(memory)
    index = torch.arange(length)
    visible = (sequence_L[:, None] == sequence_L[None]) & (index[None] <= index[:, None] - age)
    if age == 0:
      mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    else:
      scale = c.head_dim**-0.5
      score = (q @ memory[0][0].transpose(1, 2) * scale).masked_fill(~visible, torch.finfo(torch.float32).min)
      recent = [[x.roll(d, 1) for x in memory[age - d]] for d in range(age)]
      score = torch.cat([score, *[(q * k).sum(-1, keepdim=True) * scale for k, _ in recent]], -1)
      weight = score.softmax(-1)
      mixed = weight[..., :length] @ memory[0][1]
      for i, (_, v) in enumerate(recent):
        mixed = mixed + weight[..., length + i, None] * v
    x = x + F.linear(mixed.transpose(0, 1).reshape(length, -1), self.o)
    normed = x * (x.square().mean(-1, keepdim=True) + c.norm_eps).rsqrt() * self.norm
    return x + F.linear(F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up), self.down), memory


def torch_loss(head: TorchHead, frozen: Frozen, packed: Packed, objective: Objective) -> torch.Tensor:
  """The loss of one packed row, summed over steps as ours is."""
  embed, head_UD = (torch.from_numpy(np.array(x)) for x in (frozen.embed, frozen.head))
  token, position, sequence, weight = (
    torch.from_numpy(np.array(x[0])) for x in (packed.next_token, packed.position, packed.sequence, packed.weight)
  )
  feature = torch.from_numpy(np.array(packed.feature[0], np.float32))
  target = feature.roll(-1, 0)
  with torch.no_grad():
    p = (target @ head_UD.T).softmax(-1)
    top = torch.zeros_like(p).scatter_(1, p.topk(objective.top_k).indices, 1) * p
    wanted = objective.cross_entropy * p + objective.top_k_cross_entropy * top
  read, memory, total, started, norm = feature, [], 0.0, weight, 0.0
  for step in range(objective.num_steps):
    out, memory = head(F.embedding(token, embed), read, position, sequence, memory)
    entropy = -(wanted * (out @ head_UD.T).log_softmax(-1)).sum(-1)
    regression = F.smooth_l1_loss(out, target, reduction='none').mean(-1)
    decay = objective.step_decay**step
    total = total + decay * ((objective.regression * regression + entropy) * started).sum() / weight.sum()
    norm += decay
    read = out.detach().roll(1, 0)
    begun = (sequence == sequence.roll(step + 1)) & (torch.arange(len(token)) > step) & (weight.roll(step + 1) > 0)
    started = weight * begun
  return total / norm


def random_case(config: DrafterConfig, num_ids: int, num_places: int):
  """Frozen arrays, a packed row of four texts, and fresh parameters."""
  rng = np.random.default_rng(0)
  width = config.width
  row_of = np.full(config.vocab_size, -1, np.int32)
  row_of[:num_ids] = np.arange(num_ids)
  embed = jnp.float32(rng.normal(size=(config.vocab_size, width)))
  frozen = Frozen(embed, embed[:num_ids] * width**-0.5, jnp.asarray(row_of), ())
  quarter = num_places // 4
  token = rng.integers(0, config.vocab_size, (1, num_places)).astype(np.int32)
  packed = Packed(
    token=token,
    next_token=np.roll(token, -1, axis=1),
    label=np.roll(token, -2, axis=1),
    position=np.arange(num_places, dtype=np.int32)[None] % quarter,
    sequence=np.arange(num_places, dtype=np.int32)[None] // quarter,
    weight=(np.arange(num_places)[None] % quarter > 3).astype(np.float32),
    feature=rng.normal(size=(1, num_places, width)).astype(jnp.bfloat16),
  )
  return frozen, packed, jax.jit(Eagle(config).init_params)(jax.random.key(0))


def main() -> None:
  config = DrafterConfig(
    vocab_size=49152, width=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn_width=1536, rope_theta=1e5
  )
  num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
  objective = Objective(num_steps=num_steps, top_k_cross_entropy=1.0 if num_steps > 1 else 0.0)
  frozen, packed, params = random_case(config, 8192, 1024)
  recipe = Recipe(num_steps=100, num_rows=1, num_places=1024, objective=objective)
  head = TorchHead(params, config)
  optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
  state = begin(params, recipe, None)

  def ours():
    nonlocal state
    state, _ = train_step(state, frozen, packed, network=Eagle(config), recipe=recipe)
    jax.block_until_ready(state)

  def theirs():
    optimizer.zero_grad()
    torch_loss(head, frozen, packed, objective).backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), recipe.clip_norm)
    optimizer.step()

  for name, step in (('eagle_jax', ours), ('PyTorch', theirs)):
    step()
    seconds = []
    for _ in range(5):
      start = time.perf_counter()
      step()
      seconds.append(time.perf_counter() - start)
    sys.stdout.write(f'{name}: {1024 / sorted(seconds)[2]:.0f} tokens/s (median of 5 steps of 1024)\n')


if __name__ == '__main__':
  main()
