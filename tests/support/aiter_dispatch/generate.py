"""CK's choice of an instance, without the instances.

CK's generator writes its conditions unchanged, and in place of each launch a line that records the
name of the instance.

Run by build.py: generate.py FOLDER_OF_CK'S_GENERATOR OUTPUT_FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

RECEIPT = 600  # the receipt that AITER's C++ interface is built with
ARCHS = ["gfx942", "gfx950"]

FIELDS = {
    "forward": (
        "arch={F_arch.name} head_dim={F_hdim} head_dim_v={F_bn1} dtype={F_dtype} group={F_mode} "
        "soft_cap={F_logits} mask={F_mask} bias={F_bias} lse={F_lse} dropout={F_dropout} "
        "tile={F_bm0}x{F_bn0} pads={F_spad},{F_skpad},{F_dpad},{F_dvpad} trload={F_trload}"
    ),
    "backward": (
        "arch={F_arch.name} head_dim={F_hdim} head_dim_v={F_hdim} dtype={F_dtype} group={F_mode} "
        "mask={F_mask} bias={F_bias} dbias={F_dbias} dropout={F_dropout} "
        "deterministic={F_deterministic} convert_dq={F_convert_dq_enabled} key_block={F_bn0} "
        "pads={F_spad1d},{F_dpad},{F_dvpad} trload={F_trload}"
    ),
    "split_kv": (
        "arch={F_arch.name} head_dim={F_hdim} head_dim_v={F_bn1} dtype={F_dtype} group={F_mode} "
        "soft_cap={F_logits} mask={F_mask} bias={F_bias} paged={F_pagedkv} tile={F_bm0}x{F_bn0} "
        "pads={F_spad},{F_skpad},{F_dpad},{F_dvpad}"
    ),
}


def _recording(template: str, direction: str) -> str:
    """The generator's template with its launch replaced by a record."""
    condition, braces, _ = template.partition(" {{\n")
    assert braces, "CK's generator has changed its template"
    return f'{condition} {{{{\n    return record::RecordLiteral("ck {FIELDS[direction]}");\n}}}}\n'


def main(generator: Path, output: Path) -> None:
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(generator))
    from codegen.ops import (  # type: ignore[reportMissingImports]
        fmha_bwd,
        fmha_fwd,
        fmha_fwd_splitkv,
    )

    for module, direction, name in (
        (fmha_fwd, "forward", "FMHA_FWD_API_INNER_DISPATCH"),
        (fmha_bwd, "backward", "FMHA_BWD_API_INNER_DISPATCH"),
        (fmha_fwd_splitkv, "split_kv", "FMHA_FWD_SPLITKV_API_INNER_DISPATCH"),
    ):
        setattr(module, name, _recording(getattr(module, name), direction))
        # Matching every name with "*" and comparing all pairs of instances takes half a minute.
        module.fnmatch = SimpleNamespace(fnmatch=lambda *_: True)
        module.check_duplicates_and_paddings = lambda *_: None
    # These are never used here, and are a third of all instances.
    fmha_bwd.DROPOUT_MAP = {k: v for k, v in fmha_bwd.DROPOUT_MAP.items() if "store" not in k}

    forward = fmha_fwd.get_fwd_blobs(ARCHS, "", RECEIPT, [-1], "simplified")[0]
    backward = fmha_bwd.get_bwd_blobs(ARCHS, "", RECEIPT, "simplified", [-1])[0]
    for name, pool in (("fmha_fwd_api", forward), ("fmha_bwd_api", backward)):
        # These types serve the launches alone.
        text = re.sub(r"^ *using \w+_trait_ = .*;\n", "", pool.api, flags=re.MULTILINE)
        (output / f"{name}.cpp").write_text(f'#include "record.h"\n{text}')
    fmha_fwd_splitkv.write_single_kernel = lambda *_: None
    fmha_fwd_splitkv.write_blobs(ARCHS, output, "", RECEIPT, [-1], "simplified")
    path = output / fmha_fwd_splitkv.FMHA_FWD_SPLITKV_API_FILENAME
    path.write_text(f'#include "record.h"\n{path.read_text()}')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
