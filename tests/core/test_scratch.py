"""The limit on scratch memory: its values, its effect on a call, and what `explain` reports."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    dot_product_attention,
    explain,
    fallback,
    scratch_limit,
    setting_blocks,
    settings,
    target,
)
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import scratch
from attn_dispatch.core.eligibility import mask_chain, reasons_and_chain
from attn_dispatch.core.rewrites.in_parts import in_parts_of, length_of
from attn_dispatch.core.rewrites.rewrite import Calls, Rewrite
from attn_dispatch.core.select import named
from attn_dispatch.devices.memory import memory_bytes
from attn_dispatch.devices.target import parse
from attn_dispatch.reason import rules_of
from attn_dispatch.text import in_units
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.backend import needs_cudnn

GB = 10**9
LARGE = Case(
    "large", b=64, t=2048, s=2048, n=32, k=32, h=64, v=64, dtype="bfloat16",
    bias=(1, 32, 2048, 2048), bias_dtype="bfloat16",
)  # fmt: skip


def arrays(b: int, t: int, n: int, h: int = 64, k: int = 0) -> tuple[Any, ...]:
    """Query [b, t, n, h] and key [b, t, k or n, h]."""
    return tuple(jax.ShapeDtypeStruct((b, t, x, h), jnp.bfloat16) for x in (n, k or n))


def backward_of(case: Case) -> AttentionSpec:
    forward = spec_of(case.forward_options(), case.avals())
    return forward.backward(case.backward_options())


def backward_verdict(name: str, to: str, q: Any, k: Any, **options: Any) -> Any:
    found = explain(q, k, k, target=to, **options)
    (verdict,) = (x for x in found.backward if x.implementation == name)
    assert verdict.limit in str(found).replace("\n" + " " * 29, " ")
    return verdict


@pytest.mark.parametrize(
    ("text", "limit"),
    [("2GB", 2 * GB), ("1.5 gib", 3 * 2**29), ("500 MB", 5 * 10**8), ("4096", 4096), ("25%", 0.25),
     ("100%", 1.0), ("off", "off"), ("OFF", "off"), ("", None)],
)  # fmt: skip
def test_limits_from_the_environment(text: str, limit: Any, monkeypatch):
    monkeypatch.setenv(settings.SCRATCH_LIMIT, text)
    assert settings.current().scratch_limit == limit


def test_numpy_integer_as_a_limit():
    with scratch_limit(np.int64(10**9)):
        assert settings.current().scratch_limit == 10**9


def test_memory_of_a_target_is_that_of_the_product_or_of_its_properties():
    assert memory_bytes(parse("h100")) == 80 * 2**30
    assert memory_bytes(parse("sm90")) == memory_bytes(parse("h200")) > 140 * GB
    assert memory_bytes(parse("mi300x")) == 192 * 2**30
    unknown = '{"deviceVer": 900, "deviceName": "NVIDIA X1", "totalGlobalMem": 123456789}'
    assert memory_bytes(parse(unknown)) == 123456789
    smaller = '{"deviceVer": 800, "deviceName": "NVIDIA A100-SXM4-40GB"}'
    assert memory_bytes(parse(smaller)) == 40 * 2**30
    grace = '{"deviceVer": 900, "deviceName": "NVIDIA GH200 480GB"}'  # 480GB is the CPU's memory
    assert memory_bytes(parse(grace)) == memory_bytes(parse("gh200"))
    assert memory_bytes(parse('{"deviceVer": 900}')) > 0


@pytest.mark.parametrize("xla", [1, 3 * GB, 10**12])
def test_default_limit_follows_the_need_within_shares_of_memory(xla: int):
    """The limit is the usual need of a kernel, or XLA's if that is less, but at least 1/64 and at
    most 1/16 of the memory."""
    spec, device = backward_of(LARGE), parse("h100")
    found = scratch.limit_of(spec, device, lambda: xla)
    usual = 1.25 * 4 * 64 * 2048 * 32 * (64 + 2)
    least, most = (memory_bytes(device) // x for x in (64, 16))
    assert found and not found.is_strict
    assert found.bytes == pytest.approx(max(least, min(xla, usual, most)), rel=1e-6)


@needs_cudnn
def test_gradient_of_a_bias_shared_by_a_batch_runs_in_parts():
    q, _ = arrays(64, 2048, 32)
    bias = jax.ShapeDtypeStruct((1, 32, 2048, 2048), jnp.bfloat16)
    whole = 2 * 64 * 32 * 2048 * 2048
    verdict = backward_verdict("cudnn", "h200", q, q, bias=bias)
    assert verdict.rewrites == ("in parts of 2 heads, one after the other",)
    assert 1 * GB < verdict.scratch_bytes < 2 * GB
    assert f"{in_units(verdict.scratch_bytes)} in place of 17.2 GB; the limit is" in verdict.limit
    with scratch_limit("off"):
        verdict = backward_verdict("cudnn", "h200", q, q, bias=bias)
    assert verdict.rewrites == () and verdict.scratch_bytes > whole
    with scratch_limit("250MB"):
        verdict = backward_verdict("cudnn", "h200", q, q, bias=bias)
        of_heads, of_batch = verdict.rewrites
        assert of_heads == "in parts of 1 head, one after the other" and "batch rows" in of_batch
        assert verdict.scratch_bytes <= GB / 4
    with scratch_limit("0.01%"):
        verdict = backward_verdict("cudnn", "h200", q, q, bias=bias)
    assert re.fullmatch(
        r"scratch memory: takes [\d.]+ MB, even in parts, and the limit is 14.9 MB "
        r"\(0.01% of the device's memory\)",
        str(verdict.reasons[0]),
    )
    wide = jax.ShapeDtypeStruct((128, 4096, 32, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 32, 4096, 4096), jnp.float32)
    verdict = backward_verdict("cudnn", "h100", wide, wide, bias=bias)
    assert verdict.rewrites == ("in parts of 1 head, one after the other",)
    assert verdict.scratch_bytes < 5.4 * GB


@needs_cudnn
@pytest.mark.parametrize("shape", [(4, 2048, 32), (1, 4096, 32), (16, 8192, 32), (4, 512, 16)])
def test_ordinary_calls_run_in_one_part(shape: tuple[int, int, int]):
    q, k = arrays(*shape, h=128, k=8)
    bias = jax.ShapeDtypeStruct((1, shape[2], shape[1], shape[1]), jnp.bfloat16)
    calls: list[tuple[str, dict[str, Any]]] = [(to, {"is_causal": True}) for to in ("h200", "h100")]
    if shape[0] * shape[1] < 2**15:
        calls.append(("h200", {"bias": bias}))
    for to, options in calls:
        verdict = backward_verdict("cudnn", to, q, k, **options)
        assert verdict.is_eligible and verdict.rewrites == () and not verdict.limit


def gradients(implementation: str | None, *arrays: jax.Array) -> Any:
    *qkv, bias, out_grad = arrays
    call = partial(dot_product_attention, implementation=implementation)
    return jax.vjp(lambda q, k, v, bias: call(q, k, v, bias=bias), *qkv, bias)[1](out_grad)


@needs_cudnn
@pytest.mark.parametrize(("heads", "limit"), [(8, None), (1, "300MB")])
def test_program_holds_no_array_of_all_scores(heads: int, limit: str | None):
    """Nothing is larger than operands and results; the parts' bias gradients are not stacked."""
    b, t, n = 64, 2048, 8
    q, _ = arrays(b, t, n)
    bias = jax.ShapeDtypeStruct((1, heads, t, t), jnp.bfloat16)
    with target("h200"), fallback("error"), scratch_limit(limit or "500MB"):
        traced = jax.jit(partial(gradients, None)).trace(q, q, q, bias, q)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    floats = {"bf16": 2, "f32": 4, "ui8": 1}
    found = re.findall(r"tensor<((?:\d+x)+)(bf16|f32|ui8)>", text)
    sizes = {x: math.prod(map(int, x[0].rstrip("x").split("x"))) * floats[x[1]] for x in found}
    assert max(sizes.values()) <= max(math.prod(q.shape), math.prod(bias.shape)) * 2 * 2, sizes
    if heads == 1:  # the sum over parts, in float32
        assert (f"1x1x{t}x{t}x", "f32") in sizes
    assert not any(x[0].endswith(f"{t}x{t}x") and x[0].count("x") > 4 for x in sizes)
    workspaces = [size for (_, dtype), size in sizes.items() if dtype == "ui8"]
    assert max(workspaces) < GB / 2


