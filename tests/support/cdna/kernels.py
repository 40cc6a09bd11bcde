"""AITER's calls on the interpreter: its own dispatch, and the machine code that it launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tests.support.aiter_dispatch import api
from tests.support.cdna.machine import AT_ONCE, Machine, Schedule, Wrong
from tests.support.emulator.native import Backward, Emulator, Forward

_DTYPES = (jnp.float16, jnp.bfloat16)
_ATOMIC_32 = 1


@dataclass
class Gpu:
    """Serves the calls of the handlers' emulator with AITER's dispatch and the interpreter."""

    dispatch: api.Library
    machine: Machine
    emulator: Emulator
    schedule: Schedule = AT_ONCE
    ran: list[str] = field(default_factory=list)
    """The files of ASM's kernels, and "ck" for a call that is CK's, in the order of their calls."""
    instructions: int = 0
    conflicts: list[str] = field(default_factory=list)

    def serve(self, call: ctypes.Structure) -> str | None:
        """Run a call's kernels one after the other. Returns the sentence of a failure, or "".

        None if they are CK's, which hipcc would compile.
        """
        if not isinstance(call, (Forward, Backward)) or not self.dispatch.takes_asm(call):
            self.ran.append("ck")
            return None
        try:
            self._run(call)
        except Exception as error:  # ctypes would drop it
            return f"{type(error).__name__}: {error}"
        return ""

    def _run(self, call: ctypes.Structure) -> None:
        self.dispatch.take_launches()
        failure, records = self.dispatch.run(call)
        if failure:
            raise Wrong(failure)
        launches = iter(self.dispatch.take_launches())
        for record in records:
            name, *rest = record.split()
            if name == "asm":
                path = Path(rest[1])
                self._run_kernel(path, *next(launches))
                self.ran.append(path.stem)
            else:
                _CK_KERNELS[record](call)

    def buffers(self) -> list[tuple[int, int]]:
        """The start and the bytes of all that the call in progress may touch: XLA's buffers."""
        return self.emulator.noted_buffers()

    def _run_kernel(self, path: Path, sizes: Sequence[int], arguments: bytes) -> None:
        x, y, z, threads = sizes
        kernel, code = self.machine.load(path)
        result = self.machine.run(
            kernel, code, grid=(x, y, z), threads=threads, arguments=arguments,
            buffers=self.buffers(), schedule=self.schedule,
        )  # fmt: skip
        self.instructions += result.instructions
        self.conflicts += result.conflicts


def _dot_do_o(backward: ctypes.Structure) -> None:
    """softmax_d, the sum of out and its gradient over the head dim, as CK's kernel computes it."""
    call = backward.call
    out = _at(backward.out, _DTYPES[call.dtype], _shape(call, call.head_dim_v), (
        call.batch_stride_out, call.stride_out, call.nhead_stride_out))  # fmt: skip
    grad = _at(backward.out_grad, _DTYPES[call.dtype], _shape(call, call.head_dim_v), (
        backward.batch_stride_out_grad, backward.stride_out_grad, backward.nhead_stride_out_grad,
    ))  # fmt: skip
    sums = _at(backward.softmax_d, np.float32, _shape(call), (
        call.batch_stride_lse, 1, call.nhead_stride_lse))  # fmt: skip
    sums[...] = (out.astype(np.float32) * grad.astype(np.float32)).sum(-1)


def _convert_dq(backward: ctypes.Structure) -> None:
    """The gradient of query, rounded from its float32 sums."""
    call = backward.call
    if backward.accumulator != _ATOMIC_32:
        raise NotImplementedError(f"accumulator {backward.accumulator}")
    sums = _at(backward.dq_acc, np.float32, _shape(call, call.head_dim), (
        backward.batch_stride_dq_acc, backward.stride_dq_acc, backward.nhead_stride_dq_acc,
    ))  # fmt: skip
    dq = _at(backward.dq, _DTYPES[call.dtype], _shape(call, call.head_dim), (
        backward.batch_stride_dq, backward.stride_dq, backward.nhead_stride_dq))  # fmt: skip
    dq[...] = sums


_CK_KERNELS = {"dot_do_o": _dot_do_o, "convert_dq": _convert_dq}
"""Kernels of CK's around ASM's backward pass. They are no code objects of the wheel."""


def _shape(call: ctypes.Structure, *head_dim: int) -> tuple[int, ...]:
    """[batch, rows, heads, head dim]; packed rows are those of one batch entry."""
    return (1 if call.is_group else call.batch, call.seq_len_q, call.num_heads, *head_dim)


def _at(address: int, dtype: type, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The array at an address; strides count elements, and the head dim is contiguous."""
    steps = (*strides, 1)[: len(shape)]
    size = np.dtype(dtype).itemsize
    last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = (ctypes.c_char * ((last + 1) * size)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=[step * size for step in steps])
