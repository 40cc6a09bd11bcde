"""Cases that justify rewrites which no named case of the conformance suite needs."""

from attn_dispatch_tools.verify.case import Case

_HALVES = {length: ((1,) * (length // 2) + (2,) * (length // 2),) * 2 for length in (192, 256)}

REWRITE_CASES = {
    x.name: x
    for x in (
        Case("rewrites/no_keys", s=0, h=64, v=64, dtype="bfloat16"),
        Case("rewrites/value_of_320", b=1, t=64, s=64, h=128, v=320, dtype="bfloat16"),
        # At so small a scale the gradient of a bias is refused to cuDNN, after all other reasons.
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
