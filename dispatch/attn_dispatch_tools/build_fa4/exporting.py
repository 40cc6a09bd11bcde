"""The program's part that both exporters share: export_kernels.py, export_wide_kernels.py.

It uses nothing of the environment that it does not import itself, as the DSL reads the architecture
when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

VECTOR = 16
"""Bytes to which the arrays that TMA and vector instructions read are aligned."""

_ARCHS = {"sm90": "sm_90a", "sm100": "sm_100a"}


def hide_package_code(name: str) -> None:
    """Lets submodules of a package be imported without its __init__."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package


def arguments() -> tuple[Path, dict, str]:
    """FOLDER, SET and HOST of the command line. The DSL will compile for the set's architecture."""
    folder, given, host = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    os.environ["CUTE_DSL_ARCH"] = _ARCHS[given["arch"]]
    return folder, given, host


def tensor(kind, shape, align):
    """A dense array whose shape and strides, but for constant extents, are known at run time."""
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)


def export(kernels: object, folder: Path, given: dict, host: str) -> None:
    """Compile the set's kernels: the method of each name returns a function and its arrays."""
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.base_dsl.compiler import HostTarget
    from cutlass.cute.runtime import make_fake_stream

    symbols = {}
    options = (cute.GPUArch(_ARCHS[given["arch"]]), HostTarget(host))
    for name in given["kernels"]:
        function, arrays = getattr(kernels, name)()
        compiled = cute.compile[options](function, *arrays, Float32(1), make_fake_stream())
        prefix = f"{given['name']}_{name}"
        compiled.export_to_c(file_path=str(folder), file_name=name, function_prefix=prefix)
        header = (folder / f"{name}.h").read_text()
        (symbols[name],) = set(re.findall(rf"\b_mlir_{prefix}__mlir_ciface_\w+", header))
        print(name, flush=True)
    (folder / "symbols.json").write_text(json.dumps(symbols))
