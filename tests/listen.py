"""Listen to the events that JAX reports."""

import contextlib

import jax


@contextlib.contextmanager
def compile_events():
  """Collect what JAX traces, lowers or compiles inside the block."""
  events = []

  def note(event: str, duration: float, **kwargs):
    if '/compile/' in event:
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(note)
  yield events
  jax.monitoring.unregister_event_duration_listener(note)
