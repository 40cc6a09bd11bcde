"""Compile FlashAttention-4's kernels for a wheel: build_fa4_library.py FOLDER [--python PATH]

CMake runs this if ATTN_DISPATCH_FA4 is on. FOLDER gets the library, and in `licenses` the licences
of the kernels' sources, which have to accompany it. This is `attn-dispatch build-fa4`, with the
same cache.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path

DISPATCH = Path(__file__).resolve().parents[1] / "dispatch"


def _prepare_imports() -> None:
    """Let modules of this checkout be imported without attn_dispatch.fa4's __init__, which imports
    JAX: wheels are built without it."""
    sys.path.insert(0, str(DISPATCH))
    # Before the finders of editable installations, which may be of another checkout.
    sys.meta_path.insert(0, PathFinder)
    package = types.ModuleType("attn_dispatch.fa4")
    package.__path__ = [str(DISPATCH / "attn_dispatch" / "fa4")]
    sys.modules[package.__name__] = package


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="the Python for the compiler's environment")
    args = parser.parse_args()
    _prepare_imports()

    from attn_dispatch.fa4 import folder as fa4_folder
    from attn_dispatch_tools.build_fa4 import command, environment
    from attn_dispatch_tools.terminal.building import BuildError

    args.folder.mkdir(parents=True, exist_ok=True)
    library = args.folder.resolve() / fa4_folder.LIBRARY
    try:
        inside = environment.made(fa4_folder.cache(), args.python)
        command.build(library, command.chosen(), command.default_jobs(), args.python)
        licences = environment.licences(inside)
    except BuildError as error:
        sys.exit(f"FlashAttention-4's kernels: {error}")
    target = args.folder / "licenses"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for package, files in licences.items():
        (target / package).mkdir()
        for file in files:
            shutil.copy(file, target / package)


if __name__ == "__main__":
    main()