@needs_cudnn
def test_kernel_above_the_limit_is_not_used():
    q, _ = arrays(2, 512, 4)
    bias = jax.ShapeDtypeStruct((1, 4, 512, 512), jnp.bfloat16)
    with target("sm90"), scratch_limit(1), fallback("silent"):
        assert explain(q, q, q, bias=bias).chosen_backward == "xla"
        traced = jax.jit(partial(gradients, "cudnn")).trace(q, q, q, bias, q)
        with pytest.raises(NotImplementedError, match=r"scratch memory: takes .*larger scratch_li"):
            traced.lower(lowering_platforms=("cuda",))
        with setting_blocks.rewrites(False):
            (verdict, *_) = explain(q, q, q, bias=bias, implementation="cudnn").backward
            reason = str(verdict.reasons[0])
            assert "parts" not in reason and "limit is 1 byte (" in reason


@needs_cudnn
def test_parts_are_found_under_every_limit_that_admits_some():
    """Parts of one head take more scratch than parts of two: two heads share a kv head, whose
    gradients a loop over single heads must add up."""
    q, k = arrays(8, 256, 8, k=4)
    bias = jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.bfloat16)
    messages = set()
    for limit in ("1MB", "3MB", "5MB"):
        with scratch_limit(limit):
            (reason,) = backward_verdict("cudnn", "h100", q, k, bias=bias).reasons
            messages.add(str(reason).split(",")[0])
    assert messages == {"scratch memory: takes 5.26 MB"}
    for limit in ("5.27MB", "6MB", "6.5MB", "8MB"):
        with scratch_limit(limit):
            verdict = backward_verdict("cudnn", "h100", q, k, bias=bias)
        assert verdict.is_eligible and verdict.rewrites[0].startswith("in parts of 2 heads")


