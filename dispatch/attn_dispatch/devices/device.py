"""The device that a call runs on or is planned for, present or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Platform = Literal["cuda", "rocm", "cpu", "other"]

UNKNOWN_ARCH = "unknown"
"""The arch of a device that is neither present nor named as a target."""


@dataclass(frozen=True)
class Device:
    """One kind of device: the facts by which a kernel is chosen and planned."""

    platform: Platform
    arch: str
    """"sm90", "gfx942", "cpu", …"""
    name: str
    """The product's name: "NVIDIA H200"."""
    properties: str | None = field(default=None, repr=False)
    """NVIDIA, if the device is not present: cuDNN's device properties as JSON, which are all that
    planning needs."""
    ordinal: int | None = None
    """NVIDIA, if the device is present: the driver's number for it in this process."""
    is_present: bool = True
    properties_of: str | None = None
    """NVIDIA, if `properties` are those of another device of the same architecture: its name."""

    library: tuple[str, str] | None = None
    """AMD, if a target names it: the library to plan for, and its version: ("AITER", "0.1.20")."""

    def __str__(self) -> str:
        planned = f"planned as an {self.properties_of}" if self.properties_of else "planned for"
        if self.library:
            planned += f", with {' '.join(self.library)}"
        where = "" if self.is_present else f", {planned}, not present"
        return f"{self.name} ({self.arch}{where})"
