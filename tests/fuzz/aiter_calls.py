"""Drawn custom calls of AITER, whose attributes and buffer shapes are mutated from real calls.

A call must be refused with a sentence that names what is wrong, or be prepared. A prepared call may
touch only memory inside its buffers, which is computed again in Python's integers from the sizes
and strides that AITER would get. A small call also runs on the emulator, with red zones around each
buffer. A call without mutations must give the results of its handler.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

from tests.support import aiter_emulated
from tests.support.aiter_cases import AITER_CASES

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from attn_dispatch import aiter
from attn_dispatch.aiter import folder
from attn_dispatch.aiter.release import Release
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from tests.fuzz.aiter_touched import touched
from tests.support.emulator import build
from tests.support.emulator.native import Backward, Forward, Refused, SplitKv

_KINDS = {aiter.FORWARD_TARGET: (0, Forward), aiter.BACKWARD_TARGET: (1, Backward),
          aiter.SPLIT_KV_TARGET: (2, SplitKv)}  # fmt: skip
"""The number of each custom call's Pass in rocm_backend/call_site.h, and its struct."""

_DTYPES = {
    np.dtype(ml_dtypes.bfloat16): 16, np.dtype(np.float16): 10, np.dtype(np.float32): 11,
    np.dtype(np.int32): 4, np.dtype(np.uint32): 8, np.dtype(np.int8): 2, np.dtype(np.float64): 12,
}  # fmt: skip
"""The number of each dtype in XLA_FFI_DataType of c_api.h."""

_INT32 = 2**31 - 1
_SIZES = (0, 1, 2, 3, 7, 8, 16, 127, 128, 129, 256, 264, 65535, 65536, 2**20, 2**24, 2**30, _INT32,
          2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, -1)  # fmt: skip
_NUMBERS = (*_SIZES, -2, -(2**31), -(2**63), 2**33)
_FLOATS = (0.0, -0.0, 0.25, 1.0, 2.5, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38)
_WORDS = {
    "mask": ("none", "top_left", "bottom_right", "", "junk", "top_left\0"),
    "bias": ("none", "bias", "alibi", "junk", ""),
    "accumulator": ("split", "atomic_32", "atomic_16", "junk", ""),
    "arch": ("gfx942", "gfx950", "", "gfx1100" * 40),
    "generation": ("dev18", "v0.1.15", "v0.1.15\0", "v0.1", "", "junk" * 40),
}
_REFUSAL = re.compile(r"[\w ]+: expected .+, got .*|expected \d+ operands and \d+ results, got .+")
_ABOUT_DATA = re.compile(r"seqstart_|seqlen_|sequence \d|page_table\[")
"""The emulator's messages about values on the device, which a handler does not read."""

_BOTH = ("gfx942", "gfx950")
_CASES = dict.fromkeys(
    ("full", "window_bottom_right", "bias_of_heads", "bias_of_batch", "alibi_packed_rows",
     "dropout_causal_f16", "soft_cap", "deterministic_packed", "deterministic_wide",
     "lengths_bottom_right", "split_heads_first", "split_alibi_queries", "split_long",
     "paged_one_pool", "paged_heads_first_alibi"),
    ("gfx942",),
) | {"asm_lse_grad": _BOTH, "asm_packed": _BOTH}  # fmt: skip
"""Names of cases in aiter_cases.py, with the GPUs that each is lowered for."""

_NEWER = Release("v0.1.15", (0, 1, 20)), ("asm_packed", "lengths_bottom_right", "segments")
"""A release that takes prefix sums of lengths, and cases that are lowered for it too."""

_REAL_CALLS = build.FOLDER / "real_aiter_calls.pickle"

_RED_ZONE = 64
_MAX_BYTES, _MAX_SCORES = 2**23, 2**18
_SHARE_BY_XLA = 0.02
"""The share of mutated calls that XLA compiles and runs too, which takes a hundred times longer."""


