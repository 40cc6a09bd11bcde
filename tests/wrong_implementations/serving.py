"""Wrong implementations of serving: caches in pages, whole pages and their ends, few queries.

Drawn serving calls must notice them. Most split a cache at the end of the last whole page, as
core/rewrites/kv_cache does, and merge the parts wrongly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from attn_dispatch.semantics.merge import merged
from attn_dispatch.semantics.pages import gathered, gathered_spec
from attn_dispatch_tools.verify.case import Case
from tests.wrong_implementations.features import has_band, returns_lse
from tests.wrong_implementations.implementation import Array, Call, Results, wrong


def in_pages(c: Case) -> bool:
    return c.page > 1 and c.transform in ("jit", "eager", "donate")


def if_in_pages(condition: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """The condition, for cases in pages alone."""
    return lambda c: in_pages(c) and condition(c)


def has_ends(c: Case) -> bool:
    """True if some row has whole pages, and keys after the last of them."""
    return any(c.page < x <= c.s and x % c.page for x in c.kv_lengths or ())


def dense(call: Call) -> Call:
    """The call on arrays, gathered from the pages."""
    if not call.spec.is_paged:
        return call
    return Call(gathered_spec(call.spec), call.device, gathered(call.spec, call.operands))


def page_of(call: Call) -> int:
    return call.spec.page_size if call.spec.is_paged else 1


def ends(call: Call) -> Array:
    """The end of the whole pages of each row, int32 [B]."""
    page = page_of(call)
    return jnp.maximum(call["key_value_seq_lengths"], 0) // page * page


def part(call: Call, keys: Array, **options: object) -> tuple[Array, Array]:
    """out [B, T, N, V] and lse [B, T, N] over the keys for which `keys` [B, S] is true."""
    found = dense(call).right({"mask": keys[:, None, None]}, needs_lse=True, **options)
    return found["out"], found["lse"].swapaxes(1, 2)


def with_part_results(call: Call, out: Array, lse: Array) -> Results:
    """The given out and lse, with the right implementation's other results and NaN rows."""
    results = call.right()
    found = results | {"out": jnp.where(jnp.isnan(results["out"]), jnp.nan, out)}
    if "lse" in results:
        lse = lse.swapaxes(1, 2)
        found["lse"] = jnp.where(jnp.isnan(results["lse"]), jnp.nan, lse)
    return found


def both_parts(call: Call) -> tuple[Array, Array]:
    """The keys in whole pages and the keys after them, each bool [B, S]."""
    position = jnp.arange(call.spec.seq_len_kv, dtype=jnp.int32)[None]
    is_whole = position < ends(call)[:, None]
    return is_whole, ~is_whole


@wrong(if_in_pages(has_ends), "forward")
def last_keys_left_out(call):
    """The keys after the last whole page are not attended to."""
    whole, _ = both_parts(call)
    return with_part_results(call, *part(call, whole))


@wrong(if_in_pages(has_ends), "forward")
def whole_pages_twice(call):
    """The second part has the keys of the first as well."""
    whole, rest = both_parts(call)
    return with_part_results(call, *merged(*part(call, whole), *part(call, whole | rest)))


@wrong(if_in_pages(has_ends), "forward")
def parts_averaged(call):
    """The output is the mean of the two parts, whatever their lse."""
    whole, rest = both_parts(call)
    (out_1, lse_1), (out_2, lse_2) = part(call, whole), part(call, rest)
    _, lse = merged(out_1, lse_1, out_2, lse_2)
    weights = [(x != -jnp.inf).astype(jnp.float32)[..., None] for x in (lse_1, lse_2)]
    total = jnp.maximum(sum(weights), 1)
    return with_part_results(call, (out_1 * weights[0] + out_2 * weights[1]) / total, lse)


@wrong(if_in_pages(lambda c: has_ends(c) and bool(c.soft_cap)), "forward")
def cap_of_whole_pages_alone(call):
    """The scores of the last keys are not capped."""
    whole, rest = both_parts(call)
    return with_part_results(
        call, *merged(*part(call, whole), *part(call, rest, logits_soft_cap=None))
    )


@wrong(if_in_pages(lambda c: has_ends(c) and c.sinks is not None), "forward")
def sinks_in_both_parts(call):
    """Each of the two parts has the sink."""
    whole, rest = both_parts(call)
    return with_part_results(call, *merged(*part(call, whole), *part(call, rest)))


@wrong(if_in_pages(lambda c: c.alibi is not None and returns_lse(c)), "forward")
def distances_from_the_end_of_the_table(call):
    """ALiBi's distances are counted from the last key that the page table has room for."""
    results = call.right()
    if "lse" not in results or "alibi_slopes" not in call:
        return results
    missing = call.spec.seq_len_kv - call["key_value_seq_lengths"]
    moved = call["alibi_slopes"][:, :, None] * missing[:, None, None]
    return results | {"lse": results["lse"] - moved}


@wrong(if_in_pages(lambda c: 1 < c.t <= 16 and has_band(c) and c.is_causal), "forward")
def last_keys_seen_by_all(call):
    """Every one of the few queries attends to the keys of the last."""
    left, _ = call.options.meaning.window
    if call.spec.seq_len_q == 1 or left is not None:
        return call.right()
    return call.right(is_causal=False)


@wrong(if_in_pages(lambda c: c.window[0] is not None), "forward")
def window_begins_with_a_page(call):
    """The window includes all of the page in which it begins."""
    left, right = call.options.meaning.window
    if left is None:
        return call.right()
    return call.right(window=(left + page_of(call) - 1, right))


@wrong(if_in_pages(lambda c: c.b > 1), "forward")
def table_of_the_row_before(call):
    """Each row has the page table of the one before it."""
    if "page_table" not in call or call.spec.batch == 1:
        return call.right()
    table = jnp.clip(jnp.roll(call["page_table"], 1, axis=0), 0, None)
    return call.right({"page_table": table})


@wrong(if_in_pages(has_ends), "forward")
def whole_pages_to_the_end(call):
    """The keys after the length in the last page are multiplied by 0, so that NaN stays."""
    page, length = page_of(call), call["key_value_seq_lengths"]
    is_read = (length % page != 0) & (length > 0)
    results = call.right()
    return results | {"out": jnp.where(is_read[:, None, None, None], jnp.nan, results["out"])}
