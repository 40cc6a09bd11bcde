"""The device a call runs on or is planned for, present or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Platform = Literal["cuda", "rocm", "cpu", "other"]

UNKNOWN_ARCH = "unknown"
"""The arch of a device that is neither here nor named as a target."""


@dataclass(frozen=True)
class Device:
    """One kind of device, as far as choosing and planning a kernel needs to know it."""

    platform: Platform
    arch: str
    """"sm90", "gfx942", "cpu", …"""
    name: str
    """What a person calls it: "NVIDIA H200"."""
    properties: str | None = None
    """NVIDIA, of a device that is not here: cuDNN's device properties as JSON, which are everything
    that planning asks of a device."""
    ordinal: int | None = None
    """NVIDIA, of a device that is here: the driver's number of it in this process."""
    is_present: bool = True
    properties_of: str | None = None
    """NVIDIA, of a device that is not here: which one `properties` are of, if they are another's of
    the same architecture."""

    def __str__(self) -> str:
        planned = f"planned as an {self.properties_of}" if self.properties_of else "planned for"
        where = "" if self.is_present else f", {planned}, not present"
        return f"{self.name} ({self.arch}{where})"
