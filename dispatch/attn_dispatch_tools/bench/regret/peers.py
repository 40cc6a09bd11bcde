"""JAX packages that can run a drawn call, as further columns."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from attn_dispatch.flash import library
from attn_dispatch.flash.call import FlashCall
from attn_dispatch_tools.bench.peers.dew_flash_attn import forward_facts, kernels_of
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, TimedCall

_JAX_NN = frozenset((
    "query", "key", "value", "bias", "mask", "is_causal", "query_seq_lengths",
    "key_value_seq_lengths", "local_window_size",
))  # fmt: skip


class RegretPeer(Protocol):
    """A package that is called directly."""

    @property
    def NAME(self) -> str:
        """The column's name."""
        ...

    def program(self, call: TimedCall, direction: str) -> Callable[..., Any] | None:
        """The function of out_grad and the call's distinct arrays; None if it cannot express it."""
        ...


@dataclass(frozen=True)
class LikeJaxNn:
    """A package with the call of jax.nn."""

    NAME: str
    module: str
    implementation: str

    def program(self, call: TimedCall, direction: str) -> Callable[..., Any] | None:
        if not call.call.keys() <= _JAX_NN or set(call.mods) - {"mask"}:
            return None
        try:
            function = importlib.import_module(self.module).dot_product_attention
        except Exception:  # it may be missing, or lack what it imports
            return None
        return _as_peer(call, direction, function, {"implementation": self.implementation})


def _as_peer(
    call: TimedCall, direction: str, function: Callable[..., Any], further: dict[str, Any]
) -> Callable[..., Any]:
    """The call by a function with the arguments of jax.nn."""
    arguments = call.arguments
    structs = {x: y for x, y in arguments.items() if isinstance(y, jax.ShapeDtypeStruct)}
    options = {x: y for x, y in arguments.items() if x not in structs} | further
    distinct = [*{id(x): x for x in structs.values()}.values()]
    places = {
        name: next(i for i, y in enumerate(distinct) if y is x) for name, x in structs.items()
    }
    wanted = [x for x in ("query", "key", "value", "bias") if x in structs]

    def forward(out_grad: jax.Array, *arrays: jax.Array) -> jax.Array:
        return function(**{x: arrays[i] for x, i in places.items()}, **options)

    def step(out_grad: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
        named = {x: arrays[i] for x, i in places.items()}

        def moved(*moved: jax.Array) -> jax.Array:
            return function(**(named | dict(zip(wanted, moved, strict=True))), **options)

        out, pull = jax.vjp(moved, *(named[x] for x in wanted))
        return out, *pull(out_grad)

    return forward if direction == FORWARD else step


class DewFlashAttn:
    """FlashAttention-3's kernels, with nothing before or after them."""

    NAME = "dew"

    def program(self, call: TimedCall, direction: str) -> Callable[..., Any] | None:
        facts = None if library.unusable_reason() else _flash_facts(call)
        if facts is None:
            return None
        attention = kernels_of(facts)

        def forward(out_grad: jax.Array, q: jax.Array, k: jax.Array, *others: jax.Array):
            return attention(q, k, *others)

        def step(out_grad: jax.Array, q: jax.Array, k: jax.Array, *others: jax.Array):
            v, *cu = others
            out, pull = jax.vjp(lambda *moved: attention(*moved, *cu), q, k, v)
            return out, *pull(out_grad)

        return forward if direction == FORWARD else step


_FLASH = frozenset((
    "query", "key", "value", "is_causal", "local_window_size", "cu_seqlens_q", "cu_seqlens_kv",
    "max_seqlen_q", "max_seqlen_kv",
))  # fmt: skip


def _flash_facts(call: TimedCall) -> FlashCall | None:
    """The call in the kernels' terms; None if they cannot express it, or pad its head dim."""
    if not call.call.keys() <= _FLASH or call.mods:
        return None
    arguments = call.arguments
    q, k, v = (arguments[x] for x in ("query", "key", "value"))
    if q.shape[-1] not in (64, 128, 192, 256) or v.shape != k.shape or q.shape[-3] != k.shape[-3]:
        return None
    left = arguments["local_window_size"][0] if "local_window_size" in arguments else None
    longest = arguments.get("max_seqlen_q", 0)
    is_causal = bool(arguments.get("is_causal"))
    return forward_facts(q, k, is_causal, left, len(call.lengths), longest)


PEERS: tuple[RegretPeer, ...] = (
    LikeJaxNn("jax.nn", "jax.nn", "cudnn"),
    DewFlashAttn(),
    LikeJaxNn("tokamax", "tokamax", "mosaic"),
)
