"""Head dims for which no kernel was made, as a larger one: columns of zeros change no score."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed, for_
from attn_dispatch.semantics.padding import pad_last

_SIZES = {"query": "head_dim", "key": "head_dim", "value": "value_dim"} | dict.fromkeys(
    ("out", "out_grad"), "value_dim"
)


@dataclass(frozen=True)
class WiderHeads:
    """Query and key of this size, and value too where it is said."""

    name: str
    head_dim: int | None = None
    """None: that of the call."""
    is_value_as_wide: bool = False
    # A kernel for wider heads may draw another mask (H200, 9.28: backward 256 after forward 136).
    moves_dropout: bool = True

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        head_dim = self.head_dim or spec.head_dim
        value_dim = head_dim if self.is_value_as_wide else spec.head_dim_v
        if head_dim < spec.head_dim or value_dim < spec.head_dim_v:
            return None
        if (head_dim, value_dim) == (spec.head_dim, spec.head_dim_v):
            return None
        sizes = {"head_dim": head_dim, "value_dim": value_dim}
        arrays = {
            x.name: ((*x.shape[:3], sizes[_SIZES[x.name]]), x.dtype)
            for x in spec.operands
            if x.name in _SIZES
        }
        return changed(spec, arrays=arrays)

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        padded = {
            name: pad_last(x, inner.shape(name)[-1]) if name in _SIZES else x
            for name, x in operands.items()
        }
        results = calls.kernel(inner, for_(inner, padded))
        cut = {"query": spec.head_dim, "key": spec.head_dim, "value": spec.head_dim_v}
        cut["out"] = spec.head_dim_v
        return {name: x[..., : cut[name]] if name in cut else x for name, x in results.items()}
