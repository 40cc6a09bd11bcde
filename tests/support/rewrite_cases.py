"""Cases that justify rewrites which no named case of the conformance suite needs."""

from typing import Any

from attn_dispatch_tools.verify.case import Case

_HALVES = {length: ((1,) * (length // 2) + (2,) * (length // 2),) * 2 for length in (192, 256)}

_DIFFERENTIAL: dict[str, Any] = {
    "t": 256, "s": 256, "h": 128, "v": 256, "dtype": "bfloat16", "is_causal": True,
    "scale": 128**-0.5,
}  # fmt: skip

_CHUNK: dict[str, Any] = {
    "t": 128, "s": 320, "h": 64, "v": 64, "dtype": "bfloat16", "is_causal": True,
}  # fmt: skip

REWRITE_CASES = {
    x.name: x
    for x in (
        Case("rewrites/no_keys", s=0, h=64, v=64, dtype="bfloat16"),
        # Chunks of a prompt, whose place in the cache is a number.
        Case("rewrites/static_offset", **_CHUNK, offset=100, window=(60, None)),
        Case("rewrites/offset_hides_all", **_CHUNK, offset=-300),
        Case("rewrites/traced_offset", **_CHUNK, offsets=(100, 300), window=(60, None)),
        Case("rewrites/traced_offset_bias", **_CHUNK, offsets=(100,), bias=(1, 1, 128, 320)),
        # The heads of the Differential Transformer (arXiv:2410.05258): values are twice as wide as
        # queries and keys. The backward pass needs parts of 128 columns on an A100. With a gradient
        # of lse, as when parts of a sequence are merged, it needs parts of 256 on an H100 and on an
        # MI300X.
        Case("rewrites/differential", **_DIFFERENTIAL),
        Case("rewrites/differential_lse_grad", **_DIFFERENTIAL, lse_grad=True),
        # cuDNN's rules refuse a bias gradient at so small a scale, and this is the last reason that
        # is left.
        Case(
            "rewrites/bias_of_tiny_scores",
            t=256,
            s=192,
            n=3,
            k=3,
            h=72,
            v=72,
            dtype="float16",
            scale=1e-6,
            bias=(1, 1, 1, 192),
            wanted=("query", "key", "bias"),
            max_segments=2,
            q_segments=_HALVES[256],
            kv_segments=_HALVES[192],
        ),
    )
}
