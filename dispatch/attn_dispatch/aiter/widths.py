"""Head dims padded to those of an ASM kernel, where CK, which has kernels for others, is not built.

Zeros add nothing to scores, and the columns of value that they make are cut off.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import Release

_FORWARD = ((128, 128), (192, 128))
_LEAST = {"gfx942": 64, "gfx950": 72}
"""The least head dim of backward kernels. They run every multiple of 8 up to the most."""
_MOST = {"gfx942": 192, "gfx950": 128}


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
    equal = max(call.head_dim, call.head_dim_v, _LEAST[arch])
    kernels = ((equal, equal),) if equal <= _MOST[arch] else ()
    return (*kernels, (192, 128)) if arch == "gfx950" and not call.is_group else kernels
