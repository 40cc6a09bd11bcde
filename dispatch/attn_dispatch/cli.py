"""The `attn-dispatch` command."""

from __future__ import annotations

import argparse

import jax
from jaxlib.version import __version__ as JAXLIB_VERSION

from attn_dispatch import settings
from attn_dispatch._version import __version__
from attn_dispatch.aiter.build import command as build_aiter
from attn_dispatch.bench import command as bench
from attn_dispatch.conformance import command as verify
from attn_dispatch.core import select
from attn_dispatch.devices.target import device_for, parse, platform_of
from attn_dispatch.planning import plan, tune


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="attn-dispatch", description="One attention call for JAX on NVIDIA, AMD and XLA."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show_info = commands.add_parser(
        "info", help="devices, vendor libraries, and which implementations work"
    )
    show_info.set_defaults(run=lambda _: print(info()))
    build_aiter.add_parser(commands)
    verify.add_parser(commands)
    bench.add_parser(commands)
    plan.add_parser(commands)
    tune.add_parser(commands)
    chosen = parser.parse_args(arguments)
    chosen.run(chosen)


def info() -> str:
    """Devices, vendor libraries with versions and paths, and each implementation's state."""
    jax_devices = jax.devices()
    lines = [
        f"attn_dispatch {__version__}, jax {jax.__version__}, jaxlib {JAXLIB_VERSION}",
        "",
        "devices",
        *(f"  {device.id}: {device.device_kind} ({device.platform})" for device in jax_devices),
    ]
    platforms = dict.fromkeys(platform_of(device) for device in jax_devices)
    devices = [device_for(platform) for platform in platforms]
    targets = [parse(name) for name in settings.current().targets]
    lines += [f"  planning for {device} instead" for device in targets if device in devices]
    lines += ["", "vendor libraries", *_libraries(), "", "implementations"]
    for device in devices:
        for implementation in select.implementations():
            reason = implementation.unusable_reason(device)
            state = f"not usable: {reason}" if reason else "usable"
            lines.append(f"  {implementation.NAME} on {device}: {state}")
    return "\n".join(lines)


def _libraries() -> list[str]:
    return [f"  {line}" for x in select.implementations() for line in x.library_lines()]
