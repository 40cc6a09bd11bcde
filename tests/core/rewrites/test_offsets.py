"""Rewrites of causal_alignment as a number: results, gradients, and when each is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, target
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import Chain, Terms, offset_as_lengths, rewritten, static_offset
from attn_dispatch.core.rewrites.as_mask_or_bias import BAND_AS_MASK
from attn_dispatch.core.rewrites.offset_as_lengths import (
    OFFSET_AS_LENGTHS,
    OFFSET_AS_LENGTHS_OR_XLA,
)
from attn_dispatch.core.rewrites.static_offset import NOTHING_SEEN, STATIC_OFFSET
from attn_dispatch.core.verdict import Verdict
from attn_dispatch.cudnn.call import band_of
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.reference import poison_padding, reference
from tests.support.backend import needs_cudnn
from tests.support.comparing import check, poisoned, to_jax
from tests.support.kernel_stand_ins import chain_results, kernel_reasons, specs_of
from tests.support.lowered import kernel_runs

SHAPES = ((7, 12), (12, 7), (1, 9), (9, 1), (10, 10))


def drawn(seed: int) -> Case:
    """A drawn call with a static or a traced offset; some of its lengths are invalid."""
    rng = np.random.default_rng(seed)
    # Few shapes, because JAX compiles every operation for each.
    t, s = SHAPES[seed % len(SHAPES)]
    facts: dict[str, Any] = {"is_causal": bool(rng.random() < 0.6)}
    if rng.random() < 0.6:
        sides = (None if rng.random() < 0.4 else int(rng.integers(0, 6)) for _ in range(2))
        facts["window"] = tuple(sides)
    if rng.random() < 0.5:
        facts["offset"] = int(rng.integers(-14, 22))
    else:
        facts["offsets"] = tuple(int(x) for x in rng.integers(-8, 15, rng.integers(1, 3)))
    for name, length in (("q_lengths", t), ("kv_lengths", s)):
        if rng.random() < 0.3:
            facts[name] = tuple(int(x) for x in rng.integers(-1, length + 2, 2))
    for name, value in (("alibi", 1), ("sinks", 1), ("bias", (1, 4, t, s)), ("lse_grad", True)):
        if rng.random() < 0.25:
            facts[name] = value
    return Case(f"offset/{seed}", b=2, t=t, s=s, **facts)


def chain_of(spec: AttentionSpec, *, may_fall_back: bool = True) -> Chain:
    terms = Terms(lambda x: tuple(kernel_reasons(x)), may_fall_back=may_fall_back)
    return rewritten(spec, terms)


def judge(case: Case, *, may_fall_back: bool = True) -> list[Chain]:
    """Compare both directions with the reference; returns the chains of rewrites."""
    operands, chains = case.operands(), list[Chain]()

    def results(spec: AttentionSpec, given: Any) -> Any:
        chain = chain_of(spec, may_fall_back=may_fall_back)
        assert not chain.reasons
        chains.append(chain)
        return chain_results(chain, given)

    forward, *backward = specs_of(case, needs_keep=False)
    exact = reference(forward.options, operands)
    found = results(forward, to_jax(poison_padding(forward.options, operands)))
    check(forward, found, exact)
    for spec in backward:
        given = operands | case.cotangents()
        given |= {name: exact[name].astype(np.float32) for name in ("out", "lse")}
        found = results(spec, without_nan_lse(spec, to_jax(poisoned(spec, given))))
        check(spec, found, reference(spec.options, given))
    return chains


CASES = [drawn(seed) for seed in range(40)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drawn_offsets_agree_with_the_reference(case: Case):
    judge(case, may_fall_back=int(case.name[-1]) % 2 == 0)


def test_every_rewrite_of_offsets_is_drawn():
    rewrites = (NOTHING_SEEN, STATIC_OFFSET, OFFSET_AS_LENGTHS, OFFSET_AS_LENGTHS_OR_XLA)
    names = [
        name
        for case in CASES
        for x in specs_of(case, needs_keep=False)
        for name in chain_of(x).names
    ]
    for rewrite in rewrites:
        assert names.count(rewrite.name) >= 4, rewrite.name


_CHUNK: dict[str, Any] = {"t": 4, "s": 12, "is_causal": True}


@pytest.mark.parametrize(
    ("facts", "shape", "band"),
    [
        ({"offset": 3}, (4, 7), (None, 0)),
        ({"offset": 3, "window": (2, None)}, (4, 6), (2, 0)),
        ({"offset": 0 - 2}, (2, 2), (None, 0)),
        ({"offset": 10, "window": (3, None)}, (4, 5), (1, 2)),
        ({"offset": 13, "window": (3, None)}, (2, 2), (0, None)),
        ({"offset": 3, "alibi": 1}, (4, 7), (None, 0)),
        ({"offset": 2, "window": (1, 1), "is_causal": False}, (4, 6), (2, 0)),
    ],
)
def test_static_offset_leaves_the_pairs_that_attend(
    facts: dict[str, Any], shape: tuple[int, int], band: tuple[int | None, int | None]
):
    case = Case("offset/static", **{**_CHUNK, **facts})
    for spec in specs_of(case, needs_keep=False):
        inner = STATIC_OFFSET.applied(spec)
        assert inner is not None and (inner.seq_len_q, inner.seq_len_kv) == shape
        assert inner.meaning.causal_alignment == "bottom_right" and band_of(inner) is not None
        assert inner.band == band
    judge(case)


def test_static_offset_beyond_all_keys_is_left_to_others():
    for facts, rewrite in (
        ({"offset": 16, "window": (3, None)}, NOTHING_SEEN),
        ({"offset": -4}, NOTHING_SEEN),
        ({"offset": 10, "alibi": 1}, BAND_AS_MASK),
    ):
        chains = judge(Case("offset/far", **_CHUNK, **facts))
        assert all(rewrite.name in x.names and STATIC_OFFSET.name not in x.names for x in chains)


@pytest.mark.parametrize("offset", [-9, -2, 0, 5, 8, 9, 11, 12, 14, 30])
@pytest.mark.parametrize("window", [(None, None), (0, None), (3, None), (11, None), (2, 4)])
def test_traced_offset_is_right_wherever_it_is(offset: int, window: Any):
    case = Case(
        "offset/traced", t=6, s=12, is_causal=window[1] is None, window=window,
        offsets=(offset, 3), sinks=1, lse_grad=True,
    )  # fmt: skip
    for chain in judge(case, may_fall_back=False):
        assert OFFSET_AS_LENGTHS.name in chain.names and BAND_AS_MASK.name not in chain.names


def test_broken_rewrites_are_noticed(monkeypatch: pytest.MonkeyPatch):
    static = Case("offset/broken", **_CHUNK, offset=3, window=(2, None))
    traced = Case(
        "offset/broken", t=6, s=9, is_causal=True, offsets=(6, 2), window=(2, None),
        q_lengths=(5, 6),
    )  # fmt: skip
    of = static_offset._Rectangle.of
    for case, part, name, broken in (
        (static, static_offset._Rectangle, "of", lambda x: replace(of(x), offset=of(x).offset - 1)),
        (traced, offset_as_lengths, "_reversed", lambda x, lengths: x[:, ::-1]),
        (traced, offset_as_lengths, "_both", lambda rows, name, x, past: x),
        (traced, offset_as_lengths._Rows, "has_past", jnp.bool_(False)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, broken)
            with pytest.raises(AssertionError):
                judge(case)


def explained(on: str, name: str, offset: Any, **options: Any) -> Verdict:
    q, k = (jax.ShapeDtypeStruct((2, x, 2, 64), jnp.bfloat16) for x in (128, 512))
    found = explain(q, k, k, causal_alignment=offset, target=on, **options)
    (verdict,) = (v for v in found.forward if v.implementation == name)
    return verdict


@pytest.mark.parametrize(
    ("on", "name"), [pytest.param("sm90", "cudnn", marks=needs_cudnn), ("gfx942", "aiter")]
)
def test_kernels_run_offsets_and_explain_says_how(on: str, name: str):
    traced = jax.ShapeDtypeStruct((2,), jnp.int32)
    static = explained(on, name, 200, is_causal=True, local_window_size=(100, None))
    assert static.is_eligible and static.rewrites == (STATIC_OFFSET.name,)
    moving = explained(on, name, traced, is_causal=True)
    assert moving.is_eligible and moving.rewrites[0] == OFFSET_AS_LENGTHS.name
    rule = "feature/causal_alignment as a number"
    assert all(rule in {x.rule for x in v.reasons_as_it_is} for v in (static, moving))


@needs_cudnn
@pytest.mark.parametrize(
    ("offset", "window", "keys"),
    [(200, None, 328), (200, (100, 0), 228), (-64, None, 64), (600, (200, 0), 112)],
)
def test_kernels_of_a_static_offset_get_the_keys_that_are_seen(offset: int, window: Any, keys: int):
    found = gradient_runs(offset, window)
    rows = {x for _, x in found}
    queries = {-64: 64, 600: 112}.get(offset, 128)
    assert rows == {2 * queries * 8 * 64} and len(found) == 2 == sum(found.values())
    assert STATIC_OFFSET.inner(call_of(offset, window)).seq_len_kv == keys


@needs_cudnn
def test_a_traced_offset_runs_kernels_alone():
    for window in (None, (100, 0)):
        found = gradient_runs(None, window)
        assert {name for name, _ in found} == {
            "attn_dispatch_cudnn_forward", "attn_dispatch_cudnn_backward",
        }  # fmt: skip
        assert set(found.values()) == {2}


Q, KV = (jax.ShapeDtypeStruct((2, x, n, 64), jnp.bfloat16) for x, n in ((128, 8), (512, 2)))


def call_of(offset: int, window: Any) -> AttentionSpec:
    return explain(
        Q, KV, KV, is_causal=True, causal_alignment=offset, local_window_size=window, target="sm90"
    ).call


def gradient_runs(offset: int | None, window: Any) -> Any:
    """The kernels of both directions; a traced offset for None."""

    def loss(q: Any, k: Any, v: Any, x: Any) -> jax.Array:
        out, lse = dot_product_attention(
            q, k, v, is_causal=True, causal_alignment=x if offset is None else offset,
            local_window_size=window, return_lse=True,
        )  # fmt: skip
        return out.astype(jnp.float32).sum() + lse.sum()

    offsets = jax.ShapeDtypeStruct((2,), jnp.int32)
    with target("sm90"):
        return kernel_runs(jax.grad(loss, (0, 1, 2)), Q, KV, KV, offsets)
