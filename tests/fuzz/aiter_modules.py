"""Serialized programs with a changed custom call of AITER, which are read again, compiled and run.

They are exported for an MI300X, which need not be present, and run on this CPU by the handlers of
the ROCm library and the emulator. A call must be refused with the sentence by which the handler's
steps refuse the same attributes; a call that is not changed must give XLA's results.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from attn_dispatch import aiter
from tests.fuzz import custom_calls
from tests.fuzz.aiter_calls import _ABOUT_DATA, _BOTH, Drawn, _change_attribute, _prepared, _text
from tests.support import aiter_emulated

_TARGETS = (aiter.FORWARD_TARGET, aiter.BACKWARD_TARGET, aiter.SPLIT_KV_TARGET)
_TOO_SMALL = 1e-45
"""A number that XLA's threads read as 0."""


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attn_dispatch.dot_product_attention(q, k, v, **options)


def _gradients(q: Any, k: Any, v: Any, **options: Any) -> Any:
    def loss(*x: Any) -> Any:
        return (_attention(*x, is_causal=True, **options).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


_BIAS = np.linspace(-1, 1, 4 * 32 * 32, dtype=np.float32).reshape(1, 4, 32, 32)
_SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
_LENGTHS = np.array([9, 30], np.int32)

PROGRAMS: tuple[Callable[..., Any], ...] = (
    lambda q, k, v, **x: _attention(q, k, v, is_causal=True, **x),
    lambda q, k, v, **x: _attention(q, k, v, bias=jnp.asarray(_BIAS, q.dtype), **x),
    lambda q, k, v, **x: _attention(q, k, v, alibi_slopes=jnp.asarray(_SLOPES), **x),
    lambda q, k, v, **x: _attention(q, k, v, key_value_seq_lengths=jnp.asarray(_LENGTHS), **x),
    lambda q, k, v, **x: _attention(
        q[:, :3], k, v, key_value_seq_lengths=jnp.asarray(_LENGTHS), **x
    ),
    _gradients,
)


@dataclass(frozen=True)
class Program:
    """An exported program, its custom calls, and XLA's results."""

    exported: jax.export.Exported
    text: str
    calls: tuple[Drawn, ...]
    expected: Any


@cache
def arrays() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(7), 3)
    return tuple(jax.random.normal(x, (2, 32, 4, 64), jnp.bfloat16) for x in keys)


@cache
def program_of(i: int) -> Program:
    calls: list[Drawn] = []
    real = aiter._call

    def record(target, spec, device, kernel, operands, results):
        attributes = aiter._attributes(spec, aiter._kernel(spec, device)[0], kernel, device)
        shapes = [
            tuple((x.shape, np.dtype(x.dtype)) for x in buffers.values())
            for buffers in (operands, results)
        ]
        words = {x: y.item() if isinstance(y, np.generic) else y for x, y in attributes.items()}
        calls.append(Drawn(target, words, *shapes))
        return real(target, spec, device, kernel, operands, results)

    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS]
    program = jax.jit(partial(PROGRAMS[i], implementation="aiter"))
    with attn_dispatch.target("mi300x"), mock.patch.object(aiter, "_call", record):
        exported = jax.export.export(program, platforms=["rocm"], disabled_checks=checks)(*arrays())
    expected = jax.jit(partial(PROGRAMS[i], implementation="xla"))(*arrays())
    return Program(exported, exported.mlir_module(), tuple(calls), expected)


def prepare() -> None:
    aiter_emulated.emulator()
    for i in range(len(PROGRAMS)):
        program_of(i)


def draw(seed: int) -> str:
    rng = random.Random(f"modules of AITER {seed}")
    program = program_of(rng.randrange(len(PROGRAMS)))
    config = rng.choice(custom_calls.configs(program.text))
    real = custom_calls.read(config)
    call = next(x for x in program.calls if _same(x.attributes, real))
    changes = rng.choice((0, 1, 1, 1, 2, 5))
    for _ in range(changes):
        call = _change_attribute(call, rng)
    attributes = {
        name: _text(x) if isinstance(x, str) else 0.25 if x == _TOO_SMALL else x
        for name, x in call.attributes.items()
    }
    entries = {name: custom_calls.written(x) for name, x in attributes.items()}
    odd = rng.choice(list(entries)) if rng.random() < 0.1 else ""
    if odd:
        entries[odd] = rng.choice(custom_calls.ODD)
    arch = attributes["arch"]
    aiter_emulated.emulator().set_arch(arch if arch in _BOTH else "gfx942")
    module = custom_calls.with_entries(program.exported, program.text, config, entries)
    message, results = _run(module)
    if odd:
        assert f": {odd}: " in message or "Unsupported attribute type" in message, message
        return "refused: another type"
    sentence, _ = _prepared(replace(call, attributes=attributes))
    if f'library for "{arch}" is not loaded' in message:
        assert arch not in _BOTH and arch != "gfx942"
        return "refused: arch"
    if "lowered for gfx" in message:  # the other custom calls of the program are for another GPU
        assert arch == "gfx950" and len(program.calls) > 1
        return "refused: two GPUs"
    if sentence:
        assert sentence in message, f"expected {sentence}, got {message}"
        return f"refused: {sentence.partition(':')[0]}"
    if message:
        assert _ABOUT_DATA.search(message), message
        return "wrong numbers on the device"
    if _same(attributes, real):
        jax.tree.map(_is_close, results, program.expected)
        return "ran as it is"
    return "ran"


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        type(x) is type(theirs[name])
        and (np.float32(x) == np.float32(theirs[name]) if type(x) is float else x == theirs[name])
        for name, x in ours.items()
    )


def _run(module: jax.export.Exported) -> tuple[str, Any]:
    """The error of compiling or running the module, or "", and its results."""
    try:
        return "", jax.block_until_ready(jax.jit(module.call)(*arrays()))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error), None


def _is_close(got: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0.05, atol=0.05
    )
