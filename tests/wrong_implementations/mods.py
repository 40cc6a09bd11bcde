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
    """With `function` in the place of score_mod, which it is given before its arguments."""
    program = call.options.meaning.score_mod
    given = jaxpr_as_fun(program.jaxpr)
    arrays = [jnp.zeros(*array) for array in program.arrays]

    def score_mod(score, *others):
        return function(lambda *x: given(*x)[0], score, *others)

    dtype = program.jaxpr.in_avals[0].dtype.name
    return call.right(score_mod=trace("score_mod", score_mod, arrays, dtype).program, **options)


def _reads(index: str) -> Needs:
    return lambda c: index in reads_of(c.score_mod)


@wrong(lambda c: c.score_mod)
def score_mod_ignored(call):
    """Scores go on as they are."""
    return _with_score_mod(call, lambda f, score, *x: score + 0 * f(score, *x))


@wrong(lambda c: c.score_mod)
def score_mod_of_the_key_and_the_query(call):
    """score_mod is given the position of the key as that of the query, and the other way round."""
    return _with_score_mod(call, lambda f, score, b, n, t, s, *x: f(score, b, n, s, t, *x))


@wrong(_reads("n"))
def score_mod_of_the_heads_next(call):
    """score_mod is given another head."""
    return _with_score_mod(call, lambda f, score, b, n, *x: f(score, b, n ^ 1, *x))


@wrong(lambda c: c.score_mod and c.soft_cap)
def score_mod_before_the_soft_cap(call):
    """The soft cap comes after score_mod."""
    cap = call.options.meaning.logits_soft_cap

    def function(f, score, *x):
        return cap * jnp.tanh(f(score, *x) / cap)

    return _with_score_mod(call, function, logits_soft_cap=None)


@wrong(lambda c: c.mask_mod)
def mask_mod_ignored(call):
    """mask_mod forbids nothing."""
    return call.right(mask_mod=None)


@wrong(lambda c: c.mods_start[0] and ("b" in reads_of(c.score_mod) or c.mask_mod))
def batch_rows_of_mods_counted_from_0(call):
    """b does not go on where another device's batch rows end."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([0, 1])})


@wrong(lambda c: c.mods_start[1] and "n" in reads_of(c.score_mod))
def heads_of_mods_counted_from_0(call):
    """n does not go on where another device's heads end."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([1, 0])})


@wrong(lambda c: c.score_mod, "backward")
def slope_of_score_mod_is_one(call):
    """The derivative of score_mod is left out."""
    return _with_score_mod(
        call, lambda f, score, *x: score + jax.lax.stop_gradient(f(score, *x) - score)
    )


@wrong(lambda c: reads_of(c.score_mod), "backward")
def gradient_of_what_is_read_is_negative(call):
    """The gradient of the array that score_mod reads has the wrong sign."""
    return times(call.right(), "score_mod_0", -1)


@wrong(lambda c: reads_of(c.score_mod) and c.b > 1, "backward")
def gradient_of_what_is_read_by_the_first_batch_row(call):
    """The gradient of the array that score_mod reads is that of the first batch row."""
    return gradient_of_first(call, "score_mod_0")
