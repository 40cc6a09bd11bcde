"""Another thread plans the backward pass while the forward pass is lowered."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import dot_product_attention, settings
from attn_dispatch.core import background_planning, select
from attn_dispatch.devices.device import Device
from attn_dispatch.inspection import spec_of

QUERY = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.bfloat16)
SPEC = spec_of(query=QUERY, key=QUERY, value=QUERY)
FORWARD, BACKWARD = SPEC.in_training(("query", "key", "value"))
GPU = Device("cuda", "sm90", "a GPU", ordinal=0)


@pytest.fixture
def planned(monkeypatch) -> list[Any]:
    """The calls that other threads plan, with their settings and thread."""
    found: list[Any] = []

    def plan(*arguments: Any) -> None:
        found.append((*arguments, settings.current(), threading.current_thread()))
        raise NotImplementedError("the plan is never run")

    monkeypatch.setattr(select, "plan", plan)
    return found


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "attn_dispatch planning":
            thread.join()


def test_thread_plans_the_backward_call_under_the_callers_settings(planned):
    with settings.restored(replace(settings.current(), rewrites=False)):
        background_planning.plan_backward(FORWARD, GPU)
    wait()
    ((spec, device, thread_settings, thread),) = planned
    assert (spec, device) == (BACKWARD, GPU) and not thread_settings.rewrites
    assert thread is not threading.current_thread()


def test_planning_is_left_for_later_where_no_thread_starts(planned, monkeypatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    background_planning.plan_backward(FORWARD, GPU)
    assert planned == []


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (SPEC, GPU),
        (BACKWARD, GPU),
        (FORWARD, Device("cuda", "sm90", "no GPU", "{}", is_present=False)),
        (FORWARD, Device("cpu", "cpu", "a CPU")),
    ],
)
def test_nothing_is_planned_without_a_backward_pass_or_a_gpu(planned, spec, device):
    background_planning.plan_backward(spec, device)
    wait()
    assert planned == []


def test_expected_backward_call_equals_the_lowered_one(monkeypatch):
    """Under vmap and for some of the operands, too."""
    expected, lowered = [], []
    choose = select.choose

    def record(spec: Any, device: Device) -> Any:
        (lowered if spec.is_backward else expected).append(
            spec if spec.is_backward else spec.expected_backward()
        )
        return choose(spec, device)

    monkeypatch.setattr(select, "choose", record)

    def loss(q: jax.Array, k: jax.Array, b: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, k, b).astype(jnp.float32).sum()

    q, b = jnp.ones((3, 1, 8, 2, 16), jnp.bfloat16), jnp.ones((3, 1, 2, 8, 8), jnp.bfloat16)
    jax.jit(jax.vmap(jax.grad(loss, (0, 2)), (0, 0, 0)))(q, q, b)
    assert len(lowered) == 1 and expected == lowered
