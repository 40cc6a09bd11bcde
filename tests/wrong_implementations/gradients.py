"""Wrong gradients."""

from __future__ import annotations

from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import clean, gradient_of_first, times


@wrong(lambda c: c.scale not in (0, 1), "backward")
def query_gradient_not_scaled(call):
    """The gradient of query is not multiplied by the scale."""
    return times(call.right(), "query", 1 / call.options.meaning.scale)


@wrong(lambda c: c.scale not in (0, 1), "backward")
def key_gradient_alone_not_scaled(call):
    """The gradient of key is not multiplied by the scale where query's is not requested."""
    if "query" in call.options.wanted.gradients:
        return call.right()
    return times(call.right(), "key", 1 / call.options.meaning.scale)


@wrong(lambda c: True, "backward")
def value_gradient_alone_is_zero(call):
    """The gradient of value is 0 where neither query's nor key's is requested."""
    if {"query", "key"} & set(call.options.wanted.gradients):
        return call.right()
    return times(call.right(), "value", 0)


@wrong(lambda c: c.s > 1, "backward")
def delta_forgotten(call):
    """The gradient of the scores leaves out delta, the row sums of out · out_grad."""
    delta = (clean(call["out"]) * clean(call["out_grad"])).sum(axis=-1).swapaxes(1, 2)
    given = call["lse_grad"] if "lse_grad" in call else 0
    return call.right({"lse_grad": (delta + given).astype(call["lse"].dtype)})


@wrong(lambda c: c.lse_grad, "backward")
def lse_gradient_ignored(call):
    """The gradient of lse is left out."""
    return call.right({"lse_grad": None})


@wrong(lambda c: c.lse_grad, "backward")
def lse_gradient_subtracted(call):
    """The gradient of lse enters with the wrong sign."""
    return call.right({"lse_grad": -call["lse_grad"]} if "lse_grad" in call else {})


@wrong(lambda c: c.lse_grad and c.sinks, "backward")
def lse_gradient_misses_the_sinks(call):
    """The gradient of lse does not reach the sinks."""
    found = call.right({"lse_grad": None})
    return call.right() | {name: x for name, x in found.items() if name == "sinks"}


@wrong(lambda c: c.sinks, "backward")
def sinks_gradient_has_the_wrong_sign(call):
    """The gradient of the sinks has the wrong sign."""
    return times(call.right(), "sinks", -1)


@wrong(lambda c: c.alibi, "backward")
def alibi_gradient_has_the_wrong_sign(call):
    """The gradient of the ALiBi slopes has the wrong sign."""
    return times(call.right(), "alibi_slopes", -1)


@wrong(lambda c: c.bias and c.bias != (c.b, c.n, c.t, c.s), "backward")
def bias_gradient_averaged(call):
    """The gradient of a shared bias is the mean over all that share it; the sum is right."""
    spec, results = call.spec, call.right()
    full = (spec.batch, spec.num_heads, spec.seq_len_q, spec.seq_len_kv)
    shared = 1
    for length, bias_length in zip(full, call["bias"].shape, strict=True):
        shared *= length // bias_length
    return times(results, "bias", 1 / shared)


@wrong(lambda c: c.bias and c.b > 1 and c.bias[0] == 1, "backward")
def bias_gradient_of_the_first_batch_row(call):
    """The gradient of a bias that batch rows share comes from the first batch row alone."""
    return gradient_of_first(call, "bias")


@wrong(lambda c: c.sinks == 1 and c.b > 1, "backward")
def sinks_gradient_of_the_first_batch_row(call):
    """The gradient of sinks that batch rows share comes from the first batch row alone."""
    return gradient_of_first(call, "sinks")


@wrong(lambda c: c.alibi == 1 and c.b > 1, "backward")
def alibi_gradient_of_the_first_batch_row(call):
    """The gradient of ALiBi slopes that batch rows share comes from the first batch row alone."""
    return gradient_of_first(call, "alibi_slopes")
