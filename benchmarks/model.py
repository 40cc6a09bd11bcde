"""A training step of a decoder, and the share that attention has in it.

The model has four layers as in Llama 3 8B (hidden 4096, 32 query heads, 8 kv heads, head dim 128,
MLP 14336, RMSNorm, rotary positions; 870 million parameters), in bfloat16. A step is forward,
backward and SGD with momentum on one row of tokens. "none" leaves attention out, and so measures
the rest of the step.

documents  16,384 tokens of 16 documents: our call with the default choice and with each
           implementation, dew-flash-attn's bare kernels, and jax.nn's on cuDNN with the same
           documents as a padded batch, in which every layer has more rows
others     32,768 tokens under a mask: our call with FlashAttention-4's compiled kernels, with cuDNN
           and with XLA, and jax.nn's with the mask as an array over all pairs. A step that takes
           seconds is run once, and has no turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Script

from attn_dispatch import dot_product_attention, flash, ragged_dot_product_attention
from attn_dispatch.core.tuning.timing import orders
from attn_dispatch.devices.target import default_device
from attn_dispatch.implementation import ImplementationName
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.mask_shares import shares
from attn_dispatch_tools.bench.masks import Mask
from attn_dispatch_tools.bench.peers.dew_flash_attn import facts_of, kernels_of
from attn_dispatch_tools.bench.peers.jax_nn import JaxNn
from attn_dispatch_tools.bench.peers.ours import Ours
from attn_dispatch_tools.bench.peers.peer import PeerCall, first_line

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP = 4, 4096, 32, 8, 128, 14336
LONGEST, TOKENS = 2048, 16384
LENGTHS = np.random.default_rng(0).integers(184, 1844, 16)
assert TOKENS - 1000 < LENGTHS.sum() <= TOKENS
MASK_TOKENS = 32768
MASKS = {
    "prefix of 8,192": Mask(prefix=8192),
    "images of 4,096": Mask(image=4096, has_ends=True),
}
MAX_TURN_SECONDS = 2.0
"""The longest step under a mask that takes turns."""

Attention = Callable[..., jax.Array]
"""A function of query, key and value, each [tokens, heads, dim], and of further arrays."""


def parameters(key: jax.Array) -> dict[str, jax.Array]:
    """The weights of all layers, stacked: [LAYERS, inputs, outputs]."""
    shapes = {
        "q": (HIDDEN, HEADS * DIM), "k": (HIDDEN, KV_HEADS * DIM), "v": (HIDDEN, KV_HEADS * DIM),
        "o": (HEADS * DIM, HIDDEN), "up": (HIDDEN, MLP), "gate": (HIDDEN, MLP),
        "down": (MLP, HIDDEN),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, (LAYERS, *shape), jnp.bfloat16) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [tokens, heads, dim], turned by rotary positions."""
    angles = positions[:, None, None] * 500000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss(
    weights: Any, x: jax.Array, positions: jax.Array, is_real: jax.Array, attention: Attention,
    further: tuple[jax.Array, ...],
):  # fmt: skip
    """The mean square of the output, from rows x [tokens, hidden]; padding rows count as 0."""

    def layer(x: jax.Array, w: dict[str, jax.Array]):
        y = norm(x)
        q, k, v = ((y @ w[name]).reshape(len(y), -1, DIM) for name in "qkv")
        out = attention(rotary(q, positions), rotary(k, positions), v, *further)
        x = x + out.reshape(len(y), -1) @ w["o"]
        y = norm(x)
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, weights)
    return (jnp.where(is_real[:, None], norm(x), 0).astype(jnp.float32) ** 2).mean()


def train_step(attention: Attention, positions: jax.Array, is_real: jax.Array):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, momentum: Any, x: jax.Array, *further: jax.Array):
        value, grads = jax.value_and_grad(loss)(weights, x, positions, is_real, attention, further)
        momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), momentum, grads)
        weights = jax.tree.map(lambda w, m: (w - 1e-3 * m).astype(w.dtype), weights, momentum)
        return weights, momentum, value

    return step


