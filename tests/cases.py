"""The cases of the conformance suite: one option each, then the combinations that go wrong."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.spec import (
    DIFFERENTIABLE,
    AttentionOptions,
    AttentionSpec,
    CausalAlignment,
    backward_options,
)
from reference import Operands

Rows = tuple[tuple[int, ...], ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One attention call; shapes by the letters of `attn_dispatch.spec`."""

    name: str
    b: int = 2
    t: int = 10
    s: int = 14
    n: int = 4
    k: int = 2
    h: int = 8
    v: int = 8
    dtype: str = "float32"
    is_causal: bool = False
    alignment: CausalAlignment = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    dropout: float = 0.0
    dropout_keys: int = 1
    dropout_impl: str = "threefry2x32"
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    q_segments: Rows | None = None
    kv_segments: Rows | None = None
    cu_q: Rows | None = None
    cu_kv: Rows | None = None
    longest: tuple[int, int] | None = None
    """The longest packed sequences of queries and of keys."""
    mask: Shape | None = None
    dead_rows: bool = False
    """The mask forbids everything to some rows."""
    bias: Shape | None = None
    bias_dtype: str = "float32"
    infinite_bias: bool = False
    """Some biases are -inf, among them those of a whole row."""
    alibi: int | None = None
    """Length of the batch axis of the slopes."""
    sinks: int | None = None
    """Length of the batch axis of the sinks."""
    lse_grad: bool = False
    deterministic: bool = False
    scale: float = 0.3
    magnitude: float = 1.0
    """Of query and key."""
    score_shift: float = 0.0
    """Added to every score, through a constant in query and key."""

    def __str__(self) -> str:
        return self.name

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The operands of this case that have gradients."""
        return tuple(name for name in DIFFERENTIABLE if name in self.operands())

    def operands(self) -> Operands:
        """The arrays of the forward call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def normal(*shape: int, dtype: str = self.dtype) -> np.ndarray:
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        b, t, s, n = self.b, self.t, self.s, self.n
        q = self.magnitude * rng.standard_normal((b, t, n, self.h))
        k = self.magnitude * rng.standard_normal((b, s, self.k, self.h))
        if self.score_shift:
            # Some columns of each are constant, so that every score moves alike. Half of them: a
            # fused backward pass takes delta from the rounded output, and the larger a constant
            # of key, the more of that rounding shows in query's gradient.
            columns = max(1, self.h // 2)
            root = np.sqrt(abs(self.score_shift) / (self.scale * columns))
            q[..., :columns], k[..., :columns] = root, np.copysign(root, self.score_shift)
        operands = {
            "query": q.astype(jnp.dtype(self.dtype)),
            "key": k.astype(jnp.dtype(self.dtype)),
            "value": normal(b, s, self.k, self.v),
        }
        if self.bias is not None:
            bias = normal(*self.bias, dtype=self.bias_dtype)
            if self.infinite_bias:
                bias[rng.random(self.bias) < 0.2] = -np.inf
                bias[..., 1, :] = -np.inf
            operands["bias"] = bias
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.7
            if self.dead_rows:
                mask[..., ::3, :] = False
            operands["mask"] = mask
        integers = {
            "query_seq_lengths": self.q_lengths,
            "key_value_seq_lengths": self.kv_lengths,
            "query_segment_ids": self.q_segments,
            "key_value_segment_ids": self.kv_segments,
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_kv": self.cu_kv,
        }
        operands |= {x: np.array(y, np.int32) for x, y in integers.items() if y is not None}
        if self.alibi is not None:
            operands["alibi_slopes"] = np.abs(normal(self.alibi, n, dtype="float32")) / 2
        if self.sinks is not None:
            operands["sinks"] = normal(self.sinks, n, dtype="float32")
        if self.dropout:
            keys = jax.random.split(jax.random.key(7, impl=self.dropout_impl), self.dropout_keys)
            operands["dropout_key"] = np.array(jax.random.key_data(keys))
        return operands

    def cotangents(self) -> Operands:
        """out_grad, and lse_grad where the case has one; no two entries alike."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()) + 1)
        shape = (self.b, self.t, self.n, self.v)
        cotangents = {"out_grad": rng.standard_normal(shape).astype(jnp.dtype(self.dtype))}
        if self.lse_grad:
            lse_grad = rng.standard_normal((self.b, self.n, self.t))
            cotangents["lse_grad"] = lse_grad.astype(lse_dtype(self.dtype))
        return cotangents

    def forward_options(self, *, needs_lse: bool = True) -> AttentionOptions:
        """The options of the forward call."""
        return AttentionOptions(
            operands=tuple(self.operands()),
            scale=self.scale,
            is_causal=self.is_causal,
            causal_alignment=self.alignment,
            window=self.window,
            logits_soft_cap=self.soft_cap,
            max_seq_lens=self.longest,
            dropout_rate=self.dropout,
            deterministic=self.deterministic,
            dropout_impl=self.dropout_impl if self.dropout else None,
            needs_lse=needs_lse,
        )

    def backward_options(self, gradients: tuple[str, ...] | None = None) -> AttentionOptions:
        """The options of the backward call, for these gradients or all that there are."""
        return backward_options(
            self.forward_options(),
            self.differentiable if gradients is None else gradients,
            has_lse_grad=self.lse_grad,
        )


def lse_dtype(dtype: str) -> str:
    """The dtype of lse in a call of this dtype."""
    return "float64" if dtype == "float64" else "float32"


def spec_of(options: AttentionOptions, operands: dict[str, Any]) -> AttentionSpec:
    """The spec of a call with these arrays, or abstract values."""
    return AttentionSpec.of([operands[name] for name in options.operands], options)


_LENGTHS: dict[str, Any] = {"b": 4, "q_lengths": (10, 6, 0, 3), "kv_lengths": (14, 3, 5, 0)}
_PACKED: dict[str, Any] = {
    "q_segments": ((1, 1, 1, 2, 2, 2, 2, 5, 5, 0), (0, 1, 1, 1, 1, 1, 3, 0, 4, 4)),
    "kv_segments": (
        (1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 5, 0, 0, 0),
        (1, 1, 1, 0, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4),
    ),
}
# A sequence without queries, one without keys, and rows that belong to none.
_RAGGED: dict[str, Any] = {
    "cu_q": ((0, 3, 3, 8, 9), (0, 0, 4, 10, 10)),
    "cu_kv": ((0, 4, 6, 6, 13), (0, 5, 5, 9, 12)),
    "longest": (6, 7),
}
_BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "bottom_right"}
_EVERYTHING: dict[str, Any] = {
    "is_causal": True,
    "window": (6, None),
    "bias": (1, 4, 10, 14),
    "alibi": 1,
    "sinks": 1,
    "dropout": 0.25,
    "lse_grad": True,
}

CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("plain_f16", dtype="float16"),
    Case("plain_bf16", dtype="bfloat16"),
    Case("no_groups", k=4),
    Case("one_kv_head", k=1),
    Case("one_query", t=1),
    Case("one_key", s=1),
    Case("wide_value", v=5, h=8),
    Case("odd_head_dim", h=3, v=7),
    Case("no_head_dim", h=0, is_causal=True, bias=(2, 4, 10, 14)),
    Case("no_value_dim", v=0, lse_grad=True),
    Case("causal", is_causal=True),
    Case("causal_more_queries", is_causal=True, t=14, s=10),
    Case("bottom_right", **_BOTTOM_RIGHT),
    # The first four queries see no key.
    Case("bottom_right_more_queries", **_BOTTOM_RIGHT, t=14, s=10, lse_grad=True),
    Case("window", window=(3, 2)),
    Case("window_left_only", window=(2, None)),
    Case("window_right_only", window=(None, 3)),
    Case("window_wider_than_int32", window=(2**40, 2**31)),
    Case("window_causal", window=(3, 2), is_causal=True),
    Case("window_bottom_right", window=(2, 1), alignment="bottom_right"),
    Case("window_bottom_right_more_queries", window=(2, 1), alignment="bottom_right", t=14, s=10),
    Case("lengths", **_LENGTHS),
    Case("query_lengths_bottom_right", q_lengths=(7, 0), **_BOTTOM_RIGHT),
    Case("key_lengths_bottom_right", kv_lengths=(7, 0), **_BOTTOM_RIGHT),
    Case("lengths_out_of_range", q_lengths=(-3, 99), kv_lengths=(99, 99), **_BOTTOM_RIGHT),
    Case("lengths_bottom_right", **_LENGTHS, **_BOTTOM_RIGHT, window=(3, None), sinks=1),
    Case("lengths_bf16", **_LENGTHS, dtype="bfloat16", is_causal=True, lse_grad=True),
    Case("segments", **_PACKED),
    Case("segments_causal", **_PACKED, is_causal=True),
    Case("segments_bottom_right", **_PACKED, **_BOTTOM_RIGHT),
    Case("segments_window", **_PACKED, window=(1, 2), alignment="bottom_right", alibi=1),
    Case("segments_and_lengths", **_PACKED, **_BOTTOM_RIGHT, q_lengths=(8, 9), kv_lengths=(5, 12)),
    Case("ragged", **_RAGGED),
    Case("ragged_bottom_right", **_RAGGED, **_BOTTOM_RIGHT, lse_grad=True),
    Case("ragged_window", **_RAGGED, window=(1, 2), alibi=1),
    Case("mask", mask=(2, 4, 10, 14)),
    Case("mask_of_keys", mask=(2, 1, 1, 14)),
    Case("mask_of_queries", mask=(1, 4, 10, 1)),
    Case("mask_dead_rows", mask=(2, 1, 10, 14), dead_rows=True, lse_grad=True, sinks=1),
    Case("bias", bias=(2, 4, 10, 14)),
    Case("bias_of_heads", bias=(1, 4, 10, 14)),
    Case("bias_of_batch", bias=(2, 1, 10, 14)),
    Case("bias_of_keys", bias=(2, 1, 1, 14)),
    Case("bias_of_queries", bias=(1, 4, 10, 1)),
    Case("bias_scalar", bias=(1, 1, 1, 1), is_causal=True, mask=(1, 1, 10, 14)),
    Case("bias_bf16", bias=(1, 4, 10, 14), bias_dtype="bfloat16", dtype="bfloat16"),
    Case("bias_infinite", bias=(2, 4, 10, 14), infinite_bias=True, lse_grad=True),
    Case("bias_lengths", bias=(4, 1, 10, 14), **_LENGTHS),
    Case("soft_cap", soft_cap=1.5),
    Case("soft_cap_bias_bf16", soft_cap=2.0, bias=(1, 4, 10, 14), dtype="bfloat16"),
    Case("alibi", alibi=1),
    Case("alibi_of_batch", alibi=2, **_BOTTOM_RIGHT),
    Case("alibi_lengths", alibi=1, **_LENGTHS, **_BOTTOM_RIGHT),
    Case("sinks", sinks=1),
    Case("sinks_of_batch", sinks=2, is_causal=True, lse_grad=True),
    Case("lse_grad", lse_grad=True),
    Case("lse_grad_f16", lse_grad=True, dtype="float16"),
    Case("dropout", dropout=0.4),
    Case("dropout_keys_lse_grad", dropout=0.2, dropout_keys=2, lse_grad=True, sinks=1),
    Case("dropout_f16", dropout=0.4, dtype="float16", is_causal=True),
    Case("large_scores", magnitude=5.0),
    Case("large_scores_bf16", magnitude=12.0, dtype="bfloat16"),
    Case("negative_scores", score_shift=-300.0, lse_grad=True),
    Case("negative_scores_f16", score_shift=-300.0, dtype="float16"),
    Case("negative_scores_sinks", score_shift=-60.0, sinks=1, is_causal=True),
    Case("everything", **_EVERYTHING),
    Case("everything_lengths", **_EVERYTHING, **_LENGTHS, alignment="bottom_right"),
    Case("everything_segments", **_EVERYTHING, **_PACKED, alignment="bottom_right", soft_cap=3.0),
    Case("everything_bf16", **_EVERYTHING, mask=(1, 1, 10, 14), dtype="bfloat16"),
)
