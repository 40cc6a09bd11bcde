"""Runs one generator script of the wheel: run_generator.py ARCH[;ARCH...] SCRIPT ARGUMENTS...

This is a separate program because it changes modules that the script imports.
"""

from __future__ import annotations

import fnmatch
import re
import runpy
import sys
import types
from pathlib import Path

# Kernels that this project never calls, half of all: those that return dropout masks, those for
# 8-bit floats, and those that skip short sequences.
_NEVER_CALLED = re.compile("_storerandval_|_fp8|_skip_")

# Split-KV kernels are called with key lengths, so they must pad keys, and not for packed sequences
# (groups). Kernels that do not pad query rows are no faster for the few rows that there are.
_NEVER_CALLED_SPLIT_KV = re.compile("_group_|_bias_|_vr_(?!pssk)|_unused_(?!ps)")

_matches = fnmatch.fnmatch


def _matches_and_is_called(name: str, pattern: str) -> bool:
    if name.startswith("fmha_fwd_splitkv_") and _NEVER_CALLED_SPLIT_KV.search(name):
        return False
    return _matches(name, pattern) and not _NEVER_CALLED.search(f"{name}_")


def main() -> None:
    """Run the script as `python SCRIPT ARGUMENTS...` would, except for two changed modules."""
    archs, script, *arguments = sys.argv[1:]
    # CK's filters are fnmatch patterns, which cannot express what to leave out.
    fnmatch.fnmatch = _matches_and_is_called
    # AITER's chip_info would look for hipconfig, rocminfo and a GPU, although the architectures are
    # known here, and for setuptools, which environments of Python 3.12 lack.
    chip_info = types.ModuleType("chip_info")
    chip_info.__dict__["get_gfx_list"] = lambda: archs.split(";")
    sys.modules["chip_info"] = chip_info
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
