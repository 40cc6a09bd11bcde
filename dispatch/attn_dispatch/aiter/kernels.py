"""The choice of AITER's kernel for a call: a hand-written ASM ("v3") kernel, or CK's templates.

AITER's C++ dispatch chooses when it is called. The choice is made here already, for three reasons:
scratch memory depends on it; calls are lowered on machines without AITER; and the C++ dispatch
accepts calls that AITER's Python layer, which its users run, does not. The rules are the tables of
asm_rules.py and rules.py; tests compare them with AITER's compiled dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attn_dispatch.aiter import asm_rules
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import DEV18, Release, text_of
from attn_dispatch.aiter.rules import ARCHS, CK, CK_RULES, SPLIT_RULES, KernelRule
from attn_dispatch.aiter.sizes import splits_of
from attn_dispatch.reason import Reason, Rule, broken

Accumulator = Literal["split", "atomic_32", "atomic_16"]

_NEAREST_EVEN = 0  # the most accurate; every call that ASM runs has a kernel with it


@dataclass(frozen=True)
class Kernel:
    """The kernel of one call: what the custom call and its buffers depend on."""

    family: Literal["asm", "ck"]
    name: str
    bf16_rounding: int
    """ASM's rounding to bfloat16: 0 nearest even, 1 nearest away from zero, 2 towards zero."""
    accumulator: Accumulator
    """Backward: how the gradient of query is accumulated (aiter_api.h). CK: "split"."""
    why_not_asm: tuple[Reason, ...]
    """Every reason for CK rather than ASM; empty for ASM, and for split-KV, which only CK has."""
    doubts: tuple[Reason, ...] = ()
    """Known defects of the kernel, of which calls warn."""
    rounds_dq: bool = True
    """Backward: whether the kernel rounds the gradient of query, or leaves it to XLA."""
    num_splits: int = 1
    """Split-KV: the number of parts into which the keys of a row are split."""
    release: Release = DEV18

    def __str__(self) -> str:
        return self.name


_ARCH = Rule[str](
    "device/arch",
    lambda arch: arch not in ARCHS,
    f"AITER's attention kernels run on {' and '.join(ARCHS)}, and this is {{arch}}",
    facts=lambda arch: {"arch": arch},
)


def unsupported_arch(arch: str) -> tuple[Reason, ...]:
    return broken((_ARCH,), arch)


def not_supported_reasons(
    call: AiterCall, arch: str, release: Release = DEV18
) -> tuple[Reason, ...]:
    """Every reason why no kernel of AITER runs the call.

    They are those against CK, as ASM runs fewer calls, or those against ASM where CK is not built.
    """
    if why := unsupported_arch(arch):
        return why
    if release.has_ck:
        return _reasons(_rules_of(call), call, arch)
    rules = (_SPLIT_KV,) if call.is_split else asm_rules.rules_of(release)
    reasons, of_ck = _reasons(rules, call, arch), _reasons(_rules_of(call), call, arch)
    return reasons if of_ck else tuple(x.where(NO_CK) for x in reasons)


def kernel_for(call: AiterCall, arch: str, release: Release = DEV18) -> Kernel:
    """The kernel of a call that has no `not_supported_reasons`."""
    if call.is_split:
        splits = splits_of(call, arch)
        name = f"ck split-KV, {splits} split{'s' if splits > 1 else ''}"
        return Kernel("ck", name, _NEAREST_EVEN, "split", (), num_splits=splits)
    if release.has_ck and (why := _why_not_asm(call, arch)):
        name = "ck deterministic" if call.deterministic else "ck"
        return Kernel("ck", name, _NEAREST_EVEN, "split", why)
    name = "asm v3 bf16, rounding nearest even" if call.dtype == "bfloat16" else "asm v3 fp16"
    if call.backward:
        # 16-bit atomics lose bits with every block of keys, and no call runs only with them.
        name += ", one block of keys" if call.deterministic else ""
        rounds_dq = release.has_ck or arch not in asm_rules.DQ_IS_STORED_EARLY
        return Kernel(
            "asm", f"{name}, fp32 atomics", _NEAREST_EVEN, "atomic_32", (), rounds_dq=rounds_dq
        )
    doubts = () if release.has_ck else _reasons(asm_rules.DOUBTS, call, arch)
    return Kernel("asm", name, _NEAREST_EVEN, "split", (), doubts)


def kernel_of_first(call: AiterCall, arch: str, releases: Sequence[Release]) -> Kernel:
    """The kernel of a call in the first release that runs it.

    With CK's kernel come the reasons against the ASM kernels of the first release.
    """
    release = next(x for x in releases if not not_supported_reasons(call, arch, x))
    kernel = replace(kernel_for(call, arch, release), release=release)
    if release == releases[0]:
        return kernel
    kernel = replace(kernel, name=f"{kernel.name} of AITER {text_of(release.version)}")
    if kernel.family == "asm" or call.is_split:
        return kernel
    why = _reasons(asm_rules.rules_of(releases[0]), call, arch)
    return replace(kernel, why_not_asm=_remedies_if_all(why))


NO_CK = "this AITER is built without CK"
"""The note with reasons against ASM where it is all that is built, and CK would run the call."""

_SPLIT_KV = KernelRule(
    "aiter/asm_split_kv",
    "forward",
    ARCHS,
    lambda c: True,
    "few queries with a cache, or keys in pages: only CK has split-KV kernels",
    CK,
)


def _why_not_asm(call: AiterCall, arch: str) -> tuple[Reason, ...]:
    """Every reason against ASM. Remedies help only if each reason has one."""
    return _remedies_if_all(_reasons(asm_rules.rules_of(DEV18), call, arch))


def _remedies_if_all(why: tuple[Reason, ...]) -> tuple[Reason, ...]:
    return why if all(x.remedy for x in why) else tuple(replace(x, remedy="") for x in why)


def _rules_of(call: AiterCall) -> tuple[KernelRule, ...]:
    return SPLIT_RULES if call.is_split else CK_RULES


def _reasons(rules: tuple[KernelRule, ...], call: AiterCall, arch: str) -> tuple[Reason, ...]:
    return tuple(rule.reason(call) for rule in rules if rule.is_broken_by(call, arch))
