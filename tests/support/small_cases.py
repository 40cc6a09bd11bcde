"""Small cases, most in float32, which can be compared closely: one option each, combinations that
are easy to get wrong, and further edge cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import Step

_LENGTHS: dict[str, Any] = {"b": 4, "q_lengths": (10, 6, 0, 3), "kv_lengths": (14, 3, 5, 0)}
_PACKED: dict[str, Any] = {
    "q_segments": ((1, 1, 1, 2, 2, 2, 2, 5, 5, 0), (0, 1, 1, 1, 1, 1, 3, 0, 4, 4)),
    "kv_segments": (
        (1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 5, 0, 0, 0),
        (1, 1, 1, 0, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4),
    ),
}
# A sequence without queries, a sequence without keys, and rows that belong to no sequence.
_RAGGED: dict[str, Any] = {
    "cu_q": ((0, 3, 3, 8, 9), (0, 0, 4, 10, 10)),
    "cu_kv": ((0, 4, 6, 6, 13), (0, 5, 5, 9, 12)),
    "longest": (6, 7),
}
_TOO_LONG: dict[str, Any] = _RAGGED | {"longest": (5, 5)}
# In the first row, segment 2 is in two pieces and id 4 is too large; in the second, the keys of
# segment 3 are in two pieces.
_MISPLACED: dict[str, Any] = {
    "q_segments": ((1, 1, 2, 2, 0, 3, 3, 2, 4, 0), (1, 1, 1, 2, 2, 3, 3, -1, 0, 0)),
    "kv_segments": (
        (1, 1, 1, 2, 2, 2, 0, 3, 3, 3, 3, 0, 0, 0),
        (1, 1, 3, 2, 2, 2, 2, 3, 3, 0, 0, 0, 0, 0),
    ),
}
_MIXED: dict[str, Any] = {
    "q_segments": ((3, 1, 2, 1, 0, 3, 3, 2, 9, 0), (2, 1, 2, 1, 2, -1, 2, 1, 2, 1)),
    "kv_segments": (
        (1, 2, 1, 3, 3, 0, 2, 1, 9, 9, 3, 0, -4, 9),
        (1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2),
    ),
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
    Case("window_array", window_arrays=((3, 2),)),
    Case("window_array_of_batch", window_arrays=((0, 9), (2, 2**31 - 1)), lse_grad=True),
    Case("window_array_wrong", window_arrays=((3, -1), (2, 1)), sinks=1),
    Case("window_array_segments", window_arrays=((1, 2),), **_PACKED, **_BOTTOM_RIGHT, alibi=1),
    Case("offset", is_causal=True, offset=2, lse_grad=True),
    Case("offset_past_the_end", is_causal=True, offset=9, alibi=1, sinks=1),
    Case("offset_of_window", window=(2, 1), offset=-6, lse_grad=True),
    Case("offset_behind_window", window=(3, None), is_causal=True, offset=13, lse_grad=True),
    Case("offset_hides_all", window=(3, 1), offset=40, sinks=1, lse_grad=True),
    Case("offset_array", is_causal=True, offsets=(3,), window=(4, None)),
    Case("offset_array_of_batch", is_causal=True, offsets=(-4, 7), alibi=2, lse_grad=True),
    Case("offset_array_wide", window=(2**40, 0), offsets=(-(2**29), 2**29), k=1),
    Case("offset_lengths", **_LENGTHS, is_causal=True, offset=3, window=(5, None), alibi=1),
    Case("offset_array_lengths", **_LENGTHS, is_causal=True, offsets=(4, -1, 0, 9)),
    Case("offset_segments", **_PACKED, is_causal=True, offset=-1, window=(2, None)),
    Case("offset_array_segments", **_PACKED, window=(1, 1), offsets=(2, -1), alibi=1),
    Case("offset_mask_and_bias", is_causal=True, offset=2, mask=(2, 1, 10, 14), bias=(1, 4, 1, 14)),
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
    Case("segments_misplaced", **_MISPLACED, max_segments=3, lse_grad=True),
    Case(
        "segments_misplaced_causal",
        **_MISPLACED,
        max_segments=3,
        is_causal=True,
        bias=(2, 1, 10, 14),
    ),
    Case("segments_too_long", **_PACKED, max_segments=5, longest=(4, 6), **_BOTTOM_RIGHT),
    Case("segments_in_any_order", **_MIXED, lse_grad=True),
    Case(
        "segments_in_any_order_window", **_MIXED, window=(1, 2), alignment="bottom_right", alibi=1
    ),
    Case("ragged", **_RAGGED),
    Case("ragged_too_long", **_TOO_LONG, is_causal=True, sinks=1),
    Case(
        "ragged_out_of_range",
        b=3,
        cu_q=((0, 3, 2, 8, 9), (0, 0, 4, 10, 10), (0, 3, 4, 5, 6)),
        cu_kv=((0, 4, 6, 6, 13), (0, 5, 5, 9, 15), (0, 3, 4, 5, 6)),
        longest=(10, 14),
    ),
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
