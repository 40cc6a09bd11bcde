"""cuDNN calls as attributes, for tests that pass them to `_cuda` directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_dispatch.cudnn.call import CudnnCall, variants_of
from attn_dispatch_tools.verify.sizes import case
from tests.support.backend import forward_spec

PLAIN: CudnnCall = variants_of(forward_spec(case("plain", n=8, k=8), needs_lse=False))[0]
"""A forward call without options: bfloat16, query, key and value of [2, 256, 8, 64]."""


def cudnn_attributes(**changes: Any) -> dict[str, Any]:
    """The attributes of PLAIN with these changes."""
    return replace(PLAIN, **changes).attributes
