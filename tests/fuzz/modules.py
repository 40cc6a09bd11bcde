"""Serialized programs whose custom calls were changed, read again and compiled.

A program is exported for a GPU that is not here, its custom calls are rewritten, and it is written
to bytes, read from them and compiled, with the CUDA library's handlers registered for the CPU. The
library looks at the attributes while XLA compiles; there is no device to go on with. What it finds
must be what it finds about the same attributes as a dictionary.
"""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import stablehlo

import attn_dispatch
from attn_dispatch import cudnn, mods
from attn_dispatch.devices import native as native_libraries
from fuzz.cudnn_specs import Attributes, changed
from fuzz.hostile_specs import FORWARD

_TARGETS = (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)
_ACCEPTED = "attn_dispatch cuDNN (library): cuDNN is not loaded"
_REFUSED = re.compile(
    r"attn_dispatch cuDNN \(wrong call\): attributes of the custom call: (.*)", re.DOTALL
)
_CONFIG = re.compile(r"(mhlo\.backend_config = )\{([^}]*)\}")
_ENTRY = re.compile(r'(\w+) = (true|false|"[^"]*"|-?[\d.e+-]+)(?: : (\w+))?')

_ODD = ("2 : i32", "2 : ui64", "0.5 : f64", "[1, 2]", "{x = 1}", "dense<1> : tensor<2xi64>")
"""Values of types that no attribute has."""

_Q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attn_dispatch.dot_product_attention(q, k, v, implementation="cudnn", **options)


def _loss(q: Any, k: Any, v: Any) -> Any:
    return _attention(q, k, v, is_causal=True).astype(jnp.float32).sum()


PROGRAMS: tuple[Callable[..., Any], ...] = (
    lambda q, k, v: _attention(q, k, v, is_causal=True),
    lambda q, k, v: _attention(q, k, v, bias=jnp.zeros((1, 8, 256, 256), q.dtype)),
    lambda q, k, v: _attention(q, k, v, score_mod=mods.soft_cap(30.0)),
    lambda q, k, v: _attention(q, k, v, key_value_seq_lengths=jnp.array([9, 200])),
    jax.grad(_loss, argnums=(0, 1, 2)),
)


@lru_cache(maxsize=1)
def library() -> ModuleType:
    """`_cuda` without a cuDNN, its handlers registered for the CPU."""
    native = native_libraries.load(native_libraries.CUDA)
    jax.devices()
    name = "attn_dispatch_cudnn_call_site"
    jax.ffi.register_ffi_type(name, native.ffi_state_type(), platform="cpu")
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, native.ffi_handlers(), platform="cpu")
    return native


@lru_cache(maxsize=len(PROGRAMS))
def exported(i: int) -> tuple[jax.export.Exported, str]:
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS]
    with attn_dispatch.target("sm90"):
        made = jax.export.export(
            jax.jit(PROGRAMS[i]), platforms=["cuda"], disabled_checks=checks
        )(_Q, _Q, _Q)  # fmt: skip
    return made, made.mlir_module()


def read_config(text: str) -> Attributes:
    """The attributes of a custom call as MLIR prints them."""
    kinds: dict[str, Callable[[str], Any]] = {"i64": int, "f32": float}
    words = {"true": True, "false": False}
    return {
        name: kinds[kind](value) if kind else words.get(value, value.strip('"'))
        for name, value, kind in _ENTRY.findall(text)
    }


def written(value: Any) -> str:
    """A value as MLIR reads it."""
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


def compiled(module: jax.export.Exported) -> str:
    """What compiling it raises."""
    again = jax.export.deserialize(module.serialize())
    try:
        jax.jit(again.call).lower(_Q, _Q, _Q).compile()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
    return ""


def _has_real_types(attributes: Attributes) -> bool:
    types = {name: type(x) for name, x in FORWARD.items()}
    return {name: type(x) for name, x in attributes.items()} == types


def draw(seed: int) -> str:
    dice, native = random.Random(f"modules {seed}"), library()
    made, text = exported(dice.randrange(len(PROGRAMS)))
    configs = list(_CONFIG.finditer(text))
    config = dice.choice(configs)
    attributes = changed(dice, read_config(config[2]))
    entries = {name: written(x) for name, x in attributes.items()}
    if is_odd := dice.random() < 0.1:
        entries[dice.choice(list(entries))] = dice.choice(_ODD)
    inside = ", ".join(f'"{name}" = {x}' for name, x in entries.items())
    text = text[: config.start(2)] + inside + text[config.end(2) :]
    artifact = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    message = compiled(replace(made, mlir_module_serialized=artifact, platforms=("cpu",)))
    is_same = _has_real_types(attributes) and not is_odd
    if _ACCEPTED in message:
        # Of several custom calls another one may be compiled first.
        if is_same and len(configs) == 1:
            native.buffers(_as_in_memory(attributes))
        return "taken"
    if "Unsupported attribute type for attribute: " in message:
        return "refused by XLA"
    refusal = _REFUSED.search(message)
    assert refusal, message
    if is_same:
        try:
            raise AssertionError(f"{refusal[1]}: {native.buffers(_as_in_memory(attributes))}")
        except native.CudnnError as error:
            assert str(error) in refusal[1], (str(error), message)
    names = [x for x in {*attributes, *FORWARD} if x in refusal[1]]
    assert names, message
    return f"refused: {min(names, key=lambda x: (refusal[1].index(x), -len(x)))}"


def _as_in_memory(attributes: Attributes) -> Attributes:
    """With integers cut off as `written` cuts them off."""
    return {
        name: max(-(2**63), min(x, 2**63 - 1)) if type(x) is int else x
        for name, x in attributes.items()
    }
