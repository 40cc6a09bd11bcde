"""AITER's calls on the interpreter: its own dispatch, and the machine code that it launches."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tests.support.aiter_dispatch import api
from tests.support.cdna import defects
from tests.support.cdna.code_object import read
from tests.support.cdna.machine import AT_ONCE, Machine, Schedule, Wrong
from tests.support.emulator.native import Backward, Emulator, Forward

MI300, MI308 = "MI300", "MI308"
"""The boards of gfx942, whose forward kernels are different files of the same name."""
Buffers = Sequence[tuple[int, int]]
"""The start and the bytes of each."""
_DTYPES = (jnp.float16, jnp.bfloat16)
_ATOMIC_32 = 1


@dataclass
class Gpu:
    """Serves the calls of the handlers' emulator with AITER's dispatch and the interpreter."""

    dispatch: api.Library
    machine: Machine
    emulator: Emulator
    schedule: Schedule = AT_ONCE
    files: Mapping[str, Path] = field(default_factory=dict)
    """The files of kernels by name, where AITER is given a fat binary and HIP no file."""
    ran: list[str] = field(default_factory=list)
    """The files of ASM's kernels, and "ck" for a call that is CK's, in the order of their calls."""
    board: str = MI300
    waits: bool = False
    """Whether data is late too in kernels that are known not to wait for it."""
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
                path = on_board(self.files.get(rest[0]) or Path(rest[1]), self.board)
                self.run_kernel(path, *next(launches))
                self.ran.append(path.stem)
            else:
                _CK_KERNELS[record](call, self.buffers())

    def buffers(self) -> list[tuple[int, int]]:
        """The start and the bytes of all that the call in progress may touch: XLA's buffers."""
        return self.emulator.noted_buffers()

    def run_kernel(
        self, path: Path, sizes: Sequence[int], arguments: bytes, part: str = ""
    ) -> None:
        """Run a launch of a grid, x, y and z, of workgroups of so many threads.

        Of several kernels in the file it is that with `part` in its name.
        """
        x, y, z, threads = sizes
        kernel, code = self.machine.load(path, part)
        result = self.machine.run(
            kernel, code, grid=(x, y, z), threads=threads, arguments=arguments,
            buffers=self.buffers(), schedule=self.schedule_of(path),
        )  # fmt: skip
        self.instructions += result.instructions
        self.conflicts += [f"{path.stem}: {x}" for x in result.conflicts]

    def schedule_of(self, path: Path) -> Schedule:
        """The order of events in a kernel."""
        lacks_wait = not self.waits and defects.known("wait", path.parts[-3], path.stem)
        return AT_ONCE if lacks_wait else self.schedule


def files_by_name(folder: Path) -> dict[str, Path]:
    """The code objects of attention in a folder, by the names of their kernels; not MI308's."""
    paths = sorted(folder.glob("fmha_v3_*/**/*.co"))
    return {read(x).name: x for x in paths if x.parent.name != MI308}


def on_board(path: Path, board: str) -> Path:
    """The file that a board of gfx942 loads in place of MI300's."""
    return path.parent.parent / board / path.name if path.parent.name == MI300 else path


def _dot_do_o(backward: ctypes.Structure, buffers: Buffers) -> None:
    """softmax_d, the sum of out and its gradient over the head dim, as CK's kernel computes it."""
    call = backward.call
    out, grad = (
        _array(backward, x, _DTYPES[call.dtype], call.head_dim_v, buffers)
        for x in ("out", "out_grad")
    )
    shape = (_batch(call), call.num_heads, call.seq_len_q)
    strides = (call.batch_stride_lse, call.nhead_stride_lse, 1)
    sums = _at(backward.softmax_d, np.float32, shape, strides, buffers)
    sums[...] = (out.astype(np.float32) * grad.astype(np.float32)).sum(-1).transpose(0, 2, 1)


def _convert_dq(backward: ctypes.Structure, buffers: Buffers) -> None:
    """The gradient of query, rounded from its float32 sums."""
    call = backward.call
    if backward.accumulator != _ATOMIC_32:
        raise NotImplementedError(f"accumulator {backward.accumulator}")
    dq = _array(backward, "dq", _DTYPES[call.dtype], call.head_dim, buffers)
    dq[...] = _array(backward, "dq_acc", np.float32, call.head_dim, buffers)


_CK_KERNELS = {"dot_do_o": _dot_do_o, "convert_dq": _convert_dq}
"""Kernels of CK's around ASM's backward pass. They are no code objects of the wheel."""


def _batch(call: ctypes.Structure) -> int:
    return 1 if call.is_group else call.batch


def _array(
    struct: ctypes.Structure, name: str, dtype: type, head_dim: int, buffers: Buffers
) -> np.ndarray:
    """An array [batch, rows, heads, head dim]; packed rows are those of one batch entry."""
    call = struct.call
    shape = (_batch(call), call.seq_len_q, call.num_heads, head_dim)
    fields = [f"{axis}stride_{name}" for axis in ("batch_", "", "nhead_")]
    strides = [getattr(struct if hasattr(struct, x) else call, x) for x in fields]
    return _at(getattr(struct, name), dtype, shape, (*strides, 1), buffers)


def _at(
    address: int, dtype: type, shape: Sequence[int], strides: Sequence[int], buffers: Buffers
) -> np.ndarray:
    """The array at an address, which must be in one buffer; strides count elements."""
    size = np.dtype(dtype).itemsize
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    end = address + (last + 1) * size
    if not any(start <= address and end <= start + length for start, length in buffers):
        raise Wrong(f"an array of CK's, {end - address} bytes at {address:#x}, is in no buffer")
    memory = (ctypes.c_char * ((last + 1) * size)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=[step * size for step in strides])
