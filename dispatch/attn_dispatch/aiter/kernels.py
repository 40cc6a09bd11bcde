"""Which of AITER's kernels runs a call: its hand-written ASM ("v3") kernels, else CK's templates.

AITER's C++ dispatch decides by itself once it is called. It is decided here first, because the
scratch memory depends on it, because lowering happens on machines without AITER, and because that
dispatch lets through what its Python layer, the one its users run, does not. The rules are the
tables of rules.py; tests/aiter/test_dispatch.py holds them against AITER's compiled dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.rules import ARCHS, ASM_RULES, CK_RULES, SPLIT_RULES, Rule
from attn_dispatch.aiter.sizes import splits_of
from attn_dispatch.reason import Reason

Accumulator = Literal["split", "atomic_32", "atomic_16"]

_NEAREST_EVEN = 0  # the exact one, and there is a kernel of it for every call that ASM runs


@dataclass(frozen=True)
class Kernel:
    """The kernel of one call, as far as its caller must know it."""

    family: Literal["asm", "ck"]
    name: str
    bf16_rounding: int
    """How ASM rounds to bfloat16: 0 nearest even, 1 nearest away from zero, 2 towards zero."""
    accumulator: Accumulator
    """Backward: how the gradient of the queries is gathered (aiter_api.h). CK: "split"."""
    why_not_asm: tuple[Reason, ...]
    """Why CK, with every reason; empty where the kernel is ASM, and of split-KV, which is CK's."""
    num_splits: int = 1
    """Split-KV: into how many parts the keys of a row are divided."""

    def __str__(self) -> str:
        return self.name


def unsupported_arch(arch: str) -> tuple[Reason, ...]:
    if arch in ARCHS:
        return ()
    why = f"AITER's attention kernels run on {' and '.join(ARCHS)}, and this is {arch}"
    return (Reason("device/arch", (("arch", arch),), why),)


def not_supported_reasons(call: AiterCall, arch: str) -> tuple[Reason, ...]:
    """What no kernel of AITER runs. CK is what is asked: ASM runs nothing that CK does not."""
    return unsupported_arch(arch) or _reasons(_rules_of(call), call, arch)


def kernel_for(call: AiterCall, arch: str) -> Kernel:
    """The kernel of a call against which there are no `not_supported_reasons`."""
    if call.is_split:
        splits = splits_of(call, arch)
        name = f"ck split-KV, {splits} split{'s' if splits > 1 else ''}"
        return Kernel("ck", name, _NEAREST_EVEN, "split", (), splits)
    if why := _reasons(ASM_RULES, call, arch):
        name = "ck deterministic" if call.deterministic else "ck"
        return Kernel("ck", name, _NEAREST_EVEN, "split", why)
    name = "asm v3 bf16, rounding nearest even" if call.dtype == "bfloat16" else "asm v3 fp16"
    if call.backward:
        # 16-bit atomics lose bits with every block of keys, and run no call that these do not.
        return Kernel("asm", f"{name}, fp32 atomics", _NEAREST_EVEN, "atomic_32", ())
    return Kernel("asm", name, _NEAREST_EVEN, "split", ())


def _rules_of(call: AiterCall) -> tuple[Rule, ...]:
    return SPLIT_RULES if call.is_split else CK_RULES


def _reasons(rules: tuple[Rule, ...], call: AiterCall, arch: str) -> tuple[Reason, ...]:
    return tuple(rule.reason(call) for rule in rules if rule.is_broken_by(call, arch))
