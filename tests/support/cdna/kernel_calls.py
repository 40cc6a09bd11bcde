"""The smallest call that selects each of AITER's ASM kernels, found by asking AITER's dispatch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from attn_dispatch import aiter
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import kernels as aiter_kernels
from attn_dispatch.aiter.call import call_for
from attn_dispatch.aiter.kernels import Accumulator, Kernel
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.cdna import generations
from tests.support.cdna.cases import CAUSAL, TOP_LEFT, case
from tests.support.cdna.kernels import MI308

_CHOOSE = aiter_kernels.kernel_for
_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (72, 72), (192, 192), (192, 128))
_MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "top left": TOP_LEFT, "bottom right": CAUSAL, "window": {"window": (30, 20)}
}  # fmt: skip
_PACKED: dict[str, Any] = {
    "t": 430, "s": 461, "cu_q": ((0, 130, 430),), "cu_kv": ((0, 140, 461),), "longest": (300, 321)
}  # fmt: skip
_LAYOUTS: dict[str, dict[str, Any]] = {
    # Two tiles of keys and of queries, so that a workgroup takes both where the mask is causal;
    # whole tiles and equal lengths, for which there are kernels without padding; whole tiles.
    "dense": {"t": 300, "s": 321}, "even": {"t": 384, "s": 384}, "packed": _PACKED,
    "tiles": {"t": 300, "s": 512},
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What the front end decides for every call, and the handlers take as attributes."""

    rounding: int = 0
    accumulator: Accumulator = "atomic_32"

    def of(self, kernel: Kernel) -> Kernel:
        if kernel.family != "asm":
            return kernel
        accumulator = kernel.accumulator if kernel.accumulator == "split" else self.accumulator
        # In 16 bits some kernels add to dq itself, and there is nothing that XLA could round.
        rounds_dq = kernel.rounds_dq or accumulator == "atomic_16"
        facts = {"accumulator": accumulator, "rounds_dq": rounds_dq}
        return replace(kernel, bf16_rounding=self.rounding, **facts)

    def made(self) -> Any:
        """A context in which the front end chooses so."""
        return mock.patch.object(aiter_kernels, "kernel_for", lambda *x: self.of(_CHOOSE(*x)))


OURS = Choice()
OTHERS = tuple(
    Choice(rounding, accumulator)
    for rounding, accumulator in product((0, 1, 2), ("atomic_32", "atomic_16"))
    if (rounding, accumulator) != (0, "atomic_32")
)
"""Choices that the front end never makes, and that the handlers and AITER take."""


@dataclass(frozen=True)
class Unreachable:
    """Kernels in a table that no call selects, whatever the front end chooses."""

    generations: tuple[str, ...]
    archs: tuple[str, ...]
    kernels: str
    """A pattern of their names."""
    reason: str
    rules: tuple[str, ...] = ()
    """Our rules but for which calls would select them; without any AITER has no way to them."""

    def covers(self, generation: str, arch: str, kernel: str) -> bool:
        is_here = generation in self.generations and arch in self.archs
        return is_here and re.fullmatch(self.kernels, kernel) is not None


_BOTH = generations.GENERATIONS
_DEV18, _TODAY, _GFX942, _GFX950 = ("dev18",), ("v0.1.15",), ("gfx942",), ("gfx950",)
_NARROW = "aiter/asm_backward_narrow_gfx950"
UNREACHABLE = (
    Unreachable(_DEV18, _GFX950, r"fwd_hd192_hd128_bf16(_causal)?(_group)?",
        "it lacks a barrier, and CK runs its calls", ("aiter/asm_192_barrier",)),
    Unreachable(_DEV18, _GFX942, r"(MI308/)?fwd_hd128_bf16(_causal)?(_group)?",
        "AITER's tables do not name it"),
    Unreachable(_DEV18, _GFX950, r"fwd_hd128_fp16(_causal)?|bwd_hd128_bf16_(causal_)?a(16|32)",
        "the wheel has no such file, and the dispatch does not ask for it"),
    Unreachable(_TODAY, generations.ARCHS, r"(MI308/)?fwd_hd\d+_fp8(_causal)?(_group)?",
        "calls are in bfloat16 and float16"),
    Unreachable(_DEV18, _GFX942, r"bwd_\w+_group",
        "AITER reads the ends of sequences on the host, so the adapter refuses"),
    Unreachable(_DEV18, _GFX950, r"bwd_hd(64|192)_\w+_group",
        "AITER reads the ends of sequences on the host, so the adapter refuses"),
    Unreachable(_TODAY, _GFX950, r"bwd_hd192_dq_shuffle_group",
        "16-bit atomics have no kernel for packed sequences with head dim 192"),
    Unreachable(_DEV18, _GFX950, r"bwd_hd192_hd128_\w+_causal_br_a(16|32)_pssk",
        "AITER's dispatch does not take that mask"),
    Unreachable(_DEV18, _GFX950, r"bwd_hd192_hd128_\w+_causal_a(16|32)_pssk",
        "AITER's Python does not take that mask", ("aiter/asm_backward_192_top_left",)),
    Unreachable(_DEV18, _GFX950, r"bwd_hd128_\w+_swa_\w+",
        "it gives NaN now and then (github.com/ROCm/aiter/pull/816)",
        ("aiter/asm_backward_window_gfx950",)),
    Unreachable(_TODAY, _GFX950, r"bwd_hd64_\w+",
        "AITER's Python does not take ASM for these head dims, so that they are padded to 72"),
    Unreachable(_BOTH, _GFX950,
        r"bwd_hd64_\w+|bwd_hd192_(bf16|fp16|odo)_\w+|bwd_hd192_dq_convert_\w+_group",
        "AITER's Python does not take ASM for these head dims", (_NARROW,)),
)  # fmt: skip


