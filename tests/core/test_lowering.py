"""Lowering for absent GPUs: the custom calls in a module, and their attributes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attn_dispatch
from attn_dispatch import aiter, cudnn, dot_product_attention
from attn_dispatch.cudnn.arrays import backward_shapes, forward_shapes
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices.target import device_for
from attn_dispatch_tools.verify.calls import CaseProgram, specs_in
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Packed, Ragged
from attn_dispatch_tools.verify.sizes import case as sized
from tests.support.backend import backward_spec, forward_spec, needs_cudnn
from tests.support.cudnn_in_numpy import names_of
from tests.support.lowered import attributes_in, calls_in, lowered_for_cuda, printed_attributes
from tests.support.repository import environment

CUSTOM_CALLS = (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)
AITER_CALLS = (aiter.FORWARD_TARGET, aiter.BACKWARD_TARGET)
CHECKS = [export.DisabledSafetyCheck.custom_call(name) for name in (*CUSTOM_CALLS, *AITER_CALLS)]

CASE = Case(
    "lowered", b=2, t=128, s=256, n=8, k=2, h=64, v=64, dtype="bfloat16", is_causal=True, scale=0.25
)


def attention_of(case: Case, **options: Any) -> Any:
    """The case as a function of q, k and v."""

    def attention(q, k, v):
        return dot_product_attention(
            q, k, v, scale=case.scale, is_causal=case.is_causal,
            causal_alignment=case.alignment, **options,
        )  # fmt: skip

    return attention


def with_gradients(case: Case, **options: Any) -> Any:
    def both(q, k, v, out_grad):
        out, pull = jax.vjp(attention_of(case, **options), q, k, v)
        return out, *pull(out_grad)

    return jax.jit(both)


def avals(case: Case) -> list[jax.ShapeDtypeStruct]:
    arrays = case.operands() | case.cotangents()
    names = ("query", "key", "value", "out_grad")
    return [jax.ShapeDtypeStruct(arrays[x].shape, arrays[x].dtype) for x in names]


def exported(case: Case, *platforms: str, **options: Any) -> export.Exported:
    function = with_gradients(case, **options)
    return export.export(function, platforms=platforms, disabled_checks=CHECKS)(*avals(case))


@needs_cudnn
def test_one_module_holds_every_platform():
    with attn_dispatch.target("sm90", "gfx942"):
        module = exported(CASE, "cuda", "rocm", "cpu")
    assert module.platforms == ("cuda", "rocm", "cpu")
    text = module.mlir_module()
    assert set(calls_in(text)) == {*CUSTOM_CALLS, *AITER_CALLS}
    # The module holds XLA's branch as well, with at least two matrix products.
    assert text.count("stablehlo.dot_general") >= 2
    with attn_dispatch.target("sm90"):
        cuda = exported(CASE, "cuda").mlir_module()
        xla = exported(CASE, "cuda", implementation="xla").mlir_module()
    assert set(calls_in(cuda)) == set(CUSTOM_CALLS) and "dot_general" not in cuda
    assert not calls_in(xla) and "dot_general" in xla


@needs_cudnn
def test_exported_module_runs_on_the_cpu():
    with attn_dispatch.target("sm90"):
        module = exported(CASE, "cuda", "cpu")
    arrays = CASE.operands() | CASE.cotangents()
    operands = [jnp.asarray(arrays[x]) for x in ("query", "key", "value", "out_grad")]
    expected = with_gradients(CASE)(*operands)

    def check(results):
        for got, x in zip(results, expected, strict=True):
            np.testing.assert_array_equal(got, x)

    check(module.call(*operands))
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    check(export.deserialize(module.serialize()).call(*operands))


@needs_cudnn
def test_attributes_operands_and_results_of_custom_calls():
    with attn_dispatch.target("sm90"):
        calls = calls_in(exported(CASE, "cuda").mlir_module())
        device = device_for("cuda")
    forward = cudnn.plan(forward_spec(CASE), device)
    backward = cudnn.plan(backward_spec(CASE), device)
    assert backward.workspace_bytes > 0
    q, kv, lse = "2x128x8x64xbf16", "2x256x2x64xbf16", "2x8x128xf32"
    text, operands, results = calls[cudnn.FORWARD_TARGET]
    assert operands == [q, kv, kv]
    assert results == [q, lse, f"{forward.workspace_bytes}xui8"]
    attributes = {
        "backward": "false", "dtype": '"bfloat16"', "batch": "2 : i64", "num_heads": "8 : i64",
        "num_kv_heads": "2 : i64", "seq_len_q": "128 : i64", "seq_len_kv": "256 : i64",
        "head_dim": "64 : i64", "head_dim_v": "64 : i64", "scale": "2.500000e-01 : f32",
        "window_left": "-1 : i64", "window_right": "0 : i64", "bottom_right": "false",
        "has_lengths": "false", "packed_rows_q": "0 : i64", "packed_rows_kv": "0 : i64",
        "head_rows_q": "0 : i64", "head_rows_kv": "0 : i64",
        "page_size": "0 : i64", "num_pages": "0 : i64", "has_value_table": "false",
        "bends_scores": "false", "moves_scores": "false", "score_nodes": '""',
        "gradient_nodes": '""', "node_arrays": '""',
        "bias_dtype": '""', "bias_batch": "1 : i64", "bias_heads": "1 : i64",
        "bias_rows": "1 : i64", "has_sinks": "false", "dropout_rate": "0.000000e+00 : f32",
        "needs_lse": "true", "needs_max": "false", "needs_keep": "false",
        "deterministic": "false", "needs_dbias": "false", "clears_rows": "false",
        "engine": '""',
    }  # fmt: skip
    found = re.search(r"mhlo.backend_config = \{(.*?)\}", text)
    assert found and set(found[1].split(", ")) == {f"{k} = {v}" for k, v in attributes.items()}
    text, operands, results = calls[cudnn.BACKWARD_TARGET]
    assert operands == [q, kv, kv, q, lse, q]
    assert results == [q, kv, kv, f"{backward.workspace_bytes}xui8"]
    assert "backward = true" in text and "needs_lse = false" in text


@needs_cudnn
def test_inference_requests_no_lse():
    with attn_dispatch.target("sm90"):
        text = lowered_for_cuda(jax.jit(attention_of(CASE)), *avals(CASE)[:3])
        plan = cudnn.plan(forward_spec(CASE, needs_lse=False), device_for("cuda"))
    line, _, results = calls_in(text)[cudnn.FORWARD_TARGET]
    assert results == ["2x128x8x64xbf16", f"{plan.workspace_bytes}xui8"]
    assert "needs_lse = false" in line


@needs_cudnn
def test_head_dims_are_padded_to_multiples_of_eight():
    case = Case("padded", t=128, s=128, n=2, k=2, h=50, v=30, dtype="float16", scale=0.1)
    with attn_dispatch.target("sm90"):
        module = exported(case, "cuda")
    calls = calls_in(module.mlir_module())
    q, v, lse = "2x128x2x56xf16", "2x128x2x32xf16", "2x2x128xf32"
    _, operands, results = calls[cudnn.FORWARD_TARGET]
    assert (operands, results[:-1]) == ([q, q, v], [v, lse])
    _, operands, results = calls[cudnn.BACKWARD_TARGET]
    assert (operands, results[:-1]) == ([q, q, v, v, lse, v], [q, q, v])
    # The padding does not show outside; the scale stays that of the true head dim.
    assert [x.shape[-1] for x in module.out_avals] == [30, 50, 50, 30]


@needs_cudnn
def test_call_affected_by_a_known_bug_gets_a_padding_mask():
    case = Case("half_tile", t=192, s=192, n=2, k=2, h=64, v=64, dtype="float16")
    with attn_dispatch.target("sm90"):
        calls = calls_in(exported(case, "cuda").mlir_module())
    text, operands, _ = calls[cudnn.FORWARD_TARGET]
    assert "has_lengths = false" in text and "2xi32" not in operands
    text, operands, _ = calls[cudnn.BACKWARD_TARGET]
    assert "has_lengths = true" in text and operands[-2:] == ["2xi32", "2xi32"]


@needs_cudnn
def test_rows_without_keys_are_trimmed():
    case = Case(
        "trimmed", t=320, s=128, n=2, k=2, h=64, v=64, dtype="float16", is_causal=True,
        alignment="bottom_right",
    )  # fmt: skip
    with attn_dispatch.target("sm90"):
        module = exported(case, "cuda")
    trimmed, lse = "2x128x2x64xf16", "2x2x128xf32"
    calls = calls_in(module.mlir_module())
    _, operands, results = calls[cudnn.FORWARD_TARGET]
    assert (operands, results[:-1]) == ([trimmed] * 3, [trimmed, lse])
    _, operands, results = calls[cudnn.BACKWARD_TARGET]
    assert (operands, results[:-1]) == ([trimmed] * 4 + [lse, trimmed], [trimmed] * 3)
    assert module.out_avals[0].shape == (2, 320, 2, 64)


SEQUENCES = Packed((((1, 0.5), (2, 0.3)), ((3, 1.0),)))
KINDS: dict[str, dict[str, Any]] = {
    "window, sinks": {"t": 128, "window": (64, None), "sinks": 1, **BOTTOM_RIGHT},
    "lengths, dropout": {"q_lengths": (1, 0.5), "kv_lengths": (0.3, 1), "dropout": 0.1},
    "segments, soft cap, gradient of lse": {
        "packed": SEQUENCES, "max_segments": 4, "soft_cap": 5.0, "lse_grad": True,
    },
    "cu_seqlens, deterministic": {
        "packed": Ragged(((0.2, 0.5),), ((0.5, 0.4),)), "deterministic": True, **CAUSAL
    },
    "bias, mask": {"t": 320, "s": 128, "bias": "1nts", "mask": "b11s", **BOTTOM_RIGHT},
    "ALiBi, row maximum": {"t": 128, "alibi": 1, "needs_max": True, **BOTTOM_RIGHT},
}  # fmt: skip


@needs_cudnn
@pytest.mark.parametrize("kind", KINDS)
def test_custom_calls_match_one_variant_of_the_call(kind: str):
    """The attributes are those of exactly one variant of the call, and so are the operands."""
    case = sized(f"lowered/{kind}", **KINDS[kind])
    gradients = tuple(name for name in case.differentiable if name != "alibi_slopes")
    program = CaseProgram.of(case, ("cudnn",), gradients)
    with attn_dispatch.target("sm90"):
        traced = program.trace(case.operands() | case.cotangents())
        calls = calls_in(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert set(calls) == set(CUSTOM_CALLS)
    specs = {spec.is_backward: spec for spec in specs_in(traced.jaxpr.jaxpr)}
    for target, (text, operands, results) in calls.items():
        given = attributes_in(text)
        spec = specs[target == cudnn.BACKWARD_TARGET]
        (call,) = [x for x in variants_of(spec) if printed_attributes(x.attributes) == given]
        assert len(operands) == len(names_of(call))
        shapes = backward_shapes if call.backward else forward_shapes
        assert len(results) == len(shapes(call)) + 1 and re.fullmatch(r"\d+xui8", results[-1])
        for name, operand in zip(names_of(call), operands, strict=True):
            assert operand.rsplit("x", 1)[1] == OTHER_DTYPES.get(name, "bf16"), name
    assert "has_sinks = true" not in calls[cudnn.BACKWARD_TARGET][0]


OTHER_DTYPES = {
    **dict.fromkeys(("flags_q", "flags_kv"), "ui8"),
    **dict.fromkeys(("lse", "o0", "sinks", "bias"), "f32"),
    **dict.fromkeys(("lengths_q", "lengths_kv", "page_table"), "i32"),
    **{f"offsets_{x}": "i32" for x in ("query", "key", "value", "out", "lse")},
    **dict.fromkeys(("seed", "seed_offset"), "ui32"),
}
"""dtypes of the operands that do not have the call's dtype, bfloat16."""


