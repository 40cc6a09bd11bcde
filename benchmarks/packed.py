"""Speed of packed sequences on one GPU, compared with padding and with flash_attn3_jax.

usage: python benchmarks/packed.py [--rounds N] [--out FOLDER]

There are 16 sequences in a batch padded to 4096, with a mean length of a quarter of that, 32 query
and 8 key/value heads of 128, bfloat16, causal. Lengths are spread evenly in one cell, and have a
long tail up to 4096 in the other. All calls take turns in one run.

ragged, segment_ids    our two packed calls, on [rows, N, H] and on [1, rows, N, H], both with the
                       length of the longest sequence
segment_ids_any_length segment_ids without max_segment_len
padded                 our call on the padded batch, with the lengths
padded_unaware         padded without the lengths, so that padding is computed as well
jax_nn_padded          jax.nn's cuDNN call on the padded batch, with the lengths
flash_attn3_jax        the packed call of flash_attn3_jax, if that is installed
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from timing import by_turns, median_ratio

import attn_dispatch
from attn_dispatch.core.tuning.timing import JittedCall
from attn_dispatch_tools.reports.environment import environment

MIXES = {
    "even": tuple(range(184, 1984, 112))[:16],
    "long_tail": (
        4096, 2731, 1910, 1502, 1213, 980, 812, 690, 586, 480, 393, 310, 249, 190, 147, 95
    ),
}  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BATCH, LONGEST = 16, 4096
ROWS = BATCH * LONGEST // 4
assert all(sum(mix) == ROWS and len(mix) == BATCH for mix in MIXES.values())


def ragged(q, k, v, cu_seqlens):
    return attn_dispatch.ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=LONGEST, max_seqlen_kv=LONGEST, is_causal=True, implementation="cudnn",
    )  # fmt: skip


def segments(q, k, v, ids):
    return attn_dispatch.dot_product_attention(
        q, k, v, query_segment_ids=ids, max_segments=BATCH, max_segment_len=LONGEST,
        is_causal=True, implementation="cudnn",
    )  # fmt: skip


def segments_any_length(q, k, v, ids):
    return attn_dispatch.dot_product_attention(
        q, k, v, query_segment_ids=ids, max_segments=BATCH, is_causal=True,
        implementation="cudnn",
    )  # fmt: skip


def padded(q, k, v, lengths):
    return attn_dispatch.dot_product_attention(
        q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        is_causal=True, implementation="cudnn",
    )  # fmt: skip


def padded_unaware(q, k, v, lengths):
    del lengths
    return attn_dispatch.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def jax_nn_padded(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        is_causal=True, implementation="cudnn",
    )  # fmt: skip


def flash_attn3(q, k, v, cu_seqlens):
    from flash_attn3_jax import flash_mha_varlen

    return flash_mha_varlen(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=LONGEST, max_seqlen_k=LONGEST, is_causal=True
    )


def programs(mix: tuple[int, ...], direction: str) -> dict[str, JittedCall]:
    """All calls with their arguments. Lengths are arguments of the jitted functions, as in
    training."""
    cu_seqlens = jnp.asarray(np.cumsum((0, *mix)), jnp.int32)
    ids = jnp.asarray(np.repeat(np.arange(BATCH) + 1, mix), jnp.int32)[None]
    lengths = jnp.asarray(mix, jnp.int32)
    rows, row, batch = _arrays(ROWS), _arrays(1, ROWS), _arrays(BATCH, LONGEST)
    found: dict[str, JittedCall] = {
        "ragged": (_program(ragged, direction), [*rows, cu_seqlens]),
        "segment_ids": (_program(segments, direction), [*row, ids]),
        "segment_ids_any_length": (_program(segments_any_length, direction), [*row, ids]),
        "padded": (_program(padded, direction), [*batch, lengths]),
        "padded_unaware": (_program(padded_unaware, direction), [*batch, lengths]),
        "jax_nn_padded": (_program(jax_nn_padded, direction), [*batch, lengths]),
    }
    if importlib.util.find_spec("flash_attn3_jax") is not None:
        found["flash_attn3_jax"] = (_program(flash_attn3, direction), [*rows, cu_seqlens])
    return found


def _arrays(*leading: int) -> list[jax.Array]:
    """query, key, value and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        jax.random.normal(key, (*leading, n, HEAD_DIM), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def _program(call: Callable[..., Any], direction: str) -> Callable[..., Any]:
    if direction == "forward":
        return jax.jit(lambda q, k, v, out_grad, where: call(q, k, v, where))

    def both(q, k, v, out_grad, where):
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, where), q, k, v)
        return out, *pull(out_grad)

    return jax.jit(both)


def main() -> None:
    args = arguments("Speed of packed sequences.", rounds=9, seconds=0.15)
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    report: dict[str, Any] = {"environment": facts, "mixes": MIXES}
    for (name, mix), direction in itertools.product(MIXES.items(), ("forward", "forward_backward")):
        times = by_turns(programs(mix, direction), args.rounds, args.seconds)
        report[f"{name}_{direction}"] = rows = {
            call: {
                "us": 1e6 * statistics.median(seconds),
                "over_ragged": median_ratio(times, call, "ragged"),
            }
            for call, seconds in times.items()
        }
        print(f"{name}, {direction}")
        for call, row in rows.items():
            print(f"  {call:18s}{row['us']:8.0f} us {row['over_ragged']:7.2f} x ragged", flush=True)
    save("packed", report, args.out)


if __name__ == "__main__":
    main()
