"""Direct split-KV calls of the emulator: cases of strides, pages and lengths.

Elements that belong to no row, or lie between strides, are NaN, and every buffer is declared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_dispatch_tools.verify.reference import reference
from tests.support.emulator.cases import DTYPES
from tests.support.emulator.native import CONSTANTS, Call, Emulator, SplitKv
from tests.support.option_parts import options_with

SCALE = 0.3


@dataclass(frozen=True)
class SplitCase:
    """A call whose rows have `lengths` keys, in pages if `page` is not 0."""

    lengths: tuple[int, ...] = (150, 256, 0, 1)
    t: int = 2
    s: int = 256
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 8
    dtype: str = "float16"
    page: int = 0
    splits: int = 3
    mask: str = "NO_MASK"
    window: tuple[int, int] = (-1, -1)
    alibi: bool = False
    soft_cap: float = 0.0


SPLIT_CASES = {
    "rows": SplitCase(),
    "bf16": SplitCase(dtype="bfloat16"),
    "one split": SplitCase(splits=1),
    "more splits than keys": SplitCase(splits=128, lengths=(3, 100, 0, 1)),
    "pages": SplitCase(page=128, s=512, lengths=(150, 512, 0, 128)),
    "pages of 256": SplitCase(page=256, s=512, lengths=(257, 1, 0, 512)),
    "causal": SplitCase(mask="BOTTOM_RIGHT", window=(-1, 0), t=5, lengths=(150, 3, 0, 256)),
    "top left": SplitCase(mask="TOP_LEFT", window=(-1, 0), t=5, page=128),
    "window": SplitCase(mask="BOTTOM_RIGHT", window=(70, 1), t=5, page=128),
    "alibi": SplitCase(alibi=True, mask="BOTTOM_RIGHT", window=(600, 0), t=3, page=128),
    "soft cap": SplitCase(soft_cap=0.7, page=128),
}


def _spread(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(buffer, view) full of NaN, with space between the view's elements along every axis."""
    buffer = np.full([n + 1 for n in shape[:-1]] + [shape[-1] + 8], np.nan, dtype)
    return buffer, buffer[tuple(slice(n) for n in shape)]


