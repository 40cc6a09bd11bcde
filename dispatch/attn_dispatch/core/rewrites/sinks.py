"""Sinks taken into out and lse after the kernel (semantics/sinks.py).

The backward kernel needs no sinks if it is given out' and lse', because exp(score - lse') are the
probabilities.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.kv_cache.few_queries import MAX_QUERIES
from attn_dispatch.core.rewrites.rewrite import (
    CACHE,
    AskedOf,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    gradients_without,
)
from attn_dispatch.semantics.sinks import sinks_grad, with_sinks


def _inner(spec: AttentionSpec) -> AttentionSpec:
    gradients = gradients_without(spec, "sinks")
    # A sink's share depends on lse, so the forward call always returns it.
    needs_lse = not spec.is_backward or spec.wanted.needs_lse
    wanted = replace(spec.wanted, gradients=gradients, needs_lse=needs_lse)
    return changed(spec, without=("sinks",), wanted=wanted)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    results = calls.kernel(for_(inner, operands))
    if not spec.is_backward:
        return with_sinks(results, operands["sinks"])
    if "sinks" in spec.wanted.gradients:
        results["sinks"] = sinks_grad(spec, operands)
    return results


SINKS_AFTERWARDS = Rewrite(
    "sinks: put into out and lse afterwards", _inner, _compute, asked_of=AskedOf(("sinks",))
)


def _keeps_kernels_of_a_cache(spec: AttentionSpec) -> bool:
    """Whether kernels for decoding, or for pages, may run the call if its sinks are removed."""
    if not spec.has("sinks") or not spec.has("key_value_seq_lengths") or spec.is_packed:
        return False
    return not spec.meaning.dropout_rate and (spec.is_paged or spec.seq_len_q <= MAX_QUERIES)


SINKS_AFTER_A_CACHE = replace(SINKS_AFTERWARDS, asked_of=CACHE, when=_keeps_kernels_of_a_cache)
