"""Direct calls of the emulator: cases, their arrays, and the expected results.

Elements that belong to no sequence are NaN, and every buffer is declared to the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from attn_dispatch_tools.verify.reference import reference
from tests.support.emulator.native import CONSTANTS, Backward, Call, Emulator, Forward
from tests.support.option_parts import options_with

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
RNG_STATE = (0x123456789ABCDEF0, 7)


@dataclass(frozen=True)
class Case:
    """One call in AITER's terms. With `query_lengths` its sequences are packed."""

    batch: int = 2
    t: int = 5
    s: int = 7
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 8
    dtype: str = "float16"
    layout: str = "bthd"
    mask: str = "NO_MASK"
    window: tuple[int, int] = (-1, -1)
    bias: str = "NO_BIAS"
    soft_cap: float = 0.0
    dropout: float = 0.0
    use_asm: bool = False
    accumulator: str = "SPLIT"
    deterministic: bool = False
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    gaps: bool = False
    arch: str = "gfx942"

    @property
    def is_group(self) -> bool:
        return bool(self.query_lengths)


def place(array: np.ndarray) -> np.ndarray:
    """The array itself; scripts/emulator_on_nvidia.py moves it to managed memory."""
    return array


def _strided(shape: tuple[int, ...], layout: str, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(buffer, view) full of NaN: the view is [B, L, N, D] or [L, N, D], in a layout."""
    *batch, rows, heads, width = shape
    if layout == "bhtd":
        buffer = place(np.full((*batch, heads, rows, width), np.nan, dtype))
        return buffer, np.swapaxes(buffer, -3, -2)
    if layout == "padded":
        buffer = place(np.full((*batch, rows + 1, heads + 2, width + 8), np.nan, dtype))
        return buffer, buffer[..., :rows, 1 : heads + 1, :width]
    buffer = place(np.full(shape, np.nan, dtype))
    return buffer, buffer


@dataclass
class Run:
    """The arrays of one case and the calls over them."""

    case: Case
    emulator: Emulator
    views: dict[str, np.ndarray] = field(default_factory=dict)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        self.starts_q, self.lengths_q = self._sequences(case.query_lengths)
        self.starts_k, self.lengths_k = self._sequences(case.key_lengths)
        rng = np.random.default_rng(len(repr(case)))
        t, s = self.rows
        for name, rows, heads, width in (
            ("q", t, case.heads, case.dim),
            ("k", s, case.kv_heads, case.dim),
            ("v", s, case.kv_heads, case.dim_v),
            ("out_grad", t, case.heads, case.dim_v),
            ("bias", t, case.heads, self.max_lengths[1]),
        ):
            if name == "bias" and case.bias != "BIAS":
                continue
            view = self.rows_array(name, rows, heads, width)
            starts, lengths = (
                (self.starts_k, self.lengths_k) if name in "kv" else (self.starts_q, self.lengths_q)
            )
            for at in self._real_rows(starts, lengths):
                view[at] = rng.normal(size=view[at].shape)
        for name in ("out", "dq"):
            self.rows_array(name, t, case.heads, case.dim if name == "dq" else case.dim_v)
        self.rows_array("dk", s, case.heads, case.dim)
        self.rows_array("dv", s, case.heads, case.dim_v)
        if case.bias == "BIAS":
            self.rows_array("dbias", t, case.heads, self.max_lengths[1])
            self.buffers["dbias"][...] = 0
        if case.bias == "ALIBI":
            self.plain("bias", rng.uniform(0.1, 0.5, (case.batch, case.heads)).astype(np.float32))
        for name in ("lse", "softmax_d"):
            batch = () if case.is_group else (case.batch,)
            self.plain(name, np.full((*batch, case.heads, t), np.nan, np.float32))
        self.plain("rng_state", np.array(RNG_STATE, np.uint64))
        if case.is_group:
            self.plain("seqstart_q", self.starts_q)
            self.plain("seqstart_k", self.starts_k)
        if case.gaps:
            self.plain("seqlen_q", self.lengths_q)
            self.plain("seqlen_k", self.lengths_k)
        self._make_dq_acc()

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the arrays, which have more rows than the packed sequences in them."""
        if not self.case.is_group:
            return self.case.t, self.case.s
        return int(self.starts_q[-1]) + 3, int(self.starts_k[-1]) + 2

    @property
    def max_lengths(self) -> tuple[int, int]:
        if not self.case.is_group:
            return self.case.t, self.case.s
        return max(self.case.query_lengths), max(self.case.key_lengths)

    def _sequences(self, lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        space = [length + 2 * self.case.gaps for length in lengths]
        return np.cumsum([0, *space]).astype(np.int32), np.array(lengths, np.int32)

    def _real_rows(self, starts: np.ndarray, lengths: np.ndarray) -> list[Any]:
        if not self.case.is_group:
            return [np.s_[:]]
        return [np.s_[start : start + n] for start, n in zip(starts[:-1], lengths, strict=True)]

    def plain(self, name: str, array: np.ndarray) -> None:
        self.buffers[name] = self.views[name] = place(array)

    def rows_array(self, name: str, rows: int, heads: int, width: int) -> np.ndarray:
        batch = () if self.case.is_group else (self.case.batch,)
        shape = (*batch, rows, heads, width)
        dtype = DTYPES[self.case.dtype]
        self.buffers[name], self.views[name] = _strided(shape, self.case.layout, dtype)
        return self.views[name]

    def _make_dq_acc(self) -> None:
        """Make dq_acc of zeros, or of NaN where the pass writes every split completely."""
        case = self.case
        (t, _), (max_t, max_s) = self.rows, self.max_lengths
        batch = () if case.is_group else (case.batch,)
        if case.accumulator == "ATOMIC_16":
            shape = (case.batch, case.heads, -(-max_t // 16) * 16, 192 if case.dim == 192 else 128)
            array = np.zeros(shape, DTYPES[case.dtype])
        elif case.accumulator == "ATOMIC_32":
            array = np.zeros((*batch, case.heads, t, case.dim), np.float32)
        else:
            block = 128 if case.dim <= 128 else 64
            splits = -(-max_s // block) if case.deterministic else 1
            whole = case.deterministic and case.mask == "NO_MASK"
            fill = np.nan if whole else 0
            array = np.full((splits, *batch, t, case.heads, case.dim), fill, np.float32)
        self.plain("dq_acc", array)
        if case.accumulator == "ATOMIC_16" and (case.arch == "gfx942" or case.dim <= 64):
            self.buffers["dq"][...] = 0

    def strides(self, name: str) -> tuple[int, int, int]:
        """The strides (batch, head, row) in elements."""
        view = self.views[name]
        *outer, rows, heads, _ = (stride // view.itemsize for stride in view.strides)
        if name == "dq_acc" and self.case.accumulator != "SPLIT":
            rows, heads = heads, rows
        return outer[-1] if outer else 0, heads, rows

    def call(self) -> Any:
        case = self.case
        call = Call()
        for name in ("q", "k", "v", "seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k"):
            if name in self.views:
                setattr(call, name, self.views[name].ctypes.data)
        call.dtype = CONSTANTS["FP16" if case.dtype == "float16" else "BF16"]
        call.is_group = case.is_group
        call.batch = case.batch
        call.seq_len_q, call.seq_len_kv = self.rows
        call.max_seq_len_q, call.max_seq_len_kv = self.max_lengths
        call.num_heads, call.num_kv_heads = case.heads, case.kv_heads
        call.head_dim, call.head_dim_v = case.dim, case.dim_v
        call.scale = 0.3
        call.mask = CONSTANTS[case.mask]
        call.window_left, call.window_right = case.window
        call.bias_kind = CONSTANTS[case.bias]
        call.use_asm = case.use_asm
        if case.dropout:
            call.dropout_rate = case.dropout
            call.rng_state = self.views["rng_state"].ctypes.data
        if case.bias == "ALIBI":
            call.bias, call.stride_bias = self.views["bias"].ctypes.data, case.heads
        for name in ("q", "k", "v", "out") + ("bias",) * (case.bias == "BIAS"):
            self._set_strides(call, name)
        if case.bias == "BIAS":
            call.bias = self.views["bias"].ctypes.data
        lse = self.views["lse"]
        call.nhead_stride_lse = lse.strides[-2] // 4
        call.batch_stride_lse = 0 if case.is_group else lse.strides[0] // 4
        return call

    def _set_strides(self, into: Any, name: str) -> None:
        batch, heads, rows = self.strides(name)
        setattr(into, f"stride_{name}", rows)
        setattr(into, f"nhead_stride_{name}", heads)
        setattr(into, f"batch_stride_{name}", batch)

    def forward_call(self) -> Any:
        forward = Forward(call=self.call(), logits_soft_cap=self.case.soft_cap)
        forward.out = self.views["out"].ctypes.data
        forward.lse = self.views["lse"].ctypes.data
        return forward

    def backward_call(self) -> Any:
        backward = Backward(call=self.call())
        for name in ("out", "lse", "out_grad", "dq", "dk", "dv", "softmax_d", "dq_acc", "dbias"):
            if name in self.views:
                setattr(backward, name, self.views[name].ctypes.data)
        for name in ("out_grad", "dq", "dk", "dv", "dbias", "dq_acc"):
            if name in self.views:
                self._set_strides(backward, name)
        if self.case.accumulator == "SPLIT":
            array = self.views["dq_acc"]
            backward.split_stride_dq_acc = array.strides[0] // 4
            if self.case.is_group:
                backward.batch_stride_dq_acc = 0
        backward.accumulator = CONSTANTS[self.case.accumulator]
        backward.is_deterministic = self.case.deterministic
        return backward

    def run(self, call: Any) -> None:
        self.emulator.set_arch(self.case.arch)
        for buffer in self.buffers.values():
            self.emulator.note_buffer(buffer)
        self.emulator.run(call)

    def sequences(self) -> list[tuple[Any, Any, Any]]:
        """The indices of each sequence: its queries, its keys, and its part of lse."""
        if not self.case.is_group:
            return [(np.s_[i], np.s_[i], np.s_[i]) for i in range(self.case.batch)]
        rows_q = self._real_rows(self.starts_q, self.lengths_q)
        rows_k = self._real_rows(self.starts_k, self.lengths_k)
        return [(q, k, (np.s_[:], q)) for q, k in zip(rows_q, rows_k, strict=True)]

    def expected(self, index: int) -> dict[str, np.ndarray]:
        """The reference results of one sequence."""
        case = self.case
        q, k, _ = self.sequences()[index]
        views = {"query": ("q", q), "key": ("k", k), "value": ("v", k), "out_grad": ("out_grad", q)}
        operands = {name: self.views[x][at].astype(float)[None] for name, (x, at) in views.items()}
        t, s = operands["query"].shape[1], operands["key"].shape[1]
        if case.bias == "BIAS":
            bias = self.views["bias"][q][..., :s].astype(float)
            operands["bias"] = np.swapaxes(bias, 0, 1)[None]
        if case.bias == "ALIBI":
            operands["alibi_slopes"] = self.views["bias"][index][None].astype(float)
        keep = None
        if case.dropout:
            shape = (index + 1, case.heads, t, s)
            keep = self.emulator.keep(RNG_STATE, case.dropout, shape)[index:]
        left, right = (None if x < 0 else x for x in case.window)
        bottom_right = case.mask == "BOTTOM_RIGHT" or (
            case.bias == "ALIBI" and case.mask == "NO_MASK"
        )
        options = options_with(
            operands=tuple(operands),
            scale=float(np.float32(0.3)),
            causal_alignment="bottom_right" if bottom_right else "top_left",
            window=(left, right),
            logits_soft_cap=case.soft_cap or None,
            dropout_rate=float(np.float32(case.dropout)),
        )
        found = {name: x[0] for name, x in reference(options, operands, keep).items()}
        if case.bias == "ALIBI" and case.window == (-1, 0):
            # CK's score is then higher by slope * (i + offset), which is constant in a row.
            offset = s - t if bottom_right else 0
            found["lse"] = found["lse"] + np.outer(self.views["bias"][index], np.arange(t) + offset)
        return found


CAUSAL: dict[str, Any] = {"window": (-1, 0)}
PACKED: dict[str, Any] = {"batch": 3, "query_lengths": (5, 3, 4), "key_lengths": (6, 7, 2)}
CASES = {
    "dense": Case(),
    "bf16": Case(dtype="bfloat16"),
    "heads first": Case(layout="bhtd"),
    "padded rows": Case(layout="padded"),
    "causal": Case(mask="TOP_LEFT", **CAUSAL),
    "causal bottom right": Case(mask="BOTTOM_RIGHT", **CAUSAL, layout="bhtd"),
    "hidden rows": Case(mask="BOTTOM_RIGHT", **CAUSAL, t=7, s=4),
    "window": Case(mask="TOP_LEFT", window=(2, 1)),
    "window bottom right": Case(mask="BOTTOM_RIGHT", window=(1, -1), t=7, s=5),
    "bias": Case(bias="BIAS"),
    "masked bias": Case(bias="BIAS", layout="padded", mask="TOP_LEFT", **CAUSAL),
    "alibi": Case(bias="ALIBI"),
    "alibi causal": Case(bias="ALIBI", mask="TOP_LEFT", **CAUSAL),
    "alibi causal bottom right": Case(bias="ALIBI", mask="BOTTOM_RIGHT", **CAUSAL),
    "alibi window": Case(bias="ALIBI", mask="TOP_LEFT", window=(2, 2), t=7, s=5),
    "alibi window bottom right": Case(bias="ALIBI", mask="BOTTOM_RIGHT", window=(2, 2), t=7, s=5),
    "dropout": Case(dropout=0.4),
    "dropout bias": Case(dropout=0.25, bias="BIAS", mask="TOP_LEFT", **CAUSAL),
    "packed": Case(**PACKED),
    "packed with gaps": Case(**PACKED, gaps=True, layout="padded"),
    "packed causal": Case(**PACKED, mask="BOTTOM_RIGHT", **CAUSAL, gaps=True),
    "packed bias": Case(**PACKED, bias="BIAS", gaps=True),
    "packed alibi": Case(**PACKED, bias="ALIBI"),
    "packed dropout": Case(**PACKED, dropout=0.3),
    "deterministic": Case(s=150, t=3, deterministic=True),
    "deterministic packed": Case(
        **PACKED | {"key_lengths": (6, 200, 2)}, deterministic=True, mask="TOP_LEFT", window=(1, 1)
    ),
    "atomic 32": Case(use_asm=True, accumulator="ATOMIC_32"),
    "atomic 32 packed": Case(**PACKED, use_asm=True, accumulator="ATOMIC_32"),
    "atomic 16": Case(dim=72, use_asm=True, accumulator="ATOMIC_16", arch="gfx950", s=150),
    "atomic 16 packed": Case(
        **PACKED, dim=72, use_asm=True, accumulator="ATOMIC_16", arch="gfx950"
    ),
    "atomic 16 direct": Case(use_asm=True, accumulator="ATOMIC_16", s=150),
}
FORWARD_CASES = CASES | {
    "soft cap": Case(soft_cap=0.7),
    "soft cap causal": Case(soft_cap=0.7, mask="TOP_LEFT", **CAUSAL),
    "no keys": Case(**PACKED | {"key_lengths": (6, 0, 2)}, gaps=True),
}
