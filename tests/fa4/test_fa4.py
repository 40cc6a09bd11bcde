"""FlashAttention-4 (fa4-jax): its arrays with NumPy as the kernels, and every reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import explain, fa4, settings
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import kernels, library, rules
from attn_dispatch.fa4.call import call_of
from attn_dispatch.flash import clear_rows
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import reference
from tests.support import flash_in_numpy
from tests.support.comparing import check_both_directions, poisoned, to_jax
from tests.support.flash_cases import NAMED
from tests.support.small_cases import SMALL

SM90 = parse("sm90")


def is_supported(case: Case) -> bool:
    """True if the kernels run the case, apart from float32, which allows a close comparison."""
    spec = spec_of(case.forward_options(), case.avals())
    return all(x.rule == "dtype" for x in rules.not_supported_reasons(spec, SM90))


DRAWN = [replace(x, dtype="float32") for x in draws.examples(60, 20261220) if x.t * x.s < 2**15]


@pytest.fixture
def in_numpy(monkeypatch):
    """NumPy as the kernels."""
    monkeypatch.setattr(kernels, "forward", flash_in_numpy.forward)
    monkeypatch.setattr(kernels, "backward", flash_in_numpy.backward)
    monkeypatch.setattr(clear_rows, "_native", lambda: None)


NARROW_VALUES = (
    Case("mla", h=192, v=128, n=2, k=2, is_causal=True, alignment="bottom_right"),
    Case("mla_grouped", h=136, v=72, lse_grad=True),
    Case("mla_lengths", t=10, s=10, h=130, v=20, q_lengths=(7, 10), kv_lengths=(7, 10),
         is_causal=True, lse_grad=True),
    Case("mla_ragged", t=10, s=10, h=144, v=125, cu_q=((0, 3, 3, 10), (0, 1, 8, 10)),
         cu_kv=((0, 3, 3, 10), (0, 1, 8, 10)), longest=(7, 7), is_causal=True, lse_grad=True),
)  # fmt: skip
"""Calls whose values are narrower than their keys. On a GPU, grouped heads run forward only."""

CASES = [*NAMED, *NARROW_VALUES, *filter(is_supported, SMALL)]


@pytest.mark.parametrize("case", [*CASES, *filter(is_supported, DRAWN)], ids=str)
def test_results_and_gradients_agree_with_the_reference(in_numpy, case: Case):
    check_both_directions(fa4, SM90, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_package_with_its_reference_backend(monkeypatch, case: Case):
    """The installed package, with its reference formulas instead of its kernels.

    The formulas compute `out` again, so they cannot take the gradient of lse (lse_grad.py).
    """
    case = replace(case, lse_grad=False)
    pytest.importorskip("fa4_jax")
    monkeypatch.setattr(kernels, "BACKEND", "reference")
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    check_both_directions(fa4, SM90, case)


@pytest.mark.parametrize(
    ("h", "v", "forward", "back"),
    [
        (192, 128, (192, 128), (192, 128)),
        (129, 1, (192, 128), (192, 128)),
        (185, 125, (192, 128), (192, 128)),
        (192, 129, (192, 192), (192, 192)),
        (136, 136, (136, 136), (192, 192)),
        (128, 192, (192, 192), (192, 192)),
        (128, 64, (128, 128), (128, 128)),
        (193, 128, (200, 200), (256, 256)),
        (256, 128, (256, 256), (256, 256)),
    ],
)
def test_head_dims_are_padded_to_those_of_the_kernels(h, v, forward, back):
    case = Case("call", h=h, v=v, n=2, k=2, dtype="bfloat16")
    spec = spec_of(case.forward_options(), case.avals())
    calls = [call_of(x) for x in (spec, spec.backward(case.backward_options()))]
    assert [(x.head_dim, x.head_dim_v) for x in calls] == [forward, back]


@pytest.mark.parametrize("case", NARROW_VALUES, ids=str)
def test_narrow_values_get_128_columns(case):
    assert is_supported(case)
    spec = spec_of(case.forward_options(), case.avals())
    for x in (spec, spec.backward(case.backward_options())):
        assert (call_of(x).head_dim, call_of(x).head_dim_v) == (192, 128)


@pytest.mark.parametrize(("v", "columns"), [(125, 128), (126, 192), (128, 192)])
def test_gradient_of_lse_needs_columns_of_value(v, columns):
    case = Case("call", h=192, v=v, n=2, k=2, dtype="bfloat16", lse_grad=True)
    spec = spec_of(case.forward_options(), case.avals())
    back = call_of(spec.backward(case.backward_options()))
    assert (back.head_dim, back.head_dim_v) == (192, columns)


def test_plan_names_both_head_dims(monkeypatch):
    monkeypatch.setattr(library, "version", lambda: "0.1.0")
    for v, named in ((128, "192/128"), (192, "192")):
        case = Case("call", h=192, v=v, n=2, k=2, dtype="bfloat16")
        plan = fa4.plan(spec_of(case.forward_options(), case.avals()), SM90)
        assert plan.engine == f"FlashAttention-4 (fa4-jax 0.1.0), head dim {named}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, (None, None))),
        ({"is_causal": True}, (True, False, (None, None))),
        ({"window": (3, 0)}, (False, True, (3, 0))),
        ({"window": (None, 2)}, (False, True, (None, 2))),
    ],
)
def test_configuration_passed_to_the_backend(monkeypatch, options, expected):
    calls = []

    class Backend:
        def fwd_lse(self, config, q, k, v, aux, sequences):
            calls.append((config, q.shape, aux, sequences))
            return q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))

        def vjp(self, config, q, k, v, out, lse, out_grad, lse_grad, aux, sequences):
            calls.append((config, q.shape, aux, sequences))
            assert lse_grad is None and out_grad.shape == out.shape == q.shape
            return q, k, v

    package = ModuleType("fa4_jax.attention")
    package.AttnConfig = SimpleNamespace  # pyright: ignore[reportAttributeAccessIssue]
    package.get_backend = lambda name: {"cute": Backend()}[name]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "fa4_jax", ModuleType("fa4_jax"))
    monkeypatch.setitem(sys.modules, "fa4_jax.attention", package)
    case = Case("call", t=14, s=14, n=2, k=2, h=130, v=130, dtype="bfloat16", **options)
    operands = case.operands()
    spec = spec_of(case.forward_options(), case.avals())
    fa4.forward(spec, SM90, to_jax(operands))
    operands |= case.cotangents() | reference(spec.options, operands)
    back = spec.backward(case.backward_options())
    fa4.backward(back, SM90, to_jax({x: operands[x] for x in poisoned(back, operands)}))
    # Forward head dims are multiples of 8; backward ones are those of the compiled kernels.
    assert [shape[-1] for _, shape, _, _ in calls] == [136, 192]
    for config, _, aux, sequences in calls:
        found = (config.causal, config.local, config.window)
        assert found == expected and config.scale == spec.meaning.scale
        assert config.backend == "cute" and (config.mask, config.varlen) == (None, False)
        assert (aux, sequences) == ((), None)


def arrays(*, n: int = 8, k: int = 8, h: int = 64):
    shapes = ((2, 64, n, h), (2, 64, k, h), (2, 64, k, h))
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]


def reasons(target: str, *shapes: jax.ShapeDtypeStruct) -> list[tuple[str, ...]]:
    explanation = explain(*shapes, implementation="fa4", target=target)
    return [tuple(map(str, x[0].reasons)) for x in (explanation.forward, explanation.backward)]


def test_every_reason_is_given(monkeypatch):
    monkeypatch.setattr(library, "version", lambda: "0.1.0")
    absent = "its kernels are compiled on the GPU that runs them, which is not present"
    grouped = (
        "the backward pass of 8 heads on 2: gradients of key and value are wrong in programs that "
        "slice their arrays (fa4-jax 0.1.0)"
    )
    assert reasons("sm90", *arrays(k=2)) == [(absent,), (absent, grouped)]
    wide = "head dims up to 128 on sm100, got 136 columns"
    assert reasons("sm100", *arrays(h=136)) == [(absent, wide)] * 2
    (forward, _) = reasons("sm80", *arrays())
    assert forward[0].startswith("runs on sm90 and sm100 in this version, and this is NVIDIA A100")
    monkeypatch.setattr(library, "version", lambda: "0.2.0")
    assert fa4.unusable_reason(SM90) == (
        f"fa4-jax from 0.1.0 to below 0.2 is needed, and 0.2.0 is installed; {absent}"
    )
    monkeypatch.setattr(library, "version", lambda: None)
    assert fa4.unusable_reason(SM90).startswith("fa4-jax is not installed (remedy: pip install ")


def test_exported_modules_do_not_use_the_package(monkeypatch):
    monkeypatch.setattr(library, "version", lambda: "0.1.0")
    monkeypatch.setattr(library, "loading_failure", lambda: "")
    present = replace(SM90, is_present=True)
    assert fa4.unusable_reason(present) == ""
    with settings.restored(replace(settings.current(), is_exporting=True)):
        assert "another could not run the module" in fa4.unusable_reason(present)


@pytest.mark.parametrize(
    ("h", "v", "accumulated"), [(64, 64, 64), (72, 72, 96), (192, 128, 192), (136, 136, 192)]
)
def test_scratch_memory_covers_the_accumulated_gradients(h, v, accumulated):
    case = Case("call", b=2, t=300, s=200, n=4, k=4, h=h, v=v, dtype="bfloat16")
    spec = spec_of(case.forward_options(), case.avals())
    assert kernels.workspace_bytes(call_of(spec), 2) == 0
    back = spec.backward(case.backward_options())
    rows = 2 * 384  # queries, rounded up to tiles
    least = 4 * rows * 4 * (accumulated + 2)
    assert least <= kernels.workspace_bytes(call_of(back), 2) <= 1.5 * least
