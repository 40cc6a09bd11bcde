"""Small cases in float32, which can be compared closely: the suite's, and further edge cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.small_cases import CASES

_BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "bottom_right"}


STEPS = (
    Step("c tanh(x / c)", 0, 0, 1.5, 8, "n"),
    Step("x + r tanh((t - s) / 16)", 1, 0, 1.0, 8, "b"),
    Step("x / (1 + y²)", 2, 0, 1.0, 8, "n"),
    Step("x r", 3, 0, 1.0, 8, "t"),
    Step("x - |t - s| / w", 4, 0, 1.0, 8, "n"),
    Step("x if t - s < w else y", 5, 2, 1.0, 3, "n"),
    Step("x r", 6, 0, 1.0, 3, "n"),
)


PREFIX = ("s <= t or s < x[b]", 1)


_IDS = (1,) * 5 + (2,) * 4 + (0,) + (3,) * 2 + (4,) * 5


EDGES = (
    Case("one_key_bias", s=1, bias=(2, 4, 10, 1), **_BOTTOM_RIGHT),
    Case("one_key_mask", s=1, mask=(2, 1, 10, 1), **_BOTTOM_RIGHT),
    Case("one_query_bias", t=1, bias=(1, 4, 1, 14), sinks=1),
    Case("one_query_dropout", t=1, dropout=0.4, sinks=1),
    Case("more_queries_bias", t=14, s=10, bias=(2, 4, 14, 10), lse_grad=True, **_BOTTOM_RIGHT),
    Case("more_keys_bias", bias=(1, 1, 10, 14), **_BOTTOM_RIGHT),
    Case("more_keys_alibi", alibi=1, alignment="bottom_right", window=(9, 2)),
    Case("scale_0", scale=0.0, lse_grad=True, sinks=1),
    Case("scale_negative", scale=-0.4, soft_cap=2.0, is_causal=True),
    Case("scale_negative_lengths", scale=-0.4, q_lengths=(7, 10), kv_lengths=(0, 14)),
    Case("scale_0_bias", scale=0.0, bias=(1, 4, 10, 14), dropout=0.3),
    Case("wide_heads", h=200, v=24, kv_lengths=(3, 14)),
    Case("row_max", needs_max=True, sinks=1, t=14, s=10, **_BOTTOM_RIGHT),
    Case("row_max_lengths", needs_max=True, b=2, q_lengths=(7, 10), kv_lengths=(0, 14)),
    Case("lengths_mask_wrong", mask=(2, 1, 10, 14), q_lengths=(7, 11), kv_lengths=(14, 9)),
    Case("lengths_wrong_bias_max", bias=(2, 4, 10, 14), kv_lengths=(15, 9), needs_max=True),
    Case("mods", score_mod=STEPS, mask_mod=PREFIX, is_causal=True, sinks=1, lse_grad=True),
    Case("mods_cap_bias", score_mod=STEPS, soft_cap=3.0, bias=(2, 1, 10, 14), alibi=1),
    Case("mods_more_queries", score_mod=STEPS, mask_mod=PREFIX, t=14, s=10, **_BOTTOM_RIGHT),
    Case("mods_lengths", score_mod=STEPS, q_lengths=(7, 10), kv_lengths=(3, 14), window=(5, 1)),
    Case(
        "mods_bottom_right", score_mod=STEPS, q_lengths=(7, 9), kv_lengths=(3, 14), **_BOTTOM_RIGHT
    ),
    Case(
        "mods_ragged",
        score_mod=STEPS,
        mask_mod=PREFIX,
        cu_q=((0, 2, 7), (0, 5, 10)),
        cu_kv=((0, 5, 9), (0, 3, 14)),
        longest=(5, 11),
        **_BOTTOM_RIGHT,
    ),
    Case(
        "mods_packed",
        score_mod=STEPS,
        mask_mod=PREFIX,
        q_segments=(_IDS[:10], _IDS[1:11]),
        kv_segments=(_IDS[2:16], _IDS[:14]),
        max_segments=4,
        is_causal=True,
        mods_start=(2, 1),
    ),
    Case(
        "mods_copies",
        b=4,
        score_mod=STEPS,
        mask_mod=PREFIX,
        own_arrays=True,
        transform="vmap",
        is_causal=True,
        mods_start=(1, 2),
    ),
    Case("mods_one_query", t=1, score_mod=STEPS, mask_mod=PREFIX),
    Case("mods_dropout", score_mod=STEPS, dropout=0.3, kv_lengths=(14, 5)),
    Case("lengths_mask", mask=(2, 1, 10, 14), dead_rows=True, q_lengths=(7, 0), kv_lengths=(14, 9)),
)


def with_max_segments(case: Case) -> Case:
    """The case with max_segments, if it has segment ids."""
    is_missing = case.q_segments is not None and case.max_segments is None
    return replace(case, max_segments=5) if is_missing else case


SMALL = [with_max_segments(case) for case in (*CASES, *EDGES) if case.dtype == "float32"]
