"""Wrong rows and tiles, dtypes and rounding."""

from __future__ import annotations

from itertools import count

import jax
import jax.numpy as jnp

from tests.wrong_implementations.features import has_band, has_rest, returns_lse, whole_tiles
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import (
    bias_of,
    clean,
    groups,
    mantissa,
    masked_by,
    raw_scores,
    rows_of,
    soft_capped,
)


@wrong(lambda c: has_rest(c.s))
def last_tile_of_keys_skipped(call):
    """The keys after the last whole tile are hidden from every query."""
    whole = whole_tiles(call.spec.seq_len_kv)
    return masked_by(call, (jnp.arange(call.spec.seq_len_kv) < whole)[None, None, None])


@wrong(lambda c: has_rest(c.t), "forward")
def last_tile_of_queries_not_written(call):
    """The output after the last whole tile of queries is 0."""
    results, whole = call.right(), whole_tiles(call.spec.seq_len_q)
    return results | {"out": results["out"].at[:, whole:].set(0)}


@wrong(lambda c: has_rest(c.t), "backward")
def last_tile_of_queries_missing_in_key_gradient(call):
    """The gradient of key leaves out the queries after the last whole tile."""
    t = call.spec.seq_len_q
    found = call.right(rows_of(call, (jnp.arange(t) < whole_tiles(t))[None, :, None]))
    return call.right() | {name: x for name, x in found.items() if name == "key"}


@wrong(lambda c: c.t > 1, "forward")
def last_query_copied(call):
    """The output of the last query is that of the one before it."""
    results = call.right()
    return results | {"out": results["out"].at[:, -1].set(results["out"][:, -2])}


@wrong(lambda c: c.t == 1 and c.s > 1 and has_band(c))
def one_query_sees_everything(call):
    """Causality and the window are ignored for a single query."""
    return call.right(is_causal=False, window=(None, None))


@wrong(lambda c: c.s == 1, "forward")
def one_key_is_always_attended(call):
    """With a single key the output is its value."""
    value = jnp.repeat(clean(call["value"]), groups(call), axis=2)
    shape = (*call["query"].shape[:3], call.spec.head_dim_v)
    return call.right() | {"out": jnp.broadcast_to(value, shape)}


@wrong(lambda c: c.dtype == "float16" and returns_lse(c), "forward")
def lse_in_float16(call):
    """lse is rounded to float16 where the operands are float16."""
    results = call.right()
    rounded = {name: x.astype(jnp.float16) for name, x in results.items() if name == "lse"}
    return results | rounded


@wrong(lambda c: c.dtype == "float16", "forward")
def float16_overflows(call):
    """The scores of float16 are clipped, as if their exponentials overflowed."""
    if call.spec.dtype != "float16":
        return call.right()
    score = soft_capped(call, raw_scores(call))
    changed = {"bias": jnp.minimum(score, 1.0) - raw_scores(call) + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong(lambda c: True, "forward")
def half_the_mantissa(call):
    """The output is rounded to half the mantissa of its dtype."""
    results = call.right()
    bits = jnp.finfo(call.spec.dtype).nmant // 2
    return results | {"out": mantissa(results["out"], bits)}


@wrong(lambda c: c.dtype == "float32" and c.scale != 0)
def float32_multiplied_in_bfloat16(call):
    """The products of float32 queries and keys are computed in bfloat16."""
    rounded = {name: call[name].astype(jnp.bfloat16) for name in ("query", "key")}
    return call.right({name: x.astype(call[name].dtype) for name, x in rounded.items()})


@wrong(lambda c: c.deterministic, "backward")
def gradients_differ_from_call_to_call(call):
    """The gradient of value differs in its last digits at every call, in deterministic mode too."""
    results = call.right()
    if "value" not in results:
        return results
    calls = count(1)

    def drift(x):
        return x * x.dtype.type(1 + float(jnp.finfo(x.dtype).eps) * (next(calls) % 7))

    value = results["value"]
    return results | {"value": jax.pure_callback(drift, value, value, vmap_method="sequential")}
