"""Pictures of what `generate(..., trace=True)` recorded: `tree` draws one cycle, `html` writes a page of them all."""

from eagle_jax.viz.page import html
from eagle_jax.viz.picture import tree

__all__ = ['html', 'tree']
