"""`assert_kernels` judges a program as it will run, by the implementations that are allowed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import assert_kernels, dot_product_attention, explain_program, fallback
from attn_dispatch.core import select
from attn_dispatch.core.choice import order
from attn_dispatch.core.choice.rates import DeviceRates
from attn_dispatch.core.choice.time_model import Prediction
from tests.support.fake_implementation import Fake
from tests.support.program_lists import struct

Q = struct(2, 128, 8, 64)
KERNEL, OTHER, XLA = Fake("kernel"), Fake("other"), Fake("xla", PLATFORM=None)
REFUSES = Fake("kernel", ("too wide",))
TIMES = {"kernel": 2345.0, "other": 3000.0, "xla": 20.0}

check = partial(assert_kernels, target="h100")


def attend(q: Any, bias: Any = None, **options: Any) -> jax.Array:
    return dot_product_attention(q, q, q, bias=bias, **options)


@pytest.fixture(autouse=True)
def implementations(monkeypatch: pytest.MonkeyPatch):
    """A function that makes these the implementations, of which XLA is predicted to be fastest."""
    rates = DeviceRates("NVIDIA H100", "sm90", 1, {}, ("a file",))
    monkeypatch.setattr(order, "rates_for", lambda device: rates)
    monkeypatch.setattr(order, "predicted", lambda _, name, spec: Prediction(9.0, TIMES[name]))

    def use(*fakes: Fake) -> None:
        monkeypatch.setattr(select, "IMPLEMENTATIONS", fakes)

    use(KERNEL, OTHER, XLA)
    return use


def test_xla_that_is_faster_fails_the_check_with_its_prediction():
    found = explain_program(attend, Q, target="h100")
    assert found.calls[0].explanation.chosen_forward == "xla" and found.fallbacks == found.calls
    with pytest.raises(AssertionError, match="expected a kernel for every attention") as raised:
        check(attend, Q)
    text = str(raised.value)
    reason = "chosen:    faster than kernel, other by predicted time, measured on NVIDIA H100"
    assert reason in text and reason in str(found)
    for time in ("20 us", "2.35 ms", "3 ms"):
        assert f"predicted: {time} on the device" in text
    assert text.count("could run:") == 2 and "remedy    where XLA was chosen:" in text


def test_the_policy_of_the_program_is_judged():
    with fallback("error"):
        assert check(attend, Q).calls[0].explanation.chosen_forward == "kernel"

    def with_its_policy(q: Any) -> jax.Array:
        with fallback("error"):
            return attend(q)

    assert check(with_its_policy, Q).fallbacks == ()
    with fallback("error"), pytest.raises(AssertionError):
        check(lambda q: fallback("warn")(attend)(q), Q)


@pytest.mark.parametrize(
    ("allowed", "options"),
    [
        ("kernel", {"implementation": "kernel"}),
        (("xla", "kernel"), {}),
        (["xla"], {"implementation": "xla"}),
        ("other", {"implementation": ["other", "kernel"]}),
    ],
)
def test_what_is_allowed_passes(allowed: Any, options: Any):
    assert check(partial(attend, **options), Q, implementations=allowed).calls


def test_another_kernel_than_the_named_ones_fails_the_check():
    by_kernel = partial(attend, implementation=["kernel", "other"])
    assert check(by_kernel, Q).calls
    with pytest.raises(AssertionError, match="expected other or xla for every") as raised:
        check(by_kernel, Q, implementations=("other", "xla"))
    lines = [x[:26].rstrip() for x in str(raised.value).splitlines() if x.startswith("forward ")]
    assert lines == ["forward   kernel  runs: ke", "forward   other   could ru"]
    assert "chosen:    the call asks for it" in str(raised.value)


def test_what_refuses_a_call_that_names_it_is_listed(implementations: Any):
    implementations(REFUSES, OTHER, XLA)
    with pytest.raises(AssertionError, match=r"forward +kernel +cannot run:\s+- too wide"):
        check(partial(attend, implementation="kernel"), Q, implementations="other")


def test_a_call_that_asks_for_xla_fails_the_check():
    with pytest.raises(AssertionError, match="chosen:    the call asks for it"):
        check(partial(attend, implementation="xla"), Q)


def test_a_fallback_fails_the_check_even_where_xla_is_allowed(implementations: Any):
    implementations(REFUSES, XLA)
    with pytest.raises(AssertionError, match=r"too wide on sm90") as raised:
        check(attend, Q, implementations=("kernel", "xla"))
    assert "where XLA was chosen" not in str(raised.value)
    both = partial(attend, implementation=("kernel", "xla"))
    assert check(both, Q, implementations=("kernel", "xla")).fallbacks


def test_a_call_that_may_be_left_to_xla_at_run_time_fails_the_check(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.undo()
    bias = struct(2, 8, 128, 128, dtype="float32")
    amd = partial(assert_kernels, target="gfx942")
    found = explain_program(attend, Q, bias, target="gfx942")
    assert found.calls[0].explanation.chosen_forward == "aiter" and found.calls[0].fallbacks
    with pytest.raises(AssertionError, match="remedy    where a call may be left to XLA when") as e:
        amd(attend, Q, bias, implementations=("aiter", "xla"))
    assert "remedy: cast the\n" in str(e.value)
    both = partial(attend, implementation=("aiter", "xla"))
    assert amd(both, Q, bias, implementations=("aiter", "xla")).calls
    with pytest.raises(AssertionError):
        amd(both, Q, bias, implementations="aiter")
    assert amd(attend, Q, struct(*bias.shape)).calls


def test_the_part_of_a_device_is_found_under_the_policy_in_force(monkeypatch: pytest.MonkeyPatch):
    """Under "error" a kernel runs the call, which is split along the axes that are not manual."""
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "error")
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q = struct(2, 128, 8, 64, sharding=NamedSharding(mesh, P("x", None, "y")))

    def program(q: Any) -> jax.Array:
        spec: Any = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
        return jax.shard_map(attend, mesh=mesh, **spec)(q)

    (call,) = check(program, q).calls
    assert str(call.share).endswith("in a shard_map over 'x' (2), split along 'y' (4)")


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_finding_parts_of_devices_neither_warns_nor_fails(
    policy: Any, recwarn: Any, monkeypatch: pytest.MonkeyPatch
):
    """The derivative is a fallback, which the list has; the call beside it is split."""
    monkeypatch.undo()
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q = struct(2, 128, 8, 64, sharding=NamedSharding(mesh, P("x", None, "y")))

    def program(q: Any) -> Any:
        return attend(2 * q), jax.jvp(attend, (q,), (q,))

    with fallback(policy):
        found = explain_program(program, q, target="gfx942")
    parts = [str(x.share) for x in found.calls]
    assert "one device's part, split along 'x' (2), 'y' (4)" in parts and len(recwarn) == 0