def packed_rows() -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """The rows' positions in their documents, which rows belong to one, and cu_seqlens."""
    positions = np.concatenate([np.arange(x) for x in LENGTHS])
    padding = TOKENS - len(positions)
    is_real = np.arange(TOKENS) < len(positions)
    cu = jnp.asarray([0, *np.cumsum(LENGTHS)], jnp.int32)
    return np.pad(positions, (0, padding)), is_real, cu


def by_cu_seqlens(implementation: ImplementationName | None, cu: jax.Array) -> Attention:
    return partial(
        ragged_dot_product_attention, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=LONGEST,
        max_seqlen_kv=LONGEST, is_causal=True, implementation=implementation,
    )  # fmt: skip


def by_segment_ids(implementation: ImplementationName | None) -> Attention:
    ids = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    ids = jnp.asarray(np.pad(ids, (0, TOKENS - len(ids)))[None], jnp.int32)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dot_product_attention(
            q[None], k[None], v[None], is_causal=True, query_segment_ids=ids,
            max_segments=len(LENGTHS), max_segment_len=LONGEST, implementation=implementation,
        )[0]  # fmt: skip

    return attention


def bare(cu: jax.Array) -> Attention:
    """FlashAttention-3's kernels with nothing before or after them."""
    sizes = (1, TOKENS, HEADS, KV_HEADS, DIM, DIM)
    kernels = kernels_of(
        facts_of(Cell("model", "", *sizes, lengths=tuple(LENGTHS.tolist()), longest=LONGEST))
    )
    return lambda q, k, v: kernels(q, k, v, cu)


def padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """jax.nn's attention; the rows are those of a padded batch."""
    batch = [x.reshape(len(LENGTHS), LONGEST, *x.shape[1:]) for x in (q, k, v)]
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    out = jax.nn.dot_product_attention(
        *batch, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip
    return out.reshape(q.shape)


def none(q: jax.Array, k: jax.Array, v: jax.Array, *further: jax.Array) -> jax.Array:
    """No attention: the cheapest function that has gradients for all three operands."""
    return q + jnp.repeat(k + v, HEADS // KV_HEADS, axis=1)


def rows(count: int) -> jax.Array:
    """What the first layer reads."""
    return jax.random.normal(jax.random.key(1), (count, HIDDEN), jnp.bfloat16)


class Steps:
    """Compiled steps of one model, which take turns in training it."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self._compiled: dict[str, tuple[Any, tuple[jax.Array, ...]]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self._start_anew()

    def add(self, name: str, step: Any, *arrays: jax.Array) -> float:
        """Compile a step and run it once for its loss, and once more; returns its seconds."""
        compiled = step.lower(self._weights, self._momentum, *arrays).compile()
        self._compiled[name] = compiled, arrays
        try:
            first_loss = self._run(name)
        except Exception:
            self.leave_out(name)
            self._start_anew()  # the failed step may have taken the weights with it
            raise
        start = time.perf_counter()
        self._run(name)
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis().temp_size_in_bytes
        self.found[name] = {"memory_bytes": memory, "first_loss": first_loss}
        self._keep(name, [seconds])
        return seconds

    def leave_out(self, name: str) -> None:
        """Take no turns with a step."""
        del self._compiled[name]

    def take_turns(self, rounds: int, seconds: float, least: int = 2) -> None:
        """Time all steps in balanced order: each turn is of `seconds`, and of `least` steps."""
        names, square = list(self._compiled), orders(len(self._compiled))
        times: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds):
            for place in square[i % len(square)]:
                times[names[place]].append(self._seconds(names[place], seconds, least))
        for name, found in times.items():
            self._keep(name, found)

    def _start_anew(self) -> None:
        self._weights = parameters(jax.random.key(0))
        self._momentum = jax.tree.map(jnp.zeros_like, self._weights)

    def _seconds(self, name: str, seconds: float, least: int) -> float:
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds or calls < least:
            self._run(name)
            calls += 1
        return (time.perf_counter() - start) / calls

    def _run(self, name: str) -> float:
        compiled, arrays = self._compiled[name]
        self._weights, self._momentum, value = compiled(self._weights, self._momentum, *arrays)
        return float(value)

    def _keep(self, name: str, times: list[float]) -> None:
        self.found[name] |= {
            "step_ms": 1e3 * statistics.median(times),
            "min_ms": 1e3 * min(times),
            "tokens_per_second": self.tokens / statistics.median(times),
            "turns": len(times),
        }

    def shown(self) -> dict[str, dict[str, Any]]:
        """The facts of each step, with the share that attention has in it."""
        for row in self.found.values():
            row["attention_share"] = 1 - self.found["none"]["step_ms"] / row["step_ms"]
        return self.found


def documents(args: argparse.Namespace) -> dict[str, Any]:
    positions, is_real, cu = packed_rows()
    calls = {"ours": by_cu_seqlens(None, cu), "ours: cudnn": by_cu_seqlens("cudnn", cu)}
    if not flash.unusable_reason(default_device()):
        calls |= {"ours: flash": by_cu_seqlens("flash", cu), "dew-flash-attn": bare(cu)}
        calls["ours: segment ids, flash"] = by_segment_ids("flash")
    calls["ours: segment ids, cudnn"] = by_segment_ids("cudnn")
    calls |= {"none": none, "jax.nn, padded": padded}
    steps = Steps(int(LENGTHS.sum()))
    for name, attention in calls.items():
        if name == "jax.nn, padded":
            places = np.tile(np.arange(LONGEST), len(LENGTHS))
            is_token = jnp.asarray(places < np.repeat(LENGTHS, LONGEST))
            steps.add(name, train_step(attention, jnp.asarray(places), is_token), rows(len(places)))
        else:
            step = train_step(attention, jnp.asarray(positions), jnp.asarray(is_real))
            steps.add(name, step, rows(TOKENS))
    steps.take_turns(args.rounds, args.seconds)
    return {"tokens": steps.tokens, **steps.shown()}


def under_mask(mask: Mask, args: argparse.Namespace) -> dict[str, Any]:
    sizes = (1, MASK_TOKENS, HEADS, KV_HEADS, DIM, DIM)
    cell = Cell("masks", "model", *sizes, mask=mask)
    arrays, steps, refused = CellArrays(cell), Steps(MASK_TOKENS), {}
    positions, is_real = jnp.arange(MASK_TOKENS), jnp.ones(MASK_TOKENS, bool)
    x = rows(MASK_TOKENS)
    steps.add("none", train_step(none, positions, is_real), x)
    for peer in (Ours("fa4"), Ours("cudnn"), JaxNn("cudnn"), Ours("xla"), JaxNn("xla")):
        try:
            if absent := peer.absent():
                raise NotImplementedError(absent)
            call = peer.call(cell, arrays)
            step = train_step(without_batch_axis(call), positions, is_real)
            if steps.add(peer.name, step, x, *call.further_arrays) > MAX_TURN_SECONDS:
                steps.leave_out(peer.name)
        except Exception as error:  # memory and refusals alike are what readers want to know
            refused[peer.name] = first_line(error)
    steps.take_turns(args.rounds, args.seconds, least=1)
    tiles = shares(mask, MASK_TOKENS).tiles
    return {"share_of_causal_tiles": tiles, **steps.shown(), "refused": refused}


def without_batch_axis(call: PeerCall) -> Attention:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *further: jax.Array) -> jax.Array:
        return call.function(q[None], k[None], v[None], *further)[0]

    return attention


def main() -> None:
    script = Script("model", __doc__, rounds=12, seconds=0.3)
    args = script.start(dew_flash_attn=str(flash.version()))
    masks = {name: partial(under_mask, mask) for name, mask in MASKS.items()}
    parts = {"documents": documents, **masks}
    for name in script.chosen(parts):
        script.keep("steps", name, parts[name](args))


if __name__ == "__main__":
    main()
