"""Linking compiled kernels to the library that attn_dispatch loads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch.devices import code_files
from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4 import contents, environment
from attn_dispatch_tools.build_fa4.compiling import Compiled
from attn_dispatch_tools.build_fa4.processes import run
from attn_dispatch_tools.build_fa4.sets import KernelSet

SOURCE = Path(__file__).with_name("fa4_library.c")
_KERNELS = (
    "forward", "forward_bits", "forward_sinks", "forward_bits_sinks", "preprocess", "backward",
    "backward_bits", "query_grad", "backward_grouped", "backward_bits_grouped", "key_value_grad",
    "tangent", "tangent_bits", "wide_forward", "wide_forward_causal", "wide_key_grads",
    "wide_key_grads_causal", "wide_query_grad", "wide_query_grad_causal",
)  # fmt: skip
"""The kernels in the order of AttnFa4Set (fa4_library.h)."""

_ONE_EXPORT = "{ global: attn_dispatch_fa4_library; local: *; };\n"
_LINK_SECONDS = 300


def link(sets: Sequence[Compiled], target: Path) -> None:
    """Make the library. Processes with an older one open are not disturbed.

    Args:
      sets: what is in the library, compiled for one host.
      target: the file.
    """
    compiler = sets[0].host.compiler()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work_name:
        work = Path(work_name)
        (work / "sets.inc").write_text(table(sets), encoding="utf-8")
        (named := work / "contents.c").write_text(
            contents.source(x.set for x in sets), encoding="utf-8"
        )
        (work / "exports.map").write_text(_ONE_EXPORT, encoding="utf-8")
        draft = work / target.name
        command = [
            compiler, "-shared", "-O2", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden",
            f"-I{work}", SOURCE, named, *(y for x in sets for y in x.objects), "-o", draft,
            f"-Wl,-soname,{fa4_folder.LIBRARY}", "-Wl,-z,defs", "-Wl,-z,noexecstack", "-s",
            # After -Wl, a comma in a folder's name would end the argument.
            "-Xlinker", "--version-script", "-Xlinker", work / "exports.map",
        ]  # fmt: skip
        run(command, what=f"linking {target.name}", seconds=_LINK_SECONDS)
        code_files.deny_others(draft)
        draft.replace(target)


def table(sets: Sequence[Compiled]) -> str:
    """The lines of sets.inc."""
    kinds = {x.set.is_wide for x in sets}
    versions = environment.versions(has_narrow=False in kinds, has_wide=True in kinds)
    return "\n".join([f'#define VERSIONS "{versions}"', *map(_line, sets)]) + "\n"


def _line(compiled: Compiled) -> str:
    kernels, symbols = compiled.set, compiled.symbols
    listed = " ".join(
        f'KERNEL({kernels.name}_{x}, "{symbols[x]}")' if x in symbols else f"NO_KERNEL({x})"
        for x in _KERNELS
    )
    dims = f"{kernels.head_dim}, {kernels.head_dim_v}"
    facts = f'"{kernels.name}", "{kernels.arch}", "{kernels.dtype}", {dims}, {_tiles(kernels)}, '
    facts += _variant(kernels)
    return f"SET({facts}, {listed})"


def _variant(kernels: KernelSet) -> str:
    found = kernels.variant
    texts = ("", "", "") if found is None else (found.digest, found.name, found.types)
    # A text in JSON is one in C, but for characters beyond ASCII.
    return f"VARIANT({', '.join(json.dumps(x.encode('ascii', 'replace').decode()) for x in texts)})"


def _tiles(kernels: KernelSet) -> str:
    forward, backward = kernels.forward, kernels.backward
    sizes = (forward.tile_m, forward.tile_n, backward.tile_m, backward.tile_n, backward.subtiles)
    return f"TILES({', '.join(map(str, (*sizes, *kernels.tangent_tiles)))})"
