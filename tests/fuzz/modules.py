"""Serialized programs whose custom calls were changed, which are read again and compiled.

A program is exported for a GPU that need not be present. Its custom calls are changed, and the
program is serialized, read and compiled, with the CUDA library's handlers registered for the CPU.
The library checks the attributes while XLA compiles; then it finds no device and stops. Its result
must agree with its check of the same attributes as a dictionary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch import cudnn, mods
from attn_dispatch.devices import native_libraries
from tests.fuzz import custom_calls
from tests.fuzz.cudnn_attributes import Attributes, changed
from tests.fuzz.hostile_attributes import FORWARD

_TARGETS = (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)
_ACCEPTED = "attn_dispatch cuDNN (library): cuDNN is not loaded"
_REFUSED = re.compile(
    r"attn_dispatch cuDNN \(wrong call\): attributes of the custom call: (.*)", re.DOTALL
)
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
    """`_cuda` without cuDNN, with its handlers registered for the CPU."""
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
        program = jax.export.export(
            jax.jit(PROGRAMS[i]), platforms=["cuda"], disabled_checks=checks
        )(_Q, _Q, _Q)  # fmt: skip
    return program, program.mlir_module()


def compiled(module: jax.export.Exported) -> str:
    """The error of compiling a module, or ""."""
    try:
        jax.jit(module.call).lower(_Q, _Q, _Q).compile()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
    return ""


def _has_real_types(attributes: Attributes) -> bool:
    types = {name: type(x) for name, x in FORWARD.items()}
    return {name: type(x) for name, x in attributes.items()} == types


def draw(seed: int) -> str:
    rng, native = random.Random(f"modules {seed}"), library()
    program, text = exported(rng.randrange(len(PROGRAMS)))
    configs = custom_calls.configs(text)
    config = rng.choice(configs)
    attributes = changed(rng, custom_calls.read(config))
    entries = {name: custom_calls.written(x) for name, x in attributes.items()}
    if is_odd := rng.random() < 0.1:
        entries[rng.choice(list(entries))] = rng.choice(custom_calls.ODD)
    message = compiled(custom_calls.with_entries(program, text, config, entries))
    is_same = _has_real_types(attributes) and not is_odd
    if _ACCEPTED in message:
        # If there are several custom calls, another one may be compiled first.
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
    """The attributes with integers cut to 64 bits, as `custom_calls.written` cuts them."""
    return {
        name: max(-(2**63), min(x, 2**63 - 1)) if type(x) is int else x
        for name, x in attributes.items()
    }
