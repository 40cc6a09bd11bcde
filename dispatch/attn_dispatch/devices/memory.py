"""The amount of memory of a device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from attn_dispatch.devices.device import Device
from attn_dispatch.typed_jax import local_devices

_GIB = 2**30

_GIB_BY_PRODUCT = {
    "A100": 80,
    "L4": 22,
    "L40": 45,
    "L40S": 45,
    "RTX 4090": 24,
    "H100": 80,
    "H200": 139,
    "GH200": 95,
    "B200": 179,
    "GB200": 184,
    "B300": 268,
    "GB300": 268,
    "RTX 5090": 32,
    "MI300": 128,
    "MI300A": 128,
    "MI300X": 192,
    "MI325X": 256,
    "MI350": 288,
    "MI350X": 288,
    "MI355X": 288,
}
"""GiB by product name: the usual size of a product with several, the smallest size of a series."""

_UNKNOWN = 40 * _GIB
"""The assumed memory of an unknown device."""


@lru_cache
def memory_bytes(device: Device) -> int:
    """The device's memory in bytes, from its name or its properties.

    All processes must get the same number, or the programs of many devices would differ. So free
    memory, and the memory that JAX has reserved, do not count.
    """
    # In "GH200 480GB" the number is the CPU's memory.
    found = re.search(r"(\d+) ?GB", device.name)
    if found and "GH200" not in device.name:
        return int(found[1]) * _GIB
    products = sorted(_GIB_BY_PRODUCT, key=len, reverse=True)
    named = next((x for x in products if re.search(rf"\b{x}\b", device.name)), None)
    if named is not None:
        return _GIB_BY_PRODUCT[named] * _GIB
    if device.properties is not None:
        size = json.loads(device.properties).get("totalGlobalMem")
        if isinstance(size, int) and size > 0:
            return size
    return _reported(device) or _UNKNOWN


def _reported(device: Device) -> int:
    """The bytes that JAX may allocate on a device that is present; 0 if JAX does not report it."""
    if not device.is_present or device.platform not in ("cuda", "rocm"):
        return 0
    try:
        here = local_devices(device.platform)
        stats: Mapping[str, int] | None = here[0].memory_stats() if here else None
    except (RuntimeError, NotImplementedError):
        return 0
    return int((stats or {}).get("bytes_limit", 0))
