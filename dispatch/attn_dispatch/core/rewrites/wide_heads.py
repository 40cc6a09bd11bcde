"""Head dims that no kernel supports, padded to one that it does: zero columns change no score."""

from __future__ import annotations

from attn_dispatch.call.operands import fitted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Calls, NamedArrays, Rewrite, changed, for_


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    wide = {name: fitted(name, x, inner.sizes) for name, x in operands.items()}
    results = calls.kernel(for_(inner, wide))
    return {name: fitted(name, x, spec.sizes) for name, x in results.items()}


HEADS_OF_256 = Rewrite(
    "head dim: padded to 256",
    lambda spec: changed(spec, sizes={"h": 256}),
    _compute,
    when=lambda spec: spec.head_dim < 256,
    # A kernel for wider heads may draw another dropout mask (cuDNN 9.28, H200: the backward kernel
    # for 256 after the forward kernel for 136).
    moves_dropout=True,
)

VALUE_AS_WIDE = Rewrite(
    "value dim: padded to the head dim",
    lambda spec: changed(spec, sizes={"v": spec.head_dim}),
    _compute,
    when=lambda spec: spec.head_dim_v < spec.head_dim,
    moves_dropout=True,
    # No call of a known model was found that takes it: latent attention (192/128), with a bias,
    # segment ids, dropout, sinks or float16, does not on sm80, sm90, sm100 or gfx942. It is kept
    # for calls such as 256/128 with dropout on sm100, and after padding to 256, as in this case.
    needed_for="rewrites/bias_of_tiny_scores",
)
