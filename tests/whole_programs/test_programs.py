"""`explain_program`: its list equals the kernels in the program that is lowered for an H100."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import ProgramExplanation, dot_product_attention, explain_program, target
from tests.support.backend import needs_cudnn
from tests.support.lowered import kernel_runs

W = jax.ShapeDtypeStruct((6, 256, 256), jnp.bfloat16)
X = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)


def listed(found: ProgramExplanation) -> Counter[tuple[str, tuple[int, ...]]]:
    """The kernels of a list: how often each runs, by custom call and shape of the query."""
    runs: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for call in found.calls:
        query = call.explanation.call.shape("query")
        for direction, chosen, times in (
            ("forward", call.explanation.chosen_forward, call.forward_runs.times),
            ("backward", call.explanation.chosen_backward, call.backward_runs.times),
        ):
            if times:
                runs[f"attn_dispatch_{chosen}_{direction}", query] += times
    return runs


def check(function: Any, *args: Any) -> ProgramExplanation:
    """The list of a program for an H100, after comparing it with the lowered program."""
    found = explain_program(function, *args, target="h100")
    with target("h100"):
        lowered = kernel_runs(function, *args)
    assert listed(found) == Counter({k: n for k, n in lowered.items() if "attn_" in k[0]})
    return found


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    q = (x @ w).reshape(2, 128, 4, 64)
    return x + dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)


def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)
    return jax.jit(layer)(x, ws[0]).astype(jnp.float32).sum()


@needs_cudnn
def test_a_training_step_with_a_scan_under_remat():
    found = check(jax.jit(jax.grad(loss)), W, X)
    (call,) = found.calls
    # 6 layers, again under remat in the backward pass, and one after the scan.
    assert (call.forward_runs.times, call.backward_runs.times) == (13, 7)
    assert call.place is not None and call.place.file == __file__
    assert call.place.line == layer.__code__.co_firstlineno + 2 and call.place.function == "layer"
    assert found.fallbacks == ()
