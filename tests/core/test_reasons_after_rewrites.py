"""The reasons that remain after rewrites, the numbers in them, and when they warn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import aiter, explain
from attn_dispatch.core import eligibility, nearest
from attn_dispatch.core.rewrites import Terms, rewritten
from attn_dispatch.core.rewrites.as_mask_or_bias import MASK_AS_BIAS, SLOPES_AS_BIAS
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.core.verdict import Verdict
from attn_dispatch.devices.target import parse
from attn_dispatch.mods import document_mask
from attn_dispatch.reason import Reason, rules_of
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.backend import forward_spec, needs_cudnn

GFX942 = parse("gfx942")
Q = jax.ShapeDtypeStruct((4, 1, 32, 128), jnp.bfloat16)


def paged(page: int, queries: int = 1, **options: Any) -> Verdict:
    pool = jax.ShapeDtypeStruct((256, page, 8, 128), jnp.bfloat16)
    found = explain(
        jax.ShapeDtypeStruct((4, queries, 32, 128), jnp.bfloat16),
        key_pages=pool,
        value_pages=pool,
        page_table=jax.ShapeDtypeStruct((4, 8192 // page), jnp.int32),
        key_value_seq_lengths=jax.ShapeDtypeStruct((4,), jnp.int32),
        is_causal=True,
        target="mi300x",
        **options,
    )
    return next(x for x in found.forward if x.implementation == "aiter")


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("page", [64, 16])
def test_pages_are_gathered_without_being_cut_first(page: int, queries: int):
    """Cutting pages into blocks of 8 keys would not help: CK needs multiples of 128."""
    assert paged(page, queries, logits_soft_cap=30.0).rewrites == (PAGES_GATHERED.name,)


def test_a_rewrite_that_only_changes_the_facts_of_a_reason_is_not_taken():
    """Padding a head dim of 200 to 256 does not help against a value dim of 512."""
    case = Case("wide", h=200, v=512, dtype="bfloat16", inference=True)
    spec = spec_of(case.forward_options(), case.avals())
    reasons, chain = eligibility.reasons_and_chain(aiter, spec, GFX942)
    assert reasons == () and len(chain.steps) == 1 and "columns" in chain.names[0]


def test_a_rewrite_may_add_a_reason_that_another_removes():
    """Lengths become a mask, which breaks another rule, and the mask becomes a bias."""

    def reasons_against(spec: Any) -> tuple[Reason, ...]:
        found = {"lengths": spec.has("query_seq_lengths"), "mask": spec.has("mask")}
        return tuple(Reason(x) for x, is_there in found.items() if is_there)

    chain = rewritten(forward_spec(Case("call", q_lengths=(1, 0.5))), Terms(reasons_against))
    assert chain.reasons == () and len(chain.names) == 2
    middle = chain.steps[1][1]
    assert rules_of(reasons_against(chain.first)) == {"lengths"}
    assert rules_of(reasons_against(middle)) == {"mask"}


# The reasons that users read.


def test_a_reason_warns_once_and_again_with_other_facts(monkeypatch, recwarn):
    def refusing(size: int) -> Callable[..., tuple[Reason, ...]]:
        return lambda spec, device: (Reason("size", (("size", size),), f"size {size}"),)

    def lower() -> list[str]:
        x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
        call = jax.jit(lambda x: attn_dispatch.dot_product_attention(x, x, x))
        with attn_dispatch.target("gfx942"):
            call.trace(x).lower(lowering_platforms=("rocm",))
        return [str(recwarn.pop().message) for _ in range(len(recwarn))]

    monkeypatch.setattr(aiter, "not_supported_reasons", refusing(1))
    (message,) = lower()
    assert "size 1" in message and lower() == []
    monkeypatch.setattr(aiter, "not_supported_reasons", refusing(2))
    (message,) = lower()
    assert "size 2" in message


def vendor_reasons(target: str, *arrays: jax.ShapeDtypeStruct, **options: Any) -> list[str]:
    """The reasons against the vendor's forward pass on a device, as users read them."""
    name = {"sm90": "cudnn", "mi300x": "aiter"}[target]
    found = explain(*arrays, target=target, **options)
    (verdict,) = (x for x in found.forward if x.implementation == name)
    return [x.with_remedy for x in verdict.reasons]


def square(length: int, batch: int = 1, heads: int = 2, dtype: Any = jnp.bfloat16) -> tuple:
    return (jax.ShapeDtypeStruct((batch, length, heads, 64), dtype),) * 3