@dataclass(frozen=True)
class Drawn:
    """One custom call: its attributes, and the shapes and dtypes of its buffers."""

    target: str
    attributes: dict[str, Any]
    operands: tuple[tuple[tuple[int, ...], np.dtype], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    values: tuple[np.ndarray, ...] = field(repr=False, default=())
    """The operands of the call that it was mutated from."""
    answers: tuple[np.ndarray, ...] = field(repr=False, default=())
    """The results that the handler gave for that call."""

    @property
    def buffers(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        return [*self.operands, *self.results]


def prepare() -> None:
    aiter_emulated.emulator()
    _real_calls()


def draw(seed: int) -> str:
    rng = random.Random(seed)
    call, mutations = rng.choice(_real_calls()), rng.choice((0, 1, 1, 1, 2, 2, 5))
    for _ in range(mutations):
        call = rng.choice(_MUTATIONS)(call, rng)
    sentence, struct = _prepared(call)
    if mutations and rng.random() < _SHARE_BY_XLA:
        _check_by_xla(call, sentence)
    if sentence:
        assert mutations, sentence
        assert _REFUSAL.fullmatch(sentence.replace("\n", " ")), sentence
        return f"refused: {sentence.partition(':')[0]}"
    assert struct is not None
    _check_inside(call, struct)
    outcome, results = _run(call, struct)
    if not mutations:
        assert outcome == "ran", outcome
        for got, expected in zip(results, call.answers, strict=False):
            np.testing.assert_allclose(
                got.view(expected.dtype).reshape(expected.shape).astype(np.float32),
                expected.astype(np.float32), rtol=1e-2, atol=1e-6,
            )  # fmt: skip
    return outcome


def write_real_calls() -> None:
    """Write the calls that the front end makes for small cases, with their operands and results.

    Making them takes longer than the time of a draw.
    """
    cases = [(x, gfx) for x in AITER_CASES for gfx in _CASES.get(x.name, ())]
    calls = [call for case, gfx in cases for call in _calls_of(case, gfx)]
    with mock.patch.object(folder, "release", lambda arch: _NEWER[0]):
        newer = [x for x in AITER_CASES if x.name in _NEWER[1]]
        calls += [call for case in newer for call in _calls_of(case, "gfx942")]
    draft = _REAL_CALLS.with_suffix(f".{os.getpid()}")
    draft.write_bytes(pickle.dumps(calls))
    draft.replace(_REAL_CALLS)


@cache
def _real_calls() -> list[Drawn]:
    if not _REAL_CALLS.exists():
        write_real_calls()
    return pickle.loads(_REAL_CALLS.read_bytes())


def _calls_of(case: Case, gfx: str) -> list[Drawn]:
    found: list[Drawn] = []
    call = aiter._call

    def record(target, spec, device, kernel, arrays, results):
        given = call(target, spec, device, kernel, arrays, results)
        attributes = aiter._attributes(spec, aiter._kernel(spec, device)[0], kernel, device)
        found.append(
            Drawn(
                target,
                {x: y.item() if isinstance(y, np.generic) else y for x, y in attributes.items()},
                tuple((x.shape, np.dtype(x.dtype)) for x in arrays.values()),
                tuple((x.shape, np.dtype(x.dtype)) for x in results.values()),
                tuple(arrays.values()),
                # Scratch is not compared, nor dbias, part of which the handler only zeroes.
                tuple(y for x, y in given.items() if x in ("out", "lse", "dq", "dk", "dv")),
            )
        )
        return given

    def values(operands):
        with mock.patch.object(aiter, "_call", record):
            _run_case(case, gfx, operands)
        return [(x.values, x.answers) for x in found]

    aiter_emulated.emulator().set_arch(gfx)
    given = case.operands() | ({} if case.inference else case.cotangents())
    got = jax.jit(values)({x: jnp.asarray(y) for x, y in given.items()})
    arrays = jax.tree.map(np.asarray, got)
    return [replace(x, values=v, answers=a) for x, (v, a) in zip(found, arrays, strict=True)]


def _run_case(case: Case, gfx: str, operands: dict[str, jax.Array]) -> None:
    device, options, operands_of_call = parse(gfx), case.forward_options(), operands
    if case.page:
        options, operands_of_call = paged_options(case, options), in_pages(case, operands)
    operands_of_call = {x: operands_of_call[x] for x in options.operands}
    aiter.forward(spec_of(options, operands_of_call), device, operands_of_call)
    if case.inference or case.soft_cap:
        return
    given = operands | {"out": operands["out_grad"]}
    given["lse"] = jnp.zeros((case.b, case.n, case.t), jnp.float32)
    names = tuple(x for x in case.differentiable if x in ("query", "key", "value", "bias"))
    options = case.backward_options(names)
    given = {x: given[x] for x in options.operands}
    aiter.backward(spec_of(options, given), device, given)


def _change_attribute(call: Drawn, rng: random.Random) -> Drawn:
    name = rng.choice(list(call.attributes))
    old = call.attributes[name]
    new: Any = rng.choice(_NUMBERS) if rng.random() < 0.7 else int(old == 1) if old in (0, 1) else 4
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, float):
        new = rng.choice(_FLOATS)
    elif isinstance(old, str):
        new = rng.choice(_WORDS[name])
    elif new < -(2**63):
        new = -(2**63)
    return replace(call, attributes=call.attributes | {name: new})


def _change_axis(call: Drawn, rng: random.Random) -> Drawn:
    def change(shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = rng.randrange(len(shape))
        size = rng.choice((*_SIZES, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]))
        return (*shape[:axis], size, *shape[axis + 1 :])

    return _change_one(call, rng, lambda shape, dtype: (change(shape) if shape else (1,), dtype))


def _change_rank(call: Drawn, rng: random.Random) -> Drawn:
    return _change_one(
        call, rng, lambda shape, dtype: (rng.choice((shape[1:], (1, *shape), ())), dtype)
    )


def _change_dtype(call: Drawn, rng: random.Random) -> Drawn:
    return _change_one(call, rng, lambda shape, _: (shape, rng.choice(list(_DTYPES))))


def _change_one(call: Drawn, rng: random.Random, change: Any) -> Drawn:
    which = rng.choice(("operands", "results"))
    buffers = list(getattr(call, which))
    if buffers:
        at = rng.randrange(len(buffers))
        buffers[at] = change(*buffers[at])
    return replace(call, **{which: tuple(buffers)})


def _change_count(call: Drawn, rng: random.Random) -> Drawn:
    which = rng.choice(("operands", "results"))
    buffers = list(getattr(call, which))
    if buffers and rng.random() < 0.5:
        del buffers[rng.randrange(len(buffers))]
    elif buffers:
        buffers.insert(rng.randrange(len(buffers) + 1), rng.choice(buffers))
    if rng.random() < 0.3:
        rng.shuffle(buffers)
    return replace(call, **{which: tuple(buffers)})


def _change_size(call: Drawn, rng: random.Random) -> Drawn:
    """Change a size in all buffers: this often gives another valid call, or one far too large."""
    sizes = {x for shape, _ in call.buffers for x in shape}
    old = rng.choice(sorted(sizes)) if sizes else 1
    new = rng.choice((*_SIZES, old + 1, old + 8, 2 * old, 3 * old, 1000 * old, 2**17 * old))

    def replaced(buffers):
        return tuple((tuple(new if x == old else x for x in shape), y) for shape, y in buffers)

    lengths = {
        x: max(-(2**63), min(new, 2**63 - 1))
        for x in ("max_seq_len_q", "max_seq_len_kv")
        if call.attributes[x] == old
    }
    return replace(
        call, operands=replaced(call.operands), results=replaced(call.results),
        attributes=call.attributes | lengths,
    )  # fmt: skip


_MUTATIONS = (_change_attribute,) * 4 + (_change_size,) * 3 + (
    _change_axis, _change_axis, _change_rank, _change_dtype, _change_count,
)  # fmt: skip


def _address(at: int) -> int:
    """The address of a buffer that does not exist, far enough from all others for any size."""
    return (at + 1) << 55


def _prepared(call: Drawn, addresses: list[int] | None = None) -> tuple[str, Any]:
    """The handler's refusal, or the struct that AITER would get."""
    kind, struct = _KINDS[call.target]
    filled, message = struct(), ctypes.create_string_buffer(4096)
    buffers = call.buffers
    if any(not -(2**63) <= x < 2**63 for shape, _ in buffers for x in shape):
        return "q: expected sizes that an int64 holds, got others", None
    addresses = addresses or [_address(i) for i in range(len(buffers))]
    dims = [(ctypes.c_int64 * max(1, len(shape)))(*shape) for shape, _ in buffers]
    number = max(1, len(buffers))
    failed = aiter_emulated.emulator().library.attn_rocm_prepare(
        kind, "\n".join(f"{x}={_text(y)}" for x, y in call.attributes.items()).encode(),
        ctypes.c_int64(len(buffers)), ctypes.c_int64(len(call.operands)),
        (ctypes.c_int32 * number)(*(_DTYPES[dtype] for _, dtype in buffers)),
        (ctypes.c_int64 * number)(*(len(shape) for shape, _ in buffers)),
        (ctypes.c_void_p * number)(*(ctypes.addressof(x) for x in dims)),
        (ctypes.c_void_p * number)(*addresses),
        ctypes.byref(filled), ctypes.c_int64(ctypes.sizeof(filled)), message, 4096,
    )  # fmt: skip
    return (message.value.decode(), None) if failed else ("", filled)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\0", "")


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def _check_inside(call: Drawn, struct: Any) -> None:
    """Check that every array that AITER would touch lies inside a buffer."""
    ends = {_address(i): _address(i) + _bytes(*buffer) for i, buffer in enumerate(call.buffers)}
    arrays = touched(struct, call.attributes["arch"])
    assert len(arrays) >= 4
    for name, start, needed in arrays:
        base = start >> 55 << 55
        assert base in ends, f"{name} points into no buffer"
        assert start + needed <= ends[base], f"{name} needs {needed} bytes at {start - base}"


def _check_by_xla(call: Drawn, sentence: str) -> None:
    """Check that the handler, called by XLA, refuses a call with the sentence of its steps."""
    shapes = [x for x, _ in call.buffers]
    is_small = all(x >= 0 for shape in shapes for x in shape) and (
        sum(_bytes(*x) for x in call.buffers) < _MAX_BYTES
    )
    # XLA removes calls whose results are all empty, and its threads read 1e-45 as 0.
    is_kept = call.results and all(min(shape, default=1) > 0 for shape in shapes)
    is_same = call.attributes["arch"] in _BOTH and 1e-45 not in call.attributes.values()
    has_dtypes = np.dtype(np.float64) not in [x for _, x in call.buffers]
    if not (sentence and is_small and is_kept and is_same and has_dtypes):
        return
    numbers = {bool: bool, str: _text, float: np.float32, int: np.int64}
    attributes: dict[str, Any] = {x: numbers[type(y)](y) for x, y in call.attributes.items()}
    aiter_emulated.emulator().reset()
    aiter_emulated.emulator().set_arch(_text(call.attributes["arch"])[:60])
    function = jax.ffi.ffi_call(call.target, [jax.ShapeDtypeStruct(*x) for x in call.results])
    try:
        jax.block_until_ready(
            jax.jit(lambda *x: function(*x, **attributes))(*(np.zeros(*x) for x in call.operands))
        )
    except jax.errors.JaxRuntimeError as error:
        assert sentence in str(error), f"{sentence}\nXLA: {error}"
    else:
        raise AssertionError(f"XLA ran what is refused: {sentence}")


def _run(call: Drawn, struct: Any) -> tuple[str, list[np.ndarray]]:
    """Run the call on the emulator, if it is small; return the results without red zones."""
    scores = struct.call.batch * struct.call.num_heads * struct.call.max_seq_len_q
    if sum(_bytes(*x) for x in call.buffers) > _MAX_BYTES:
        return "prepared, too large to run", []
    if scores * struct.call.max_seq_len_kv > _MAX_SCORES:
        return "prepared, too long to run", []
    emulator = aiter_emulated.emulator()
    emulator.reset()
    emulator.set_arch(call.attributes["arch"])
    emulator.set_generation(call.attributes["generation"])
    arenas = [np.full(_bytes(*x) + 2 * _RED_ZONE, 0xA5, np.uint8) for x in call.buffers]
    insides = [x[_RED_ZONE:-_RED_ZONE] for x in arenas]
    for inside, is_sum in zip(insides[len(call.operands) :], _is_sum(call), strict=True):
        inside[:] = 0 if is_sum else 0xFF
    for inside, value in zip(insides, call.values, strict=False):
        inside[:] = np.resize(np.ascontiguousarray(value).reshape(-1).view(np.uint8), inside.size)
    sentence, struct = _prepared(call, [x.ctypes.data for x in insides])
    assert not sentence, sentence
    emulator.library.attn_emulator_clear_buffers()
    for inside in insides:
        emulator.note_buffer(inside)
    try:
        emulator.run(struct)
    except Refused as refused:
        assert _ABOUT_DATA.match(str(refused)), f"the emulator refuses a prepared call: {refused}"
        return "wrong numbers on the device", []
    for arena in arenas:
        assert (arena[:_RED_ZONE] == 0xA5).all() and (arena[-_RED_ZONE:] == 0xA5).all(), (
            "a red zone changed"
        )
    return "ran", insides[len(call.operands) :]


def _is_sum(call: Drawn) -> list[bool]:
    """Whether AITER adds to each result: to dq_acc and dbias, and to dq in 16-bit kernels."""
    if call.target != aiter.BACKWARD_TARGET:
        return [False] * len(call.results)
    names = ["dq", "dk", "dv", *["dbias"] * bool(call.attributes["has_dbias"]), "", "dq_acc"]
    sums = {"dq_acc", "dbias", *["dq"] * (call.attributes["accumulator"] == "atomic_16")}
    return [name in sums for name in names[: len(call.results)]]
