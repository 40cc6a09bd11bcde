"""The names of targets as people write them: "h100", "sm_90a", "MI300X"."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from attn_dispatch.choices import did_you_mean

PRODUCTS = {
    "a100": ("sm80", "NVIDIA A100"),
    "l4": ("sm89", "NVIDIA L4"),
    "l40": ("sm89", "NVIDIA L40"),
    "l40s": ("sm89", "NVIDIA L40S"),
    "rtx4090": ("sm89", "NVIDIA GeForce RTX 4090"),
    "h100": ("sm90", "NVIDIA H100"),
    "h200": ("sm90", "NVIDIA H200"),
    "gh200": ("sm90", "NVIDIA GH200"),
    "b200": ("sm100", "NVIDIA B200"),
    "gb200": ("sm100", "NVIDIA GB200"),
    "b300": ("sm103", "NVIDIA B300"),
    "gb300": ("sm103", "NVIDIA GB300"),
    "rtx5090": ("sm120", "NVIDIA GeForce RTX 5090"),
    "mi300": ("gfx942", "AMD Instinct MI300"),
    "mi300a": ("gfx942", "AMD Instinct MI300A"),
    "mi300x": ("gfx942", "AMD Instinct MI300X"),
    "mi325x": ("gfx942", "AMD Instinct MI325X"),
    "mi350": ("gfx950", "AMD Instinct MI350"),
    "mi350x": ("gfx950", "AMD Instinct MI350X"),
    "mi355x": ("gfx950", "AMD Instinct MI355X"),
}
"""Name without spaces, in lower case → (arch, product name)."""

Target = str | Literal[
    "a100", "l4", "l40", "l40s", "rtx4090", "h100", "h200", "gh200", "b200", "gb200", "b300",
    "gb300", "rtx5090", "mi300", "mi300a", "mi300x", "mi325x", "mi350", "mi350x", "mi355x",
]  # fmt: skip
"""Any name of a target; the products are here for editors, which complete them."""

# Words that drivers and people add to a product's name: "NVIDIA H100 80GB HBM3", "A100-SXM4-40GB".
_VENDORS = ("nvidia", "amd", "geforce", "instinct")
_FORM = re.compile(r"sxm\d?|pcie|nvl|oam|\d+gb|hbm\d\w?")
_NVIDIA_ARCH = re.compile(r"(?:sm|compute)(\d{2,3})[af]?")


@lru_cache
def resolve(name: str) -> tuple[str, str | None]:
    """(arch, product) of a name; the product is None if the name is an arch's or unknown.

    Case, spaces, hyphens and underscores are ignored, and so are a vendor's name, a form factor and
    a memory size beside a product, and the letter of "sm_90a".
    """
    short = _short(name)
    if found := _NVIDIA_ARCH.fullmatch(short):
        return f"sm{found[1]}", None
    return PRODUCTS.get(short, (short, None))


def hint(name: str, archs: list[str]) -> str:
    """The end of a message about an unknown name: the known name that is similar, or all."""
    return did_you_mean(_short(name), [*PRODUCTS, *archs]) or f"; products: {', '.join(PRODUCTS)}"


def _short(name: str) -> str:
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(x for x in words if x not in _VENDORS and not _FORM.fullmatch(x))
