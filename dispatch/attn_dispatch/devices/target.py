"""The target, the device to plan for, which need not be present, and its names as people write
them: "h100", "sm_90a", "MI300X"."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal, TypeGuard, cast

from attn_dispatch import settings
from attn_dispatch.choices import did_you_mean
from attn_dispatch.devices import aiter_versions
from attn_dispatch.devices.device import UNKNOWN_ARCH, Device, Platform
from attn_dispatch.files import reading
from attn_dispatch.text import error_text
from attn_dispatch.typed_jax import JaxDevice, local_devices

CPU = Device("cpu", "cpu", "CPU")
_XLA_ONLY = {"cpu": CPU, "tpu": Device("other", "tpu", "TPU", is_present=False)}

_AMD_NAMES = {"gfx942": "AMD Instinct MI300", "gfx950": "AMD Instinct MI350"}


def target(*targets: Target) -> settings.Block:
    """Plan calls for these devices within the block, whether they are present or not.

    For example, to lower a program for an H100 on a machine without a GPU:

        with attn_dispatch.target("h100"):
            lowered = jax.jit(step).trace(q, k, v).lower(lowering_platforms=("cuda",))

    Args:
      targets: at most one for each platform. A product ("h100", "b200", "rtx5090", "mi300x", …), or
        an architecture: "sm80", "sm89", "sm90", "sm100", "sm103" and "sm120" mean an A100, L40S,
        H200, B200, B300 and RTX 5090, and "gfx942" and "gfx950" an MI300 and MI350. Other products
        of an architecture are planned with the same properties. "cpu" and "tpu" leave every call to
        XLA. For any other NVIDIA GPU, give cuDNN's device properties, as JSON or as the path of a
        JSON file. "mi300x:aiter0.1.20" names the version of AITER to plan for as well; without it
        that is the one that is built here, or else 0.1.7. The environment variable
        ATTN_DISPATCH_TARGET (comma-separated) does the same outside such blocks.

    Raises:
      ValueError: for an unknown target, or two for one platform.
    """
    _by_platform(targets)
    return settings.Block("target", {"targets": targets})


def device_for(platform: str) -> Device:
    """The device that calls are planned for when lowering for this JAX platform."""
    named = _by_platform(settings.current().targets)
    if platform in named:
        return named[platform]
    if platform == "cuda":
        return _present_nvidia()
    if platform == "rocm":
        return _present_amd()
    return CPU if platform == "cpu" else Device("other", platform, platform.upper())


def targets_to_check(platform: str) -> list[Device]:
    """The targets that must be able to run the calls of a program lowered for another platform.

    Under `fallback("error")`, a program that is lowered for a platform without a target is checked
    for the targets in force too: so a test on a CPU fails if a call would fall back on the target.
    """
    current = settings.current()
    if current.fallback != "error" or not current.targets:
        return []
    named = _by_platform(current.targets)
    return [] if platform in named else list(named.values())


def default_device() -> Device:
    """The target if exactly one is named, else JAX's default device."""
    named = _by_platform(settings.current().targets)
    if len(named) == 1:
        return next(iter(named.values()))
    return device_for(platform_of(local_devices()[0]))


def device_to_explain(name: str) -> Device:
    """`default_device` for the public function of this name.

    Raises:
      ValueError: several targets are in force.
    """
    if len(targets := settings.current().targets) > 1:
        raise ValueError(
            f"{name}: expected one target, got {targets} in force (remedy: pass "
            f"target={targets[0]!r})"
        )
    return default_device()


def platform_of(device: JaxDevice) -> str:
    """A device's platform by lowering's name. JAX calls the platform of both vendors "gpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def local_nvidia_ordinals() -> list[int]:
    """The driver's numbers of the GPUs that JAX uses in this process, not of all in the machine."""
    return [device.local_hardware_id for device in _local_devices("cuda")]