@needs_cudnn
def test_both_directions_under_dropout_run_in_the_same_parts():
    """The parts depend neither on the wanted gradients nor on whether the mask is returned."""
    case = Case(
        "dropout", b=6, t=1024, s=1024, n=4, k=2, h=64, v=64, dtype="bfloat16", dropout=0.3,
        bias=(1, 4, 1024, 1024), bias_dtype="bfloat16",
    )  # fmt: skip
    forward = spec_of(case.forward_options(), case.avals())
    cudnn, device = named("cudnn"), parse("sm90")
    calls = [forward]
    for wanted in (("query", "key", "value", "bias"), ("query",), ("value", "bias")):
        calls += [forward.backward(case.backward_options(wanted)), *forward.in_training(wanted)]
    for limit in ("35MB", "25MB", "20MB"):
        with (
            scratch_limit(limit),
            settings.restored(replace(settings.current(), fallback="silent")),
        ):
            chains = [reasons_and_chain(cudnn, spec, device)[1] for spec in calls]
            drawn = mask_chain(cudnn, forward, device)
            if drawn is not None:
                chains.append(drawn)
        parts = {tuple(x for x, _ in c.steps if x.parts) for c in chains}
        assert len(parts) == 1 and parts != {()}, parts


@needs_cudnn
def test_batch_beyond_the_launch_grid_runs_in_parts():
    q, _ = arrays(70_001, 16, 2)
    found = explain(q, q, q, target="sm90")
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", "cudnn")
    for verdict in (found.forward[0], found.backward[0]):
        assert verdict.rewrites == ("in parts of 35001 batch rows, one after the other",)
        assert "65535 exceed the launch grid" in str(verdict.reasons_as_it_is[0])
    with target("sm90"), fallback("error"):
        lowered = jax.jit(dot_product_attention).trace(q, q, q).lower(lowering_platforms=("cuda",))
    assert "tensor<35001x16x2x64xbf16>" in lowered.as_text()
    assert "tensor<35000x16x2x64xbf16>" in lowered.as_text()


