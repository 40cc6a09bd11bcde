"""Random weights of SmolLM2-135M's shapes or smaller, for benchmarks and tests."""

import jax
import jax.numpy as jnp

from .model import Config, Params

SMOLLM2_135M = Config(
    layers=30, heads=9, kv_heads=3, head_dim=64, width=576, ffn_width=1536, vocab=49152,
    context=8192, rope_base=1e5, norm_eps=1e-5,
)  # fmt: skip
"""The sizes in https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json."""


def drawn(config: Config, dtype: str, seed: int = 0) -> Params:
    """Random weights whose logits differ so much that there is a clear likeliest token."""
    c = config
    heads, kv_heads = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "attn_q": (c.width, heads), "attn_k": (c.width, kv_heads), "attn_v": (c.width, kv_heads),
        "attn_output": (heads, c.width), "ffn_gate": (c.width, c.ffn_width),
        "ffn_up": (c.width, c.ffn_width), "ffn_down": (c.ffn_width, c.width),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    layers = {
        name: (jax.random.normal(key, (c.layers, *shape)) * shape[0] ** -0.5).astype(dtype)
        for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    layers |= {name: jnp.ones((c.layers, c.width), dtype) for name in ("attn_norm", "ffn_norm")}
    embed = jax.random.normal(keys[0], (c.vocab, c.width)) * c.width**-0.5
    return {
        "embed": (4 * embed).astype(dtype),
        "output_norm": jnp.ones(c.width, dtype),
        "layers": layers,
    }
