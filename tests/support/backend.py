"""Marks of tests that need cuDNN but no GPU, and specs of cases."""

from __future__ import annotations

import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.library import CudnnLibrary, Missing
from attn_dispatch_tools.verify.case import Case, spec_of

needs_cudnn = pytest.mark.skipif(
    not cudnn_library.find().is_usable, reason=f"cuDNN: {cudnn_library.find().unusable_reason}"
)
"""Planning, and with it lowering for cuda, needs attn_dispatch._cuda and cuDNN but no GPU."""


WITHOUT_PLANNER = CudnnLibrary(
    None,
    unusable_reason="attn_dispatch was installed without its CUDA library; reinstall it",
    missing=Missing(
        "attn_dispatch was installed without its CUDA library",
        "pip install --no-deps nvidia-cudnn-cu13 && ATTN_DISPATCH_CUDA=1 pip install .",
    ),
)
"""What `cudnn.library.find` returns after a plain `pip install .`."""

needs_no_driver = pytest.mark.skipif(
    cudnn_library.find().can_run,
    reason="needs a machine without an NVIDIA driver: with one, cuDNN would be loaded into the "
    "test process for good",
)


def forward_spec(case: Case, *, needs_lse: bool = True) -> AttentionSpec:
    return spec_of(case.forward_options(needs_lse=needs_lse), case.avals())


def backward_spec(case: Case, gradients: tuple[str, ...] | None = None) -> AttentionSpec:
    """The spec of the backward call for these gradients; None means all that the case has."""
    return forward_spec(case).backward(case.backward_options(gradients))
