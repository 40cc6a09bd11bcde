"""Settings of `with` blocks inside a program: they travel with the calls made in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch import dot_product_attention, explain_program, settings
from attn_dispatch.core.tuning import contest
from tests.support.module_report import report_of

BF16 = jnp.bfloat16
Q = jax.ShapeDtypeStruct((2, 128, 4, 64), BF16)
WIDE = jax.ShapeDtypeStruct((2, 128, 4, 128), BF16)
BIAS = jax.ShapeDtypeStruct((1, 4, 128, 128), BF16)
MESH = AbstractMesh((4,), ("s",), axis_types=(AxisType.Explicit,))
SPREAD = jax.ShapeDtypeStruct((2, 128, 4, 64), BF16, sharding=NamedSharding(MESH, P(None, "s")))

Program = Callable[..., Any]


def attend(q: Any) -> jax.Array:
    return dot_product_attention(q, q, q, is_causal=True)


def loss(q: Any) -> jax.Array:
    return attend(q).astype(jnp.float32).sum()


def masked(q: Any) -> jax.Array:
    return dot_product_attention(q, q, q, mask=jnp.tril(jnp.ones((128, 128), bool)))


def dropped(q: Any) -> jax.Array:
    return dot_product_attention(q, q, q, dropout_rate=0.5, dropout_key=jax.random.key(0))


def of_bias(bias: Any) -> jax.Array:
    q = jnp.ones(Q.shape, BF16)
    return dot_product_attention(q, q, q, bias=bias).astype(jnp.float32).sum()


# By setting: a value, a program on which it can be seen, and the program's argument.
SEEN: dict[str, tuple[Any, Program, Any]] = {
    "target": ("gfx950", attend, Q),
    "rewrites": (False, masked, Q),
    "aiter_asm": (False, jax.grad(loss), WIDE),
    "scratch_limit": ("300KB", jax.grad(of_bias), BIAS),
    "sharded_dropout": ("same", dropped, Q),
    "context_parallel": ("gather", attend, SPREAD),
}


def block(name: str, value: Any) -> settings.Block:
    return getattr(attn_dispatch, name)(value)


def inside(program: Program, name: str, value: Any) -> Program:
    """The program with a block in it."""

    def function(x: Any) -> Any:
        with block(name, value):
            return program(x)

    return function


def lowered(program: Program, x: Any, *outside: tuple[str, Any]) -> str:
    """The text of a program for AMD, traced and lowered in these blocks, the outermost first."""

    def named(x: Any) -> Any:
        return program(x)

    with ExitStack() as stack:
        for name, value in (("target", "gfx942"), ("fallback", "silent"), *outside):
            stack.enter_context(block(name, value))
        traced = jax.jit(named).trace(x)
    with attn_dispatch.fallback("silent"):
        return traced.lower(lowering_platforms=("rocm",)).as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r"@attn_dispatch_aiter_(\w+)\(", text)


def test_these_are_all_settings_that_have_blocks():
    blocks = {x for x in dir(attn_dispatch) if isinstance(_made(x), settings.Block)}
    # finite_padding is read when a call is traced; tests/semantics have it.
    assert blocks == {*SEEN, "fallback", "tuning", "finite_padding"}


def _made(name: str) -> object:
    values = {name: value for name, (value, *_) in SEEN.items()}
    made = getattr(attn_dispatch, name)
    others = {"fallback": "warn", "tuning": 1.0, "finite_padding": True}
    value = {**values, **others}.get(name)
    if value is None or not callable(made):
        return None
    found = made(value)
    if isinstance(found, settings.Block):
        with found:  # a block that is not entered warns
            pass
    return found


@pytest.mark.parametrize("name", SEEN)
def test_a_block_inside_a_program_is_as_one_around_it(name: str):
    value, program, x = SEEN[name]
    default = lowered(program, x)
    around = lowered(program, x, (name, value))
    assert lowered(inside(program, name, value), x) == around != default


@pytest.mark.parametrize("name", SEEN)
def test_blocks_nest_as_in_python(name: str):
    value, program, x = SEEN[name]
    around = lowered(program, x, (name, value))
    other = {"target": "sm90", "scratch_limit": "off", "context_parallel": "ring"}
    usual = other.get(name, {False: True, "same": "own"}.get(value))
    assert lowered(inside(program, name, value), x, (name, usual)) == around
    assert lowered(inside(inside(program, name, value), name, usual), x) == around


def test_a_block_around_the_lowering_alone_sets_what_the_call_does_not():
    traced = jax.jit(inside(masked, "rewrites", False)).trace(Q)
    for setting, expected in (("gfx942", []), ("gfx950", [])):
        with attn_dispatch.target(setting), attn_dispatch.rewrites(True):
            with pytest.warns(UserWarning, match="falls back to xla") as caught:
                text = traced.lower(lowering_platforms=("rocm",)).as_text()
        assert kernels(text) == expected
        assert setting in str(caught[0].message)


def test_fallback_inside_a_program():
    def one(q: Any) -> Any:
        return attend(q.astype(jnp.float32))

    strict = inside(inside(one, "fallback", "error"), "target", "gfx942")
    for transformed in (strict, jax.grad(lambda q: strict(q).astype(jnp.float32).sum())):
        traced = jax.jit(transformed).trace(Q)
        with pytest.raises(NotImplementedError, match="falls back to xla"):
            traced.lower(lowering_platforms=("rocm",))
        with pytest.raises(NotImplementedError, match="falls back to xla"):
            traced.lower()  # for a CPU: checked for the target
    silent = jax.jit(inside(one, "fallback", "silent")).trace(Q)
    with attn_dispatch.target("gfx942"), attn_dispatch.fallback("error"):
        silent.lower(lowering_platforms=("rocm",))


def test_tuning_inside_a_program(monkeypatch: pytest.MonkeyPatch):
    tuned: list[float | None] = []

    def tune(spec: object, device: object) -> None:
        tuned.append(settings.current().tuning_seconds)

    monkeypatch.setattr(contest, "tune", tune)
    lowered(inside(attend, "tuning", 3.0), Q)
    assert tuned == [3.0]
    lowered(attend, Q)
    assert tuned == [3.0]


def scanned(q: Any) -> jax.Array:
    def layer(x: Any, _: None) -> tuple[Any, None]:
        return gfx942(x), None

    return jax.lax.scan(layer, q, None, length=3)[0]


@jax.custom_vjp
def custom(q: Any) -> jax.Array:
    return gfx942(q)


custom.defvjp(lambda q: jax.vjp(gfx942, q), lambda pull, grad: pull(grad))

gfx942 = inside(attend, "target", "gfx942")
TRANSFORMED: dict[str, tuple[Program, int]] = {
    "plain": (gfx942, 1),
    "vmap": (lambda q: jax.vmap(gfx942)(q[None])[0], 1),
    "scan": (scanned, 1),
    "remat": (jax.checkpoint(gfx942), 2),
    "custom_vjp": (custom, 1),
    "jit": (jax.jit(gfx942), 1),
    "cond": (lambda q: jax.lax.cond(q[0, 0, 0, 0] > 0, gfx942, lambda q: q, q), 1),
}
"""Programs with a block in them, and the number of forward kernels in their gradient."""


@pytest.mark.parametrize("name", TRANSFORMED)
def test_settings_survive_transformations(name: str):
    program, runs = TRANSFORMED[name]
    with attn_dispatch.fallback("error"):
        text = jax.jit(program).trace(Q).lower(lowering_platforms=("rocm",)).as_text()
        assert kernels(text) == ["forward"]
        gradient = jax.grad(lambda q: (program(q).astype(jnp.float32) ** 2).sum())
        text = jax.jit(gradient).trace(Q).lower(lowering_platforms=("rocm",)).as_text()
        assert sorted(kernels(text)) == ["backward", *["forward"] * runs]


def test_settings_survive_an_export():
    with attn_dispatch.fallback("error"):
        exported = jax.export.export(
            jax.jit(gfx942),
            platforms=("rocm",),
            disabled_checks=[
                jax.export.DisabledSafetyCheck.custom_call("attn_dispatch_aiter_forward")
            ],
        )(Q)
    assert kernels(exported.mlir_module()) == ["forward"]


def test_the_backward_pass_outside_of_the_block_has_the_settings_of_the_forward_pass():
    """Outside of jit, too."""
    _, pull = jax.vjp(gfx942, jnp.ones(Q.shape, BF16))
    program = jax.make_jaxpr(pull)(jnp.ones(Q.shape, BF16))
    (call,) = (x for x in program.eqns if x.primitive.name == "attn_bwd")
    assert call.params["options"].settings.changes == (("targets", ("gfx942",)),)


def test_derivatives_by_formulas_ask_the_settings_of_the_call():
    def tangent(q: Any) -> Any:
        return jax.jvp(inside(gfx942, "fallback", "error"), (q,), (q,))[1]

    with pytest.raises(NotImplementedError, match="forward-mode derivative falls back to xla"):
        jax.jit(tangent).trace(Q).lower(lowering_platforms=("rocm",))


def test_one_function_that_jit_keeps_is_compiled_for_each_block():
    kept = jax.jit(masked)

    def both(q: Any) -> Any:
        with attn_dispatch.rewrites(False):
            first = kept(q)
        with attn_dispatch.rewrites(True):
            return kept(q) - first

    text = lowered(both, Q)
    assert kernels(text) == ["forward"]
    assert text.count("call @masked") == 2


def test_calls_outside_of_blocks_have_no_settings():
    program = jax.make_jaxpr(attend)(Q)
    (call,) = (x for x in program.eqns if x.primitive.name == "attn_fwd")
    assert call.params["options"].settings == settings.CallSettings()
    assert "settings" not in repr(call.params["options"])


def test_explained_programs_have_the_settings_of_their_calls():
    def both(q: Any) -> Any:
        return masked(inside(masked, "rewrites", False)(q))

    first, second = explain_program(both, Q, target="gfx942").calls
    assert first.fallbacks == ("forward",) and second.fallbacks == ()
    found = explain_program(jax.grad(lambda q: gfx942(q).astype(jnp.float32).sum()), Q)
    assert found.calls[0].explanation.device.platform == "cpu"
    (call,) = explain_program(inside(attend, "context_parallel", "gather"), SPREAD).calls
    assert call.share is not None and call.share.strategy == "gather"


@pytest.mark.parametrize("name", ["gfx942", "h100", "cpu"])
@pytest.mark.parametrize("kind", list(AxisType)[:2])
def test_blocks_in_a_program_do_not_change_the_target_of_its_list(name: str, kind: AxisType):
    mesh = AbstractMesh((4,), ("s",), axis_types=(kind,))
    q = jax.ShapeDtypeStruct((4, 128, 4, 64), BF16, sharding=NamedSharding(mesh, P("s")))
    program = jax.grad(lambda q: inside(attend, "target", name)(q).astype(jnp.float32).sum())
    expected, found = (explain_program(x, q, target="gfx950") for x in (jax.grad(loss), program))
    assert found.calls[0].explanation.device == found.device == expected.device
    assert str(found.calls[0].explanation) == str(expected.calls[0].explanation)
    assert found.calls[0].share == expected.calls[0].share and found.fallbacks == ()


def test_strategies_inside_a_program_that_the_partitioner_splits():
    report = report_of("tests.settings_on_a_mesh", devices=4)
    assert report["inside"] == report["around"]
    strategies = report["around"]
    assert strategies["heads"]["all-to-all"] and not strategies["gather"]["all-to-all"]
    assert not strategies["ring"]["all-gather"] and strategies["gather"]["all-gather"]