def parse(name: str) -> Device:
    """The device that a target names; see `target`.

    Raises:
      ValueError: for an unknown target.
    """
    if not isinstance(name, str):
        raise ValueError(f"target: expected a name like 'h100', got {name!r}")
    if name.lstrip().startswith("{"):
        return _nvidia(name)
    if name.endswith(".json") and (properties := _properties_in_file(name)) is not None:
        return _nvidia(properties, f"{name} with ")
    known = _known_nvidia()
    gpu, version = aiter_versions.named(name) if ":" in name else (name, "")
    arch, product = resolve(gpu)
    if arch in _AMD_NAMES:
        library = ("AITER", version) if version else None
        gpu_name = product or _AMD_NAMES[arch]
        return Device("rocm", arch, gpu_name, is_present=False, library=library)
    if version:
        amd = ", ".join(_AMD_NAMES)
        raise ValueError(
            f"target: expected an AMD GPU ({amd}) before AITER's version, got {name!r}"
        )
    if arch in _XLA_ONLY:
        return _XLA_ONLY[arch]
    if arch in known:
        device = _known_device(arch)
        # "NVIDIA A100" matches the "NVIDIA A100-SXM4-80GB"; "NVIDIA L40" must not match the L40S.
        if product is None or re.match(rf"{product}\b", device.name):
            return device
        return replace(device, name=product, properties_of=device.name)
    archs = [*known, *_AMD_NAMES, *_XLA_ONLY]
    raise ValueError(
        f"target: expected a product like 'h100' or 'mi300x', one of {archs}, or "
        f"cuDNN's device properties as a JSON text or the path of an existing .json file; got "
        f"{name[:200]!r}{hint(name, archs)}"
    )


def _by_platform(targets: tuple[str, ...]) -> dict[Platform, Device]:
    devices: dict[Platform, Device] = {}
    for device in map(parse, targets):
        if device.platform in devices:
            raise ValueError(
                f"target: expected at most one per platform, got {devices[device.platform].arch} "
                f"and {device.arch}"
            )
        devices[device.platform] = device
    return devices


@lru_cache
def _known_nvidia() -> dict[str, Path]:
    folder = resources.files("attn_dispatch.devices") / "targets"
    files = (Path(str(file)) for file in folder.iterdir() if file.name.endswith(".json"))
    return {file.stem: file for file in sorted(files, key=lambda f: int(f.stem[2:]))}


@lru_cache
def _known_device(arch: str) -> Device:
    return _nvidia(_known_nvidia()[arch].read_text())


def _properties_in_file(name: str) -> str | None:
    """The text of the file; None if it does not exist."""
    try:
        return reading.text(Path(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"target: {error_text(error)}") from error


_OLDEST, _NEWEST = 10, 99_999
"""Bounds of deviceVer, which is ten times the number in an architecture's name."""


def _nvidia(properties: str, where: str = "") -> Device:
    try:
        value = reading.json_value(properties)
        facts = reading.as_object(value)
        if facts is None:
            raise ValueError(f"expected an object, got {type(value).__name__}")
        version = facts.get("deviceVer")
        name = facts.get("deviceName", "NVIDIA GPU")
        if not _is_count(version) or not _OLDEST <= version <= _NEWEST:
            raise ValueError(f"expected a whole number like 900 as deviceVer, got {version!r}")
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"expected a name as deviceName, got {name!r}")
        for key, value in facts.items():
            counts = cast("list[object]", value) if isinstance(value, list) else [value]
            if key != "deviceName" and not all(map(_is_count, counts)):
                raise ValueError(f"expected whole numbers from 0 to 2^63 as {key}, got {value!r}")
    except ValueError as error:
        raise ValueError(
            "target: expected cuDNN's device properties, a JSON object with deviceVer; "
            f"got {where}{properties[:80]!r} ({str(error)[:200]})"
        ) from error
    return Device("cuda", f"sm{version // 10}", name, properties, is_present=False)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _present_nvidia() -> Device:
    devices = _local_devices("cuda")
    if not devices:
        return Device("cuda", UNKNOWN_ARCH, "an NVIDIA GPU", is_present=False)
    device = devices[0]
    major, minor = str(device.compute_capability).split(".")
    arch = f"sm{major}{minor}"
    return Device("cuda", arch, device.device_kind, ordinal=device.local_hardware_id)


def _present_amd() -> Device:
    devices = _local_devices("rocm")
    if not devices:
        return Device("rocm", UNKNOWN_ARCH, "an AMD GPU", is_present=False)
    device = devices[0]
    # In "gfx942:sramecc+:xnack-" kernels depend on the first part alone.
    arch = str(getattr(device, "compute_capability", UNKNOWN_ARCH)).split(":")[0]
    return Device("rocm", arch, device.device_kind)


def _local_devices(backend: str) -> list[JaxDevice]:
    """JAX's devices in this process; empty if JAX has no such backend."""
    try:
        return local_devices(backend)
    except RuntimeError:
        return []


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
