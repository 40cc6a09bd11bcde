"""`explain_program` of small programs: loops, branches, derivatives, and wrong arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import (
    AttentionConventionWarning,
    assert_kernels,
    dot_product_attention,
    explain_program,
)
from attn_dispatch.text import in_units
from tests.support.backend import needs_cudnn
from tests.support.program_lists import checked, struct

B, T, N, H = 2, 128, 4, 64  # as in test_models.py, so that cuDNN plans the same calls
W, X, Q = struct(6, 256, 256), struct(B, T, N * H), struct(B, T, N, H)


def attend(q: Any) -> jax.Array:
    return dot_product_attention(q, q, q, is_causal=True)


LINE = attend.__code__.co_firstlineno + 1


def layer(x: Any, w: Any) -> jax.Array:
    return x + attend((x @ w).reshape(Q.shape)).reshape(x.shape)


def loss(ws: Any, x: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)
    return jax.jit(layer)(x, ws[0]).astype(jnp.float32).sum()


@needs_cudnn
def test_a_training_step_with_a_scan_under_remat():
    found = checked(jax.jit(jax.grad(loss)), W, X)
    (call,) = found.calls
    # 6 layers, again under remat in the backward pass, and one after the scan.
    assert (call.forward_runs.times, call.backward_runs.times) == (13, 7)
    assert call.place is not None
    assert (call.place.file, call.place.line, call.place.function) == (__file__, LINE, "attend")
    assert call.explanation.chosen_forward == call.explanation.chosen_backward == "cudnn"
    text = str(found)
    again = "(6 of them again under jax.checkpoint)"
    assert f"runs      forward 13 {again}; backward 7" in text
    assert f"test_programs.py:{LINE}, in attend" in text
    size = call.explanation.backward[0].scratch_bytes
    assert size > 0 and f"scratch memory {in_units(size)}" in text


def test_nested_checkpoints_name_only_what_runs_again():
    """Each layer runs once in the forward pass, and again under the outer and the inner one."""
    inner = in_a_scan(jax.checkpoint(attend), 3)
    outer = in_a_scan(jax.checkpoint(inner), 4)
    grad = jax.grad(lambda x: outer(x).astype(jnp.float32).sum())
    (call,) = explain_program(grad, Q, target="cpu").calls
    assert str(call.forward_runs) == "36 (24 of them again under jax.checkpoint)"
    assert str(call.backward_runs) == "12"


def while_loop(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < c[2], lambda c: (c[0] + 1, attend(c[1]), c[2]),
                              (0, x, jnp.argmax(x)))[1]  # fmt: skip


def choose(*branches: Any) -> Any:
    return lambda x: jax.lax.switch(x[0, 0, 0, 0].astype(int), branches, x)


def nothing(x: Any) -> Any:
    return x


def twice(x: Any) -> Any:
    return attend(attend(x))


def in_a_scan(body: Any, length: int = 5) -> Any:
    return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]


@jax.custom_vjp
def custom(x: Any) -> jax.Array:
    return attend(x)


custom.defvjp(lambda x: (attend(x), x), lambda x, dout: (jax.vjp(attend, x)[1](dout)[0],))


@jax.custom_jvp
def with_jvp(x: Any) -> jax.Array:
    return attend(x)


with_jvp.defjvp(lambda primals, tangents: (attend(*primals), tangents[0]))


@needs_cudnn
@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda x: attend(attend(x)), "2", "0"),
        (in_a_scan(in_a_scan(attend)), "25", "0"),
        (while_loop, "unknown, in a while loop", "0"),
        (in_a_scan(while_loop), "unknown, in a while loop", "0"),
        (in_a_scan(lambda x: jax.lax.cond(x[0, 0, 0, 0] > 0, attend, lambda x: x, x)),
         "at most 5, in a branch", "0"),
        (in_a_scan(choose(attend, lambda x: attend(x + 1))), "5", "0"),
        (in_a_scan(choose(attend, twice)), "at most 10, in a branch", "0"),
        (in_a_scan(choose(attend, nothing, twice)), "at most 10, in a branch", "0"),
        (lambda x: choose(attend, nothing)(choose(nothing, twice)(attend(x))),
         "at most 4, in a branch", "0"),
        (choose(attend, choose(nothing, attend)), "at most 1, in a branch", "0"),
        (choose(twice, choose(attend, nothing)), "at most 2, in a branch", "0"),
        (choose(attend, while_loop), "unknown, in a while loop", "0"),
        (custom, "1", "0"),
        (with_jvp, "1", "0"),
        (lambda x: jax.grad(lambda x: custom(x).astype(jnp.float32).sum())(x), "1", "1"),
        (lambda x: jax.vjp(attend, x)[1](x)[0], "1", "1"),
        (lambda x: jax.vmap(attend)(x[:, None])[:, 0], "1", "0"),
        (lambda x: jax.lax.map(attend, jnp.stack(3 * [x]))[0], "3", "0"),
        (lambda x: (attend(x), x)[1], "0", "0"),  # nothing uses the result
    ],
    ids=lambda x: "" if callable(x) else x,
)  # fmt: skip
def test_how_often_a_call_runs(function: Any, forward: str, backward: str):
    found = explain_program(function, Q, target="h100")
    runs = [(str(x.forward_runs), str(x.backward_runs)) for x in found.calls]
    assert runs == ([] if forward == "0" else [(forward, backward)])
    assert found.others == ()


def test_a_call_in_a_scan_without_steps_runs_no_times():
    found = explain_program(in_a_scan(attend, 0), Q, target="cpu")
    assert "runs      forward 0\n" in str(found)


def test_programs_are_traced_and_never_run():
    ran: list[Any] = []

    def program(config: Any, x: Any) -> Any:
        assert config["name"] == "a text" and config["is_causal"] is True
        x = jax.pure_callback(lambda x: ran.append(x) or x, x, x)
        jax.debug.callback(ran.append, x)
        return {"out": dot_product_attention(x, x, x, is_causal=config["is_causal"])}

    config = {"name": "a text", "is_causal": True, "function": attend}
    found = explain_program(program, config, jnp.ones((1, 8, 1, 8)), target="cpu")
    assert ran == [] and len(found.calls) == 1 and found.name == "program"
    assert found.calls[0].explanation.call.meaning.is_causal


def test_derivatives_by_formulas_are_fallbacks():
    q = struct(1, 8, 1, 8)
    found = explain_program(lambda q: jax.jvp(attend, (q,), (q,)), q, target="h100")
    plain, tangent = found.calls
    assert plain.fallbacks == () and tangent.fallbacks == ("forward",)
    assert "runs      forward-mode derivative 1" in str(found)

    hessian = jax.hessian(lambda q: attend(q).astype(jnp.float32).sum())
    found = explain_program(hessian, q, target="h100")
    assert "runs      derivative of a derivative 1" in str(found)
    assert found.others == ()  # the formula's products are ours


@needs_cudnn
def test_reasons_of_a_fallback_are_listed_with_its_direction():
    q = struct(1, 128, 2, 256, dtype="float16")  # as in test_explain.py
    found = explain_program(jax.grad(lambda q: attend(q).sum().astype("float32")), q, target="sm80")
    (call,) = found.calls
    assert call.fallbacks == ("backward",) and found.fallbacks == (call,)
    assert call.explanation.chosen_forward == "cudnn"
    text = str(found)
    assert "backward  cudnn   cannot run:" in text and "hidden_dim" in text
    assert "aiter" not in text and "forward   xla" not in text  # only what matters there


def test_two_targets_are_an_error():
    with attn_dispatch.target("h100", "mi300x"), pytest.raises(ValueError, match="pass target='h"):
        explain_program(attend, Q)


def test_reprs_are_short_lines():
    found = explain_program(attend, Q, target="gfx942")
    call = found.calls[0]
    calls = "1 attention call of attn_dispatch, 0 fallbacks"
    assert repr(found) == f"<ProgramExplanation attend: {calls}, {found.device.name}>"
    assert repr(call).endswith(f"test_programs.py:{LINE}, in attend: forward 1 by aiter>")
    verdicts = [repr(x) for x in call.explanation.forward]
    assert {"<Verdict aiter: runs>", "<Verdict cudnn: cannot run, 1 reason>"} <= {*verdicts}
    query, name = "query bfloat16[2, 128, 4, 64]", found.device.name
    assert repr(call.explanation) == f"<Explanation of a call of {query}: forward: aiter, {name}>"
    spec = call.explanation.call
    assert repr(spec) == f"<AttentionSpec {spec}>"
    assert "maxGridSize" not in repr(explain_program(attend, Q, target="h100").device)


def in_float32(q: Any) -> jax.Array:
    return attend(q.astype(jnp.float32))


@needs_cudnn
def test_assert_kernels_raises_if_a_call_has_no_kernel():
    found = assert_kernels(jax.grad(loss), W, X, target="h100")
    assert found == explain_program(jax.grad(loss), W, X, target="h100")
    with pytest.raises(AssertionError, match="needs float16 or bfloat16, got float32") as raised:
        assert_kernels(lambda q: attend(q) + in_float32(q), Q, target="h100")
    assert str(raised.value).count("line  ") == 1  # only the call that falls back
    number = "<lambda>: 2 attention calls of attn_dispatch, 1 of them without a kernel"
    assert number in str(raised.value)

    def both(q: Any) -> jax.Array:
        return attend(q) + jax.nn.dot_product_attention(q, q, q)

    with pytest.raises(AssertionError, match=r"jax\.nn\.dot_product_attention\s+on XLA") as raised:
        assert_kernels(both, Q, target="h100")
    number = "both: 1 attention call of attn_dispatch, 0 of them without a kernel"
    assert number in str(raised.value)
    assert len(assert_kernels(both, Q, target="h100", allow_others=True).others) == 1
    message = r"(?s)got only attention that does not go .*jax\.nn\.dot_product_attention\s+on XLA"
    with pytest.raises(AssertionError, match=message):
        theirs = jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q))
        assert_kernels(theirs, Q, target="h100", allow_others=True)


@needs_cudnn
def test_a_step_that_does_not_return_its_gradients_is_found_out():
    def returns_the_loss(ws: Any, x: Any) -> Any:
        value, _ = jax.value_and_grad(loss)(ws, x)
        return value

    found = explain_program(returns_the_loss, W, X, target="h100")
    assert found.lacks_backward and "\nbackward  none in the program" in str(found)
    with pytest.warns(AttentionConventionWarning, match="returns_the_loss differentiates"):
        assert_kernels(returns_the_loss, W, X, target="h100")

    def forgets_the_gradient(ws: Any, x: Any) -> Any:
        jax.grad(loss)(ws, x)
        return layer(x, ws[0])

    with pytest.warns(AttentionConventionWarning, match="forgets_the_gradient differentiates"):
        assert_kernels(forgets_the_gradient, W, X, target="h100")
    for uses_it in (jax.value_and_grad(loss), lambda ws, x: jax.jvp(loss, (ws, x), (ws, x))):
        found = explain_program(uses_it, W, X, target="h100")
        assert not found.lacks_backward and "none in the program" not in str(found)


@needs_cudnn
def test_a_teacher_whose_gradient_is_stopped_passes():
    def distillation(w: Any, x: Any) -> Any:
        distance = layer(x, w) - jax.lax.stop_gradient(layer(x, 2 * w))
        return (distance.astype(jnp.float32) ** 2).sum()

    found = assert_kernels(jax.grad(distillation), struct(256, 256), X, target="h100")
    assert not found.lacks_backward


def test_fallback_error_checks_for_a_gpu_target_while_lowering_for_a_cpu():
    """A call that would fall back on the target is an error when a program is lowered for a CPU."""
    q = np.ones(Q.shape, jnp.bfloat16)

    def lowered(function: Any) -> None:
        jax.jit(function).lower(q)

    for target in ("h100", "rtx5090"):
        with attn_dispatch.target(target), attn_dispatch.fallback("error"):
            lowered(attend)
            with pytest.raises(NotImplementedError, match=r"device: NVIDIA .*\n.*\n.*got float32"):
                lowered(in_float32)
    with attn_dispatch.fallback("error"):
        lowered(in_float32)
    with attn_dispatch.target("h100"):
        lowered(in_float32)
    # For the CPU as a target, XLA is no fallback.
    with attn_dispatch.target("cpu", "h100"), attn_dispatch.fallback("error"):
        lowered(in_float32)


def test_the_policy_error_on_a_cpu_also_checks_derivatives():
    q = np.ones((1, 8, 1, 8), jnp.bfloat16)
    with attn_dispatch.target("h100"), attn_dispatch.fallback("error"):
        with pytest.raises(NotImplementedError, match="none for a forward-mode derivative"):
            jax.jit(lambda q: jax.jvp(attend, (q,), (q,))).lower(q)
