"""Rewrites as records: the calls they are tried on, the operands they add, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import ONE_BY_ONE, REWRITES, Rewrite, preferred
from attn_dispatch.core.rewrites.catalogue import FOR_DECODING
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.mask_as_lengths import MASK_MOD_AS_LENGTHS
from attn_dispatch.core.rewrites.sinks import SINKS_AFTERWARDS
from attn_dispatch.inspection import spec_of
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import CASES
from attn_dispatch_tools.verify.each_rewrite import calls_of

ALL_REWRITES: tuple[Rewrite, ...] = (*REWRITES, *FOR_DECODING, *ONE_BY_ONE)
TRAINING = Case("training", is_causal=True)


def names_of(spec: AttentionSpec) -> set[str]:
    return {x.name for x in spec.operands}


def some_calls() -> Iterator[AttentionSpec]:
    """Calls of every seventh named case; the others have the same options in other sizes."""
    for case in CASES[::7]:
        if case.transform != "eager":
            yield from calls_of(case)


def tried_on(spec: AttentionSpec, *, skips: bool) -> tuple[Rewrite, ...]:
    return preferred(
        spec.options.operands,
        is_backward=spec.is_backward,
        has_decoding_kernel=True,
        skips_from_bottom_right=skips,
    )


def test_rewrites_are_immutable():
    with pytest.raises(FrozenInstanceError):
        SINKS_AFTERWARDS.name = "another"  # type: ignore[misc]


def test_rewrite_names_are_unique():
    names = [x.name for x in (*REWRITES, *ONE_BY_ONE)]
    assert len(set(names)) == len(names)


def test_inner_calls_add_only_the_declared_operands():
    applied = set()
    for spec in some_calls():
        for rewrite in ALL_REWRITES:
            if (inner := rewrite.applied(spec)) is not None:
                applied.add(rewrite.name)
                assert names_of(inner) <= names_of(spec) | set(rewrite.adds), rewrite.name
    assert len(applied) > 20


def test_decoding_rewrites_are_tried_only_on_calls_with_a_cache():
    for rewrite in FOR_DECODING:
        assert rewrite.asked_of.direction == "forward"
        assert set(rewrite.asked_of.operands) <= {"page_table", "key_value_seq_lengths"}
    for spec in calls_of(TRAINING):
        for skips in (False, True):
            tried = tried_on(spec, skips=skips)
            assert not set(tried) & set(FOR_DECODING)


def test_rewrite_is_tried_if_an_earlier_one_adds_its_operand():
    """Lengths can come from a mask_mod, and pages from a cache in arrays."""
    x = jax.ShapeDtypeStruct((2, 4, 8, 64), jnp.bfloat16)
    lengths = jnp.ones(2, jnp.int32)

    def tried(**options: Any) -> tuple[Rewrite, ...]:
        spec = spec_of(query=x, key=x, value=x, **options)
        return tried_on(spec, skips=True)

    with_mask = tried(mask_mod=lambda b, n, t, s, a: s < a[b], mask_mod_args=(lengths,))
    assert {MASK_MOD_AS_LENGTHS, QUERIES_AS_HEADS} <= set(with_mask)
    on_a_cache = tried(
        key_value_seq_lengths=lengths, is_causal=True, causal_alignment="bottom_right"
    )
    assert HEADS_AS_QUERIES in on_a_cache and MASK_MOD_AS_LENGTHS not in on_a_cache
    assert tried() == ()


def test_arrays_over_pairs_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch):
    found = [
        (rewrite, spec, rewrite.pairs(spec)[0])
        for spec in some_calls()
        for rewrite in REWRITES
        if rewrite.applied(spec) is not None and rewrite.pairs(spec)
    ]
    assert len({rewrite.name for rewrite, *_ in found}) >= 5
    monkeypatch.setattr("attn_dispatch.core.rewrites.rewrite.MAX_PAIR_ENTRIES", 0)
    for rewrite, spec, shape in found:
        assert rewrite.applied(spec) is None and rewrite.too_large(spec) == shape