def test_error_without_a_target_gives_the_remedies():
    function = jax.jit(attention_of(CASE))
    operands = avals(CASE)[:3]
    remedies = r'attn_dispatch\.target\("sm90"\).*ATTN_DISPATCH_TARGET=sm90'
    with pytest.raises(RuntimeError, match=remedies):
        lowered_for_cuda(function, *operands)
    # XLA compiles for any device, so it needs no target.
    xla = lowered_for_cuda(jax.jit(attention_of(CASE, implementation="xla")), *operands)
    assert "dot_general" in xla and not calls_in(xla)


@needs_cudnn
def test_target_from_the_environment(monkeypatch):
    operands = avals(CASE)[:3]
    monkeypatch.setenv("ATTN_DISPATCH_TARGET", "gfx942, sm90")
    from_environment = lowered_for_cuda(jax.jit(attention_of(CASE)), *operands)
    with attn_dispatch.target("sm90"):
        assert lowered_for_cuda(jax.jit(attention_of(CASE)), *operands) == from_environment
    assert set(calls_in(from_environment)) == {cudnn.FORWARD_TARGET}


@needs_cudnn
def test_changed_target_lowers_again():
    """No cache of JAX reuses a jitted function's plan for another device."""
    case = Case("retargeted", t=512, s=512, n=8, k=8, h=64, v=64, dtype="bfloat16")
    function = with_gradients(case)
    workspaces_by_target: dict[str, list[str]] = {}
    for name in ("sm80", "sm90", "sm80"):
        with attn_dispatch.target(name):
            calls = calls_in(lowered_for_cuda(function, *avals(case)))
            device = device_for("cuda")
        workspaces = [calls[x][2][-1] for x in CUSTOM_CALLS]
        plans = (cudnn.plan(forward_spec(case), device), cudnn.plan(backward_spec(case), device))
        assert workspaces == [f"{plan.workspace_bytes}xui8" for plan in plans]
        assert workspaces_by_target.setdefault(name, workspaces) == workspaces
    assert workspaces_by_target["sm80"] != workspaces_by_target["sm90"]


