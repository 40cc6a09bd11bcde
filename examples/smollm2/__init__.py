"""SmolLM2-135M-Instruct in plain JAX, with `attn_dispatch` as its attention."""
