"""Runs the cases of test_emulator.py on an NVIDIA GPU.

usage: PYTHONPATH=dispatch python -m tests.scripts.emulator_on_nvidia [LIBRARY]

If no library is given, the script builds it with nvcc.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

from tests.rocm_backend import test_emulator
from tests.support.emulator import build, cases
from tests.support.emulator.native import Emulator

_ARENA_BYTES = 1 << 30


class OnGpu(Emulator):
    """The emulator in memory that a GPU reaches; it waits for every call to finish."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.library.attn_emulator_cuda_memory.restype = ctypes.c_void_p
        self.library.attn_emulator_cuda_wait.restype = ctypes.c_char_p
        start = self.library.attn_emulator_cuda_memory(ctypes.c_int64(_ARENA_BYTES))
        if start is None:
            raise RuntimeError("no memory on a GPU: is there one?")
        self._arena = np.ctypeslib.as_array((ctypes.c_uint8 * _ARENA_BYTES).from_address(start))
        self._used = 0

    def run(self, call: ctypes.Structure) -> None:
        super().run(call)
        outcome = self.library.attn_emulator_cuda_wait().decode()
        if outcome != "no error":
            raise RuntimeError(outcome)

    def place(self, array: np.ndarray) -> np.ndarray:
        first = self._used
        self._used += -(-array.nbytes // 256) * 256
        placed = self._arena[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed


def main() -> None:
    emulator = OnGpu(sys.argv[1] if len(sys.argv) > 1 else build.cuda_library())
    cases.place = emulator.place
    for name in cases.FORWARD_CASES:
        test_emulator.test_the_forward_pass_agrees_with_the_reference(emulator, name)
    for name in cases.CASES:
        test_emulator.test_the_backward_pass_agrees_with_the_reference(emulator, name)
    test_emulator.test_sequences_without_keys_or_queries_show_the_bugs_of_dev18(emulator)
    test_emulator.test_rows_hidden_by_bias_alone_are_nan(emulator)
    print(f"{len(cases.FORWARD_CASES)} forward and {len(cases.CASES)} backward")


if __name__ == "__main__":
    main()