@needs_cudnn
def test_target_applies_when_the_outermost_function_is_lowered():
    """A target from an earlier lowering of the inner function has no effect."""
    inner = jax.jit(attention_of(CASE))
    outer = jax.jit(lambda q, k, v: inner(q, k, v) * 2)
    operands = avals(CASE)[:3]
    with attn_dispatch.target("sm90"):
        assert set(calls_in(lowered_for_cuda(outer, *operands))) == {cudnn.FORWARD_TARGET}
    with pytest.raises(RuntimeError, match="ATTN_DISPATCH_TARGET"):
        lowered_for_cuda(outer, *operands)


@needs_cudnn
def test_two_processes_lower_to_the_same_text():
    script = Path(__file__).with_name("lowered_text.py")
    running = [
        subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(PYTHONHASHSEED=seed),
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    (first, first_error), (second, second_error) = (x.communicate() for x in running)
    assert [process.returncode for process in running] == [0, 0], first_error + second_error
    assert "attn_dispatch_cudnn_backward" in first
    assert first == second


@needs_cudnn
def test_dense_training_lowers_to_custom_calls_only():
    """Every XLA operation would be another kernel to compile and to launch, except the barrier.

    Behind the forward pass it keeps XLA from running the kernel twice in a scan.
    """
    with attn_dispatch.target("sm90"):
        text = lowered_for_cuda(with_gradients(CASE, implementation="cudnn"), *avals(CASE))
    operations = re.findall(r"stablehlo\.\w+", text)
    assert set(operations) == {"stablehlo.custom_call", "stablehlo.optimization_barrier"}
    assert operations.count("stablehlo.optimization_barrier") == 1
