"""Decoding with other installed packages, for decode.py.

flash_attn3_jax has a call with a cache (FlashAttention-3; its wheels only have head dim 128), whose
caller chooses the number of splits. PyTorch's scaled_dot_product_attention runs in a separate
process, on full caches, because it takes no lengths. FlashInfer is left out, because its wheel
compiles or downloads kernels on first use.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch_tools.bench.peers.torch_sdpa import Worker

_SPLITS = (1, 16)

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
    if importlib.util.find_spec("flash_attn3_jax") is None:
        print("flash_attn3_jax: not installed", flush=True)
        return {}
    if (dim := query[1].shape[-1]) != 128:
        print(f"flash_attn3_jax: its wheels have no kernels of head dim {dim}", flush=True)
        return {}
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    def contiguous(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array, **options: Any) -> Any:
        return flash_mha_with_kvcache(q, k, v, cache_seqlens=n, is_causal=True, **options)

    def paged(
        q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, n: jax.Array, **options: Any
    ) -> Any:
        return flash_mha_with_kvcache(
            q, k, v, cache_seqlens=n, page_table=table, is_causal=True, **options
        )

    def ours(q: jax.Array, *others: jax.Array) -> jax.Array:
        """The same by our call, on the cache or on pages."""
        if len(others) == 4:
            return paged_attention(q, *others)
        options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
        return dot_product_attention(q, *others[:2], key_value_seq_lengths=others[2], **options)

    size, found = pages[0].shape[1], {}
    for splits in _SPLITS:
        for t in (1, 4):
            name = f"flash_attn3_jax, {splits} splits" + ("" if t == 1 else f", {t} queries")
            found[name] = partial(contiguous, num_splits=splits), query[t], *cache, full
            given = partial(paged, num_splits=splits), query[t], *pages, full
            found[name.replace(",", f", pages of {size},", 1)] = given
    return {name: x for name, x in found.items() if _is_right(name, x, ours)}


def _is_right(name: str, program: tuple[Any, ...], ours: Callable[..., jax.Array]) -> bool:
    call, *given = program
    try:
        found = jax.block_until_ready(jax.jit(call)(*given))
    except Exception as error:  # another package may raise anything
        print(f"{name}: {(str(error).splitlines() or [type(error).__name__])[0]}", flush=True)
        return False
    expected = jax.jit(ours)(*given)
    error = jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    if error <= 0.03 * jnp.abs(expected).max():
        return True
    print(f"{name}: left out, its result differs by {float(error):.3g}", flush=True)
    return False


class Torch:
    """PyTorch's calls with one query in each row."""

    def __init__(self) -> None:
        self._worker = Worker(None)
        if reason := self._worker.about().get("reason"):
            print(f"torch: {reason}", flush=True)

    def times(self, cell: tuple[int, ...], rounds: int) -> dict[str, float]:
        """The device time of each backend's call, in microseconds."""
        if "version" not in self._worker.about():
            return {}
        batch, keys, heads, kv_heads, dim = cell
        torch_cell = {
            "batch": batch, "queries": 1, "seq_len": keys, "num_heads": heads,
            "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dim, "is_causal": False,
        }  # fmt: skip
        found = {}
        for backend in ("cudnn", "flash"):
            program = self._worker.new_id()
            try:
                self._worker.ask(
                    do="prepare", id=program, backend=backend, cell=torch_cell, direction="forward"
                )
                times = [
                    self._worker.ask(do="device_seconds", id=program, calls=16)["seconds"]
                    for _ in range(rounds)
                ]
                found[f"torch: {backend}, device time"] = 1e6 * statistics.median(times)
            except RuntimeError as error:
                print(f"torch: {backend}: {error}", flush=True)
            self._worker.ask(do="release")
        return found

    def close(self) -> None:
        self._worker.close()