@dataclass
class SplitRun:
    """The arrays of a case and the call over them."""

    case: SplitCase
    emulator: Emulator
    views: dict[str, np.ndarray] = field(default_factory=dict)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, dtype = self.case, DTYPES[self.case.dtype]
        rng = np.random.default_rng(len(repr(case)))
        batch, rows = len(case.lengths), (len(case.lengths), case.heads, case.t)
        pages = case.s // (case.page or case.s)
        self.pages = batch * pages + 2
        blocks, block = (self.pages, case.page) if case.page else (batch, case.s)
        self.table = rng.permutation(self.pages)[: batch * pages].reshape(batch, pages)
        self.add("q", (*rows, case.dim), dtype)
        self.add("k", (blocks, block, case.kv_heads, case.dim), dtype)
        self.add("v", (blocks, block, case.kv_heads, case.dim_v), dtype)
        self.add("out", (*rows, case.dim_v), dtype)
        self.add("lse", rows, np.float32)
        parts = (batch, case.heads, case.splits, case.t)
        self.add("lse_acc", parts, np.float32)
        self.add("out_acc", (*parts, case.dim_v), np.float32)
        self.views["q"][...] = rng.normal(size=self.views["q"].shape)
        self.keys, self.values = {}, {}
        for row, length in enumerate(case.lengths):
            for name, into in (("k", self.keys), ("v", self.values)):
                x = rng.normal(size=(length, *self.views[name].shape[2:])).astype(dtype)
                into[row] = x.astype(float)
                for s in range(length):
                    at = (self.table[row, s // case.page], s % case.page) if case.page else (row, s)
                    self.views[name][at] = x[s]
        self.plain("seqlen_k", np.array(case.lengths, np.int32))
        if case.page:
            reached = -(-np.array(case.lengths)[:, None] // case.page)
            table = np.where(np.arange(pages) < reached, self.table, 2**30)
            self.plain("page_table", np.pad(table, ((0, 0), (0, 3))).astype(np.int32))
        if case.alibi:
            self.plain("bias", rng.uniform(0.1, 0.5, rows[:2]).astype(np.float32))

    def add(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.buffers[name], self.views[name] = _spread(shape, dtype)

    def plain(self, name: str, array: np.ndarray) -> None:
        self.buffers[name] = self.views[name] = array

    def _strides(self, name: str) -> list[int]:
        return [x // self.views[name].itemsize for x in self.views[name].strides]

    def call(self) -> Any:
        case, data = self.case, {name: x.ctypes.data for name, x in self.views.items()}
        call = Call(
            q=data["q"], k=data["k"], v=data["v"], seqlen_k=data["seqlen_k"],
            bias=data.get("bias"), bias_kind=CONSTANTS["ALIBI" if case.alibi else "NO_BIAS"],
            stride_bias=case.heads if case.alibi else 0,
            dtype=CONSTANTS["FP16" if case.dtype == "float16" else "BF16"],
            batch=len(case.lengths), seq_len_q=case.t, max_seq_len_q=case.t, seq_len_kv=case.s,
            max_seq_len_kv=case.s, num_heads=case.heads, num_kv_heads=case.kv_heads,
            head_dim=case.dim, head_dim_v=case.dim_v, scale=SCALE, mask=CONSTANTS[case.mask],
            window_left=case.window[0], window_right=case.window[1],
        )  # fmt: skip
        for name in ("q", "out"):
            batch, heads, rows, _ = self._strides(name)
            self._set(call, name, batch, heads, rows)
        for name in ("k", "v"):
            blocks, rows, heads, _ = self._strides(name)
            self._set(call, name, blocks, heads, rows)
        split = SplitKv(
            logits_soft_cap=case.soft_cap, out=data["out"], lse=data["lse"],
            lse_acc=data["lse_acc"], out_acc=data["out_acc"], num_splits=case.splits,
        )  # fmt: skip
        call.batch_stride_lse, call.nhead_stride_lse, _ = self._strides("lse")
        lse, out = self._strides("lse_acc"), self._strides("out_acc")
        split.batch_stride_lse_acc, split.nhead_stride_lse_acc, split.split_stride_lse_acc = lse[:3]
        split.batch_stride_out_acc, split.nhead_stride_out_acc = out[:2]
        split.split_stride_out_acc, split.stride_out_acc = out[2:4]
        if case.page:
            split.page_table, split.page_size = data["page_table"], case.page
            split.num_pages, split.batch_stride_page_table = (
                self.pages,
                self._strides("page_table")[0],
            )
        split.call = call
        return split

    def _set(self, call: Any, name: str, batch: int, heads: int, rows: int) -> None:
        setattr(call, f"batch_stride_{name}", batch)
        setattr(call, f"nhead_stride_{name}", heads)
        setattr(call, f"stride_{name}", rows)

    def run(self, call: Any) -> None:
        for buffer in self.buffers.values():
            self.emulator.note_buffer(buffer)
        self.emulator.run(call)

    def expected(self, row: int) -> dict[str, np.ndarray]:
        """The reference's out [N, T, V] and lse [N, T] of one row."""
        case = self.case
        query = np.swapaxes(self.views["q"][row].astype(float), 0, 1)
        operands = {"query": query, "key": self.keys[row], "value": self.values[row]}
        if case.alibi:
            operands["alibi_slopes"] = self.views["bias"][row].astype(float)
        operands = {name: x[None] for name, x in operands.items()}
        left, right = (None if x < 0 else x for x in case.window)
        options = options_with(
            operands=tuple(operands),
            scale=float(np.float32(SCALE)),
            causal_alignment="bottom_right" if case.mask == "BOTTOM_RIGHT" else "top_left",
            window=(left, right),
            logits_soft_cap=case.soft_cap or None,
        )
        found = reference(options, operands, None)
        return {"out": np.swapaxes(found["out"][0], 0, 1), "lse": found["lse"][0]}
