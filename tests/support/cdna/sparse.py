"""Calls of AITER on arrays of many GiB, of which only the rows of a few short sequences are used.

Memory that nobody touches takes no space, so a batch row or a sequence can be anywhere. The calls
go to the adapter; XLA would need whole arrays.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.aiter_dispatch import grid
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.cdna.kernels import Gpu

GIB = 2**30
HEAD_DIM = 128
_NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE since Python 3.13
_SCALE = 0.08
_OF_QUERIES, _OF_KEYS = ("q", "out", "out_grad", "dq"), ("k", "v", "dk", "dv")


@dataclass(frozen=True)
class Far:
    """Where sequences lie: in bytes, between batch rows, rows, or starts of packed sequences."""

    batch: int = 0
    row: int = 2 * HEAD_DIM
    start: int = 0
    sequences: int = 2
    queries: int = 150
    keys: int = 140

    def rows(self, name: str) -> int:
        return self.queries if name in _OF_QUERIES else self.keys

    @property
    def is_group(self) -> bool:
        return self.start > 0

    @property
    def first_rows(self) -> list[int]:
        return [n * (self.start // self.row) for n in range(self.sequences)]

    def bytes_of(self, rows: int) -> int:
        between = self.start or self.batch
        return (self.sequences - 1) * between + (rows - 1) * self.row + 2 * HEAD_DIM


@dataclass
class _Memory:
    """Zeros that take no space."""

    size: int
    held: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self.held = mmap.mmap(-1, max(self.size, 8), flags=flags)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.held))

    def rows(self, offset: int, shape: tuple[int, ...], dtype: Any, row: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, self.held, offset, (row, size)[-len(shape) :])


class SparseCall:
    """A call, its arrays, and what must come out."""

    def __init__(self, far: Far, generation: str, *, backward: bool) -> None:
        self.far, self.backward = far, backward
        self._generation = generation
        self._longest = far.first_rows[-1] + max(far.queries, far.keys) if far.is_group else 0
        names = [*_OF_QUERIES, *_OF_KEYS] if backward else ["q", "k", "v", "out"]
        self._memory = {x: _Memory(far.bytes_of(far.rows(x))) for x in names}
        rows = self._longest or far.sequences * far.queries
        self._memory["lse"] = _Memory(4 * rows)
        if backward:
            self._memory |= {"softmax_d": _Memory(4 * rows), "dq_acc": _Memory(512 * rows)}
        if far.is_group:
            self._memory |= {"seqstart_q": _Memory(64), "seqstart_k": _Memory(64)}
        self._expected = list(self._fill())

    def _part(self, name: str, n: int) -> np.ndarray:
        """The rows of sequence n."""
        between = self.far.start or self.far.batch
        shape = (self.far.rows(name), HEAD_DIM)
        return self._memory[name].rows(n * between, shape, jnp.bfloat16, self.far.row)

    def _lse(self, n: int) -> np.ndarray:
        first = self.far.first_rows[n] if self.far.is_group else n * self.far.queries
        return self._memory["lse"].rows(4 * first, (self.far.queries,), np.float32, 4)

    def _fill(self) -> Iterator[dict[str, np.ndarray]]:
        random = np.random.default_rng(20270501)
        for n in range(self.far.sequences):
            given: dict[str, np.ndarray] = {}
            for name in ("q", "k", "v", "out_grad"):
                drawn = random.standard_normal((self.far.rows(name), HEAD_DIM)).astype(jnp.bfloat16)
                given[name] = drawn.astype(np.float32)
                if name in self._memory:
                    self._part(name, n)[...] = drawn
            expected = _attention(given)
            if self.backward:
                self._part("out", n)[...] = expected["out"].astype(jnp.bfloat16)
                self._lse(n)[...] = expected["lse"]
            yield expected
        # The last sequence ends with the arrays, and all but the first begin at their row.
        for name, rows in (("seqstart_q", self.far.queries), ("seqstart_k", self.far.keys)):
            if self.far.is_group:
                starts = [*self.far.first_rows, self.far.first_rows[-1] + rows]
                self._memory[name].rows(0, (len(starts),), np.int32, 4)[...] = starts

    def _struct(self) -> Any:
        far = self.far
        call = replace(
            grid.CALL, backward=self.backward, num_heads=1, num_kv_heads=1, is_group=far.is_group,
            batch=far.sequences, max_seq_len_q=far.queries, max_seq_len_kv=far.keys,
            seq_len_q=far.first_rows[-1] + far.queries if far.is_group else far.queries,
            seq_len_kv=far.first_rows[-1] + far.keys if far.is_group else far.keys,
            needs_lse=not self.backward,
        )  # fmt: skip
        accumulator = "atomic_32" if self.backward else "split"
        struct = struct_of(call, use_asm=True, accumulator=accumulator, generation=self._generation)
        struct.call.scale = _SCALE
        for name, memory in self._memory.items():
            owner = struct if hasattr(struct, name) else struct.call
            setattr(owner, name, memory.address)
            if name in (*_OF_QUERIES, *_OF_KEYS):
                at = struct if hasattr(struct, f"stride_{name}") else struct.call
                setattr(at, f"stride_{name}", far.row // 2)
                setattr(at, f"batch_stride_{name}", 0 if far.is_group else far.batch // 2)
        if self.backward:
            struct.dq_acc_bytes = self._memory["dq_acc"].size
        return struct

    def buffers(self) -> list[tuple[int, int]]:
        return [(x.address, x.size) for x in self._memory.values()]

    def run(self, gpu: Gpu) -> str:
        """Run the call. Returns what is wrong, or ""."""
        gpu.buffers = self.buffers
        failure = gpu.serve(self._struct())
        if failure != "":
            return failure or "not ASM"
        names = ("dq", "dk", "dv") if self.backward else ("out",)
        for n, expected in enumerate(self._expected):
            for name in names:
                error = np.abs(self._part(name, n).astype(np.float32) - expected[name]).max()
                if not error <= 0.02 * np.abs(expected[name]).max():
                    return f"{name} of sequence {n} is wrong by {error:.3g}"
        return ""


def _attention(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results, and the gradients, of one sequence."""
    q, k, v, out_grad = (given[x].astype(np.float64) for x in ("q", "k", "v", "out_grad"))
    scores = _SCALE * q @ k.T
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[:, None])
    out = p @ v
    ds = _SCALE * p * (out_grad @ v.T - (out_grad * out).sum(-1)[:, None])
    return {"out": out, "lse": lse, "dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ out_grad}
