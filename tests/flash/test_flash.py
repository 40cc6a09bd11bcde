"""FlashAttention: its arrays with NumPy as the kernels, its custom calls, and when it is chosen."""

from __future__ import annotations

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    AttentionFallbackWarning,
    cudnn,
    dot_product_attention,
    explain,
    flash,
    ragged_dot_product_attention,
    setting_blocks,
)
from attn_dispatch import target as planning_for
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch.flash import kernels, library, rules
from attn_dispatch.flash.generations import FA2, FA3
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import reference
from tests.support import flash_in_numpy
from tests.support.backend import needs_cudnn
from tests.support.comparing import check_both_directions, to_jax
from tests.support.extent import number_of_draws
from tests.support.flash_cases import NAMED
from tests.support.lowered import calls_in, lowered_for_cuda
from tests.support.small_cases import SMALL

SM90, SM80 = parse("sm90"), parse("sm80")


def is_supported(case: Case) -> bool:
    """True if the kernels run the case, apart from float32, which allows a close comparison."""
    spec = spec_of(case.forward_options(), case.avals())
    reasons = rules.not_supported_reasons(spec, FA3, "sm90")
    return all(x.rule == "dtype" for x in reasons)


def is_supported_by_flash_2(case: Case) -> bool:
    spec = spec_of(case.forward_options(), case.avals())
    spec = spec.backward(case.backward_options())
    reasons = rules.not_supported_reasons(spec, FA2, "sm80")
    return all(x.rule == "dtype" for x in reasons)


