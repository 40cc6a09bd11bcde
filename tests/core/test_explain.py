"""`explain`: the choice of implementations, as data and as a table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch import aiter, cudnn, dot_product_attention, explain
from attn_dispatch.core import select
from attn_dispatch.devices.implementation import NOTHING, Plan
from attn_dispatch.devices.target import CPU, default_device, device_for, parse
from attn_dispatch.text import in_units
from tests.support.backend import needs_cudnn
from tests.support.option_parts import spec_with

Q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)


@needs_cudnn
def test_explanation_of_a_call_that_cudnn_runs():
    explanation = explain(Q, KV, KV, is_causal=True, target="sm90")
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("cudnn", "cudnn")
    assert str(explanation.device) == "NVIDIA H200 (sm90, planned for, not present)"
    assert [v.implementation for v in explanation.forward] == [
        "cudnn",
        "flash",
        "fa4",
        "aiter",
        "xla",
    ]
    assert [v.is_eligible for v in explanation.forward] == [True, False, False, False, True]
    forward, backward = explanation.forward[0].plan, explanation.backward[0].plan
    assert forward == cudnn.plan(explanation.call, explanation.device)
    assert forward and backward and backward.workspace_bytes > forward.workspace_bytes
    lines = str(explanation).splitlines()
    assert lines[0].startswith("call      forward(query bfloat16[2, 128, 8, 64], ")
    assert "device    cuda: NVIDIA H200 (sm90, planned for, not present)" in lines
    assert "chosen    forward: cudnn, backward: cudnn" in lines
    for direction, plan in (("forward  ", forward), ("backward ", backward)):
        size = in_units(plan.scratch_bytes)
        assert f"{direction} cudnn   runs: {plan.engine}, scratch memory {size}" in lines
    assert sum(line.startswith(("forward   xla     runs: ", "backward  xla     runs: "))
               for line in lines) == 2  # fmt: skip


@needs_cudnn
def test_forward_and_backward_can_have_different_implementations():
    q = jax.ShapeDtypeStruct((1, 128, 2, 256), jnp.float16)
    explanation = explain(q, q, q, target="sm80")
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("cudnn", "xla")
    (refused,) = (x for x in explanation.backward if x.implementation == "cudnn")
    assert refused.plan is None and "hidden_dim" in str(refused.reasons[0])
    text = str(explanation)
    assert "chosen    forward: cudnn, backward: xla" in text
    assert re.search(r"backward  cudnn   cannot run:\n +- cuDNN refuses the graph", text)


def test_table_shows_every_reason():
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    options: dict[str, Any] = {"mask": np.ones((128, 128), bool), "sinks": np.zeros(2, np.float32)}
    with attn_dispatch.rewrites(False):
        explanation = explain(q, q, q, **options, return_max_logits=True, target="gfx942")
    (reasons,) = (x.reasons for x in explanation.forward if x.implementation == "aiter")
    assert len(reasons) == 4 and explanation.chosen_forward == "xla"
    unwrapped = " ".join(str(explanation).split())
    for reason in reasons:
        assert f"- {reason}" in unwrapped
    assert max(len(line) for line in str(explanation).splitlines()) <= 100


@pytest.mark.parametrize("target", ["gfx942", "gfx950:aiter0.1.20"])
@pytest.mark.parametrize(
    "queries, options",
    [(0, {}), (128, {"is_causal": True, "causal_alignment": -200})],
    ids=["no queries", "offset hides all"],
)
def test_no_kernel_is_named_where_the_results_are_constants(
    queries: int, options: dict[str, Any], target: str
):
    q = jax.ShapeDtypeStruct((2, queries, 8, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 128, 8, 128), jnp.bfloat16)
    explanation = explain(q, kv, kv, **options, target=target)
    for verdicts in (explanation.forward, explanation.backward):
        found = next(x for x in verdicts if x.implementation == "aiter")
        assert found.plan == NOTHING and found.scratch_bytes == 0
        assert "constants, and no kernel" in str(found.rewrites)
    assert re.search(
        r"aiter   runs: nothing to compute, scratch memory 0 bytes\n", str(explanation)
    )


def doubled(score, b, n, t, s):
    return 2 * score


def test_nothing_is_chosen_where_nothing_runs():
    explanation = explain(Q, KV, KV, score_mod=doubled, implementation="cudnn")
    assert (explanation.chosen_forward, explanation.chosen_backward) == (None, None)
    assert "\nchosen    none\n" in str(explanation)


def test_preference_list_is_explained_in_order():
    explanation = explain(Q, KV, KV, implementation=["xla", "cudnn"])
    assert [v.implementation for v in explanation.backward] == ["xla", "cudnn"]
    assert explanation.chosen_forward == "xla"


def test_explanation_says_what_the_order_follows():
    q = jax.ShapeDtypeStruct((1, 2048, 8, 512), jnp.bfloat16)
    found = explain(q, q, q, target="h100")
    assert found.basis.startswith("by predicted time, measured on NVIDIA H100")
    assert f"order     {found.basis}" in found.text(width=200)
    for other in (
        explain(q, q, q, target="h100", implementation=("xla", "cudnn")),
        explain(q, q, q, target="cpu"),
    ):
        assert not other.basis and not any(x.predicted for x in other.forward)


def test_arrays_and_shapes_give_equal_explanations():
    options = {"is_causal": True, "return_lse": True, "sinks": np.zeros(8, np.float32)}
    shapes = explain(Q, KV, KV, **options)
    arrays = explain(*(jnp.zeros(x.shape, x.dtype) for x in (Q, KV, KV)), **options)
    assert shapes == arrays and hash(shapes) == hash(arrays)


def test_backward_call_has_an_lse_gradient_only_if_lse_is_returned(monkeypatch):
    asked = []
    monkeypatch.setattr(aiter, "not_supported_reasons", lambda spec, _: asked.append(spec) or ())
    monkeypatch.setattr(aiter, "plan", lambda spec, device: Plan("", 0))
    for name in ("return_lse", "return_residual", "return_max_logits", "deterministic_backward"):
        explain(Q, KV, KV, **{name: True})
    assert [spec.has("lse_grad") for spec in asked if spec.is_backward] == [True] + 3 * [False]


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"return_lse": True, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        {"return_max_logits": True, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        {"return_max_logits": True},
    ],
)
def test_explain_and_the_call_ask_about_the_same_specs(monkeypatch, options):
    """`explain` and a differentiated call ask the implementations about equal specs."""
    asked: list = []

    class Recorder:
        NAME = "recorder"
        PLATFORM = None
        IS_EXTRA = False
        HAS_DECODING_KERNEL = False
        SKIPS_FROM_BOTTOM_RIGHT = True
        unusable_reason = staticmethod(lambda device: "")
        plan = staticmethod(lambda spec, device: Plan("", 0))

        @staticmethod
        def not_supported_reasons(spec, device):
            # A differentiated call keeps its lse even if it is not returned.
            asked.append(spec_with(spec, needs_lse=True, partner=None))
            return ()

        @staticmethod
        def forward(spec, device, operands):
            return tuple(jnp.zeros(x.shape, x.dtype) for x in spec.results)

        backward = forward

    monkeypatch.setattr(select, "IMPLEMENTATIONS", (Recorder,))
    q, kv = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 24, 2, 8))
    bias, mask = jnp.ones((4, 1, 24)), jnp.ones((16, 24), bool)
    explain(q, kv, kv, bias, mask, **options)
    explained, asked[:] = list(asked), []

    def loss(q, k, v, bias):
        out, *more = dot_product_attention(q, k, v, bias, mask, **options)
        return out.sum() + sum(x.sum() for x in more)

    jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, kv, kv, bias)
    assert {spec.is_backward for spec in explained} == {False, True}
    assert set(asked) == set(explained) and len(set(asked)) == 2


@needs_cudnn
def test_target_as_properties_file_or_name(tmp_path: Path):
    properties = parse("sm100").properties or ""
    other = json.dumps(json.loads(properties) | {"deviceVer": 1030, "deviceName": "NVIDIA B300"})
    file = tmp_path / "b300.json"
    file.write_text(other)
    for name in (other, str(file)):
        explanation = explain(Q, KV, KV, target=name)
        assert str(explanation.device) == "NVIDIA B300 (sm103, planned for, not present)"
        assert explanation.chosen_forward == "cudnn"
    with attn_dispatch.target("sm80"):  # the argument overrides the block
        assert explain(Q, KV, KV).device.arch == "sm80"
        assert explain(Q, KV, KV, target="sm120").device.arch == "sm120"
        assert explain(Q, KV, KV).device.arch == "sm80"
    assert explain(Q, KV, KV).device.arch == "cpu"


def test_explain_needs_target_if_several_are_in_force():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    with attn_dispatch.target("sm90", "gfx942"):
        with pytest.raises(
            ValueError, match=r"got \('sm90', 'gfx942'\) in force \(remedy: pass target='sm90'\)"
        ):
            explain(x, x, x)
        assert explain(x, x, x, target="gfx942").device.arch == "gfx942"
    with pytest.raises(ValueError, match="target: expected a name like 'h100', got 90"):
        explain(x, x, x, target=90)


def test_device_for_each_platform_of_several_targets(monkeypatch):
    assert default_device() == CPU
    monkeypatch.setenv("ATTN_DISPATCH_TARGET", "gfx950")
    assert default_device().arch == "gfx950"
    with attn_dispatch.target("sm89", "gfx942"):
        assert device_for("cuda").name == "NVIDIA L40S"
        assert device_for("rocm").arch == "gfx942"
        assert device_for("cpu") == default_device() == CPU
    properties = parse("sm120").properties or ""
    monkeypatch.setenv("ATTN_DISPATCH_TARGET", properties)
    assert default_device().arch == "sm120"
    monkeypatch.setenv("ATTN_DISPATCH_TARGET", "sm80,,sm90")
    with pytest.raises(ValueError, match="at most one per platform"):
        default_device()


def test_reason_on_an_old_device():
    properties = json.dumps({"deviceVer": 750, "deviceName": "NVIDIA T4"})
    explanation = explain(Q, KV, KV, target=properties)
    (reason, *_) = explanation.forward[0].reasons
    assert str(reason).startswith(
        "needs compute capability sm80 or newer, and this is NVIDIA T4 (sm75"
    )
    assert explanation.chosen_forward == "xla"


def test_array_window_is_explained_from_its_shape():
    side = jax.ShapeDtypeStruct((), jnp.int32)
    x = jax.ShapeDtypeStruct((2, 512, 8, 64), jnp.bfloat16)
    for window in ((side, 0), side):
        text = str(attn_dispatch.explain(x, x, x, local_window_size=window, target="sm90"))
        assert "local_window_size" in text or "band" in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_call_of_sharded_arrays_is_that_of_one_device(kind: AxisType):
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)

    def struct(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    q = struct(P("data", None, "model"), 8, 128, 16, 64)
    k = struct(P("data", None, "model"), 8, 256, 4, 64)
    found = explain(q, k, k, target="cpu")
    assert found.call.shape("query") == (2, 128, 8, 64)
    assert found.call.shape("key") == (2, 256, 2, 64)
    assert found.share is not None and found.share.received_bytes == 0
    assert found.share.split == (("data", 4), ("model", 2))
    lines = str(found).splitlines()
    assert "share     one device's part, split along 'data' (4), 'model' (2)" in lines
    # Each direction is planned for the part of one device.
    alone = explain(*(jax.ShapeDtypeStruct(found.call.shape(x), jnp.float32)
                      for x in ("query", "key", "value")), target="cpu")  # fmt: skip
    assert alone.share is None
    assert (found.forward, found.backward) == (alone.forward, alone.backward)

    # Keys and values split along their length: a device has an eighth of its 262,144 bytes of each.
    k = struct(P(None, ("data", "model")), 8, 256, 4, 64)
    found = explain(q, k, k, target="cpu")
    assert found.call.shape("key") == (2, 256, 2, 64)
    assert found.share is not None
    assert found.share.received_bytes == 2 * 262_144 * 7 // 8
    assert "receives 459 kB forward and " in str(found.share)


def test_fp8_is_refused_with_what_to_do_everywhere():
    x = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.float8_e4m3fn)
    for target in ("h100", "mi300x", "cpu"):
        found = explain(x, x, x, target=target)
        assert found.chosen_forward is None
        (reason,) = (x for v in found.forward for x in v.reasons if x.rule == "xla/dtype")
        assert "to bfloat16, multiplied by their scales" in reason.remedy
    with pytest.raises(NotImplementedError, match="cast query, key and value to bfloat16"):
        dot_product_attention(*[jnp.zeros((1, 2, 1, 8), jnp.float8_e4m3fn)] * 3)


def test_an_implementation_of_another_vendor_gets_the_names_of_this_ones():
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    found = explain(x, x, x, implementation="cudnn", target="mi300x").text(200)
    assert "one that runs on this device: 'aiter', 'xla'\n" in found
    assert "remedy" not in str(explain(x, x, x, implementation="aiter", target="mi300x"))
