"""The calls that tests plan with real cuDNN: every option, and the combinations that matter.

A plan takes cuDNN about half a second, so that each call tests something that no other does. Many
differ only in the option that they are named after: a process plans equal backward calls once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from attn_dispatch import mods
from attn_dispatch.call.masks_as_windows import with_window
from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import changed
from attn_dispatch.programs.tracing import trace
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Packed, Ragged, case
from tests.support.backend import backward_spec, forward_spec
from tests.support.option_parts import spec_with

Facts = dict[str, Any]

ARCHS = ("sm80", "sm90", "sm100", "sm120")


@dataclass(frozen=True)
class PlanCase:
    """One attention call, as a spec for each direction."""

    case: Case
    gradients: tuple[str, ...] | None = None
    """The operands whose gradients the backward call computes; None means all that have one."""
    needs_lse: bool = True
    needs_keep: bool = False
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None

    def spec(self, direction: str) -> AttentionSpec:
        """The spec of the forward or the backward call."""
        if direction == "backward":
            return self._changed(backward_spec(self.case, self.gradients))
        spec = forward_spec(self.case, needs_lse=self.needs_lse)
        return self._changed(spec, needs_keep=self.needs_keep)

    def _changed(self, spec: AttentionSpec, **options: Any) -> AttentionSpec:
        spec = spec_with(spec, **options)
        arrays, programs = {}, {}
        for name, function in (("score_mod", self.score_mod), ("mask_mod", self.mask_mod)):
            if function is not None:
                programs[name] = program = trace(name, function, (), "float32").program
                names = mod_operands(name, len(program.arrays))
                for x, (shape, dtype) in zip(names, program.arrays, strict=True):
                    arrays[x] = (1, *shape), dtype
        if not programs:
            return spec
        spec = changed(
            spec,
            arrays=arrays | {"mods_start": ((1, 2), "int32")},
            meaning=replace(spec.meaning, **programs),
        )
        operands = {x.name: x for x in spec.operands}
        facts, operands = with_window(spec.options, operands)
        return AttentionSpec(facts, tuple(operands.values()))


_SQUARE: Facts = {"t": 256, "s": 256, "h": 64, "n": 8, "k": 2}
_CROSS: Facts = {"t": 128, "s": 320}
_MORE_QUERIES: Facts = {"t": 320, "s": 192}
_ONE_QUERY: Facts = {"t": 1, "s": 512, "h": 128}
_MLA: Facts = {"h": 192, "v": 128}
_LENGTHS: Facts = {"q_lengths": (1, 0.45), "kv_lengths": (1, 0.7), **CAUSAL}
_LONG: Facts = {"t": 32768, "s": 32768, "n": 2, "k": 1, **CAUSAL}
_SEGMENTS: Facts = {
    **_LONG,
    "packed": Packed((tuple((i + 1, 1 / 64) for i in range(64)),)),
    "max_segments": 64,
}
_CU_SEQLENS: Facts = {**_LONG, "h": 128, "packed": Ragged(((0.25, 0.5),), ((0.5, 0.25),))}
_WINDOW: Facts = {"window": (64, None)}
_16_BITS: Facts = {"bias_dtype": "same"}
_HEADS_FIRST: Facts = {"heads_first": "q kv"}
_DETERMINISTIC: Facts = {"deterministic": True}
_BOTH: Facts = {"score_mod": mods.soft_cap(30.0), "mask_mod": mods.prefix_lm(jnp.array([9, 30]))}
_QKV: Facts = {"gradients": ("query", "key", "value")}


def _call(*facts: Facts, **how: Any) -> PlanCase:
    together = dict(_SQUARE)
    for more in facts:
        together |= more
    return PlanCase(case("planned", **together), **how)


SECTIONS: dict[str, dict[str, PlanCase]] = {
    "Shapes and dtypes": {
        "bfloat16": _call(),
        "float16, head dim 20, bottom right": _call(
            _CROSS, BOTTOM_RIGHT, {"dtype": "float16", "h": 20}
        ),
        "float32": _call({"dtype": "float32"}),
        "causal": _call(CAUSAL),
        "head dim 256": _call(CAUSAL, {"h": 256}),
        "head dim 192, value dim 128": _call(CAUSAL, _MLA),
        "one query, lse not asked for": _call(_ONE_QUERY, needs_lse=False),
    },
    "Windows": {
        "window, causal": _call(CAUSAL, _WINDOW),
        "window, bottom right, head dim 128": _call(_CROSS, BOTTOM_RIGHT, _WINDOW, {"h": 128}),
        "window on both sides, more queries than keys": _call(_MORE_QUERIES, {"window": (50, 20)}),
    },
    "Lengths": {
        "lengths": _call(_LENGTHS),
        "lengths, window, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, _WINDOW),
    },
    "Packed sequences": {
        "segment ids": _call(_SEGMENTS),
        "segment ids without max_segments": _call(_SEGMENTS, {"max_segments": None}),
        "segment ids, window, bottom right": _call(_SEGMENTS, BOTTOM_RIGHT, _WINDOW),
        "cu_seqlens, head dim 128": _call(_CU_SEQLENS),
    },
    "Bias and mask": {
        "bias [B, N, T, S], float32": _call({"bias": "bnts"}),
        "bias [1, N, T, S], 16 bits": _call({"bias": "1nts"}, _16_BITS),
        "bias [1, N, T, S], 16 bits, without its gradient": _call(
            {"bias": "1nts"}, _16_BITS, **_QKV
        ),
        "bias [B, 1, 1, S], bottom right": _call(_CROSS, BOTTOM_RIGHT, {"bias": "b11s"}),
        "bias [B, N, T, 1]": _call({"bias": "bnt1"}),
        "bias, lengths": _call(_LENGTHS, {"bias": "1nts"}),
        "bias, lengths, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, {"bias": "1nts"}),
        "bias, segment ids": _call(_SEGMENTS, {"bias": "111s"}),
        "bias, soft cap": _call({"bias": "bnts", "soft_cap": 30.0}),
        "mask [1, N, T, S]": _call({"mask": "1nts"}),
        "mask [B, 1, 1, S], bias [1, N, T, S]": _call({"mask": "b11s", "bias": "1nts"}),
    },
    "ALiBi": {
        "ALiBi": _call(CAUSAL, {"alibi": 1}),
        "ALiBi, without its gradient": _call(CAUSAL, {"alibi": 1}, **_QKV),
        "ALiBi [B, N], without its gradient": _call(CAUSAL, {"alibi": 2}, **_QKV),
        "ALiBi on both sides, bottom right": _call(
            _CROSS, {"alibi": 1, "alignment": "bottom_right"}, **_QKV
        ),
        "ALiBi, lengths": _call(_LENGTHS, {"alibi": 1}, **_QKV),
        "ALiBi, lengths, bottom right": _call(_LENGTHS, BOTTOM_RIGHT, {"alibi": 1}, **_QKV),
    },
    "Soft cap": {
        "soft cap": _call({"soft_cap": 30.0}),
        "soft cap, lengths": _call(_LENGTHS, {"soft_cap": 30.0}),
    },
    "Sinks": {
        "sinks": _call({"sinks": 1}),
        "sinks [B, N]": _call({"sinks": 2}),
        "sinks, segment ids": _call(_SEGMENTS, {"sinks": 1}),
        "sinks, one query": _call(_ONE_QUERY, {"sinks": 1}),
    },
    "Dropout": {
        "dropout": _call({"dropout": 0.2}),
        "dropout, its mask returned": _call({"dropout": 0.2}, needs_keep=True),
        "dropout, a key for each row": _call({"dropout": 0.2, "dropout_keys": 2}),
        "dropout, lengths": _call(_LENGTHS, {"dropout": 0.2}),
        "dropout, segment ids": _call(_SEGMENTS, {"dropout": 0.2}),
        "dropout, segment ids, its mask returned": _call(
            _SEGMENTS, {"dropout": 0.2}, needs_keep=True
        ),
    },
    "Row maximum": {
        "row maximum": _call({"needs_max": True}),
        "row maximum, sinks": _call({"needs_max": True, "sinks": 1}),
    },
    "Gradient of lse": {
        "gradient of lse": _call({"lse_grad": True}),
        "gradient of lse, head dim 128": _call(CAUSAL, {"h": 128, "lse_grad": True}),
        "gradient of lse, head dim 256": _call(CAUSAL, {"h": 256, "lse_grad": True}),
        "gradient of lse, head dim 192, value dim 128": _call(CAUSAL, _MLA, {"lse_grad": True}),
        "gradient of lse, segment ids": _call(_SEGMENTS, {"lse_grad": True}),
    },
    "Deterministic": {
        "deterministic": _call(_DETERMINISTIC),
        "deterministic, head dim 256": _call(CAUSAL, {"h": 256}, _DETERMINISTIC),
        "deterministic, 8,192 tokens": _call({"t": 8192, "s": 8192}, _DETERMINISTIC),
        "deterministic, segment ids": _call(_SEGMENTS, _DETERMINISTIC),
        "deterministic, dropout": _call({"dropout": 0.2}, _DETERMINISTIC),
    },
    "Heads first": {
        "heads first": _call(_HEADS_FIRST, CAUSAL),
        "heads first, lengths": _call(_HEADS_FIRST, _LENGTHS),
        "heads first, segment ids": _call(_HEADS_FIRST, _SEGMENTS),
        "heads first, one query": _call(_HEADS_FIRST, _ONE_QUERY, needs_lse=False),
        "heads first, bias, mask, dropout": _call(
            _HEADS_FIRST, {"bias": "1nts", "mask": "11ts", "dropout": 0.2}, **_QKV
        ),
    },
    "score_mod and mask_mod": {
        "soft cap, as a score_mod": _call(CAUSAL, score_mod=mods.soft_cap(30.0)),
        "ALiBi, as a score_mod": _call(CAUSAL, score_mod=mods.alibi(jnp.ones(8))),
        "T5's buckets": _call(score_mod=mods.relative_position(jnp.ones((32, 8)))),
        "prefix LM": _call(mask_mod=mods.prefix_lm(jnp.array([9, 30]))),
        "chunks": _call(mask_mod=mods.chunked_window(32)),
        "dilated window": _call(mask_mod=mods.dilated_window(64, 4)),
        "documents": _call(mask_mod=mods.document_mask(jnp.arange(512).reshape(2, 256) // 100)),
        "neighbourhood of pixels": _call(mask_mod=mods.neighborhood_2d(16, 16, 2)),
        "score_mod and mask_mod, lengths": _call(_LENGTHS, **_BOTH),
        "score_mod and mask_mod, segment ids": _call(_SEGMENTS, **_BOTH),
        "score_mod and mask_mod, cu_seqlens": _call(_CU_SEQLENS, **_BOTH),
        "score_mod and mask_mod, bias, sinks, dropout": _call(
            {"bias": "1nts", "sinks": 1, "dropout": 0.2}, **_BOTH, **_QKV
        ),
    },
}
"""The rows of the table in docs/features.md."""

CASES: dict[str, PlanCase] = {
    label: call for calls in SECTIONS.values() for label, call in calls.items()
}

CELLS = tuple(
    (label, direction, arch)
    for label in CASES
    for direction in ("forward", "backward")
    for arch in ARCHS
)
"""Every label, direction and architecture, in the order in which they are planned."""


PARTS = 48


def cells_of(part: int | None) -> tuple[tuple[str, str, str], ...]:
    """All cells, or those of one part and every cell of the causal call."""
    labels = list(CASES)

    def number(label: str, direction: str, arch: str) -> int:
        return labels.index(label) + (direction == "backward") + ARCHS.index(arch)

    return tuple(x for x in CELLS if part is None or number(*x) % PARTS == part or x[0] == "causal")
