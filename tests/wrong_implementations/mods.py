"""Wrong score_mods and mask_mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from attn_dispatch.programs.tracing import trace
from attn_dispatch_tools.verify.drawn_mods import reads_of
from tests.wrong_implementations.implementation import Array, Call, Needs, Results, wrong
from tests.wrong_implementations.parts import gradient_of_first, times


def _with_score_mod(call: Call, function: Callable[..., Array], **options: Any) -> Results:
    """The results with `function` in place of score_mod; its first argument is that score_mod."""
    program = call.options.meaning.score_mod
    given = jaxpr_as_fun(program.jaxpr)
    arrays = [jnp.zeros(*array) for array in program.arrays]

    def score_mod(score, *arguments):
        return function(lambda *x: given(*x)[0], score, *arguments)

    dtype = program.jaxpr.in_avals[0].dtype.name
    return call.right(score_mod=trace("score_mod", score_mod, arrays, dtype).program, **options)


def _reads(index: str) -> Needs:
    return lambda c: index in reads_of(c.score_mod)


@wrong(lambda c: c.score_mod)
def score_mod_ignored(call):
    """score_mod does not change the scores."""
    return _with_score_mod(call, lambda f, score, *x: score + 0 * f(score, *x))


@wrong(lambda c: c.score_mod)
def score_mod_of_the_key_and_the_query(call):
    """score_mod receives the position of the key as that of the query, and vice versa."""
    return _with_score_mod(call, lambda f, score, b, n, t, s, *x: f(score, b, n, s, t, *x))


@wrong(_reads("n"))
def score_mod_of_another_head(call):
    """score_mod receives the index of another head."""
    return _with_score_mod(call, lambda f, score, b, n, *x: f(score, b, n ^ 1, *x))


@wrong(lambda c: c.score_mod and c.soft_cap)
def score_mod_before_the_soft_cap(call):
    """The soft cap is applied after score_mod."""
    cap = call.options.meaning.logits_soft_cap

    def function(f, score, *x):
        return cap * jnp.tanh(f(score, *x) / cap)

    return _with_score_mod(call, function, logits_soft_cap=None)


@wrong(lambda c: c.mask_mod)
def mask_mod_ignored(call):
    """mask_mod hides no key."""
    return call.right(mask_mod=None)


@wrong(lambda c: c.mods_start[0] and ("b" in reads_of(c.score_mod) or c.mask_mod))
def batch_rows_of_mods_counted_from_0(call):
    """The batch index b starts at 0 on every device."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([0, 1])})


@wrong(lambda c: c.mods_start[1] and "n" in reads_of(c.score_mod))
def heads_of_mods_counted_from_0(call):
    """The head index n starts at 0 on every device."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([1, 0])})


@wrong(lambda c: c.score_mod, "backward")
def slope_of_score_mod_is_one(call):
    """The derivative of score_mod is taken to be 1."""
    return _with_score_mod(
        call, lambda f, score, *x: score + jax.lax.stop_gradient(f(score, *x) - score)
    )


@wrong(lambda c: reads_of(c.score_mod), "backward")
def gradient_of_the_mods_array_is_negative(call):
    """The gradient of the array that score_mod reads has the wrong sign."""
    return times(call.right(), "score_mod_0", -1)


@wrong(lambda c: reads_of(c.score_mod) and c.b > 1, "backward")
def gradient_of_the_mods_array_from_the_first_batch_row(call):
    """The gradient of the array that score_mod reads comes from the first batch row alone."""
    return gradient_of_first(call, "score_mod_0")
