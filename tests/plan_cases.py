"""Plans kernel cases with one cuDNN and prints what comes of it as JSON; run as a script.

One process speaks to one cuDNN, so each version has a process of its own: ATTN_DISPATCH_CUDNN names
the library.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from attn_dispatch import cudnn, cudnn_library
from attn_dispatch.conformance.cases import KERNEL_CASES
from attn_dispatch.spec import AttentionSpec
from attn_dispatch.target import parse
from backend import backward_spec, forward_spec

CASES = (
    "float16_d64_full",
    "bfloat16_d128_causal",
    "bfloat16_d256_full",
    "padded_d20",
    "value_narrower",
    "cross_bottom_right_odd",
    "more_queries_bottom_right",
    "decode",
    "half_tile_full",
    "everything_one",
)
ARCHS = ("sm80", "sm90", "sm100", "sm120")


def outcome(spec: AttentionSpec, arch: str) -> dict[str, Any]:
    """The plan, or every reason against one."""
    device = parse(arch)
    if reasons := cudnn.not_supported_reasons(spec, device):
        return {"reasons": reasons}
    return asdict(cudnn.plan(spec, device))


def main() -> None:
    library = cudnn_library.find()
    by_name = {case.name.removeprefix("shapes/"): case for case in KERNEL_CASES}
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for name in sys.argv[1:] or CASES:
        case = by_name[name]
        rows[name] = {
            arch: {
                "forward": outcome(forward_spec(case), arch),
                "backward": outcome(backward_spec(case), arch),
            }
            for arch in ARCHS
        }
    print(json.dumps({"version": library.version, "path": library.path, "rows": rows}))


if __name__ == "__main__":
    main()
