"""From one checked call to the implementation that computes it: JAX's side, and the choice."""
