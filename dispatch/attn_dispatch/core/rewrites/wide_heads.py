"""Head dims that no kernel supports, padded to one that it does: zero columns change no score."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Calls, NamedArrays, Rewrite, changed, for_
from attn_dispatch.semantics.wider_arrays import pad_last

_SIZES = {"query": "head_dim", "key": "head_dim", "value": "value_dim"} | dict.fromkeys(
    ("out", "out_grad"), "value_dim"
)


def _widened(spec: AttentionSpec, head_dim: int, value_dim: int) -> AttentionSpec:
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    arrays = {
        x.name: ((*x.shape[:3], sizes[_SIZES[x.name]]), x.dtype)
        for x in spec.operands
        if x.name in _SIZES
    }
    return changed(spec, arrays=arrays)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    padded = {
        name: pad_last(x, inner.shape(name)[-1]) if name in _SIZES else x
        for name, x in operands.items()
    }
    results = calls.kernel(for_(inner, padded))
    cut = {"query": spec.head_dim, "key": spec.head_dim, "value": spec.head_dim_v}
    cut["out"] = spec.head_dim_v
    return {name: x[..., : cut[name]] if name in cut else x for name, x in results.items()}


HEADS_OF_256 = Rewrite(
    "head dim: padded to 256",
    lambda spec: _widened(spec, 256, spec.head_dim_v),
    _compute,
    when=lambda spec: spec.head_dim < 256,
    # A kernel for wider heads may draw another dropout mask (cuDNN 9.28, H200: the backward kernel
    # for 256 after the forward kernel for 136).
    moves_dropout=True,
)

VALUE_AS_WIDE = Rewrite(
    "value dim: padded to the head dim",
    lambda spec: _widened(spec, spec.head_dim, spec.head_dim),
    _compute,
    when=lambda spec: spec.head_dim_v < spec.head_dim,
    moves_dropout=True,
    # No call of a known model was found that takes it: latent attention (192/128), with a bias,
    # segment ids, dropout, sinks or float16, does not on sm80, sm90, sm100 or gfx942. It is kept
    # for calls such as 256/128 with dropout on sm100, and after padding to 256, as in this case.
    needed_for="rewrites/bias_of_tiny_scores",
)
