"""Calls in the form that an ASM kernel has, where CK, which has kernels for others, is not built.

Head dims are padded: zeros add nothing to scores, and the columns of value that they make are cut
off. The diagonals of packed sequences are the same from both corners where lengths are equal.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.aiter.call import AiterCall, call_of
from attn_dispatch.aiter.release import Release
from attn_dispatch.call.spec import AttentionSpec

_FORWARD = ((128, 128), (192, 128))
_LEAST = {"gfx942": 64, "gfx950": 72}
"""The least head dim of backward kernels. They run every multiple of 8 up to the most."""
_MOST = {"gfx942": 192, "gfx950": 128}
_OF_WINDOWS = 72, 128


def call_for(spec: AttentionSpec, arch: str, release: Release) -> AiterCall:
    """The call in AITER's terms, for the kernels that are built."""
    call = widened(call_of(spec), arch, release)
    is_same_diagonal = call.is_group and spec.meaning.same_lengths and call.mask == "top_left"
    return replace(call, mask="bottom_right") if is_same_diagonal and not release.has_ck else call


def widened(call: AiterCall, arch: str, release: Release) -> AiterCall:
    """The call with the least head dims that an ASM kernel has, where ASM kernels alone are built;
    unchanged if none is so wide."""
    if release.has_ck or call.is_split or arch not in _LEAST:
        return call
    kernels = _backward(call, arch) if call.backward else _FORWARD
    fits = (x for x in kernels if x[0] >= call.head_dim and x[1] >= call.head_dim_v)
    head_dim, head_dim_v = next(fits, (call.head_dim, call.head_dim_v))
    return replace(call, head_dim=head_dim, head_dim_v=head_dim_v)


def _backward(call: AiterCall, arch: str) -> tuple[tuple[int, int], ...]:
    """The head dims of kernels for the call, the narrowest first."""
    least, most = _OF_WINDOWS if call.is_window else (_LEAST[arch], _MOST[arch])
    equal = max(call.head_dim, call.head_dim_v, least)
    kernels = ((equal, equal),) if equal <= most else ()
    return (*kernels, (192, 128)) if arch == "gfx950" and not call.is_group else kernels
