"""Decoding with a left-padded cache: the ways to say which keys are padding.

One GPU; bfloat16, 32 query and 8 key/value heads of 128. The real keys of a batch row are at the
end of its cache; the rows have from an eighth to all of the places, evenly spread. A program makes
16 steps, as those of decode.py do, or as a scan over 16 layers does that share the padding, and all
forms of a cell take turns. The results of all forms of a cell are compared with those of "ids".

ids             segment ids: 1 for each query and each real key, 0 for padding
lengths         key_value_seq_lengths, with the keys at the beginning of the cache: what decoding
                costs if the cache is padded on the right
moved           lengths, with the keys of the left-padded cache moved to the beginning in each step
mask            a boolean mask [B, 1, T, S], which frameworks pass
mask_mod        the first real key of each row as an array that a mask_mod reads
jax.nn mask     jax.nn's call on cuDNN, with that mask
jax.nn lengths  jax.nn's call on cuDNN, with lengths; only for a single query
whole           no padding: every place of the cache is a key
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from decode import BOTTOM_RIGHT, STEPS, Cache, Call, repeated
from harness import Script, compared, device_us

from attn_dispatch import dot_product_attention, explain_program
from attn_dispatch.core.tuning.timing import orders
from attn_dispatch_tools.bench.peers.peer import first_line

CELLS = ((Cache(16, 8192), 1), (Cache(64, 4096), 1), (Cache(16, 8192), 4), (Cache(16, 8192), 512))
"""A cache, and the number of queries."""
WHOLE, BESIDE = "whole", "lengths"
MAX_DIFFERENCE = 0.02
"""As a share of the largest number; bfloat16 and its probabilities err by less."""


def ids(q, k, v, n) -> jax.Array:
    ones = jnp.ones(q.shape[:2], jnp.int32)
    return dot_product_attention(
        q, k, v, query_segment_ids=ones, key_value_segment_ids=is_real(k, n).astype(jnp.int32),
        max_segments=1, **BOTTOM_RIGHT,
    )  # fmt: skip


def lengths(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, key_value_seq_lengths=n, **BOTTOM_RIGHT)


def moved(q, k, v, n) -> jax.Array:
    # XLA would move arrays that are the same in each step once, before the first.
    q, k, v = jax.lax.optimization_barrier((q, k, v))
    return lengths(q, at_the_beginning(k, n), at_the_beginning(v, n), n)


def mask(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, mask=seen(q, k, n))


def mask_mod(q, k, v, n) -> jax.Array:
    first = k.shape[1] - n
    return dot_product_attention(
        q, k, v, mask_mod=lambda b, n, t, s, first: s >= first[b], mask_mod_args=(first,),
        **BOTTOM_RIGHT,
    )  # fmt: skip


def jax_nn_mask(q, k, v, n) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=seen(q, k, n), implementation="cudnn")


def jax_nn_lengths(q, k, v, n) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=jnp.ones_like(n), key_value_seq_lengths=n, implementation="cudnn"
    )


def whole(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, **BOTTOM_RIGHT)


FORMS: dict[str, Call] = {
    "ids": ids, BESIDE: lengths, "moved": moved, "mask": mask, "mask_mod": mask_mod,
    "jax.nn mask": jax_nn_mask, "jax.nn lengths": jax_nn_lengths, WHOLE: whole,
}  # fmt: skip
PADDED_ON_THE_RIGHT = (BESIDE, "jax.nn lengths")


def is_real(k: jax.Array, n: jax.Array) -> jax.Array:
    """bool [B, S]: the last n[b] places of each row."""
    return jnp.arange(k.shape[1]) >= k.shape[1] - n[:, None]


def seen(q: jax.Array, k: jax.Array, n: jax.Array) -> jax.Array:
    """bool [B, 1, T, S]: the real keys that each query sees."""
    t, s = q.shape[1], k.shape[1]
    is_past = jnp.arange(s) <= jnp.arange(t)[:, None] + s - t
    return (is_past & is_real(k, n)[:, None])[:, None]


@jax.jit
def at_the_beginning(x: jax.Array, n: jax.Array) -> jax.Array:
    """The last n[b] places of each row as its first ones."""
    places = (jnp.arange(x.shape[1]) - n[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, places[:, :, None, None], axis=1)


def what_runs(form: Call, arrays: list[jax.Array]) -> str:
    """What runs the form's call on this device, with the rewrites that it takes."""
    calls = explain_program(form, *arrays).calls
    if not calls:
        return "not ours"
    verdict = next(x for x in calls[0].explanation.forward if x.is_eligible)
    return ", ".join((verdict.implementation, *verdict.rewrites))


def measure(cache: Cache, queries: int, args: Any) -> dict[str, dict[str, Any]]:
    """For each form what runs it, its difference from "ids" and its times; after an error, only
    that.

    Raises:
      AssertionError: a form computes something else.
    """
    spread = jnp.linspace(cache.keys / 8, cache.keys, cache.batch)
    n = jnp.maximum(spread.astype(jnp.int32), queries)
    left = [cache.query(cache.batch, queries), *cache.arrays(), n]
    right = [left[0], *(at_the_beginning(x, n) for x in left[1:3]), n]
    rows, programs, expected = {}, {}, None
    for name, form in FORMS.items():
        if name == "jax.nn lengths" and queries > 1:
            continue
        arrays = right if name in PADDED_ON_THE_RIGHT else left
        try:
            result = jax.jit(form)(*arrays).astype(jnp.float32)
            expected = result if expected is None else expected
            program = (repeated(form), arrays)
            jax.block_until_ready(program[0](*arrays))
        except Exception as failure:  # jax.nn refuses some calls
            rows[name] = {"failed": first_line(failure)}
            continue
        programs[name] = program
        rows[name] = {"runs": what_runs(form, arrays)}
        if name != WHOLE:
            difference = float(jnp.abs(result - expected).max() / jnp.abs(expected).max())
            assert difference < MAX_DIFFERENCE, (name, difference)
            rows[name]["difference"] = difference
    square = len(orders(len(programs)))  # each form follows each other one equally often
    args.rounds = -(-args.rounds // square) * square
    times = compared(programs, args, dict.fromkeys(programs, BESIDE), least=2)
    for name, (run, arrays) in programs.items():
        device = device_us(lambda run=run, arrays=arrays: run(*arrays))
        rows[name] |= times[name] | {"us": times[name]["us"] / STEPS}
        rows[name]["device_us"] = device and device / STEPS
    return rows


def main() -> None:
    script = Script("left_padding", __doc__, rounds=14, seconds=0.03)
    args = script.start()
    cells = {f"{cache}, {queries} queries": (cache, queries) for cache, queries in CELLS}
    for name in script.chosen(cells):
        script.keep("cells", name, measure(*cells[name], args))


if __name__ == "__main__":
    main()