def test_strides_beyond_32_bits_run_in_parts():
    q, k = arrays(2, 2**16, 64, h=128, k=8)
    long_q, long_k = arrays(2, 2**18, 128, h=128, k=8)
    bias = jax.ShapeDtypeStruct((1, 64, 16384, 16384), jnp.bfloat16)
    with_bias = arrays(2, 16384, 64, h=128, k=8)
    for q, k, options in ((long_q, long_k, {}), (*with_bias, {"bias": bias})):
        with scratch_limit("off"):
            found = explain(q, k, k, target="gfx942", implementation="aiter", **options)
        for (verdict,) in (found.forward, found.backward):
            assert verdict.is_eligible, verdict.reasons
            assert re.match(r"in parts of \d+ heads?, one", verdict.rewrites[0])
            assert "aiter/int32" in rules_of(verdict.reasons_as_it_is)


def sizes_of(steps: tuple[Rewrite, ...]) -> dict[str, int]:
    return {x.parts.axis: x.parts.size for x in steps if x.parts}


@pytest.mark.parametrize("batch", [1, 2, 6, 13, 64, 97])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 40, 10**6])
def test_parts_are_the_largest_within_the_limit(batch: int, divisor: int):
    """Scratch memory has a part that grows with batch rows and heads and a constant part."""
    case = Case("parts", b=batch, n=8, k=4, t=64, s=64, bias=(1, 1, 64, 64))
    spec = backward_of(case)

    def taken(spec: AttentionSpec) -> int:
        return 1000 + spec.batch * spec.num_heads * 10**6

    limit = taken(spec) // divisor
    steps = scratch.parts_within(spec, taken, limit)
    whole = scratch.parts_bytes(spec, steps, taken) or 0
    if divisor == 1:
        assert steps == ()
    smallest = in_parts_of("batch", 1).applied(spec) or spec
    smallest = in_parts_of("heads", 1).applied(smallest) or smallest
    if limit > 2 * taken(smallest):
        assert whole <= limit and whole > limit / 5, (steps, whole, limit)
    inner = spec
    for step in steps:
        assert step.parts and 0 < step.parts.size < length_of(inner, step.parts.axis)
        following = step.applied(inner)
        assert following is not None
        inner = following


def test_gradients_of_parts_are_summed_in_float32():
    """In bfloat16, 256 + 1 would be 256."""
    spec = backward_of(Case("sum", b=600, dtype="bfloat16", bias=(1, 4, 10, 14), k=4))

    def ones(spec: AttentionSpec, operands: Any) -> dict[str, Any]:
        return {
            name: jnp.ones(x.shape, x.dtype)
            for name, x in zip(spec.result_names, spec.results, strict=True)
        }

    def computed(step: Rewrite, spec: AttentionSpec) -> dict[str, Any]:
        operands = {x.name: jnp.zeros(x.shape, x.dtype) for x in spec.operands}
        inner = step.inner(spec)
        return step.compute(spec, inner, operands, Calls(partial(ones, inner), ones, ones))

    for size in (1, 7):
        results = computed(in_parts_of("batch", size), spec)
        assert results["bias"].dtype == jnp.float32
        np.testing.assert_array_equal(results["bias"], -(-600 // size))
    by_head = in_parts_of("heads", 1)
    heads = computed(by_head, spec)
    np.testing.assert_array_equal(heads["bias"], 1)
    group = backward_of(Case("sum", b=1, n=600, k=1, dtype="bfloat16"))
    results = computed(by_head, group)
    np.testing.assert_array_equal(results["key"], 600)
    np.testing.assert_array_equal(results["query"], 1)
