"""Wrong softmax, lse and row_max."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.features import has_band, returns_lse
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import first_everywhere, masked_by, times


@wrong(lambda c: c.sinks, "forward")
def sink_missing_in_out(call):
    """The output is divided by a denominator without the sink."""
    return call.right() | {"out": call.right({"sinks": None})["out"]}


@wrong(lambda c: c.sinks and returns_lse(c), "forward")
def sink_missing_in_lse(call):
    """The sink is left out of lse, not of the output."""
    results, without = call.right(), call.right({"sinks": None})
    return results | {name: x for name, x in without.items() if name == "lse"}


@wrong(lambda c: c.sinks and c.scale != 1)
def sink_before_the_scale(call):
    """The sink is multiplied by the scale."""
    return call.right({"sinks": call["sinks"] * call.options.meaning.scale})


@wrong(lambda c: c.sinks and c.n > 1)
def sink_of_the_first_head(call):
    """All heads have the sink of the first."""
    return call.right({"sinks": first_everywhere(call["sinks"], axis=1)})


@wrong(lambda c: (c.sinks or 1) > 1)
def sinks_of_the_first_batch_row(call):
    """All batch rows have the sinks of the first."""
    return call.right({"sinks": first_everywhere(call["sinks"])})


@wrong(lambda c: c.sinks, "forward")
def sink_left_in_rows_without_keys(call):
    """The lse of a query that sees no keys is the sink."""
    results = call.right(needs_lse=True)
    lse = results["lse"]
    return results | {"lse": jnp.where(lse == -jnp.inf, call["sinks"][:, :, None], lse)}


@wrong(lambda c: c.sinks and c.needs_max, "forward")
def row_max_includes_the_sink(call):
    """row_max is the sink where the sink is larger than every score."""
    results = call.right()
    if "row_max" not in results:
        return results
    top = jnp.maximum(results["row_max"], call["sinks"][:, :, None])
    return results | {"row_max": jnp.where(results["row_max"] == -jnp.inf, -jnp.inf, top)}


@wrong(lambda c: c.needs_max and (has_band(c) or c.mask), "forward")
def row_max_before_the_mask(call):
    """row_max includes the keys that mask, window and causality hide."""
    results = call.right()
    if "row_max" not in results:
        return results
    seen = call.right({"mask": None}, is_causal=False, window=(None, None))["row_max"]
    return results | {"row_max": jnp.where(results["row_max"] == -jnp.inf, -jnp.inf, seen)}


@wrong(lambda c: c.inference and c.s > 1, "forward")
def last_key_forgotten_without_lse(call):
    """The last key is hidden where only the output is requested."""
    if call.options.wanted.needs_lse:
        return call.right()
    return masked_by(
        call, (jnp.arange(call.spec.seq_len_kv) < call.spec.seq_len_kv - 1)[None, None, None]
    )


@wrong(returns_lse, "forward")
def lse_in_base_two(call):
    """lse is the logarithm to base 2."""
    return times(call.right(), "lse", 1.4426950408889634)


@wrong(returns_lse, "forward")
def lse_without_the_maximum(call):
    """lse leaves out the row maximum, which was subtracted from the scores."""
    results = call.right(needs_lse=True, needs_max=True)
    row_max = results["row_max"]
    less = results["lse"] - jnp.where(row_max == -jnp.inf, 0, row_max)
    return results | {"lse": less}


@wrong(lambda c: returns_lse(c) and (c.dead_rows or c.infinite_bias), "forward")
def lse_of_hidden_rows_is_finite(call):
    """The lse of a query that sees no keys is a large negative number, not -inf."""
    results = call.right(needs_lse=True)
    return results | {"lse": jnp.maximum(results["lse"], -1e30)}
