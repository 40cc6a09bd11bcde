"""Explaining calls for a GPU that is not here, without the planner of its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import (
    assert_kernels,
    cudnn,
    dot_product_attention,
    explain,
    explain_program,
)
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.library import CudnnLibrary
from attn_dispatch.devices import target
from attn_dispatch.devices.implementation import planner_reason
from attn_dispatch.devices.target import parse
from attn_dispatch.reason import Reason
from attn_dispatch_tools import cli
from tests.support.backend import WITHOUT_PLANNER

Q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
STATE = "unknown: cuDNN's planner is not here: attn_dispatch was installed without its CUDA library"
COMMAND = "pip install --no-deps nvidia-cudnn-cu13 && ATTN_DISPATCH_CUDA=1 pip install ."


@pytest.fixture(autouse=True)
def without_planner(monkeypatch):
    monkeypatch.setattr(cudnn_library, "find", lambda: WITHOUT_PLANNER)


def attend(q: Any) -> jax.Array:
    return dot_product_attention(q, q, q, is_causal=True)


def loss(q: Any) -> jax.Array:
    return attend(q).astype(jnp.float32).sum()


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "rtx5090"])
def test_what_runs_a_call_is_unknown(target: str):
    found = explain(Q, Q, Q, is_causal=True, target=target)
    assert (found.chosen_forward, found.chosen_backward) == ("unknown", "unknown")
    lines = str(found).splitlines()
    at = lines.index("chosen    forward: unknown, backward: unknown")
    assert lines[at + 1].startswith("planner   not here; in a checkout of attn-dispatch")
    assert lines[at + 2].strip() == COMMAND
    assert f"forward   cudnn   {STATE}"[:80] in str(found)
    assert found.forward[0].is_unknown and not found.forward[0].is_eligible


def test_calls_with_options_that_rewrites_may_remove_are_unknown():
    wide = jax.ShapeDtypeStruct((2, 128, 8, 40), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((128, 128), jnp.bool_)
    found = explain(wide, wide, wide, mask=mask, sinks=jnp.ones(8), target="h100")
    assert found.chosen_forward == "unknown"
    by_row = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    found = explain(Q, Q, Q, alibi_slopes=by_row, target="h100")
    assert (found.chosen_forward, found.chosen_backward) == ("unknown", "unknown")


DROPOUT: dict[str, Any] = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}


def test_a_call_with_dropout_is_unknown():
    found = explain(Q, Q, Q, **DROPOUT, target="h100")
    assert (found.chosen_forward, found.chosen_backward) == ("unknown", "unknown")


@pytest.mark.parametrize("backward", [False, True])
def test_a_rule_for_one_direction_leaves_the_other_unknown(monkeypatch, backward: bool):
    """With dropout, each direction is asked about the other, too."""
    missing, rule = planner_reason("cudnn", "no planner", ""), Reason("a rule", text="a rule")
    monkeypatch.setattr(
        cudnn,
        "not_supported_reasons",
        lambda spec, device: (missing, rule) if spec.is_backward is backward else (missing,),
    )
    found = explain(Q, Q, Q, **DROPOUT, target="h100")
    refused, unknown = (found.forward, found.backward)[:: -1 if backward else 1]
    assert refused[0].reasons == (rule,) and unknown[0].reasons == (missing,)


def test_a_rule_of_this_package_is_known_without_the_planner():
    q = jax.ShapeDtypeStruct(Q.shape, jnp.float32)
    found = explain(q, q, q, target="h100")
    assert (found.chosen_forward, found.chosen_backward) == ("xla", "xla")
    (reason,) = found.forward[0].reasons
    assert str(reason) == "needs float16 or bfloat16, got float32"
    assert "planner" not in str(found)
    old = '{"deviceVer": 750, "deviceName": "NVIDIA T4"}'
    assert explain(Q, Q, Q, target=old).chosen_forward == "xla"
    found = explain(Q, Q, Q, target="h100", implementation="xla")
    assert found.chosen_forward == "xla" and found.missing_planner is None


def test_targets_without_cudnn_are_known():
    assert explain(Q, Q, Q, target="mi300x").chosen_forward == "aiter"
    assert explain(Q, Q, Q, target="cpu").chosen_forward == "xla"


def test_a_planner_that_fails_for_another_reason_has_no_command(monkeypatch):
    broken = CudnnLibrary(None, unusable_reason="cuDNN 9.1 is out of range")
    monkeypatch.setattr(cudnn_library, "find", lambda: broken)
    found = explain(Q, Q, Q, target="h100")
    text = str(found)
    assert found.chosen_forward == "unknown" and "pip install --no-deps nvidia-cudnn" not in text
    assert "planner   not here: cuDNN's planner is not here: cuDNN 9.1 is out of range" in text


def test_the_command_says_unknown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    call = "q=bf16[2,128,8,64]"
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", call, "--target", "h100"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 1
    assert (
        "chosen    forward: unknown, backward: unknown" in lines and f"{' ' * 12}{COMMAND}" in lines
    )
    assert [x for x in lines if len(x) > 80] == [f"{' ' * 12}{COMMAND}"]  # to copy


def test_a_program_for_it_is_unknown():
    found = explain_program(jax.grad(loss), Q, target="h100")
    (call,) = found.fallbacks
    assert call.explanation.chosen_forward == call.explanation.chosen_backward == "unknown"
    lines = str(found).splitlines()
    assert lines[2].startswith("planner   not here") and lines[3].strip() == COMMAND
    text = "\n".join(lines[4:])
    assert "runs:" not in text and "xla" not in text
    with pytest.raises(AssertionError, match="unknown: cuDNN's planner is not here") as raised:
        assert_kernels(attend, Q, target="h100")
    assert COMMAND in str(raised.value)


def test_lowering_names_the_planner_and_the_command():
    with attn_dispatch.target("h100"), attn_dispatch.fallback("error"):
        with pytest.raises(NotImplementedError, match="cuDNN's planner is not here") as raised:
            jax.jit(attend).trace(Q).lower(lowering_platforms=("cuda",))
    assert f"(remedy: {COMMAND})" in str(raised.value)


def test_a_gpu_that_is_here_runs_xla(monkeypatch):
    """Then the program itself cannot use cuDNN, whatever a planner would say."""
    here = replace(parse("sm90"), properties=None, ordinal=0, is_present=True)
    monkeypatch.setattr(target, "default_device", lambda: here)
    found = explain(Q, Q, Q)
    assert found.device == here and found.chosen_forward == "xla"
    assert found.forward[0].reasons[-1].rule == "cudnn/library"
