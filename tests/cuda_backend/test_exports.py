"""The CUDA library offers the process one symbol, so that nothing of it can be mistaken."""

from __future__ import annotations

import importlib
import shutil
import subprocess

import pytest

from tests.support.backend import needs_cudnn


@needs_cudnn
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm, of binutils, lists symbols")
def test_only_the_module_is_exported():
    native = importlib.import_module("attn_dispatch._cuda")
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(native.__file__)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    symbols = [line.split()[-1] for line in listing.splitlines()]
    # What templates of the standard library leave behind is weak and may be shared: no state.
    strong = [x for x, line in zip(symbols, listing.splitlines(), strict=True) if " T " in line]
    unique = [x for x, line in zip(symbols, listing.splitlines(), strict=True) if " u " in line]
    assert strong == ["PyInit__cuda"]
    assert not [name for name in unique if "locale" in name]
