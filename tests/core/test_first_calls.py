"""The first call of a process where another kernel comes before cuDNN: it never asks for cuDNN.

Loading cuDNN and planning with it takes longer than all the rest of such a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, target
from attn_dispatch.core import select
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled
from attn_dispatch.flash import library as flash_library
from attn_dispatch.inspection import spec_of
from tests.support.fa4_on_cpu import LIBRARY
from tests.support.lowered import lowered_for_cuda

LENGTH = 2048
IDS = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"is_causal": True, "local_window_size": (511, 0)},
    "documents": {"is_causal": True, "max_segments": 8},
}
DEVICE = parse("h200")


class AskedForCudnn(BaseException):
    pass


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch):
    """Ask for cuDNN, and the test fails; and no extra is installed."""

    def find():
        raise AskedForCudnn

    monkeypatch.setattr(cudnn_library, "find", find)
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    monkeypatch.setattr(flash_library, "version", lambda: None)
    select.is_installed.cache_clear()
    yield
    select.is_installed.cache_clear()
    jax.clear_caches()


@pytest.fixture
def flash(monkeypatch) -> None:
    monkeypatch.setattr(flash_library, "version", lambda: "0.3.6")
    monkeypatch.setattr(flash_library, "unusable_reason", lambda: None)


@pytest.fixture
def fa4(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "find", lambda: LIBRARY)


def first_call(name: str, *implementation: str) -> str:
    """A call with its gradients, lowered for an H200."""
    jax.clear_caches()
    options = CALLS[name]

    def step(q: jax.Array, ids: jax.Array, out_grad: jax.Array):
        has_ids = "max_segments" in options
        of_ids = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)

        def call(q: jax.Array) -> jax.Array:
            given = options | (of_ids if has_ids else {})
            return dot_product_attention(q, q, q, **given, implementation=implementation or None)

        out, pull = jax.vjp(call, q)
        return out, pull(out_grad)

    q = jax.ShapeDtypeStruct((1, LENGTH, 8, 64), jnp.bfloat16)
    with target("h200"):
        return lowered_for_cuda(jax.jit(step), q, IDS, q)


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_flash_ask_for_no_cudnn(flash, name):
    text = first_call(name, "flash", "cudnn")
    assert "attn_dispatch_flash" in text and "cudnn" not in text


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_fa4_ask_for_no_cudnn(fa4, name):
    text = first_call(name, "fa4", "cudnn")
    assert "attn_dispatch_fa4_forward" in text and "attn_dispatch_fa4_backward" in text
    assert "cudnn" not in text


def test_calls_that_flash_runs_first_ask_for_no_cudnn(flash):
    assert "attn_dispatch_flash_backward" in first_call("causal")


def test_calls_that_need_cudnn_ask_for_it():
    with pytest.raises(AskedForCudnn):
        first_call("causal")


def test_winners_of_other_calls_ask_for_no_cudnn(flash, monkeypatch, tmp_path):
    monkeypatch.setenv(winners.FILE, str(tmp_path / "winners.json"))
    q = jax.ShapeDtypeStruct((1, LENGTH, 8, 64), np.dtype(jnp.bfloat16))
    spec = spec_of(query=q, key=q, value=q, is_causal=True)
    winner = Winner(
        call=winners.described(spec), device=DEVICE.name, versions={"flash": "0"},
        implementation="flash", engine="", date="2026-11-26", untuned="flash",
        microseconds={"flash": 1.5},
    )  # fmt: skip
    winners.keep(replace(winner, call={**winner.call, "query": "bfloat16[1,9,8,64]"}))
    assert "attn_dispatch_flash_backward" in first_call("causal")
    winners.keep(winner)
    with pytest.raises(AskedForCudnn):  # its entry counts for certain versions
        winners.find(spec, DEVICE, select.versions)
