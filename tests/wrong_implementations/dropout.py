"""Wrong dropout."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.implementation import Array, Call, Results, wrong
from tests.wrong_implementations.parts import first_everywhere, times, without_dropout


@wrong(lambda c: c.dropout)
def dropout_key_ignored(call):
    """Every dropout key draws the same mask."""
    return call.right({"dropout_key": jnp.zeros_like(call["dropout_key"])})


@wrong(lambda c: c.dropout and c.dropout_keys > 1)
def only_the_first_dropout_key(call):
    """The first of several dropout keys draws for all batch rows."""
    return call.right({"dropout_key": first_everywhere(call["dropout_key"])})


@wrong(lambda c: c.dropout)
def half_of_the_dropout_key(call):
    """Dropout keys that differ in their last word alone draw the same mask."""
    return call.right({"dropout_key": call["dropout_key"].at[:, -1].set(0)})


@wrong(lambda c: c.dropout and c.b > 1)
def same_dropout_in_every_batch_row(call):
    """All batch rows drop the same pairs."""
    keys = call["dropout_key"]
    return call.right({"dropout_key": jnp.repeat(keys, call.spec.batch // len(keys), axis=0)})


@wrong(lambda c: c.dropout and c.n > 1)
def same_dropout_in_every_head(call):
    """All heads drop the same pairs."""
    return _heads_as_batch_rows(call)


def _heads_as_batch_rows(call: Call) -> Results:
    """The results of a call whose batch rows are this call's heads, all with one dropout key."""
    b, n, k = call.spec.batch, call.spec.num_heads, call.spec.num_kv_heads

    def fold(name: str, x: Array) -> Array:
        if name in ("query", "out", "out_grad", "key", "value"):
            x = jnp.repeat(x, n // x.shape[2], axis=2).swapaxes(1, 2)
            return x.reshape(b * n, x.shape[2], 1, x.shape[3])
        if name in ("bias", "mask"):
            return jnp.broadcast_to(x, (b, n, *x.shape[2:])).reshape(b * n, 1, *x.shape[2:])
        if name in ("alibi_slopes", "sinks"):
            return jnp.broadcast_to(x, (b, n)).reshape(b * n, 1)
        if name in ("lse", "lse_grad"):
            return x.reshape(b * n, 1, -1)
        return jnp.repeat(x, b * n // len(x), axis=0)

    def unfold(name: str, x: Array) -> Array:
        x = x.reshape(b, n, *x.shape[1:])
        if name in ("out", "query"):
            return x[:, :, :, 0].swapaxes(1, 2)
        if name in ("key", "value"):
            x = x[:, :, :, 0].astype(jnp.float32)
            return x.reshape(b, k, n // k, *x.shape[2:]).sum(axis=2).swapaxes(1, 2)
        x = x[:, :, 0]
        if call.is_backward:
            shared = tuple(i for i, m in enumerate(call.spec.shape(name)) if m == 1)
            x = x.sum(axis=shared, keepdims=True) if shared else x
        return x

    found = call.right({name: fold(name, x) for name, x in call.operands.items()})
    return {name: unfold(name, x) for name, x in found.items()}


@wrong(lambda c: c.dropout)
def dropout_not_rescaled(call):
    """The probabilities that dropout keeps are not divided by 1 - rate."""
    kept = 1 - call.options.meaning.dropout_rate
    if call.is_backward:
        return call.right({"out_grad": kept * call["out_grad"]})
    return times(call.right(), "out", kept)


@wrong(lambda c: c.dropout and c.dropout != 0.5)
def dropout_keeps_what_it_should_drop(call):
    """The dropout rate is taken for the share of pairs that is kept."""
    return call.right(dropout_rate=1 - call.options.meaning.dropout_rate)


@wrong(lambda c: c.dropout, "backward")
def backward_draws_another_mask(call):
    """The backward pass drops different pairs from the forward pass."""
    return call.right({"dropout_key": call["dropout_key"] + 1})


@wrong(lambda c: c.dropout and c.s > 1, "forward")
def another_dropout_mask_is_returned(call):
    """The dropout mask that is returned is not the one that was used."""
    results = call.right()
    changed = {"keep": results["keep"][..., ::-1]} if "keep" in results else {}
    return results | changed


@wrong(lambda c: c.dropout, "backward")
def value_gradient_before_dropout(call):
    """The gradient of value is computed with the probabilities before dropout."""
    found = without_dropout(call)
    return call.right() | {name: x for name, x in found.items() if name == "value"}


@wrong(lambda c: c.dropout, "backward")
def score_gradient_without_dropout(call):
    """The gradients of query and key are computed without dropout."""
    found = without_dropout(call)
    return call.right() | {name: x for name, x in found.items() if name in ("query", "key")}
