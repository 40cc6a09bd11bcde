"""Attention calls of real models: shapes and options from their public configurations.

docs/features.md shows which implementation runs each of them. A rewrite that none of them needs
names another case as its justification.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import mods

Facts = dict[str, Any]


def struct(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype="int32")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype="float32")


@dataclass(frozen=True)
class ModelCall:
    """One call: `attn_dispatch.explain(**call.arguments)`."""

    model: str
    what: str
    """The name of the call among those of the model."""
    arguments: dict[str, Any] = field(hash=False)
    is_training: bool = True
    """True if the call has a backward pass."""

    def __str__(self) -> str:
        return f"{self.model}: {self.what}"


def arrays(
    batch: int, length: int, heads: int, kv_heads: int, dim: int, *, keys: int = 0, value: int = 0
) -> dict[str, Any]:
    """The arrays query, key and value."""
    rows = (batch, keys or length, kv_heads)
    return {
        "query": struct(batch, length, heads, dim),
        "key": struct(*rows, dim),
        "value": struct(*rows, value or dim),
    }


def tokens(total: int, sequences: int, longest: int, heads: int, kv_heads: int, dim: int) -> dict:
    """Sequences packed by cu_seqlens, with as many keys as queries."""
    number = ints(sequences + 1)
    return {
        "query": struct(total, heads, dim),
        "key": struct(total, kv_heads, dim),
        "value": struct(total, kv_heads, dim),
        "cu_seqlens_q": number,
        "cu_seqlens_kv": number,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def cache(
    batch: int, queries: int, heads: int, kv_heads: int, dim: int, *, keys: int, **options: Any
) -> dict[str, Any]:
    """A few queries of each row, with a cache as an array."""
    return {
        **arrays(batch, queries, heads, kv_heads, dim, keys=keys),
        "key_value_seq_lengths": ints(batch),
        "is_causal": True,
        "causal_alignment": "bottom_right",
        **options,
    }


def pages(
    batch: int, queries: int, heads: int, kv_heads: int, dim: int, *, keys: int, page: int,
    value: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Queries of each row, with a cache in pages."""
    columns = keys // page
    pool = (batch * columns, page, kv_heads)
    return {
        "query": struct(batch, queries, heads, dim),
        "key_pages": struct(*pool, dim),
        "value_pages": struct(*pool, value or dim),
        "page_table": ints(batch, columns),
        "key_value_seq_lengths": ints(batch),
        "is_causal": True,
        **options,
    }


