"""The choice of an implementation: order, the caller's preferences, warnings about a fallback."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import AttentionFallbackWarning, dot_product_attention, settings, xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.verdict import verdicts_on
from attn_dispatch.devices.target import CPU, parse
from attn_dispatch.reason import reason_from_sentence
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.fake_implementation import Fake
from tests.support.option_parts import with_facts

CUDA, ROCM = parse("sm90"), parse("gfx942")


FAST, SLOW, LAST = Fake("fast"), Fake("slow"), Fake("last", PLATFORM=None)
REFUSES = Fake("fast", ("too wide", "too tall"))
REFUSES_TOO = Fake("slow", ("too small",))


@pytest.fixture
def implementations(monkeypatch):
    def use(*fakes: Fake) -> None:
        monkeypatch.setattr(select, "IMPLEMENTATIONS", fakes)

    return use


def spec(*wanted: str, **facts) -> AttentionSpec:
    case = Case("selected", **facts)
    return spec_of(with_facts(case.forward_options(), implementation=wanted), case.operands())


@pytest.mark.parametrize(
    ("available", "wanted", "chosen"),
    [
        ((FAST, SLOW, LAST), (), "fast"),
        ((REFUSES, SLOW, LAST), (), "slow"),
        ((REFUSES, REFUSES_TOO, LAST), (), "last"),
        ((FAST, SLOW, LAST), ("slow",), "slow"),
        ((FAST, SLOW, LAST), ("last", "fast"), "last"),
        ((REFUSES, SLOW, LAST), ("fast", "last"), "last"),
        ((REFUSES, SLOW, LAST), ("last", "fast"), "last"),
    ],
)
def test_first_eligible_implementation_is_chosen(implementations, available, wanted, chosen):
    implementations(*available)
    with attn_dispatch.fallback("silent"):
        assert select.choose(spec(*wanted), CUDA).NAME == chosen
    verdicts = verdicts_on(spec(*wanted), CUDA)
    assert [v.implementation for v in verdicts] == list(wanted or [x.NAME for x in available])
    assert next(v.implementation for v in verdicts if v.is_eligible) == chosen
    assert all((v.plan is None) == bool(v.reasons) for v in verdicts)


@pytest.mark.parametrize(
    ("available", "wanted", "refusals"),
    [
        ((REFUSES, SLOW, LAST), ("fast",), [REFUSES]),
        ((REFUSES, REFUSES_TOO, LAST), ("slow", "fast"), [REFUSES_TOO, REFUSES]),
        ((REFUSES, REFUSES_TOO), (), [REFUSES, REFUSES_TOO]),
    ],
)
def test_error_lists_every_reason_if_nothing_runs(implementations, available, wanted, refusals):
    implementations(*available)
    call = spec(*wanted)
    with pytest.raises(NotImplementedError) as error:
        select.choose(call, CUDA)
    expected = [
        "no implementation can run this attention call",
        f"  call: {call}",
        f"  device: {CUDA}",
    ]
    for fake in refusals:
        expected += [f"  {fake.NAME}:", *(f"    - {reason} on sm90" for reason in fake.reasons)]
    assert str(error.value).splitlines() == expected


def test_names_of_implementations_are_accepted(implementations):
    assert select.names() == ("cudnn", "flash", "fa4", "aiter", "xla")
    implementations(FAST, LAST)
    assert select.names() == ("fast", "last")
    x = np.ones((1, 2, 1, 8), np.float32)
    assert np.all(dot_product_attention(x, x, x, implementation="last") == len("last"))
    with pytest.raises(ValueError, match=re.escape("one of ('fast', 'last')")):
        dot_product_attention(x, x, x, implementation="xla")


@pytest.mark.parametrize("device", [CUDA, ROCM], ids=str)
def test_fallback_warns_once_per_call_with_every_reason(implementations, device):
    vendors = (replace(fake, PLATFORM=device.platform) for fake in (REFUSES, REFUSES_TOO))
    implementations(*vendors, LAST)
    call = spec()
    with pytest.warns(AttentionFallbackWarning) as given:
        for _ in range(3):
            select.choose(call, device)
    message = str(given[0].message)
    assert len(given) == 1
    for part in ("falls back to last", str(call), str(device), "fast:", "slow:",
                 "too wide on", "too tall on", "too small on"):  # fmt: skip
        assert part in message
    # Another call or another device gets its own warning.
    with pytest.warns(AttentionFallbackWarning) as given:
        select.choose(spec(t=20), device)
        select.choose(call, parse("sm80" if device is CUDA else "gfx950"))
    assert len(given) == 2


def test_no_warning_without_a_fallback(implementations):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        implementations(FAST, SLOW, LAST)
        select.choose(spec(), CUDA)
        implementations(REFUSES, SLOW, LAST)
        select.choose(spec(), CPU)  # a CPU has no vendor's kernel to fall back from
        select.choose(spec("fast", "last"), CUDA)  # the caller named the fallback
        select.choose(spec("last"), CUDA)


def test_other_vendors_implementation_causes_no_warning(implementations, recwarn):
    implementations(Fake("other", ("never",), PLATFORM="rocm"), FAST, LAST)
    assert select.choose(spec(), CUDA).NAME == "fast"
    implementations(FAST, LAST)
    assert select.choose(spec(), ROCM).NAME == "last"
    assert not recwarn.list
    with pytest.raises(NotImplementedError, match="never on sm90"):  # unless the caller names it
        implementations(Fake("other", ("never",), PLATFORM="rocm"), LAST)
        select.choose(spec("other"), CUDA)


def test_fallback_policies(implementations):
    implementations(REFUSES, LAST)
    call = spec()
    with attn_dispatch.fallback("error"):
        expected = r"(?s)falls back to last.*too wide.*too tall"
        with pytest.raises(NotImplementedError, match=expected):
            select.choose(call, CUDA)
        assert select.choose(call, CPU).NAME == "last"
        with attn_dispatch.fallback("silent"):
            assert select.choose(call, CUDA).NAME == "last"
        with pytest.raises(NotImplementedError):
            select.choose(call, CUDA)
    with pytest.warns(AttentionFallbackWarning):
        select.choose(call, CUDA)


def test_fallback_policy_from_the_environment(implementations, monkeypatch):
    implementations(REFUSES, LAST)
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "error")
    with pytest.raises(NotImplementedError, match="falls back to last"):
        select.choose(spec(), CUDA)
    with attn_dispatch.fallback("silent"):  # a block overrides the environment
        select.choose(spec(), CUDA)
    with attn_dispatch.target("sm90"), pytest.raises(NotImplementedError):  # "error" still holds
        select.choose(spec(), CUDA)
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "silent")
    assert select.choose(spec(), CUDA).NAME == "last"
    expected = re.escape(": expected one of ('warn', 'error', 'silent'), got 'loud'")
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "loud")
    with pytest.raises(ValueError, match=f"ATTN_DISPATCH_FALLBACK{expected}"):
        settings.current()
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "")
    assert settings.current().fallback == "warn"
    monkeypatch.delenv("ATTN_DISPATCH_FALLBACK")
    with pytest.raises(ValueError, match=f"fallback{expected}"), attn_dispatch.fallback("loud"):  # pyright: ignore
        pass
    for policy, meant in {"raise": "error", "Warn": "warn", "ignore": "silent"}.items():
        with pytest.raises(ValueError, match=f"got '{policy}'; did you mean '{meant}'\\?$"):
            attn_dispatch.fallback(policy)  # pyright: ignore


def test_changed_policy_lowers_a_jitted_call_again(implementations):
    implementations(REFUSES, LAST)
    q = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)
    function = jax.jit(lambda q: dot_product_attention(q, q, q))

    def lower() -> None:
        function.trace(q).lower(lowering_platforms=("cuda",))

    with attn_dispatch.target("sm90"):
        with attn_dispatch.fallback("silent"):
            lower()
        with attn_dispatch.fallback("error"), pytest.raises(NotImplementedError, match="too wide"):
            lower()


def test_error_of_a_real_call_gives_every_reason():
    x = np.ones((2, 2, 1, 8), np.float32)
    ids = np.ones((2, 2), np.int32)
    with pytest.raises(NotImplementedError) as error:
        dot_product_attention(
            x, x, x, query_segment_ids=ids, sinks=np.ones((2, 1), np.float32),
            alibi_slopes=np.ones((2, 1), np.float32), implementation="cudnn",
        )  # fmt: skip
    text = str(error.value)
    parts = (
        "cuDNN runs on NVIDIA GPUs, and this is CPU (cpu)", "query float32[2, 2, 1, 8]",
        "segment ids: kernels need max_segments", "sinks: cuDNN has one",
        "alibi_slopes: cuDNN has one", "needs float16 or bfloat16, got float32",
    )  # fmt: skip
    for part in parts:
        assert part in text
    assert text.endswith("one that runs on this device: 'xla'") and text.count("xla") == 1


@pytest.mark.parametrize("is_jitted", [False, True])
def test_both_passes_give_one_warning_at_the_line_of_the_call(implementations, is_jitted):
    implementations(REFUSES, LAST)
    x = jnp.ones((1, 8, 1, 8), jnp.float32)

    def loss(x):
        # The next line is the call.
        return dot_product_attention(x, x, x).sum()

    grad = jax.grad(loss)
    with attn_dispatch.target("sm90"), pytest.warns(AttentionFallbackWarning) as given:
        jax.jit(jax.jit(grad) if is_jitted else grad).trace(x).lower(lowering_platforms=("cuda",))
    (warned,) = given
    assert warned.filename == __file__
    lines = Path(__file__).read_text().splitlines()
    assert "dot_product_attention(x, x, x).sum()" in lines[warned.lineno - 1]
    assert "the next line" in lines[warned.lineno - 2].lower()
    message = str(warned.message)
    assert "falls back to last" in message and "and so does its backward pass" in message
    assert 'implementation="last" asks for it without a warning' in message
    assert message.count("too wide on sm90") == 1


def test_warning_about_a_derivative_points_at_the_line_of_the_call(implementations):
    implementations(FAST, xla)
    x = jnp.ones((1, 8, 1, 8), jnp.float32)

    def attend(x):
        return dot_product_attention(x, x, x)  # the call

    tangent = jax.jit(lambda x: jax.jvp(attend, (x,), (x,)))
    with attn_dispatch.target("sm90"), pytest.warns(AttentionFallbackWarning) as given:
        tangent.trace(x).lower(lowering_platforms=("cuda",))
    (warned,) = given
    assert str(warned.message).startswith("attention's forward-mode derivative falls back to")
    assert Path(__file__).read_text().splitlines()[warned.lineno - 1].endswith("# the call")


def test_backward_pass_with_other_reasons_is_named(implementations):
    class OnlyForward(Fake):
        def not_supported_reasons(self, spec, device):
            return super().not_supported_reasons(spec, device) if spec.is_backward else ()

    implementations(OnlyForward("fast", ("no gradients",)), LAST)
    x = jnp.ones((1, 8, 1, 8), jnp.float32)
    grad = jax.jit(jax.grad(lambda x: dot_product_attention(x, x, x).sum()))
    with attn_dispatch.target("sm90"), pytest.warns(AttentionFallbackWarning) as given:
        grad.trace(x).lower(lowering_platforms=("cuda",))
    (warned,) = given
    assert str(warned.message).startswith("attention's backward pass falls back to last")
    assert warned.filename == __file__

    class Both(Fake):
        def not_supported_reasons(self, spec, device):
            return (
                reason_from_sentence(
                    "fast", f"no {'gradients' if spec.is_backward else 'outputs'}"
                ),
            )

    implementations(Both("fast"), LAST)
    with attn_dispatch.target("sm90"), pytest.warns(AttentionFallbackWarning) as given:
        jax.jit(grad).trace(x[:, :4]).lower(lowering_platforms=("cuda",))
    (warned,) = given
    assert re.search(
        r"(?s)falls back to last.*- no outputs\n  and so does its backward pass\n.*- no gradients",
        str(warned.message),
    )


def test_fallback_warning_gives_remedies():
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    call = jax.jit(lambda x, ids: dot_product_attention(x, x, x, query_segment_ids=ids))
    with (
        attn_dispatch.target("sm90"),
        attn_dispatch.rewrites(False),
        pytest.warns(AttentionFallbackWarning) as given,
    ):
        call.trace(x, ids).lower(lowering_platforms=("cuda",))
    (warned,) = given
    assert "remedy: cast query, key and value to bfloat16" in str(warned.message)
    assert "remedy: pass max_segments" in str(warned.message)