COUNT = number_of_draws(60, most=600)
DRAWN = [replace(x, dtype="float32") for x in draws.examples(COUNT, 20261202) if x.t * x.s < 2**15]
SUPPORTED = [*NAMED, *filter(is_supported, SMALL), *filter(is_supported, DRAWN)]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The package appears to be installed, with NumPy as its kernels."""
    monkeypatch.setattr(library, "version", lambda: "0.3.6")
    monkeypatch.setattr(kernels, "forward", flash_in_numpy.forward)
    monkeypatch.setattr(kernels, "backward", flash_in_numpy.backward)
    monkeypatch.setattr(clear_rows, "_native", lambda: None)


def test_named_cases_are_supported():
    assert all(map(is_supported, NAMED)) and len(SUPPORTED) > 40


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_results_and_gradients_agree_with_the_reference(case: Case):
    check_both_directions(flash, SM90, case)


@pytest.mark.parametrize("case", [x for x in SUPPORTED if is_supported_by_flash_2(x)], ids=str)
def test_flash_attention_2_agrees_with_the_reference(monkeypatch, case: Case):
    """NumPy stands in for the custom calls; XLA computes everything around them."""
    monkeypatch.undo()
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    monkeypatch.setattr(kernels, "_run", flash_in_numpy.run_fa2)
    check_both_directions(flash, SM80, case)


def test_nan_in_one_batch_row_does_not_reach_another():
    case = Case("lengths", t=10, s=10, q_lengths=(7, 10), kv_lengths=(7, 10), is_causal=True)
    operands, spec = case.operands(), spec_of(case.forward_options(), case.avals())
    out = operands["out"] = reference(spec.options, operands)["out"].astype(np.float32)
    operands |= case.cotangents() | {"lse": reference(spec.options, operands)["lse"]}
    right = flash.backward(back := spec.backward(case.backward_options()), SM90, to_jax(operands))
    for name in ("query", "key", "value", "out_grad"):
        operands[name] = operands[name].copy()
        operands[name][1] = np.nan
    (found, _) = flash.forward(spec, SM90, to_jax(operands))
    np.testing.assert_allclose(found[0], out[0], atol=1e-5)
    for x, y in zip(flash.backward(back, SM90, to_jax(operands)), right, strict=True):
        np.testing.assert_allclose(x[0], y[0], atol=1e-5)


def arrays(t: int, s: int, *, h: int = 64, v: int = 64, b: int = 2, n: int = 8):
    shapes = ((b, t, n, h), (b, s, 2, h), (b, s, 2, v))
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]


def chosen(*shapes, **options) -> tuple[str | None, str | None]:
    explanation = explain(*shapes, **options, target="sm90")
    return explanation.chosen_forward, explanation.chosen_backward


@needs_cudnn
def test_faster_implementation_is_chosen():
    causal = {"is_causal": True}
    assert chosen(*arrays(2048, 2048), **causal) == ("flash", "flash")
    assert chosen(*arrays(1024, 1024), **causal, implementation="cudnn") == ("cudnn", "cudnn")
    assert chosen(*arrays(1, 4096)) == ("cudnn", "cudnn")  # cuDNN splits the keys of one query
    assert chosen(*arrays(8192, 8192), **causal) == ("flash", "flash")
    assert chosen(*arrays(1024, 1024), logits_soft_cap=30.0, **causal) == ("cudnn", "cudnn")
    # cuDNN supports sinks; flash adds them afterwards where that was measured to be faster.
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert chosen(*arrays(8192, 8192), sinks=sinks, **causal) == ("flash", "flash")
    assert chosen(*arrays(64, 64), sinks=sinks, implementation="flash") == ("flash", "flash")


@needs_cudnn
@pytest.mark.parametrize(
    ("target", "head_dim", "expected"),
    [
        ("sm80", 128, ("flash", "flash")),
        ("sm80", 256, ("flash", "flash")),
        ("sm120", 192, ("flash", "flash")),
        ("sm120", 200, ("flash", "xla")),
        ("sm89", 128, ("cudnn", "cudnn")),
    ],
)
def test_flash_attention_2_comes_first_where_others_measured_it_to(target, head_dim, expected):
    """It is unmeasured here, and runs wide heads backward only on sm80."""
    options = {"query_segment_ids": jax.ShapeDtypeStruct((2, 512), jnp.int32), "max_segments": 4}
    for kind in ({}, options):
        found = explain(*arrays(512, 512, h=head_dim, v=head_dim), **kind, target=target)
        assert (found.chosen_forward, found.chosen_backward) == expected
        by_name = explain(
            *arrays(512, 512, h=head_dim, v=head_dim), **kind, target=target, implementation="flash"
        )
        plan = by_name.forward[0].plan
        assert plan and "FlashAttention-2" in plan.engine and "never run here" in plan.engine


@needs_cudnn
def test_missing_package_causes_no_warning(monkeypatch, recwarn):
    monkeypatch.setattr(library, "version", lambda: None)
    explanation = explain(*arrays(1024, 1024), target="sm90")
    assert explanation.chosen_forward == "cudnn"
    (verdict,) = (x for x in explanation.forward if x.implementation == "flash")
    needs = ", which needs Python 3.12" if sys.version_info < (3, 12) else ""
    (reason,) = verdict.reasons
    assert (reason.rule, str(reason)) == ("flash/library", "dew-flash-attn is not installed")
    assert reason.remedy == f"pip install dew-flash-attn-cu13{needs}"
    q, k, v = arrays(64, 64)
    with planning_for("sm90"):
        text = lowered_for_cuda(jax.jit(lambda *x: dot_product_attention(*x)), q, k, v)
        assert set(calls_in(text)) == {cudnn.FORWARD_TARGET} and not recwarn.list
        # The call falls back to XLA; the warning is about cuDNN only.
        with pytest.warns(AttentionFallbackWarning) as given:
            wide = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.float32)
            loss = jax.grad(lambda q: dot_product_attention(q, q, q).sum())
            lowered_for_cuda(jax.jit(loss), wide)
    assert "flash" not in str(given[0].message)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.3.5", False), ("0.3.6+cu130", True), ("0.3.10", True), ("0.4.0", False), ("?", False)],
)
def test_other_versions_of_the_package_give_a_reason(monkeypatch, version: str, fits: bool):
    monkeypatch.setattr(library, "version", lambda: version)
    assert flash.unusable_reason(SM90) == ("" if fits else (
        f"dew-flash-attn from 0.3.6 to below 0.4 is needed, and {version} is installed"
    ))  # fmt: skip


def test_many_short_batch_rows_are_not_spaced_out(monkeypatch):
    """With a tile between them, 70,000 rows of 8 would take 25 times the memory."""
    lengths = jax.ShapeDtypeStruct((70_000,), jnp.int32)
    options = {"key_value_seq_lengths": lengths, "implementation": "flash", "target": "sm90"}
    (verdict,) = explain(*arrays(8, 8, b=70_000), **options).forward
    assert str(verdict.reasons[0]) == (
        "lengths and packed sequences of 70,000 batch rows, of 8 queries or keys: they would have "
        "to lie 192 rows apart"
    )
    options["key_value_seq_lengths"] = jax.ShapeDtypeStruct((2**20,), jnp.int32)
    with setting_blocks.scratch_limit("off"):
        (verdict,) = explain(*arrays(2048, 2048, b=2**20, n=2), **options).forward
    assert verdict.rewrites == ("in parts of 61681 batch rows, one after the other",)
    assert (*map(str, verdict.reasons_as_it_is),) == (
        "packed sequences of 2,348,810,240 rows, gaps among them, past 32-bit offsets",
    )
    options["key_value_seq_lengths"] = jax.ShapeDtypeStruct((4,), jnp.int32)
    (verdict,) = explain(*arrays(1024, 1024, b=4), **options).forward
    rows = 4 * (1024 + 192)
    assert verdict.scratch_bytes == 2 * 2 * rows * (8 + 2) * 64 + 8


def test_every_reason_is_given():
    q = jax.ShapeDtypeStruct((2, 64, 8, 260), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 96, 8, 260), jnp.float32)
    explanation = explain(q, k, k, is_causal=True, logits_soft_cap=2.0, implementation="flash",
                          return_max_logits=True, target="sm100")  # fmt: skip
    assert (*map(str, explanation.forward[0].reasons),) == (
        "runs on sm120, sm80, sm86, sm87, sm89, sm90 in this version, and this is "
        f"{parse('sm100')}",
        "logits_soft_cap: dew-flash-attn's kernels have none",
        "the row maximum: dew-flash-attn's kernels have none",
        "needs float16 or bfloat16, got float32",
        "head dims up to 256, got 264 columns",
        "causality and windows from the top left with 64 queries and 96 keys: kernels count from "
        "the last of both, and no side of a window may be below 0",
    )


def test_backward_pass_beyond_the_launch_grid_runs_in_parts():
    explanation = explain(*arrays(8, 8, b=70_000), implementation="flash", target="sm90")
    assert explanation.chosen_forward == explanation.chosen_backward == "flash"
    (verdict,) = explanation.backward
    assert verdict.rewrites == ("in parts of 35000 batch rows, one after the other",)
    assert (*map(str, verdict.reasons_as_it_is),) == (
        "batch and heads up to 65,535 each in the backward pass, got 70,000 and 8",
    )
    with setting_blocks.rewrites(False):
        explanation = explain(*arrays(8, 8, b=70_000), implementation="flash", target="sm90")
    assert explanation.backward[0].reasons == verdict.reasons_as_it_is


def test_library_that_does_not_load_gives_a_reason(monkeypatch, tmp_path):
    """As if a machine with a GPU had a library for another CUDA version."""
    (tmp_path / FA3.library).write_text("not a library")
    monkeypatch.setattr(library, "_folder", lambda: tmp_path)
    present = replace(SM90, is_present=True)
    assert "dew-flash-attn's library cannot be loaded: " in flash.unusable_reason(present)
    assert not flash.unusable_reason(SM90)
    with pytest.raises(RuntimeError, match="library cannot be loaded"):
        flash.register()


def lowered(function, *arguments) -> dict:
    with planning_for("sm90"):
        return calls_in(lowered_for_cuda(jax.jit(function), *arguments))


def test_operands_results_and_attributes_of_custom_calls(monkeypatch):
    """The program for an absent GPU has the results and attributes that the library requires."""
    monkeypatch.undo()
    monkeypatch.setattr(library, "version", lambda: "0.3.6")
    monkeypatch.setattr(clear_rows, "_native", lambda: None)

    def packed(q, k, v, cu):
        def loss(q, k, v):
            out = ragged_dot_product_attention(
                q[0], k[0], v[0], is_causal=True, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                max_seqlen_q=32, max_seqlen_kv=32, implementation="flash",
            )  # fmt: skip
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    calls = lowered(packed, *arrays(96, 96, h=60, v=64), jax.ShapeDtypeStruct((4,), jnp.int32))
    line, operands, results = calls["attn_dispatch_flash_forward_packed"]
    offsets = ["12xi32"] * 2
    assert operands == ["96x8x64xbf16", "96x2x64xbf16", "96x2x64xbf16", *offsets]
    assert results[:2] == ["96x8x64xbf16", "8x96xf32"]
    for attribute in ("is_causal = true", "max_seqlen = 32", "window_size_left = -1"):
        assert attribute in line
    _, operands, results = calls["attn_dispatch_flash_backward_packed"]
    assert operands[4:] == ["96x8x64xbf16", "8x96xf32", *offsets]
    assert results[3:] == [f"{8 * (96 + 128 * 12)}xf32"] * 2


def test_one_array_for_both_sides_counts_as_equal_lengths():
    def reasons(**options) -> tuple[Reason, ...]:
        q, k, v = arrays(64, 64)
        options |= {"is_causal": True, "implementation": "flash", "target": "sm90"}
        return explain(q, k, v, **options).forward[0].reasons

    lengths, others = (jax.ShapeDtypeStruct((2,), jnp.int32) for _ in range(2))
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    assert not reasons(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    assert not reasons(query_segment_ids=ids, max_segments=3)
    assert reasons(query_seq_lengths=lengths, key_value_seq_lengths=others)
    assert reasons(key_value_seq_lengths=lengths)
    assert not reasons(key_value_seq_lengths=lengths, causal_alignment="bottom_right")
