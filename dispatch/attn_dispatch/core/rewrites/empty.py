"""A call without scores: its results are constants, and no kernel runs."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Calls, NamedArrays, Rewrite, changed


def _inner(spec: AttentionSpec) -> AttentionSpec:
    """The same call with axes of 2 for those of 0, so that any other reason against it is found.

    Of 1 there are reasons, too: kernels treat a single query differently.
    """
    arrays = {x.name: (tuple(size or 2 for size in x.shape), x.dtype) for x in spec.operands}
    return changed(spec, arrays=arrays)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    return calls.xla(spec, operands)


NO_SCORES = Rewrite(
    "an axis of length zero: constants, and no kernel",
    _inner,
    _compute,
    is_constant=True,
    when=lambda spec: spec.is_empty,
    needed_for="rewrites/no_keys",
)
