"""The `attn-dispatch info` command: what is here, what works, and what to do next."""

from __future__ import annotations

import argparse

import jax
from jaxlib.version import __version__ as JAXLIB_VERSION

from attn_dispatch import settings
from attn_dispatch._version import __version__
from attn_dispatch.core import select
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.native_libraries import cuda_majors
from attn_dispatch.devices.target import device_for, parse, platform_of
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import Commands, add_command
from attn_dispatch_tools.terminal.text import width, wrapped

_DESCRIPTION = """\
Print the devices, the vendor libraries that were found, which implementations work on the devices
and why others do not, and what to do next.
"""


def add_parser(commands: Commands, help: str) -> None:
    """Add `info` to the parser of `attn-dispatch`."""
    add_command(
        commands, "info", main,
        help=help,
        description=_DESCRIPTION, examples=("attn-dispatch info",),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Print the devices, libraries, implementations and next steps."""
    style.show(info(), _MARKS)


_MARKS = {
    r"(?m)^\w.*": style.HEADING,
    r"(?m)^  \w+ +(usable)$": style.GOOD,
    r"(?m)^  \w+ +(no:)": style.NOT,
    r"(?m)^ +\[/.*\]$": style.QUIET,
}


def info() -> str:
    """The devices, the vendor libraries with versions and paths, the state of each implementation,
    and the next steps, as text."""
    jax_devices = jax.devices()
    platforms = dict.fromkeys(platform_of(device) for device in jax_devices)
    devices = [device_for(platform) for platform in platforms]
    targets = [parse(name) for name in settings.current().targets]
    planned_for = [x for x in targets if x in devices and not x.is_present]
    versions = f"attn_dispatch {__version__}, jax {jax.__version__}, jaxlib {JAXLIB_VERSION}"
    lines = wrapped("", versions)
    lines += ["", "devices"]
    for device in jax_devices:
        lines += wrapped("  ", f"{device.id}: {device.device_kind} ({device.platform})")
    for device in planned_for:
        lines += wrapped("  ", f"planning for {device} instead")
    lines += ["", "vendor libraries"]
    for x in select.implementations():
        for line in x.library_lines():
            lines += _library(line)
    for device in devices:
        lines += ["", f"implementations on {device}"]
        for x in select.implementations():
            reason = x.unusable_reason(device)
            lines += wrapped(f"  {x.NAME:<6} ", f"no: {reason}" if reason else "usable")
    lines += ["", "next"]
    for what, command in _next(devices):
        lines += [*wrapped("  ", what), f"    {command}"]  # to copy: only the terminal may wrap it
    return "\n".join(lines)


def _library(line: str) -> list[str]:
    """An implementation's line about its library, wrapped, with the path on a separate line."""
    library, bracket, path = line.partition(" [")
    first, *further = wrapped("  ", library, width() - 4)
    return [first, *(f"    {x}" for x in further), *([f"      [{path}"] if bracket else [])]


def _next(devices: list[Device]) -> list[tuple[str, str]]:
    """(what, command line) of the steps that remain to be done on this machine."""
    usable = {x.NAME for x in select.implementations() for y in devices if not x.unusable_reason(y)}
    platforms = {device.platform for device in devices}
    explain = 'attn-dispatch explain "q=bf16[2,4096,32,128] k=bf16[2,4096,8,128]" --causal'
    if "cuda" in platforms and "cudnn" not in usable:
        install = f"ATTN_DISPATCH_CUDA=1 pip install '.[cuda{cuda_majors()[0]}]'"
        return [("cuDNN is not usable yet: build the library in a checkout", install)]
    if "rocm" in platforms and "aiter" not in usable:
        (arch,) = {device.arch for device in devices if device.platform == "rocm"}
        build = f"attn-dispatch build-aiter --arch {arch}"
        install = "ATTN_DISPATCH_ROCM=1 pip install '.[rocm]'"
        return [
            ("AITER is not usable yet: build our library in a checkout", install),
            ("and AITER's kernels, from the sources in its wheel", build),
        ]
    if platforms & {"cuda", "rocm"}:
        return [
            ("what runs a call of yours, and why", explain),
            ("prove the kernels on this GPU", "attn-dispatch verify --out report"),
        ]
    missing = cudnn_library.find().missing
    if missing is None:
        return [("XLA computes everything here. What a GPU would run:", f"{explain} --target h100")]
    what = (
        "XLA computes everything here. What an H100 or another NVIDIA GPU would run cannot be "
        "known before cuDNN's planner is here, which needs no GPU. In a checkout of attn-dispatch:"
    )
    return [(what, missing.install)]