def _training() -> Iterator[ModelCall]:
    def call(model: str, what: str, /, **arguments: Any) -> ModelCall:
        return ModelCall(model, what, arguments)

    llama: Facts = {**arrays(2, 8192, 32, 8, 128), "is_causal": True}
    yield call("Llama 3 8B", "training", **llama)
    ids = ints(2, 8192)
    packed: Facts = {"query_segment_ids": ids, "key_value_segment_ids": ids, "max_segments": 16}
    yield call("Llama 3 8B", "packed training, segment ids", **llama, **packed)
    ragged = tokens(16384, 16, 8192, 32, 8, 128)
    yield call("Llama 3 8B", "packed training, cu_seqlens", **ragged, is_causal=True)
    documents = mods.document_mask(jnp.zeros((1, 8192), jnp.int32))
    one: Facts = {**arrays(1, 8192, 32, 8, 128), "is_causal": True}
    yield call("Llama 3 8B", "packed training, a document mask", **one, mask_mod=documents)
    long: Facts = {**arrays(1, 32768, 32, 8, 128), "is_causal": True}
    yield call("Qwen3 8B", "long-context training", **long)
    dropout: Facts = {"dropout_rate": 0.1, "dropout_key": struct(2, dtype="uint32")}
    gpt2: Facts = {**arrays(8, 1024, 12, 12, 64), "is_causal": True}
    yield call("GPT-2", "training with dropout", **gpt2, **dropout)
    window: Facts = {"is_causal": True, "local_window_size": (4095, 0)}
    yield call("Mistral 7B", "training", **arrays(1, 16384, 32, 8, 128), **window)
    second = arrays(1, 16384, 32, 8, 128, keys=32768)
    yield call(
        "Mistral 7B", "training on the second half of a context", **second, **window,
        causal_alignment="bottom_right",
    )  # fmt: skip
    gemma = arrays(2, 8192, 16, 8, 256)
    yield call("Gemma 2 9B", "training, local layer", **gemma, **window, logits_soft_cap=50.0)
    wide: Facts = {**arrays(1, 8192, 32, 16, 128), "is_causal": True, "scale": 144**-0.5}
    cap = mods.soft_cap(50.0)
    yield call("Gemma 2 27B", "training, the soft cap as a score_mod", **wide, score_mod=cap)
    near: Facts = {"is_causal": True, "local_window_size": (1023, 0)}
    yield call("Gemma 3 12B", "training, local layer", **gemma, **near)
    prefix = mods.prefix_lm(jnp.zeros(8, jnp.int32))
    yield call("PaliGemma 3B", "prefix-LM", **arrays(8, 1024, 8, 1, 256), mask_mod=prefix)
    oss: Facts = {**arrays(2, 4096, 64, 8, 64), "is_causal": True, "sinks": floats(64)}
    yield call("GPT-OSS 20B", "training, local layer", **oss, local_window_size=(127, 0))
    latent: Facts = {**arrays(1, 4096, 128, 128, 192, value=128), "is_causal": True}
    yield call("DeepSeek V3", "training, latent attention", **latent)
    kimi: Facts = {**arrays(1, 4096, 64, 64, 192, value=128), "is_causal": True}
    yield call("Kimi K2", "training, with the maxima of QK-clip", **kimi, return_max_logits=True)
    t5: Facts = {**arrays(8, 512, 12, 12, 64), "scale": 1.0}
    yield call("T5 base", "encoder, the bias a float32 array", **t5, bias=floats(1, 12, 512, 512))
    table = mods.relative_position(jnp.zeros((32, 12), jnp.bfloat16))
    lengths: Facts = {"key_value_seq_lengths": ints(8)}
    yield call("T5 base", "encoder, the bias as a score_mod", **t5, **lengths, score_mod=table)
    bert = arrays(32, 512, 12, 12, 64)
    yield call("BERT base", "pretraining, lengths", **bert, key_value_seq_lengths=ints(32))
    yield call(
        "BERT base", "pretraining, padding as a mask_mod", **bert,
        mask_mod=_is_no_padding, mask_mod_args=(ints(32),),
    )  # fmt: skip
    yield call("ViT-L/16", "training", **arrays(64, 577, 16, 16, 64))
    vision = tokens(16384, 256, 64, 16, 16, 80)
    yield call("Qwen2.5-VL", "vision windows, cu_seqlens", **vision)
    windows = arrays(131072, 49, 3, 3, 32)
    yield call("Swin-T", "first stage, 2,048 images", **windows, bias=struct(1, 3, 49, 49))
    pair: Facts = {"bias": struct(1, 4, 256, 256), "mask": struct(256, 1, 1, 256, dtype="bool")}
    yield call("AlphaFold 2", "triangle attention", **arrays(256, 256, 4, 4, 32), **pair)
    atoms = arrays(8, 768, 16, 16, 48)
    yield call("AlphaFold 3", "diffusion, pair bias", **atoms, bias=floats(1, 16, 768, 768))
    bloom: Facts = {**arrays(2, 2048, 32, 32, 128), "is_causal": True}
    yield call("BLOOM 7B", "training", **bloom, alibi_slopes=floats(32))
    alibi = mods.alibi(jnp.ones(32))
    yield call("MPT 7B", "training, ALiBi as a score_mod", **bloom, score_mod=alibi)
    yield call("Whisper large v3", "encoder", **arrays(16, 1500, 20, 20, 64))
    yield call("Stable Diffusion 1.5", "self-attention, 8 x 8", **arrays(8, 64, 8, 8, 160))
    yield call("FLUX.1", "joint attention", **arrays(2, 4608, 24, 24, 128))


def _is_no_padding(b: Any, n: Any, t: Any, s: Any, lengths: Any) -> Any:
    return s < lengths[b]