@pytest.mark.parametrize("target", [pytest.param("sm90", marks=needs_cudnn), "mi300x"])
def test_a_reason_gives_the_size_of_an_array_that_is_too_large(target: str):
    def documents(batch: int) -> dict[str, Any]:
        return {"mask_mod": document_mask(jnp.zeros((batch, 1024), jnp.int32))}

    assert vendor_reasons(target, *square(1024, 4), **documents(4)) == []
    (reason,) = vendor_reasons(target, *square(1024, 200), **documents(200))
    assert reason.startswith("mask_mod: ") and reason.endswith(
        "(as an array over pairs it would be [200, 1, 1024, 1024], 209,715,200 entries; the limit "
        "is 134,217,728) (remedy: make calls for a part of the batch each)"
    )


def test_splitting_the_batch_is_no_remedy_if_one_row_is_too_large():
    reason = nearest._with_size(Reason("mask_mod", text="mask_mod"), (2, 1, 16384, 16384))
    assert "536,870,912 entries" in str(reason) and reason.remedy == ""
    reason = nearest._with_size(Reason("mask_mod", remedy="its own"), (2, 1, 8192, 16384))
    assert reason.remedy == "its own"


def test_a_reason_names_the_rewrite_that_dropout_prescribes():
    """The kernel would run the call as it is, but the forward pass has applied a rewrite."""
    spec = forward_spec(Case("call", mask=(1, 1, 8, 8), t=8, s=8))
    terms = Terms(lambda x: (Reason("bias"),) * x.has("bias"), first=MASK_AS_BIAS.name)
    chain = rewritten(spec, terms)
    assert chain.reasons and [x for x, _ in chain.steps] == [MASK_AS_BIAS]
    chain = replace(chain, nearest=(0, ()))
    (reason,) = nearest.reasons_to_read(chain, (), lambda x: (Reason("bias"),))
    assert reason.rule == "bias" and MASK_AS_BIAS.name in str(reason)


def test_slopes_become_a_bias_only_up_to_the_limit():
    spec = forward_spec(Case("call", b=4, t=8192, s=8192, alibi=1))
    assert SLOPES_AS_BIAS.applied(spec) is None
    assert SLOPES_AS_BIAS.too_large(spec) == (1, 4, 8192, 8192)
    assert SLOPES_AS_BIAS.too_large(forward_spec(Case("call", t=64, s=64, alibi=1))) is None


def test_a_mask_too_large_for_32_bits_has_a_reason_after_its_rewrite():
    """The mask would become a bias, which the user did not pass and AITER cannot index."""
    mask = jax.ShapeDtypeStruct((1, 1, 65536, 65536), jnp.bool_)
    as_made, rewritten = vendor_reasons("mi300x", *square(65536), mask=mask)
    assert as_made.startswith("mask: not run through AITER") and "(remedy: pass lengths" in as_made
    assert rewritten.startswith("strides over 2**31 - 1 elements (head of bias, ")
    assert rewritten.endswith(f"(of the call as rewritten: {MASK_AS_BIAS.name})")


def test_a_score_mod_that_reads_a_float32_table_has_a_reason():
    def options(dtype: Any, *, reads: bool = True) -> dict[str, Any]:
        table = jnp.zeros((32, 2), dtype)
        if not reads:
            return {"score_mod": lambda score, b, n, t, s: score + jnp.tanh((t - s) / 9.0)}
        return {"score_mod": lambda score, b, n, t, s: score + table[jnp.clip(t - s, 0, 31), n]}

    assert vendor_reasons("mi300x", *square(1024), **options(jnp.bfloat16)) == []
    as_made, reason = vendor_reasons("mi300x", *square(1024), **options(jnp.float32))
    assert as_made == "score_mod: not run through AITER by this version"
    assert reason.startswith(
        "bias: AITER needs query's dtype bfloat16, got float32 (of the call as"
    )
    assert reason.endswith("(remedy: read arrays of bfloat16 alone in score_mod)")
    # A value that is computed in float32 cannot be cast by the caller.
    _, reason = vendor_reasons("mi300x", *square(1024), **options(jnp.float32, reads=False))
    assert "got float32" in reason and "remedy" not in reason


def test_reasons_that_rewrites_remove_are_not_shown():
    """Such reasons are shown only with another reason that rewrites add, as in the tests above."""
    sinks = jnp.zeros(2)
    wide = (jax.ShapeDtypeStruct((1, 512, 2, 264), jnp.bfloat16),) * 3
    assert vendor_reasons("mi300x", *wide, sinks=sinks) == ["head dims up to 256, got (264, 264)"]
    with attn_dispatch.rewrites(False):
        assert len(vendor_reasons("mi300x", *wide, sinks=sinks)) == 2
