"""Our training loss and its gradients against PyTorch's, on a tiny case."""

import jax
import numpy as np
import pytest

pytest.importorskip('torch')

from torch_training import TorchHead, random_case, torch_loss

from eagle_jax.config import DrafterConfig
from eagle_jax.draft.eagle import Eagle
from eagle_jax.draft.kinds import tensor_table
from eagle_jax.train.step import Objective, Recipe, loss_and_metrics
from eagle_jax.weights.load import flatten

pytestmark = pytest.mark.parity
CONFIG = DrafterConfig(vocab_size=41, width=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=24)


@pytest.mark.parametrize(
  'objective', [Objective(), Objective(num_steps=3, step_decay=0.8, top_k=5, top_k_cross_entropy=0.5)]
)
def test_loss_and_gradients_equal_pytorch(objective):
  frozen, packed, params = random_case(CONFIG, 29, 48)
  recipe = Recipe(num_steps=1, num_rows=1, num_places=48, chunk_places=12, feature_noise=0.0, objective=objective)
  (ours, _), gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)(
    params, frozen, packed, jax.random.key(0), network=Eagle(CONFIG), target=None, recipe=recipe
  )
  head = TorchHead(params, CONFIG)
  theirs = torch_loss(head, frozen, packed, objective)
  theirs.backward()
  np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5)
  gradient = flatten(gradient, tensor_table(CONFIG))
  attention = {f'layers.0.self_attn.{name}_proj': getattr(head, name) for name in 'qkvo'}
  mlp = {f'layers.0.mlp.{name}_proj': getattr(head, name) for name in ('gate', 'up', 'down')}
  for name, weight in {'fc': head.fc, **attention, **mlp}.items():
    np.testing.assert_allclose(gradient[f'{name}.weight'], weight.grad.numpy(), rtol=1e-3, atol=1e-5)
