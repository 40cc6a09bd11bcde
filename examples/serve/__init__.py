"""SmolLM2 served with continuous batching, on `attn_dispatch.serving`: see README.md."""
