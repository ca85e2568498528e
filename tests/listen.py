"""What JAX says of its work."""

import contextlib

import jax


@contextlib.contextmanager
def compile_events():
  """What JAX traces, lowers or compiles meanwhile."""
  events = []

  def note(event: str, duration: float, **kwargs):
    if '/compile/' in event:
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(note)
  yield events
  jax.monitoring.unregister_event_duration_listener(note)
