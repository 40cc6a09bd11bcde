"""Decoding with other installed packages, for decode.py.

flash_attn3_jax has a call with a cache (FlashAttention-3; its wheels only have head dim 128), whose
caller chooses the number of splits. PyTorch's scaled_dot_product_attention runs in a separate
process, on full caches, because it takes no lengths. FlashInfer is left out, because its wheel
compiles or downloads kernels on first use.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch_tools.bench.peers.peer import first_line, why_absent
from attn_dispatch_tools.bench.peers.torch_sdpa import Worker

Programs = dict[str, tuple[Any, ...]]
"""By name, a call and its arguments. The first is the query, whose shape the result has."""


def flash_attn3(
    query: Mapping[int, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array, jax.Array],
    full: jax.Array,
) -> Programs:
    """The calls of flash_attn3_jax with 1 and 4 queries, without those that compute wrong results.

    Args:
      query: by T, the queries [B, T, N, H].
      cache: key and value [B, S, K, H].
      pages: the pages of keys and of values [P, page, K, H], and the page table [B, M].
      full: the lengths [B].
    """
    absent = why_absent("flash_attn3_jax", "flash-attn3-jax")
    if absent or query[1].shape[-1] != 128:
        print(f"flash_attn3_jax: {absent or 'its wheels only have head dim 128'}", flush=True)
        return {}
    package = importlib.import_module("flash_attn3_jax")

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array, splits: int) -> Any:
        *table, n = others
        options = {"page_table": table[0]} if table else {}
        return package.flash_mha_with_kvcache(
            q, k, v, cache_seqlens=n, is_causal=True, num_splits=splits, **options
        )

    def ours(q: jax.Array, *others: jax.Array) -> jax.Array:
        """The same by our call, on the cache or on pages."""
        if len(others) == 4:
            return paged_attention(q, *others)
        options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
        return dot_product_attention(q, *others[:2], key_value_seq_lengths=others[2], **options)

    found: Programs = {}
    for splits in (1, 16):
        for t in (1, 4):
            end = f"{splits} splits" + ("" if t == 1 else f", {t} queries")
            call = partial(theirs, splits=splits)
            found[f"flash_attn3_jax, {end}"] = call, query[t], *cache, full
            size = pages[0].shape[1]
            found[f"flash_attn3_jax, pages of {size}, {end}"] = call, query[t], *pages, full
    for name, (call, *given) in [*found.items()]:
        try:
            result, expected = (jax.jit(x)(*given).astype(jnp.float32) for x in (call, ours))
            error = float(jnp.abs(result - expected).max() / jnp.abs(expected).max())
            wrong = "" if error <= 0.03 else f"its result differs by {error:.3g} of the largest"
        except Exception as failure:  # another package may raise anything
            wrong = first_line(failure)
        if wrong:
            del found[name]
            print(f"{name}: left out: {wrong}", flush=True)
    return found


class Torch:
    """PyTorch's calls with one query in each row."""

    def __init__(self) -> None:
        self._worker = Worker(None)
        if reason := self._worker.about().get("reason"):
            print(f"torch: {reason}", flush=True)

    def times(self, cache: Any, rounds: int) -> dict[str, dict[str, float]]:
        """The device time of each backend's call, in microseconds.

        Args:
          cache: a Cache of decode.py.
        """
        cell = {
            "batch": cache.batch, "queries": 1, "seq_len": cache.keys, "num_heads": cache.heads,
            "num_kv_heads": cache.kv_heads, "head_dim": cache.dim, "head_dim_v": cache.dim,
            "is_causal": False,
        }  # fmt: skip
        found: dict[str, dict[str, float]] = {}
        for backend in ("cudnn", "flash") if "version" in self._worker.about() else ():
            program = self._worker.new_id()
            asked = {"id": program, "backend": backend, "cell": cell, "direction": "forward"}
            try:
                self._worker.ask(do="prepare", **asked)
                times = [
                    self._worker.ask(do="device_seconds", id=program, calls=16)["seconds"]
                    for _ in range(rounds)
                ]
                found[f"torch: {backend}"] = {"device_us": 1e6 * statistics.median(times)}
            except RuntimeError as error:
                print(f"torch: {backend}: {error}", flush=True)
            self._worker.ask(do="release")
        return found

    def close(self) -> None:
        self._worker.close()
