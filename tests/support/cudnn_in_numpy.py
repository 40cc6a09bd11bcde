"""cuDNN's custom calls in float64 NumPy: the contract of buffers.h, written out.

Results that a kernel leaves unspecified are NaN here: rows of no sequence, and rows without keys.
The code reads what a kernel may read: all of an array that is not packed, whatever the lengths, and
pages up to the end of a tile, as NaN past the end of the table. The kernel for decoding, with one
query and key lengths, reads no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_dispatch.cudnn.call import CudnnCall
from tests.support.nodes_in_numpy import run as run_nodes

NamedArrays = dict[str, np.ndarray]

_TILE = 128
"""Keys of pages read at a time: NaN past the end of the table made results NaN (H200, 9.19)."""


def names_of(call: CudnnCall) -> list[str]:
    """The names of the operands, in the order of buffers.h."""
    flags = ["flags_q", "flags_kv"] if call.backward else ["flags_q"]
    names = flags if call.clears_rows else []
    names += ["query", "key", "value"]
    names += ["out", "lse", "out_grad"] if call.backward else []
    options = {
        "lengths_q lengths_kv": call.has_lengths,
        "offsets_query offsets_key offsets_value offsets_out": call.is_packed,
        "offsets_lse": call.is_packed and call.has_statistics,
        "page_table": call.page_size,
        "value_table": call.has_value_table,
        "bias": call.bias_dtype,
        " ".join(f"o{i}" for i in range(_node_arrays(call))): call.node_arrays,
        "sinks": call.has_sinks,
        "seed seed_offset": call.dropout_rate,
    }
    return names + [name for some, wanted in options.items() if wanted for name in some.split()]


def _node_arrays(call: CudnnCall) -> int:
    return len(call.node_arrays.split(",")) if call.node_arrays else 0


def run(call: CudnnCall, operands: list[Any]) -> NamedArrays:
    """The results in float32, by their names in buffers.h."""
    assert call.scale > 0
    given = dict(zip(names_of(call), map(np.asarray, operands), strict=True))
    results = _Results(call)
    for b in range(call.batch):
        sequence = _Sequence(call, given, b)
        sequence.backward(results) if call.backward else sequence.forward(results)
    if call.clears_rows:
        for name in ("dq", "dk", "dv") if call.backward else ("out",):
            flags = given["flags_kv" if name in ("dk", "dv") else "flags_q"]
            rows = results.arrays[name].reshape(len(flags), -1)
            rows[flags == 0] = 0
            rows[flags == 2] = np.nan
    return {name: x.astype(np.float32) for name, x in results.arrays.items()}


def keep_mask(call: CudnnCall, seed: np.ndarray) -> np.ndarray:
    """The dropout mask, bool [B, N, T, S], True = kept."""
    shape = (call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv)
    return np.random.default_rng(seed.astype(np.uint64)).random(shape) >= call.dropout_rate


class _Results:
    """The results of a call, which are NaN until they are written."""

    def __init__(self, call: CudnnCall) -> None:
        n, k = call.num_heads, call.num_kv_heads

        def rows(side: str, *dims: int) -> np.ndarray:
            is_query = side == "q"
            packed = call.packed_rows_q if is_query else call.packed_rows_kv
            length = call.seq_len_q if is_query else call.seq_len_kv
            head_rows = call.head_rows_q if is_query else call.head_rows_kv
            if head_rows and len(dims) == 2:
                batch = packed // head_rows if call.is_packed else call.batch
                return np.full((batch, dims[0], head_rows, dims[1]), np.nan)
            leading = (packed,) if call.is_packed else (call.batch, length)
            return np.full((*leading, *dims), np.nan)

        if call.backward:
            self.arrays = {
                "dq": rows("q", n, call.head_dim),
                "dk": rows("kv", k, call.head_dim),
                "dv": rows("kv", k, call.head_dim_v),
            }
            if call.needs_dbias:
                extents = (call.bias_batch, call.bias_heads, call.seq_len_q, call.seq_len_kv)
                self.arrays["dbias"] = np.zeros(extents)
            return
        self.arrays = {"out": rows("q", n, call.head_dim_v)}
        wanted = {"lse": call.needs_lse, "row_max": call.needs_max, "row_sum": call.needs_max}
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
            unpacked = np.full((call.batch, n, call.seq_len_q), np.nan)
            self.arrays[name] = rows("q", n) if call.is_packed else unpacked
        if call.needs_keep:
            self.arrays["keep"] = np.ones((call.batch, n, call.seq_len_q, call.seq_len_kv))


@dataclass
class _Sequence:
    """Sequence `b` of a call as arrays [N, T, ·] and [N, S, ·], kv heads repeated to N."""

    call: CudnnCall
    given: NamedArrays
    b: int

    def __post_init__(self) -> None:
        call, given = self.call, self.given
        self.length_q, self.length_kv = call.seq_len_q, call.seq_len_kv
        if call.has_lengths:
            self.length_q = int(given["lengths_q"][self.b])
            self.length_kv = int(given["lengths_kv"][self.b])
        self.t = self.length_q if call.is_packed else call.seq_len_q
        self.s = self.length_kv if call.is_packed or call.decodes else call.seq_len_kv
        if call.page_size and not call.decodes:
            self.s = -(-self.s // _TILE) * _TILE
        self.groups = call.num_heads // call.num_kv_heads
        self.q = self.heads_first("query")
        self.k = self.heads_first("key").repeat(self.groups, axis=0)
        self.v = self.heads_first("value").repeat(self.groups, axis=0)
        score = call.scale * (self.q @ self.k.swapaxes(1, 2))
        i, j = np.arange(self.t)[:, None], np.arange(self.s)
        if call.score_nodes:
            score = self.with_nodes(score, i, j)
        is_hidden = score == -np.inf
        if call.bias_dtype:
            rows = slice(self.t) if call.bias_rows > 1 else slice(1)
            score = score + self.bias_of(given["bias"].astype(np.float64))[:, rows, : self.s]
        diagonal = i + (self.length_kv - self.length_q if call.bottom_right else 0)
        is_visible = (i < self.length_q) & (j < self.length_kv)
        if call.window_left >= 0:
            is_visible &= j >= diagonal - call.window_left
        if call.window_right >= 0:
            is_visible &= j <= diagonal + call.window_right
        self.is_hidden = is_visible.any(axis=-1) & ~(is_visible & ~is_hidden).any(axis=-1)
        self.score = np.where(is_visible, score, -np.inf)
        self.kept: Any = 1.0
        if call.dropout_rate:
            self.keep = keep_mask(call, given["seed"])[self.b, :, : self.t, : self.s]
            self.kept = self.keep / (1 - call.dropout_rate)

    def with_nodes(self, score: np.ndarray, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """The score after the score nodes; their results are kept in `self.nodes`."""
        every = np.broadcast_arrays(t, s, score)
        self.nodes: dict[str, Any] = {"x": score, "t": every[0], "s": every[1]}
        extents = ([int(x) for x in a.split()[1:]] for a in self.call.node_arrays.split(",") if a)
        for number, shape in enumerate(extents):
            x = self.given[f"o{number}"]
            assert x.shape == tuple(shape)
            x = x[self.b if shape[0] > 1 else 0][:, : self.t, : self.s]
            self.nodes[f"o{number}"] = x.astype(np.float64) if x.dtype == np.float32 else x
        return run_nodes(self.call.score_nodes, self.nodes)

    def forward(self, results: _Results) -> None:
        top = self.score.max(axis=2, initial=-np.inf)
        # cuDNN does not document rows without keys; but where nodes make all scores -inf, out is 0
        # and lse -inf (H200, 9.19 and 9.28, in hundreds of drawn batch rows).
        is_hidden = self.is_hidden
        top = np.where(is_hidden, 0, np.where(top == -np.inf, np.nan, top))
        weights = np.exp(self.score - top[..., None])
        total = weights.sum(axis=2) + 0 * top
        if self.call.has_sinks:
            total = total + np.exp(self.given["sinks"].astype(np.float64)[:, None] - top)
        whole = np.where(is_hidden, 1, total)
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        found = {
            "out": (weights / whole[..., None] * self.kept) @ self.v + 0 * top[..., None],
            "lse": lse,
            "row_max": np.where(is_hidden, -np.inf, top),
            "row_sum": total,
        }
        for name, array in results.arrays.items():
            if name == "keep":
                array[self.b][:, : self.t, : self.s] = self.keep
            else:
                self.put(array, found[name], "out")

    def backward(self, results: _Results) -> None:
        out, out_grad = self.heads_first("out"), self.heads_first("out_grad")
        if self.call.is_packed:
            lse = self.in_rows(self.given["lse"], "lse", self.t)[..., 0]
        else:
            lse = self.given["lse"][self.b]
        p = np.exp(self.score - lse[..., None].astype(np.float64))
        delta = (out * out_grad).sum(axis=2)[..., None]
        score_grad = p * ((out_grad @ self.v.swapaxes(1, 2)) * self.kept - delta)
        if self.call.gradient_nodes:
            raw_grad = run_nodes(self.call.gradient_nodes, self.nodes | {"g": score_grad})
        else:
            raw_grad = score_grad
        raw_grad = self.call.scale * raw_grad
        self.put(results.arrays["dq"], raw_grad @ self.k, "query")
        dk = self.sum_groups(raw_grad.swapaxes(1, 2) @ self.q)
        self.put(results.arrays["dk"], dk, "key")
        dv = self.sum_groups((p * self.kept).swapaxes(1, 2) @ out_grad)
        self.put(results.arrays["dv"], dv, "value")
        if self.call.needs_dbias:
            target = self.bias_of(results.arrays["dbias"])[:, : self.t, : self.s]
            per_head = np.where(self.score == -np.inf, 0, score_grad)
            target += per_head if target.shape[0] > 1 else per_head.sum(axis=0)

    def bias_of(self, bias: np.ndarray) -> np.ndarray:
        return bias[self.b if self.call.bias_batch > 1 else 0]

    def sum_groups(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.call.num_kv_heads, self.groups, *x.shape[1:]).sum(axis=1)

    def in_rows(self, x: np.ndarray, name: str, count: int) -> np.ndarray:
        """A view [heads, count, dim] of the sequence's rows of an array, by cuDNN's strides.

        `name` is the tensor whose offsets, heads and width apply.
        """
        call = self.call
        is_key = name in ("key", "value")
        heads = call.num_kv_heads if is_key else call.num_heads
        dims = {"query": call.head_dim, "key": call.head_dim, "lse": 1}
        dim = dims.get(name, call.head_dim_v)
        length = call.seq_len_kv if is_key else call.seq_len_q
        head_rows = call.head_rows_kv if is_key else call.head_rows_q
        if name == "lse":
            head_rows = 0
        by_head, by_row = (head_rows * dim, dim) if head_rows else (dim, heads * dim)
        first = self.b * length * heads * dim
        if call.is_packed:
            first = int(self.given[f"offsets_{name}"][self.b])
        assert x.flags.c_contiguous
        flat = x.reshape(-1)[first:]
        assert not count or (heads - 1) * by_head + (count - 1) * by_row + dim <= len(flat)
        strides = [stride * x.itemsize for stride in (by_head, by_row, 1)]
        return np.lib.stride_tricks.as_strided(flat, (heads, count, dim), strides)

    def heads_first(self, name: str) -> np.ndarray:
        x = self.given[name].astype(np.float64)
        is_key = name in ("key", "value")
        if self.call.page_size and is_key:
            # Kernels may read pages past a length, so that these must exist.
            has_own_table = name == "value" and self.call.has_value_table
            pages = x[self.given["value_table" if has_own_table else "page_table"][self.b]]
            heads, dim = self.call.num_kv_heads, x.shape[-1]
            if self.call.head_rows_kv:
                assert self.call.head_rows_kv == self.call.page_size
                pages = pages.reshape(-1, heads, self.call.page_size, dim).swapaxes(1, 2)
            rows = pages.reshape(-1, heads, dim)[: self.s]
            behind = np.full((self.s - len(rows), heads, dim), np.nan)
            return np.concatenate([rows, behind]).swapaxes(0, 1)
        name = "out" if name == "out_grad" else name
        return self.in_rows(x, name, self.s if is_key else self.t).copy()

    def put(self, target: np.ndarray, x: np.ndarray, name: str) -> None:
        """Write [heads, rows, …] to the sequence's rows; rows past its length stay NaN."""
        length = self.length_kv if name in ("key", "value") else self.length_q
        x = x[:, :length]
        if x.ndim == 2 and not self.call.is_packed:
            target[self.b][:, :length] = x
            return
        name, x = ("lse", x[..., None]) if x.ndim == 2 else (name, x)
        self.in_rows(target, name, length)[...] = x
