"""Wrong implementations of serving: caches in pages, whole pages and their ends, few queries.

Drawn calls of serving must notice them. Most take a cache apart as core/rewrites/kv_cache does, at
the last whole page, and put it together wrongly.
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


def of_all(condition: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """Of cases in pages."""
    return lambda c: in_pages(c) and condition(c)


def has_ends(c: Case) -> bool:
    """Whether some row has keys after its last whole page, and whole pages."""
    return any(c.page < x <= c.s and x % c.page for x in c.kv_lengths or ())


def dense(call: Call) -> Call:
    """The call on arrays."""
    if not call.spec.is_paged:
        return call
    return Call(gathered_spec(call.spec), call.device, gathered(call.spec, call.operands))


def page_of(call: Call) -> int:
    return call.spec.page_size if call.spec.is_paged else 1


def ends(call: Call) -> Array:
    """Where the whole pages of each row end, int32 [B]."""
    page = page_of(call)
    return jnp.maximum(call["key_value_seq_lengths"], 0) // page * page


def part(call: Call, of: Array, **options: object) -> tuple[Array, Array]:
    """out [B, T, N, V] and lse [B, T, N] over the keys that `of` [B, S] is true for."""
    found = dense(call).right({"mask": of[:, None, None]}, needs_lse=True, **options)
    return found["out"], found["lse"].swapaxes(1, 2)


def put_together(call: Call, out: Array, lse: Array) -> Results:
    """With what the right implementation says of the rest, and of rows that are wrong."""
    results = call.right()
    found = results | {"out": jnp.where(jnp.isnan(results["out"]), jnp.nan, out)}
    if "lse" in results:
        lse = lse.swapaxes(1, 2)
        found["lse"] = jnp.where(jnp.isnan(results["lse"]), jnp.nan, lse)
    return found


def both_parts(call: Call) -> tuple[Array, Array]:
    """bool [B, S]: the keys of whole pages, and those after them."""
    place = jnp.arange(call.spec.seq_len_kv, dtype=jnp.int32)[None]
    is_whole = place < ends(call)[:, None]
    return is_whole, ~is_whole


@wrong(of_all(has_ends), "forward")
def last_keys_left_out(call):
    """The keys after the last whole page are not attended to."""
    whole, _ = both_parts(call)
    return put_together(call, *part(call, whole))


@wrong(of_all(has_ends), "forward")
def whole_pages_twice(call):
    """The second of the two parts has the keys of the first as well."""
    whole, rest = both_parts(call)
    return put_together(call, *merged(*part(call, whole), *part(call, whole | rest)))


@wrong(of_all(has_ends), "forward")
def parts_averaged(call):
    """Of two parts the mean is taken, whatever their lse."""
    whole, rest = both_parts(call)
    (one, of_one), (other, of_other) = part(call, whole), part(call, rest)
    _, lse = merged(one, of_one, other, of_other)
    weights = [(x != -jnp.inf).astype(jnp.float32)[..., None] for x in (of_one, of_other)]
    total = jnp.maximum(sum(weights), 1)
    return put_together(call, (one * weights[0] + other * weights[1]) / total, lse)


@wrong(of_all(lambda c: has_ends(c) and bool(c.soft_cap)), "forward")
def cap_of_whole_pages_alone(call):
    """The scores of the last keys are not capped."""
    whole, rest = both_parts(call)
    return put_together(call, *merged(*part(call, whole), *part(call, rest, logits_soft_cap=None)))


@wrong(of_all(lambda c: has_ends(c) and c.sinks is not None), "forward")
def sinks_in_both_parts(call):
    """Each of two parts has the sink."""
    whole, rest = both_parts(call)
    return put_together(call, *merged(*part(call, whole), *part(call, rest)))


@wrong(of_all(lambda c: c.alibi is not None and returns_lse(c)), "forward")
def distances_from_the_end_of_the_table(call):
    """ALiBi's distances are counted to the last key that the table has room for."""
    results = call.right()
    if "lse" not in results or "alibi_slopes" not in call:
        return results
    missing = call.spec.seq_len_kv - call["key_value_seq_lengths"]
    moved = call["alibi_slopes"][:, :, None] * missing[:, None, None]
    return results | {"lse": results["lse"] - moved}


@wrong(of_all(lambda c: 1 < c.t <= 16 and has_band(c) and c.is_causal), "forward")
def last_keys_seen_by_all(call):
    """All of a few queries attend to the keys of the last one."""
    left, _ = call.options.meaning.window
    if call.spec.seq_len_q == 1 or left is not None:
        return call.right()
    return call.right(is_causal=False)


@wrong(of_all(lambda c: c.window[0] is not None), "forward")
def window_begins_with_a_page(call):
    """A window attends to all of the page that it begins in."""
    left, right = call.options.meaning.window
    if left is None:
        return call.right()
    return call.right(window=(left + page_of(call) - 1, right))


@wrong(of_all(lambda c: c.b > 1), "forward")
def table_of_the_next_row(call):
    """Rows have each other's page tables."""
    if "page_table" not in call or call.spec.batch == 1:
        return call.right()
    results = call.right({"page_table": jnp.clip(jnp.roll(call["page_table"], 1, axis=0), 0, None)})
    return results


@wrong(of_all(has_ends), "forward")
def whole_pages_to_the_end(call):
    """What stands past a length in the last page is multiplied by 0, which NaN is not."""
    page, length = page_of(call), call["key_value_seq_lengths"]
    is_read = (length % page != 0) & (length > 0)
    results = call.right()
    return results | {"out": jnp.where(is_read[:, None, None, None], jnp.nan, results["out"])}
