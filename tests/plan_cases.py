"""The calls that are planned with real cuDNN: every option, and the combinations that matter.

A plan takes cuDNN some half a second, so every call says what no other says. Many are alike but for
the option they are named after: a process plans a backward call once for all that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.conformance.case import Case, lse_dtype, spec_of
from attn_dispatch.conformance.sizes import BOTTOM_RIGHT, CAUSAL, Packed, Ragged, case
from attn_dispatch.spec import AttentionOptions, AttentionSpec

Facts = dict[str, Any]

ARCHS = ("sm80", "sm90", "sm100", "sm120")


@dataclass(frozen=True)
class PlanCase:
    """One attention call, as a spec for each direction."""

    case: Case
    gradients: tuple[str, ...] | None = None
    """The operands whose gradient the backward call computes; None: of all that have one."""
    needs_lse: bool = True
    needs_keep: bool = False
    score_mod: Callable[..., Any] | None = None

    def spec(self, direction: str) -> AttentionSpec:
        """The forward or the backward call."""
        case, operands = self.case, self.case.operands()
        if direction == "forward":
            options = case.forward_options(needs_lse=self.needs_lse, needs_keep=self.needs_keep)
            return spec_of(self._modified(options), operands)
        out = jax.ShapeDtypeStruct((case.b, case.t, case.n, case.v), case.dtype)
        lse = jax.ShapeDtypeStruct((case.b, case.n, case.t), lse_dtype(case.dtype))
        operands |= {"out": out, "out_grad": out, "lse": lse, "lse_grad": lse}
        return spec_of(self._modified(case.backward_options(self.gradients)), operands)

    def _modified(self, options: AttentionOptions) -> AttentionOptions:
        return replace(options, score_mod=self.score_mod)


_SQUARE: Facts = {"t": 256, "s": 256, "h": 64, "n": 8, "k": 2}
_CROSS: Facts = {"t": 128, "s": 320}
_MORE_QUERIES: Facts = {"t": 320, "s": 128}
_LENGTHS: Facts = {"q_lengths": (1, 0.45), "kv_lengths": (1, 0.7)}
_SEGMENTS: Facts = {
    "packed": Packed((((1, 0.4), (2, 0.6)), ((1, 0.9),))),
    "max_segments": 4,
    **CAUSAL,
}
_CU_SEQLENS: Facts = {"packed": Ragged(((0.3, 0.1, 0.5),), ((0.4, 0.2, 0.3),)), **CAUSAL}
_WINDOW: Facts = {"window": (64, None), **CAUSAL}
_16_BITS: Facts = {"bias_dtype": "same"}
_LONG: Facts = {"t": 32768, "s": 32768, "n": 2, "k": 1}
_DOCUMENTS: Facts = {
    "packed": Packed((tuple((m + 1, 1 / 64) for m in range(64)),)),
    "max_segments": 64,
    **CAUSAL,
}
_QKV = {"gradients": ("query", "key", "value")}


def _call(*facts: Facts, **how: Any) -> PlanCase:
    together = dict(_SQUARE)
    for more in facts:
        together |= more
    return PlanCase(case("planned", **together), **how)


def _shaped(**facts: Any) -> PlanCase:
    return _call(facts)


SECTIONS: dict[str, dict[str, PlanCase]] = {
    "Shapes and dtypes": {
        "float16": _shaped(dtype="float16"),
        "float32": _shaped(dtype="float32"),
        "causal": _call(CAUSAL),
        "causal, without lse": _call(CAUSAL, needs_lse=False),
        "head dim 128": _call(CAUSAL, {"h": 128}),
        "head dim 256": _call(CAUSAL, {"h": 256}),
        "head dim 20, bottom right, odd lengths": _call(BOTTOM_RIGHT, {"t": 100, "s": 333, "h": 20}),
        "value dim twice the head dim, more queries than keys": _call(
            BOTTOM_RIGHT, _MORE_QUERIES, {"v": 128}
        ),
        "head dim 192, value dim 128": _call(CAUSAL, {"h": 192, "v": 128}),
        "one query": _shaped(t=1, s=512, h=128),
        "one query, one head, batch of one": _shaped(b=1, n=1, k=1, t=1, s=128),
        "192 keys": _shaped(t=192, s=192),
    },
    "Windows": {
        "window, causal": _call(_WINDOW),
        "window, bottom right": _call(_CROSS, BOTTOM_RIGHT, {"window": (64, None)}),
        "window on both sides, more queries than keys": _call(_MORE_QUERIES, {"window": (50, 20)}),
        "window on both sides, bottom right": _call(
            _CROSS, {"window": (50, 20), "alignment": "bottom_right"}
        ),
    },
    "Lengths": {
        "lengths": _call(_LENGTHS, CAUSAL),
        "lengths, window, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, {"window": (64, None)}),
    },
    "Packed sequences": {
        "segment ids": _call(_SEGMENTS),
        "segment ids without max_segments": _call(_SEGMENTS, {"max_segments": None}),
        "segment ids, window, bottom right": _call(_SEGMENTS, BOTTOM_RIGHT, {"window": (64, None)}),
        "cu_seqlens, head dim 128": _call(_CU_SEQLENS, {"h": 128}),
        "64 segments in 32,768 tokens": _call(_LONG, _DOCUMENTS),
    },
    "Bias and mask": {
        "bias [B, N, T, S], float32": _call(CAUSAL, {"bias": "bnts"}),
        "bias [1, 1, T, S], float32": _call({"bias": "11ts"}),
        "bias [1, N, T, S], 16 bits": _call(CAUSAL, {"bias": "1nts"}, _16_BITS),
        "bias [1, N, T, S], 16 bits, without its gradient": _call(
            CAUSAL, {"bias": "1nts"}, _16_BITS, **_QKV
        ),
        "bias [B, 1, 1, S], 16 bits": _call({"bias": "b11s"}, _16_BITS),
        "bias [B, N, T, 1]": _call(CAUSAL, {"bias": "bnt1"}),
        "bias, bottom right": _call(_CROSS, BOTTOM_RIGHT, {"bias": "1nts"}),
        "bias, lengths": _call(_LENGTHS, CAUSAL, {"bias": "1nts"}),
        "bias, lengths, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, {"bias": "1nts"}),
        "bias, segment ids": _call(_SEGMENTS, {"bias": "1nts"}),
        "bias, soft cap": _call(CAUSAL, {"bias": "bnts", "soft_cap": 30.0}),
        "mask [1, N, T, S]": _call(CAUSAL, {"mask": "1nts"}),
        "mask [B, 1, 1, S] and bias [1, N, T, S]": _call(CAUSAL, {"mask": "b11s", "bias": "1nts"}),
    },
    "ALiBi": {
        "ALiBi": _call(CAUSAL, {"alibi": 1}),
        "ALiBi, without its gradient": _call(CAUSAL, {"alibi": 1}, **_QKV),
        "ALiBi [B, N], without its gradient": _call(CAUSAL, {"alibi": 2}, **_QKV),
        "ALiBi of both sides, bottom right": _call(
            _CROSS, {"alibi": 1, "alignment": "bottom_right"}, **_QKV
        ),
        "ALiBi, lengths": _call(_LENGTHS, CAUSAL, {"alibi": 1}, **_QKV),
        "ALiBi, lengths, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, {"alibi": 1}, **_QKV),
    },
    "Soft cap": {
        "soft cap": _call(CAUSAL, {"soft_cap": 30.0}),
        "soft cap, lengths": _call(_LENGTHS, CAUSAL, {"soft_cap": 30.0}),
    },
    "Sinks": {
        "sinks": _call(CAUSAL, {"sinks": 1}),
        "sinks [B, N]": _call(CAUSAL, {"sinks": 2}),
        "sinks, segment ids": _call(_SEGMENTS, {"sinks": 1}),
        "sinks, one query": _call({"t": 1, "s": 512, "h": 128, "sinks": 1}),
    },
    "Dropout": {
        "dropout": _call(CAUSAL, {"dropout": 0.2}),
        "dropout, its mask returned": _call(CAUSAL, {"dropout": 0.2}, needs_keep=True),
        "dropout, a key for each row": _call(CAUSAL, {"dropout": 0.2, "dropout_keys": 2}),
        "dropout, lengths": _call(_LENGTHS, CAUSAL, {"dropout": 0.2}),
        "dropout, segment ids": _call(_SEGMENTS, {"dropout": 0.2}),
        "dropout, segment ids, its mask returned": _call(
            _SEGMENTS, {"dropout": 0.2}, needs_keep=True
        ),
    },
    "What is returned": {
        "row maximum": _call(CAUSAL, {"needs_max": True}),
        "row maximum, sinks": _call(CAUSAL, {"needs_max": True, "sinks": 1}),
        "gradient of lse": _call(CAUSAL, {"lse_grad": True}),
        "gradient of lse, head dim 128": _call(CAUSAL, {"h": 128, "lse_grad": True}),
        "gradient of lse, head dim 256": _call(CAUSAL, {"h": 256, "lse_grad": True}),
        "gradient of lse, head dim 192, value dim 128": _call(
            CAUSAL, {"h": 192, "v": 128, "lse_grad": True}
        ),
        "gradient of lse, segment ids": _call(_SEGMENTS, {"lse_grad": True}),
    },
    "Deterministic": {
        "deterministic": _call(CAUSAL, {"deterministic": True}),
        "deterministic, head dim 256": _call(CAUSAL, {"h": 256, "deterministic": True}),
        "deterministic, 8,192 tokens": _call(
            CAUSAL, {"t": 8192, "s": 8192, "deterministic": True}
        ),
        "deterministic, segment ids": _call(_SEGMENTS, {"deterministic": True}),
        "deterministic, dropout": _call(CAUSAL, {"dropout": 0.2, "deterministic": True}),
    },
    "score_mod": {"score_mod": _call(CAUSAL, score_mod=jnp.tanh)},
}  # fmt: skip
"""The rows of docs/support.md."""

CASES: dict[str, PlanCase] = {
    label: call for calls in SECTIONS.values() for label, call in calls.items()
}

CELLS = tuple(
    (label, direction, arch)
    for label in CASES
    for direction in ("forward", "backward")
    for arch in ARCHS
)
"""Everything that is planned, in this order."""
