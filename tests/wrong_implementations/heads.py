"""Wrong heads."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import groups, rows_of, times


@wrong(lambda c: c.k > 1)
def kv_heads_swapped(call):
    """The key heads are in the opposite order."""
    return call.right({name: call[name][:, :, ::-1] for name in ("key", "value")})


@wrong(lambda c: 1 < c.k < c.n, "forward")
def kv_heads_interleaved(call):
    """Query head n attends to key head n % K, where n // G is right."""
    heads = jnp.arange(call.spec.num_heads) % call.spec.num_kv_heads
    return call.right({name: call[name][:, :, heads] for name in ("key", "value")})


@wrong(lambda c: c.k > 1, "forward")
def values_of_the_next_head(call):
    """Each key head takes the values of the next one."""
    return call.right({"value": jnp.roll(call["value"], -1, axis=2)})


@wrong(lambda c: c.k < c.n, "backward")
def key_gradient_averaged_over_the_group(call):
    """The gradient of a key is the mean over the heads that share it; the sum is right."""
    return times(call.right(), "key", 1 / groups(call))


@wrong(lambda c: c.k < c.n, "backward")
def key_gradient_of_the_groups_first_head(call):
    """The gradient of a key comes from the first of the heads that share it alone."""
    is_first = jnp.arange(call.spec.num_heads) % groups(call) == 0
    found = call.right(rows_of(call, is_first[None, None]))
    return call.right() | {name: x for name, x in found.items() if name == "key"}


@wrong(lambda c: c.k < c.n, "backward")
def value_gradient_without_the_groups_last_head(call):
    """The gradient of a value leaves out the last of the heads that share it."""
    is_last = jnp.arange(call.spec.num_heads) % groups(call) == groups(call) - 1
    found = call.right(rows_of(call, ~is_last[None, None]))
    return call.right() | {name: x for name, x in found.items() if name == "value"}
