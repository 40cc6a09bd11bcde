"""Reading, writing and changing attributes of custom calls in the text of an exported program."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jaxlib.mlir.dialects import stablehlo

_CONFIG = re.compile(r"(mhlo\.backend_config = )\{([^}]*)\}")
_ENTRY = re.compile(r'(\w+) = (true|false|"[^"]*"|-?[\d.e+-]+)(?: : (\w+))?')

ODD = ("2 : i32", "2 : ui64", "0.5 : f64", "[1, 2]", "{x = 1}", "dense<1> : tensor<2xi64>")
"""Values whose types no attribute has."""


def configs(text: str) -> list[re.Match[str]]:
    """The match of each custom call's attributes in a module's text; group 2 is in the braces."""
    return list(_CONFIG.finditer(text))


def read(config: re.Match[str]) -> dict[str, Any]:
    """The attributes of a custom call as MLIR prints them."""
    kinds: dict[str, Callable[[str], Any]] = {"i64": int, "f32": float}
    words = {"true": True, "false": False}
    return {
        name: kinds[kind](value) if kind else words.get(value, value.strip('"'))
        for name, value, kind in _ENTRY.findall(config[2])
    }


def written(value: Any) -> str:
    """A value in the syntax of MLIR."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{max(-(2**63), min(value, 2**63 - 1))} : i64"
        case float():
            return f"0x{struct.unpack('>I', struct.pack('>f', _float32(value)))[0]:08X} : f32"
        case str() | bytes():
            encoded = value.encode() if isinstance(value, str) else value
            return '"' + "".join(f"\\{byte:02X}" for byte in encoded) + '"'
    return "[1]" if isinstance(value, list) else "dense<1> : tensor<2xi64>"


def _float32(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > 3.4e38 else value


def with_entries(
    program: jax.export.Exported, text: str, config: re.Match[str], entries: Mapping[str, str]
) -> jax.export.Exported:
    """The program for the CPU with other attributes in one custom call, after serialization.

    Args:
      program: the exported program.
      text: its text.
      config: the one of its `configs` to change.
      entries: all attributes by name, in the syntax of MLIR.
    """
    inside = ", ".join(f'"{name}" = {x}' for name, x in entries.items())
    text = text[: config.start(2)] + inside + text[config.end(2) :]
    artifact = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    changed = replace(program, mlir_module_serialized=artifact, platforms=("cpu",))
    return jax.export.deserialize(changed.serialize())
