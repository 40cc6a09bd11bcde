"""Drawn calls of models: correct ones do not warn, and many whose axes are swapped do."""

from __future__ import annotations

import random
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import AttentionConventionWarning, dot_product_attention, warning

# Query heads, kv heads, head dim and window of public models; A number is that of the last keys.
MODELS = {
    "BERT": (12, 12, 64, None), "ViT-B": (12, 12, 64, None), "Whisper": (20, 20, 64, None),
    "ModernBERT": (12, 12, 64, (64, 64)), "SmolLM2": (9, 3, 64, None), "Gemma 3": (8, 4, 256, 1024),
    "Llama 7B": (32, 32, 128, None), "Llama 13B": (40, 40, 128, None),
    "Llama 30B": (52, 52, 128, None), "Llama 65B": (64, 64, 128, None),
    "Llama 3 8B": (32, 8, 128, None), "Mistral": (32, 8, 128, 4096), "MiniCPM": (36, 36, 64, None),
    "Falcon 7B": (71, 1, 64, None), "Falcon 40B": (128, 8, 64, None), "GPT-OSS": (64, 8, 64, 128),
    "OPT 30B": (56, 56, 128, None), "OPT 66B": (72, 72, 128, None), "GPT-3": (96, 96, 128, None),
    "BLOOM": (112, 112, 128, None), "T5 11B": (128, 128, 128, None), "ViT-22B": (48, 48, 128, None),
    "Galactica": (80, 80, 128, None), "DeepSeek V3": (128, 128, 192, None),
    "Wan 14B": (40, 40, 128, None), "GQA 32": (64, 32, 128, None), "MQA": (48, 1, 256, None),
}  # fmt: skip
WITH_CROSS_ATTENTION = ("Whisper", "T5 11B", "Wan 14B")
LENGTHS = (33, 40, 48, 49, 50, 60, 64, 77, 80, 96, 100, 120, 127, 128)
"""Usual short lengths; from 129 on every call with swapped axes warns."""

Call = tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]


def correct(draw: random.Random) -> Call:
    """A training step, a prompt, a step of decoding or cross-attention of a model, or a shard."""
    kind = draw.choice(("self", "prompt", "decode", "cross"))
    models = WITH_CROSS_ATTENTION if kind == "cross" else list(MODELS)
    heads, kv_heads, dim, window = MODELS[draw.choice(models)]
    shards = draw.choice([n for n in (1, 1, 2, 4, 8) if kv_heads % n == 0])
    heads, kv_heads = heads // shards, kv_heads // shards
    length = draw.choice((draw.randint(1, 40), *LENGTHS, draw.randint(1, 4096)))
    options: dict[str, Any] = {}
    keys = length
    if kind == "decode":
        length, keys = draw.choice((1, 1, 4)), draw.choice((length + 4, 2048))
    elif kind == "cross":
        keys = draw.choice((50, 77, 128, 197, 256, 512, 1500))
    if window is not None:
        options["local_window_size"] = window if isinstance(window, tuple) else (window - 1, 0)
    if kind == "prompt" or (kind == "decode" and window is None):
        options["is_causal"] = True
    if kind == "decode":
        options["causal_alignment"] = "bottom_right"
    batch = draw.choice(((), (1,), (2,), (8,)))
    if not batch and dim > 128:
        batch = (1,)
    q = jax.ShapeDtypeStruct((*batch, length, heads, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((*batch, keys, kv_heads, dim), jnp.bfloat16)
    return {"query": q, "key": k, "value": k}, options


def swapped(draw: random.Random) -> Call:
    """Self-attention or cross-attention over a short length, in [batch, heads, length, dim]."""
    heads, kv_heads, dim, window = MODELS[draw.choice([x for x in MODELS if MODELS[x][0] <= 32])]
    length, keys = draw.choice(LENGTHS), draw.choice(LENGTHS)
    keys = keys if draw.random() < 0.3 else length
    options: dict[str, Any] = {}
    if window is not None:
        options["local_window_size"] = window if isinstance(window, tuple) else (window - 1, 0)
    q = jax.ShapeDtypeStruct((2, heads, length, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, kv_heads, keys, dim), jnp.bfloat16)
    return {"query": q, "key": k, "value": k}, options


def notice(call: Call) -> str:
    """What is said of a call: a warning about its axes or an error, or ""."""
    arrays, options = call
    warning.forget()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", AttentionConventionWarning)
        try:
            jax.eval_shape(lambda arrays: dot_product_attention(**arrays, **options), arrays)
        except ValueError as error:
            return str(error)
    return "; ".join(str(x.message) for x in given)


@pytest.mark.parametrize("seed", range(4))
def test_correct_calls_do_not_warn(seed: int):
    draw = random.Random(seed)
    for _ in range(500):
        call = correct(draw)
        assert not notice(call), call


def test_many_calls_with_swapped_axes_do_not_pass_in_silence():
    """Silent calls have the numbers of a short prompt and many heads."""
    draw = random.Random(0)
    said = [bool(notice(swapped(draw))) for _ in range(200)]
    assert sum(said) > 160
