"""What is wrong with AITER's ASM kernels, as far as it is known; docs/proof.md describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["barrier", "wait"]


@dataclass(frozen=True)
class Defect:
    kind: Kind
    arch: str
    kernels: str
    """A pattern of the names of kernels, in all releases that have them."""
    cycles: int
    """The fewest between two conflicting accesses in times like hardware's; 0: none is allowed."""


DEFECTS = (
    # LDS is overwritten with no barrier after another wave's reads.
    Defect("barrier", "gfx950", r"bwd_hd128_\w+_causal_(br_)?a(16|32)_psskddv(_group)?", 1500),
    Defect("barrier", "gfx950", r"fwd_hd128_bf16_causal(_group)?", 3000),
    Defect("barrier", "gfx950", r"fwd_hd192_hd128_bf16(_causal)?(_group)?", 600),
    # Data read from LDS is stored after a barrier alone, with no s_waitcnt.
    Defect("wait", "gfx942", r"bwd_hd\d+_dq_convert_\w+", 0),
)


def known(kind: Kind, arch: str, kernel: str) -> Defect | None:
    return next(
        (
            x
            for x in DEFECTS
            if (x.kind, x.arch) == (kind, arch) and re.fullmatch(x.kernels, kernel)
        ),
        None,
    )


def unknown_conflicts(arch: str, conflicts: Iterable[str]) -> list[str]:
    """The conflicts, "KERNEL: ... N cycles apart", that no defect explains: in other kernels, or
    closer to each other."""
    found: list[str] = []
    for line in conflicts:
        kernel, text = line.split(": ", 1)
        defect = known("barrier", arch, kernel)
        cycles = re.search(r"(\d+) cycles apart", text)
        if defect is None or (cycles and int(cycles[1]) < defect.cycles):
            found.append(line)
    return found
