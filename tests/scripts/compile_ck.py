"""Compiles one of CK's kernels of each kind, for tests/cdna/test_ck.py; four minutes.

usage: python -m tests.scripts.compile_ck FOLDER

hipcc must be on PATH; any, upstream's clang too, of HIP 6 or newer. The sources are those of
build-aiter's generators in the amd-aiter wheel, for gfx942.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from attn_dispatch_tools.build_aiter import flags, generate, toolchain, wheel
from tests.support.cdna.ck import ATTENDS, KERNELS

ARCH = "gfx942"
_DEVICE_CODE = ("--offload-device-only", "--no-gpu-bundle-output", "-c")


def main() -> None:
    folder = Path(sys.argv[1]) / ARCH
    folder.mkdir(parents=True, exist_ok=True)
    found = wheel.find()
    compiler = toolchain.find(ARCH, folder)
    assert not compiler.compile_check_only, "hipcc is missing, and Debian's HIP is too old to run"
    filters = generate.Filters(KERNELS["forward"], f"*@*@{KERNELS['backward']}", ATTENDS)
    generate.generate(found, ARCH, filters, folder)
    for name, pattern in KERNELS.items():
        (source,) = folder.glob(f"*ward/{pattern}.cpp")
        options = flags.FORWARD if source.parent.name == "forward" else flags.BACKWARD
        started = time.time()
        subprocess.run(
            [*compiler.compile, *found.include_flags, *options, *_DEVICE_CODE, str(source),
             "-o", str(folder / f"{name}.co")],
            check=True,
        )  # fmt: skip
        print(f"{name}: {source.stem}, {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
