"""Cases for FlashAttention's kernels that differ in their sequences."""

from __future__ import annotations

from attn_dispatch_tools.verify.case import Case

_DOCUMENTS = ((0, 0, 1, 1, 1, 3, 3, 0, 4, 0), (1, 1, 1, 1, 1, 1, 2, 3, 3, 3))


_LONG_GAPS = ((1, 1, *(0,) * 7, 2, 3, 3, 0, 0, 0, 0), ((0,) * 9) + (1, 2, 2, 0, 0, 3, 0))


_NO_GAPS = ((0, 3, 3, 10), (0, 1, 8, 10))


_WINDOW = {"window": (3, 1), "alignment": "bottom_right"}


NAMED = (
    Case("more_queries", t=14, s=10, is_causal=True),
    Case("more_queries_window", t=12, s=10, window=(4, 1)),
    Case("more_keys_window", t=10, s=12, window=(4, 3)),
    Case("documents", t=10, s=10, q_segments=_DOCUMENTS, kv_segments=_DOCUMENTS,
         max_segments=4, is_causal=True, lse_grad=True),
    Case("documents_longest", t=10, s=10, q_segments=_DOCUMENTS, kv_segments=_DOCUMENTS,
         max_segments=4, longest=(3, 3), window=(1, 0)),
    Case("long_gaps", t=16, s=16, q_segments=_LONG_GAPS, kv_segments=_LONG_GAPS,
         max_segments=3, longest=(2, 2), is_causal=True, lse_grad=True),
    Case("ragged", t=10, s=10, cu_q=_NO_GAPS, cu_kv=_NO_GAPS, longest=(7, 7), is_causal=True),
    Case("ragged_both", t=10, s=14, cu_q=_NO_GAPS, cu_kv=((0, 5, 9, 9), (0, 0, 3, 14)),
         longest=(7, 11), lse_grad=True, **_WINDOW),
    Case("lengths", t=10, s=10, q_lengths=(7, 10), kv_lengths=(7, 10), is_causal=True),
    Case("lengths_of_keys", q_lengths=(7, 10), kv_lengths=(0, 14), is_causal=True,
         alignment="bottom_right"),
    Case("values", h=24, v=8, lse_grad=True, is_causal=True, alignment="bottom_right"),
)  # fmt: skip
