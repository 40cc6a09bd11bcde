"""The CUDA library exports one symbol, so that it cannot clash with another library's symbols."""

from __future__ import annotations

import importlib
import shutil
import subprocess

import pytest

from tests.support.backend import needs_cudnn


@needs_cudnn
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, from binutils")
def test_the_modules_init_function_is_the_only_export():
    native = importlib.import_module("attn_dispatch._cuda")
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(native.__file__)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    symbols = [line.split()[-1] for line in listing.splitlines()]
    # Symbols from the standard library's templates are weak: they have no state and may be shared.
    strong = [x for x, line in zip(symbols, listing.splitlines(), strict=True) if " T " in line]
    unique = [x for x, line in zip(symbols, listing.splitlines(), strict=True) if " u " in line]
    assert strong == ["PyInit__cuda"]
    assert not [name for name in unique if "locale" in name]


@needs_cudnn
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, from binutils")
def test_the_library_has_no_symbols_that_nothing_needs():
    """They would be two fifths of its size."""
    native = importlib.import_module("attn_dispatch._cuda")
    done = subprocess.run(["nm", str(native.__file__)], capture_output=True, text=True, check=True)
    assert done.stdout == "", "a Release build is stripped"