def _inference() -> Iterator[ModelCall]:
    def call(model: str, what: str, /, **arguments: Any) -> ModelCall:
        return ModelCall(model, what, arguments, is_training=False)

    heads = (32, 8, 128)
    paged: Facts = {"keys": 8192, "page": 16}
    yield call("Llama 3 8B", "decoding, a cache as an array", **cache(32, 1, *heads, keys=8192))
    yield call("Llama 3 8B", "decoding, pages", **pages(32, 1, *heads, **paged))
    yield call("Llama 3 8B", "speculative drafts, pages", **pages(16, 5, *heads, **paged))
    tree = mods.tree_mask(jnp.arange(-1, 23, dtype=jnp.int32), 4096)
    drafts = arrays(1, 24, *heads, keys=4120)
    yield call("Llama 3 8B", "a tree of drafts", **drafts, mask_mod=tree)
    yield call("Llama 3 8B", "a chunk of a prompt, pages", **pages(1, 512, *heads, **paged))
    yield from _caches_of_models()
    window = cache(16, 1, *heads, keys=32768, local_window_size=(4095, 0))
    yield call("Mistral 7B", "decoding, a cache as an array", **window)
    capped = pages(16, 5, 32, 16, 128, keys=8192, page=64, score_mod=mods.soft_cap(50.0))
    yield call("Gemma 2 27B", "drafts, the soft cap as a score_mod", **capped)
    oss = pages(32, 1, 64, 8, 64, **paged, sinks=floats(64), local_window_size=(127, 0))
    yield call("GPT-OSS 20B", "decoding, pages, local layer", **oss)
    bloom = pages(8, 1, 32, 32, 128, keys=2048, page=64, alibi_slopes=floats(32))
    yield call("BLOOM 7B", "decoding, pages", **bloom)
    absorbed = pages(32, 1, 128, 1, 576, keys=8192, page=64, value=512)
    yield call("DeepSeek V3", "decoding, latent attention absorbed, pages", **absorbed)
    falcon = pages(16, 5, 71, 1, 64, keys=2048, page=16)
    yield call("Falcon 7B", "speculative drafts, pages", **falcon)


def _caches_of_models() -> Iterator[ModelCall]:
    """The calls of docs/caches.md."""

    def call(model: str, what: str, /, **arguments: Any) -> ModelCall:
        return ModelCall(model, what, arguments, is_training=False)

    def ids(batch: int, queries: int, keys: int) -> Facts:
        given = {
            "query_segment_ids": ints(batch, queries),
            "key_value_segment_ids": ints(batch, keys),
        }
        return {**given, "max_segments": 1, "is_causal": True, "causal_alignment": "bottom_right"}

    heads = (32, 8, 128)
    prompt = arrays(16, 2048, *heads)
    yield call("Llama 3 8B", "prompts padded on the left, ids", **prompt, **ids(16, 2048, 2048))
    one = arrays(32, 1, *heads, keys=8192)
    yield call("Llama 3 8B", "decoding, padded on the left, ids", **one, **ids(32, 1, 8192))
    mask = struct(32, 1, 1, 8192, dtype="bool")
    yield call("Llama 3 8B", "decoding, padded on the left, a mask", **one, mask=mask)
    drafts = cache(16, 5, *heads, keys=8192)
    yield call("Llama 3 8B", "speculative drafts, a cache as an array", **drafts)
    chunk = cache(4, 512, *heads, keys=8192, query_seq_lengths=ints(4))
    yield call("Llama 3 8B", "a chunk of a prompt, a cache as an array", **chunk)
    filled = {"key_value_seq_lengths": ints(16)}
    yield call(
        "Mistral 7B", "decoding, a ring buffer", **arrays(16, 1, *heads, keys=4096), **filled
    )
    yield call(
        "Mistral 7B", "a chunk behind a ring buffer", **arrays(1, 512, *heads, keys=4096),
        mask_mod=_in_ring, mask_mod_args=(ints(1),), return_lse=True,
    )  # fmt: skip
    sliding = arrays(16, 4, 16, 8, 256, keys=1027)
    window: Facts = {"local_window_size": (1023, 0), "causal_alignment": "bottom_right"}
    yield call(
        "Gemma 3 12B", "drafts, a sliding cache, ids", **sliding, **(ids(16, 4, 1027) | window)
    )


def _in_ring(b: Any, n: Any, t: Any, s: Any, first: Any) -> Any:
    token = first[b] - 1 - (first[b] - 1 - s) % 4096
    return (token >= 0) & (token > first[b] + t - 4096)


MODEL_CALLS = (*_training(), *_inference())
