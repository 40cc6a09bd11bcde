"""The calls that this version does not run through AITER, whatever its kernels run (rules.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attn_dispatch.call.features import feature_rule, unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import (
    DECIDED,
    DROPOUT_KEYS,
    DTYPE,
    EMPTY,
    MAX_SEGMENTS,
    ROW_BIAS_GRADIENT,
    scale_rule,
)

_ALIBI_LENGTHS = 2**16  # CK takes distances as 16-bit numbers (block_position_encoding.hpp)

_MAX_RATE_ERROR = 1 / 32
"""The largest relative error of the share of kept entries, and so of the output."""

_NOT_RUN = "not run through AITER by this version"


def _feature(name: str, remedy: str = "") -> Rule[AttentionSpec]:
    return feature_rule(name, f"{name}: {_NOT_RUN}", remedy)


def _share_kept(rate: float) -> float:
    """The share of entries that CK keeps, which draws one byte for each (block_dropout.hpp)."""
    return (np.floor(np.float32(1 - rate) * np.float32(255)) + 1) / 256 if rate else 1.0


def _keeps_another_share(spec: AttentionSpec) -> bool:
    kept, wanted = _share_kept(spec.meaning.dropout_rate), 1 - spec.meaning.dropout_rate
    return abs(kept - wanted) > _MAX_RATE_ERROR * wanted


CALL_RULES = (
    _feature("mask", "pass lengths, a window or segment ids instead, if they express the mask"),
    _feature("sinks"),
    Rule[AttentionSpec](
        "aiter/bias_and_alibi",
        lambda s: s.has("bias") and s.has("alibi_slopes"),
        f"bias and alibi_slopes in one call: {_NOT_RUN}",
        "add ALiBi's distances to the bias",
    ),
    _feature("the gradient of alibi_slopes"),
    replace(DROPOUT_KEYS, text=f"several dropout keys in one call: {_NOT_RUN}"),
    _feature("the row maximum"),
    _feature("the dropout mask as a result"),
    _feature("score_mod"),
    _feature("mask_mod"),
    _feature("local_window_size as an array"),
    _feature("causal_alignment as a number"),
    DTYPE,
    MAX_SEGMENTS,
    ROW_BIAS_GRADIENT,
    Rule[AttentionSpec](
        "bias_dtype",
        lambda s: s.has("bias") and s.dtype_of("bias") != s.dtype,
        "bias: AITER needs query's dtype {dtype}, got {bias}",
        "cast the bias to query's dtype",
        facts=lambda s: {"dtype": s.dtype, "bias": s.dtype_of("bias")},
    ),
    Rule[AttentionSpec](
        "aiter/alibi_lengths",
        lambda s: s.has("alibi_slopes") and max(s.seq_len_q, s.seq_len_kv) >= _ALIBI_LENGTHS,
        f"alibi_slopes with {{queries:,}} queries and {{keys:,}} keys: CK counts distances below "
        f"{_ALIBI_LENGTHS:,}",
        facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
    ),
    Rule[AttentionSpec](
        "aiter/dropout_rate",
        _keeps_another_share,
        "dropout_rate: CK decides with 8 bits, and would keep {kept:.4g} of the entries where "
        "{wanted:.4g} is asked for",
        "a multiple of 1/256",
        facts=lambda s: {
            "kept": float(_share_kept(s.meaning.dropout_rate)),
            "wanted": 1 - s.meaning.dropout_rate,
        },
    ),
    scale_rule("aiter/scale", "AITER multiplies"),
    EMPTY,
)
"""The limits of forward and backward calls."""


def call_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """Every reason against a call that does not depend on AITER's kernels."""
    return broken(CALL_RULES, spec) + unknown_features(spec, DECIDED, _NOT_RUN)
