"""Wrong scores: scale, soft cap, bias, ALiBi."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.features import is_packed, is_plain
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import (
    alibi_of,
    bias_of,
    distances,
    first_everywhere,
    misread,
    raw_scores,
    slopes_of,
    soft_capped,
    with_scores,
)


@wrong(lambda c: c.scale != 0)
def scale_ten_percent_off(call):
    """The scale is a tenth too large."""
    return call.right(scale=1.1 * call.options.meaning.scale)


@wrong(lambda c: c.scale < 0)
def scale_without_its_sign(call):
    """A negative scale loses its sign."""
    return call.right(scale=abs(call.options.meaning.scale))


@wrong(lambda c: c.scale == 0)
def scale_of_zero_is_the_default(call):
    """A scale of 0 is taken for the default, 1/sqrt(H)."""
    return call.right(scale=call.options.meaning.scale or call.spec.head_dim**-0.5)


@wrong(lambda c: c.scale < 0 and c.needs_max, "forward")
def row_max_of_a_negative_scale_is_the_smallest_score(call):
    """row_max is the smallest score where the scale is negative: the largest product, scaled."""
    results = call.right()
    if "row_max" not in results:
        return results
    turned = call.right(scale=-call.options.meaning.scale)["row_max"]
    return results | {"row_max": jnp.where(turned == -jnp.inf, turned, -turned)}


@wrong(lambda c: 0 < abs(c.scale) < 1e-3)
def tiny_scale_is_zero(call):
    """A very small scale is taken for 0."""
    return call.right(scale=0.0)


@wrong(lambda c: c.v != c.h and c.scale != 0)
def scale_of_the_value_dim(call):
    """The scale is computed from the head dim of value, not from that of query."""
    ratio = call.spec.head_dim / call.spec.head_dim_v
    return call.right(scale=call.options.meaning.scale * ratio**0.5)


@wrong(lambda c: c.h > 1 and c.scale != 0)
def last_column_of_query_forgotten(call):
    """The last column of query and key does not enter the scores."""
    return call.right({"query": call["query"].at[..., -1].set(0)})


@wrong(lambda c: c.soft_cap)
def soft_cap_ignored(call):
    """The scores are not capped."""
    return call.right(logits_soft_cap=None)


@wrong(lambda c: c.soft_cap, "forward")
def soft_cap_clips(call):
    """The scores are clipped at the soft cap, not bent towards it."""
    cap = call.options.meaning.logits_soft_cap
    score = jnp.clip(raw_scores(call), -cap, cap)
    changed = {"bias": score - raw_scores(call) + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong(lambda c: c.soft_cap and c.scale not in (0, 1), "forward")
def soft_cap_before_the_scale(call):
    """The products are capped first and scaled afterwards."""
    scale, raw = call.options.meaning.scale, raw_scores(call)
    changed = {"bias": scale * soft_capped(call, raw / scale) - raw + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong(lambda c: c.soft_cap, "backward")
def soft_cap_without_a_slope(call):
    """The gradients of query and key leave out the derivative of the soft cap."""
    results, raw = call.right(), raw_scores(call)
    wanted = tuple(name for name in call.options.wanted.gradients if name in ("query", "key"))
    if not wanted:
        return results
    changed = {"bias": soft_capped(call, raw) - raw + bias_of(call)}
    return results | call.right(changed, logits_soft_cap=None, gradients=wanted)


@wrong(lambda c: c.soft_cap and c.bias, "forward")
def bias_before_the_soft_cap(call):
    """The soft cap is applied after the bias, not before it."""
    bias = bias_of(call)
    score = soft_capped(call, raw_scores(call) + jnp.where(bias == -jnp.inf, 0, bias))
    score = jnp.where(bias == -jnp.inf, -jnp.inf, score)
    return call.right({"bias": score - raw_scores(call)}, logits_soft_cap=None)


@wrong(lambda c: c.soft_cap and c.alibi and is_plain(c), "forward")
def soft_cap_after_alibi(call):
    """The soft cap is applied after ALiBi, not before it."""
    score = soft_capped(call, raw_scores(call) + alibi_of(call)) + bias_of(call)
    return with_scores(call, score)


@wrong(lambda c: c.bias and c.scale != 1)
def bias_before_the_scale(call):
    """The bias is scaled as well."""
    bias = call["bias"]
    return call.right(
        {"bias": jnp.where(jnp.isfinite(bias), bias * call.options.meaning.scale, bias)}
    )


@wrong(lambda c: c.bias and c.bias[0] > 1)
def bias_of_the_first_batch_row(call):
    """All batch rows have the bias of the first."""
    return call.right({"bias": first_everywhere(call["bias"])})


@wrong(lambda c: c.bias and c.bias[1] > 1)
def bias_of_the_first_head(call):
    """All heads have the bias of the first."""
    return call.right({"bias": first_everywhere(call["bias"], axis=1)})


@wrong(lambda c: c.bias and c.bias[2] > 1 and c.bias[3] > 1)
def bias_transposed(call):
    """The bias's query axis and key axis are swapped."""
    return call.right({"bias": misread(call["bias"])})


@wrong(lambda c: c.infinite_bias)
def infinite_bias_is_finite(call):
    """A bias of -inf is a large negative number, so that a row of -inf is as a row of zeros."""
    bias = call["bias"].astype(jnp.float32)
    return call.right({"bias": jnp.where(bias == -jnp.inf, -1e4, bias)})


@wrong(lambda c: c.alibi and is_plain(c) and c.s > 1, "forward")
def alibi_distance_signed(call):
    """ALiBi's distance has a sign, so that it favours keys to the right of the diagonal."""
    bias = bias_of(call) - slopes_of(call) * distances(call)
    return call.right({"alibi_slopes": None, "bias": bias})


@wrong(lambda c: c.alibi and is_plain(c) and c.alignment == "bottom_right", "forward")
def alibi_from_the_top_left(call):
    """ALiBi's distances are counted from the top left diagonal, whatever the alignment."""
    distance = jnp.abs(distances(call, is_aligned=False))
    return call.right({"alibi_slopes": None, "bias": bias_of(call) - slopes_of(call) * distance})


@wrong(lambda c: c.alibi and is_packed(c) and c.alignment == "top_left", "forward")
def alibi_from_the_rows_start(call):
    """ALiBi's distances are counted in the row, not in the packed sequence."""
    bias = bias_of(call) - slopes_of(call) * jnp.abs(distances(call))
    return call.right({"alibi_slopes": None, "bias": bias})


@wrong(lambda c: c.alibi and c.n > 1)
def alibi_slope_of_the_next_head(call):
    """Each head has the ALiBi slope of the next."""
    return call.right({"alibi_slopes": jnp.roll(call["alibi_slopes"], -1, axis=1)})


@wrong(lambda c: (c.alibi or 1) > 1)
def alibi_slopes_of_the_first_batch_row(call):
    """All batch rows have the ALiBi slopes of the first."""
    return call.right({"alibi_slopes": first_everywhere(call["alibi_slopes"])})
