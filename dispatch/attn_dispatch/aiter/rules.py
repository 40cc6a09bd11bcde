"""The limits of AITER's CK kernels as two tables, and what a row of a table is (also asm_rules.py).

A row is a name, a condition and a sentence. If its `source` is DISPATCH or CK, AITER's C++ refuses
the call too. All other rows are stricter than AITER's C++, and name the source of the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import GENERATIONS
from attn_dispatch.aiter.sizes import (
    FOUR_GIB,
    MAX_GRID_SIZE,
    dq_acc_bytes,
    over_4_gib,
    over_grid,
    over_int32,
)
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.common_rules import DTYPE

ARCHS = ("gfx942", "gfx950")

DISPATCH = "hsa/gfx*/fmha_v3_*/codegen.py"
CK = "example/ck_tile/01_fmha/codegen"
PYTHON = "aiter/ops/mha.py"
HOST = "csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu"
ADAPTER = "rocm_backend/aiter_adapter.h"
DEFECTS = "docs/aiter_defects.md"


@dataclass(frozen=True)
class KernelRule:
    """A row: on these archs, calls of this direction do not run if `applies` is true."""

    name: str
    direction: str
    """"forward", "backward" or "both"."""
    archs: tuple[str, ...]
    applies: Callable[[AiterCall], bool]
    text: str
    """The sentence, with facts in braces: fields of the call or entries of `_COUNTED`."""
    source: str
    remedy: str | Callable[[AiterCall], str] = ""
    """One remedy for all calls that break the rule, or a function of the call."""
    generations: tuple[str, ...] = GENERATIONS
    """The generations of AITER that have the limit."""

    def is_broken_by(self, call: AiterCall, arch: str) -> bool:
        of_direction = self.direction in ("both", "backward" if call.backward else "forward")
        return of_direction and arch in self.archs and self.applies(call)

    def reason(self, call: AiterCall) -> Reason:
        """The reason for a call that breaks the rule. Its facts are those in the sentence."""
        names = [name for _, name, _, _ in Formatter().parse(self.text) if name]
        facts = {x: _COUNTED[x](call) if x in _COUNTED else getattr(call, x) for x in names}
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(call)
        return Reason(self.name, tuple(facts.items()), self.text.format(**facts), remedy)


_COUNTED: dict[str, Callable[[AiterCall], str | int]] = {
    "arrays": lambda call: ", ".join(over_4_gib(call)),
    "dq_bytes": dq_acc_bytes,
    "axes": lambda call: ", ".join(over_int32(call)),
    "layers": lambda call: ", ".join(over_grid(call)),
}

_DIMS = "({head_dim}, {head_dim_v})"


def _head_dims(call: AiterCall) -> tuple[int, int]:
    return call.head_dim, call.head_dim_v


OVER_GRID = KernelRule("aiter/grid", "both", ARCHS, lambda c: bool(over_grid(c)),
    f"{{layers}}: an AMD GPU's grid has at most {MAX_GRID_SIZE} workgroups along an axis",
    "maxGridSize of hipamd/src/hip_device.cpp in github.com/ROCm/clr; sizes.over_grid",
)  # fmt: skip
"""hipModuleLaunchKernel refuses a larger grid, and AITER then aborts the process."""

OVER_INT32 = KernelRule("aiter/int32", "both", ARCHS, lambda c: bool(over_int32(c)),
    "strides over 2**31 - 1 elements ({axes}): AITER counts elements in 32 bits",
    "fmha_fwd_args and fmha_bwd_args",
)  # fmt: skip

CK_RULES = (
    KernelRule("dtype", "both", ARCHS, lambda c: c.dtype not in ("float16", "bfloat16"),
        DTYPE.text, CK, str(DTYPE.remedy)),
    KernelRule("aiter/head_dim", "both", ARCHS, lambda c: max(_head_dims(c)) > 256,
        f"head dims up to 256, got {_DIMS}", CK),
    OVER_INT32,
    OVER_GRID,
    KernelRule("aiter/dq_bytes", "backward", ARCHS, lambda c: dq_acc_bytes(c) >= FOUR_GIB,
        "4 GiB or more of float32 gradients of query, which CK addresses at once: "
        "{dq_bytes:,} bytes",
        "github.com/ROCm/aiter/pull/1873; fmha_bwd_kernel.hpp"),
    KernelRule("aiter/bias_packed", "both", ARCHS, lambda c: c.bias == "bias" and c.is_group,
        "AITER has no bias with packed sequences or lengths",
        "aiter/ops/mha.py takes none in both directions"),
    KernelRule("aiter/soft_cap_bias", "forward", ARCHS,
        lambda c: c.logits_soft_cap > 0 and c.bias != "none",
        "CK has no logits_soft_cap together with bias or ALiBi", CK),
    KernelRule("aiter/inference_head_dims", "forward", ARCHS,
        lambda c: 128 < c.head_dim <= 192 and c.head_dim_v <= 128
        and (c.bias != "none" or c.dropout_rate > 0),
        f"bias, ALiBi or dropout with head dims {_DIMS}: CK built these for inference alone", CK),
    KernelRule("aiter/soft_cap_gradient", "backward", ARCHS, lambda c: c.logits_soft_cap > 0,
        "CK does not compute the gradient under logits_soft_cap",
        "no field of fmha_bwd_args has it"),
)  # fmt: skip
"""The calls that CK does not run, and so no kernel of AITER: ASM runs fewer."""

SPLIT_RULES = (
    KernelRule("dtype", "forward", ARCHS, lambda c: c.dtype not in ("float16", "bfloat16"),
        DTYPE.text, CK, str(DTYPE.remedy)),
    KernelRule("aiter/head_dim", "forward", ARCHS, lambda c: max(_head_dims(c)) > 256,
        f"head dims up to 256, got {_DIMS}", CK),
    KernelRule("aiter/page_size", "forward", ARCHS, lambda c: c.page_size % 128 != 0,
        "key and value in pages of {page_size}: CK's split-KV kernels take multiples of 128",
        HOST, "make pages of 128 or 256 keys"),
    KernelRule("aiter/paged_bias", "forward", ARCHS, lambda c: c.bias == "bias",
        "CK has no bias with keys in pages", HOST),
    KernelRule("aiter/soft_cap_bias", "forward", ARCHS,
        lambda c: c.logits_soft_cap > 0 and c.bias != "none",
        "CK has no logits_soft_cap together with bias or ALiBi", CK),
    KernelRule("aiter/int32", "forward", ARCHS, lambda c: bool(over_int32(c)),
        "strides over 2**31 - 1 elements ({axes}): AITER counts elements in 32 bits",
        "fmha_fwd_splitkv_args"),
    OVER_GRID,
)  # fmt: skip
"""The calls that CK's split-KV kernels do not run."""