def unreachable(generation: str, arch: str, kernel: str) -> Unreachable | None:
    return next((x for x in UNREACHABLE if x.covers(generation, arch, kernel)), None)


def lifted_rules(generation: str, arch: str) -> tuple[str, ...]:
    """The rules of ours that keep kernels of a table from calls."""
    covering = (unreachable(generation, arch, x) for x in generations.table(generation, arch))
    return tuple(sorted({rule for x in covering if x for rule in x.rules}))


def without_call_or_reason(generation: str, arch: str, table: Iterable[str]) -> list[str]:
    """The kernels of a table that no call selects, and of which there is no reason why."""
    found = calls_of(generation, arch)
    return [x for x in table if x not in found and unreachable(generation, arch, x) is None]


def calls() -> Iterator[Case]:
    """Every mask, dtype and kind of layout with all head dims of AITER's tables."""
    for dtype, (h, v), (mask, facts), (layout, shape) in product(
        ("bfloat16", "float16"), _DIMS, _MASKS.items(), _LAYOUTS.items()
    ):
        name = f"{dtype} {h}/{v} {mask} {layout}"
        yield case(name, n=1, k=1, h=h, v=v, dtype=dtype, scale=h**-0.5, **shape, **facts)


def kernels_of(call: Case, generation: str, arch: str, choice: Choice) -> set[str]:
    """The ASM kernels that AITER's dispatch would launch for a call, by their files."""
    device = parse(arch)
    gpu = generations.dispatch(generation, arch)
    operands = call.operands() | call.cotangents()
    operands |= {"out": operands["out_grad"], "lse": np.zeros((call.b, call.n, call.t), np.float32)}
    found: set[str] = set()
    for options in (call.forward_options(), call.backward_options()):
        spec = spec_of(options, operands)
        if aiter.not_supported_reasons(spec, device):
            continue
        aiter_call = call_for(spec, arch, aiter_folder.release(arch))
        kernel = choice.of(_CHOOSE(aiter_call, arch, aiter_folder.release(arch)))
        if kernel.family != "asm":
            continue
        struct = struct_of(
            aiter_call, use_asm=True, rounding=kernel.bf16_rounding,
            accumulator=kernel.accumulator, generation=generation,
        )  # fmt: skip
        if gpu.takes_asm(struct):
            found |= set(_files(gpu.run(struct), generation, arch))
    return found


def _files(ran: tuple[str, list[str]], generation: str, arch: str) -> Iterator[str]:
    failure, records = ran
    if failure:  # the adapter refuses
        return
    for name, *rest in (x.split() for x in records if x.startswith("asm ")):
        assert name == "asm"
        path = generations.file_of(generation, arch, *rest)
        yield path.stem
        if path.parent.name == "MI300":
            yield f"{MI308}/{path.stem}"


@cache
def calls_of(
    generation: str, arch: str, lifted: tuple[str, ...] = ()
) -> dict[str, tuple[Case, Choice]]:
    """The first call that selects each kernel, with our choice if it does, or else another.

    `lifted` are rules of ours that do not count.
    """
    found: dict[str, tuple[Case, Choice]] = {}
    with generations.planned(generation, lifted):
        for choice, call in product((OURS, *OTHERS), tuple(calls())):
            for kernel in sorted(kernels_of(call, generation, arch, choice)):
                found.setdefault(kernel, (call, choice))
    return found
