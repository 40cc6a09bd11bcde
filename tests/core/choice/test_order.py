"""The order of implementations: by predicted time, with what XLA may replace, and its basis."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.choice import order, rates
from attn_dispatch.core.choice.rates import DeviceRates, Rate
from attn_dispatch.core.choice.work import TRAITS
from attn_dispatch.core.explanation import explain_specs
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import CPU, parse
from attn_dispatch.inspection import explain, spec_of
from attn_dispatch_tools.bench.regret.named_mods import functions_of
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.case import spec_of as spec_of_case
from tests.support.backend import needs_cudnn
from tests.support.fake_implementation import Fake

CUDA = parse("h200")
KERNEL, EXTRA = Fake("kernel"), Fake("extra", IS_EXTRA=True)
XLA = Fake("xla", PLATFORM=None)


def everywhere(implementation: Any, device: Device) -> bool:
    return implementation.PLATFORM in (None, device.platform)


def spec(**facts: Any) -> AttentionSpec:
    case = Case("ordered", **({"dtype": "bfloat16"} | facts))
    return spec_of_case(case.forward_options(), case.avals())


def a_rate(tile: float, host: float = 10.0, **further: Any) -> Rate:
    nothing = dict.fromkeys(("path", "wave", "block", "megabyte", "pair_megabyte"), 0.0)
    tiles = dict.fromkeys(("64", "128", "512"), tile)
    return Rate(host=host, start=1.0, tile=tiles, traits=TRAITS, **nothing, **further)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch):
    """A function that makes these the rates of an H200, by implementation."""

    def use(**by_name: Rate) -> None:
        passes = {(x, y): r for x, r in by_name.items() for y in ("forward", "backward")}
        known = DeviceRates("NVIDIA H200", "sm90", 1, passes, ("a file",))
        monkeypatch.setattr(rates, "_packaged", lambda *_: known)
        monkeypatch.setattr(rates, "_users", lambda: ())

    return use


def names(spec: AttentionSpec, *known: Fake, device: Device = CUDA) -> list[str]:
    return [x.NAME for x in order.ranking(known, spec, device, everywhere).order]


def test_the_least_predicted_time_comes_first_and_a_changed_rate_changes_the_choice(times):
    times(kernel=a_rate(2.0), extra=a_rate(1.0))
    assert names(spec(), KERNEL, EXTRA) == ["extra", "kernel"]
    times(kernel=a_rate(2.0), extra=a_rate(3.0))
    assert names(spec(), KERNEL, EXTRA) == ["kernel", "extra"]
    times(kernel=a_rate(2.0), extra=a_rate(1.0, tile_times={"sinks": 3.0}))
    assert names(spec(sinks=1), KERNEL, EXTRA) == ["kernel", "extra"]


def test_implementations_without_rates_follow_in_their_order(times):
    times(extra=a_rate(1.0))
    assert names(spec(), KERNEL, EXTRA, XLA) == ["extra", "kernel", "xla"]
    assert names(spec(), KERNEL, EXTRA, XLA, device=CPU) == ["kernel", "extra", "xla"]
    times(extra=a_rate(1.0))
    assert names(spec(h=300, v=300), KERNEL, EXTRA) == ["kernel", "extra"], "no rate of these dims"


def test_the_host_counts_in_a_program_of_one_call_alone(times, monkeypatch):
    times(kernel=a_rate(0.01, host=90.0), extra=a_rate(0.1, host=10.0))
    assert names(spec(), KERNEL, EXTRA) == ["kernel", "extra"]
    alone = replace(order.settings.current(), is_alone=True)
    with order.settings.restored(alone):
        assert names(spec(), KERNEL, EXTRA) == ["extra", "kernel"]


def test_xla_comes_before_slower_kernels_by_a_margin_and_without_a_warning(times, monkeypatch):
    times(kernel=a_rate(1.0), xla=a_rate(0.95))
    assert names(spec(), KERNEL, XLA) == ["kernel", "xla"]
    times(kernel=a_rate(100.0), xla=a_rate(1.0))
    assert names(spec(), KERNEL, XLA) == ["xla", "kernel"]
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (KERNEL, XLA))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select.choose(spec(), CUDA).NAME == "xla"
        assert not select.has_kernel(spec(), CUDA)
        with attn_dispatch.fallback("error"):
            assert select.choose(spec(), CUDA).NAME == "kernel"


@pytest.mark.parametrize(
    "facts",
    [{"dropout": 0.5}, {"query_ids": "1 1 2 2", "max_segments": 2}, {"dtype": "float32"}, {"b": 0}],
    ids=str,
)
def test_xla_never_replaces_kernels_whose_results_would_differ(times, facts):
    times(kernel=a_rate(100.0), xla=a_rate(1.0))
    if "query_ids" in facts:
        q = jax.ShapeDtypeStruct((1, 4, 1, 64), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        call = spec_of(query=q, key=q, value=q, query_segment_ids=ids, max_segments=2)
    else:
        call = spec(**facts)
    assert names(call, KERNEL, XLA) == ["kernel", "xla"]


def test_xla_is_not_preferred_where_no_kernel_runs_the_call(times, monkeypatch):
    """Then the warning of a fallback says why."""
    times(kernel=a_rate(100.0), extra=a_rate(100.0), xla=a_rate(1.0))
    refuses = Fake("kernel", ("a head dim of 512",))
    assert names(spec(), refuses, XLA) == ["kernel", "xla"]
    assert names(spec(), refuses, EXTRA, XLA)[0] == "xla"
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (refuses, XLA))
    with pytest.warns(attn_dispatch.AttentionFallbackWarning, match="a head dim of 512"):
        assert select.choose(spec(), CUDA).NAME == "xla"


@needs_cudnn
def test_xla_is_not_preferred_where_it_takes_much_memory(times):
    times(cudnn=a_rate(100.0), xla=a_rate(1.0))

    def first(**facts: Any) -> str:
        with attn_dispatch.target("h200"):
            return select.asked_in_order(spec(h=512, v=512, **facts), CUDA)[0][0].NAME

    assert first(t=8192, s=8192, n=8, k=4) == "xla"
    assert first(b=8, t=65536, s=65536, n=16, k=16) == "cudnn"
    with attn_dispatch.scratch_limit("1MB"):
        assert first(t=8192, s=8192, n=8, k=4) == "cudnn"


_SLOW_MASKS = {
    "4k, window 1,024 and 64 keys": (4096, {"is_causal": True}, ["window_and_first", 1024, 64]),
    "8k, prefix 2,048": (8192, {}, ["prefix", 2048]),
    "4k, prefix 512": (4096, {}, ["prefix", 512]),
}
"""Masks that ran 2 to 8 times slower than fa4 by default, because nobody had timed their cells."""


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", _SLOW_MASKS)
def test_masks_that_nobody_timed_go_to_the_kernels_that_skip_their_tiles(name, backward):
    length, options, mod = _SLOW_MASKS[name]
    q = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16)
    call = spec_of(query=q, key=k, value=k, **options, **functions_of({"mask_mod": mod}))
    if backward:
        call = call.in_training(("query", "key", "value"))[1]
    known = (Fake("cudnn"), Fake("fa4", IS_EXTRA=True), XLA)
    found = order.ranking(known, call, CUDA, everywhere)
    assert found.order[0].NAME == "fa4"
    assert found.predictions["fa4"].device < found.predictions["cudnn"].device


def test_cards_nobody_timed_follow_public_reports_and_explain_says_so():
    known = (Fake("cudnn"), Fake("flash", IS_EXTRA=True), XLA)
    assert names(spec(), *known, device=parse("a100"))[0] == "flash"
    assert names(spec(), *known, device=parse("l40s"))[0] == "cudnn"
    assert names(spec(), *known, device=parse("sm120"))[0] == "flash"
    assert names(spec(), *known, device=parse("b200"))[0] == "cudnn"
    q = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    assert "order     not measured here; transformers#48163" in explain(
        q, q, q, target="a100"
    ).text(200)
    assert "measured on NVIDIA H200, not here" in explain(q, q, q, target="gh200").text(200)
    assert "by predicted time, measured on NVIDIA H100" in explain(q, q, q, target="h100").text(200)


@needs_cudnn
def test_explain_shows_predicted_times_of_both_passes_and_what_was_assumed():
    q = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    found = explain(q, q, q, is_causal=True, query_segment_ids=ids, target="h200")
    (cudnn,) = (x for x in found.forward if x.implementation == "cudnn")
    assert cudnn.predicted is not None and cudnn.predicted.device > 10
    (cudnn,) = (x for x in found.backward if x.implementation == "cudnn")
    assert cudnn.predicted is not None and cudnn.predicted.device > 10
    text = found.text(200)
    assert "on the device" in text and "assumed: 4 documents in a row" in text


def test_explain_says_what_else_runs_a_call_alone_in_its_program(times, monkeypatch):
    times(kernel=a_rate(0.01, host=90.0), extra=a_rate(0.1, host=10.0))
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (KERNEL, EXTRA, XLA))
    monkeypatch.setattr(select, "_is_usable", lambda *_: True)
    call = spec()
    found = explain_specs(call, CUDA, call, None)
    assert found.chosen_forward == "kernel" and found.alone == "forward: extra"
    assert "\nalone     forward: extra\n" in found.text()
    with attn_dispatch.target("h200"):
        assert not explain_specs(call, CUDA, call, None).alone
