"""SmolLM2 behind continuous batching, on `attn_dispatch.serving`: see README.md."""
