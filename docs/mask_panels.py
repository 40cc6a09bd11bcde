"""The calls whose masks docs/semantics.md shows, and what the library's own code says of them.

draw_masks.py draws them, and those of mod_panels.py; tests/test_draw_masks.py asks real calls
whether they are so.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import dot_product_attention
from attn_dispatch.call.arguments import ARRAY_ARGUMENTS, normalise
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.mods import arrays_of, modified
from attn_dispatch.semantics.positions import Positions


@dataclass(frozen=True)
class Panel:
    """One call with T queries and S keys, and the head of it that is shown."""

    title: str
    seq_len_q: int
    seq_len_kv: int
    arguments: dict[str, Any] = field(default_factory=dict)
    num_heads: int = 1
    head: int = 0

    def call(self) -> dict[str, Any]:
        """Arguments of a `dot_product_attention` whose output is its probabilities, [1, T, N, S].

        query · key is 0 unless they are given, so that they tell of bias, ALiBi and mods alone.
        """
        t, s, n = self.seq_len_q, self.seq_len_kv, self.num_heads
        unit_vectors = np.eye(s, dtype=np.float32)[None, :, None]
        return {
            "query": np.zeros((1, t, n, 1), np.float32),
            "key": np.zeros((1, s, n, 1), np.float32),
            "value": np.broadcast_to(unit_vectors, (1, s, n, s)),
            **self.arguments,
        }

    @cached_property
    def picture(self) -> Picture:
        """What is drawn, by the library's own normal form, positions and mask."""
        arguments = self.call()
        # Traced: what wrong segment ids mean is worth showing, and nobody looks at them there.
        arrays = {name: x for name, x in arguments.items() if name in ARRAY_ARGUMENTS}
        return Picture(**jax.jit(lambda arrays: self._parts(arguments | arrays))(arrays))

    def _parts(self, arguments: dict[str, Any]) -> dict[str, jax.Array | None]:
        bound = inspect.signature(dot_product_attention).bind(**arguments)
        bound.apply_defaults()
        call = normalise(**bound.arguments, known_implementations=("xla",))
        whole = LeadingCall.of(call.operands, call.options)
        operands = whole.fold(dict(zip(call.options.operands, call.operands, strict=True)))
        spec = whole.spec
        positions = Positions.of(spec, operands)
        mask = allowed(spec, operands, positions)
        distance = positions.distance() if spec.has("alibi_slopes") else None
        shown = {
            "mask": True if mask is None else mask,
            "diagonal": _diagonal(positions),
            "padding": _padding(positions),
            "numbers": operands.get("bias", distance),
        }
        program = spec.options.score_mod
        if program is not None:
            assert positions.indices is not None
            score = jnp.einsum("btnh,bsnh->bnts", operands["query"], operands["key"])
            read = arrays_of("score_mod", program, operands)
            shown["numbers"] = modified(program, score, positions.indices, read)
        shape = (1, self.num_heads, self.seq_len_q, self.seq_len_kv)
        return {
            name: None if x is None else jnp.broadcast_to(x, shape)[0, self.head]
            for name, x in shown.items()
        }


@dataclass(frozen=True)
class Picture:
    """What a panel shows of its call."""

    mask: jax.Array
    """bool [T, S]; True = the query attends to the key."""
    diagonal: jax.Array
    """bool [T, S]; the key is at i + offset, where positions count."""
    padding: jax.Array
    """bool [T, S]; the query or the key is padding."""
    numbers: jax.Array | None
    """[T, S]; ALiBi's distances, the bias or what score_mod returns, where the call has one."""

    def text(self) -> str:
        """A line of characters for each query; . where it does not attend to the key."""
        shown = "x" if self.numbers is None else np.vectorize(shortened)(self.numbers)
        return "\n".join("".join(row) for row in np.where(self.mask, shown, "."))


def shortened(number: Any) -> str:
    """A number as pictures have it."""
    return f"{round(float(number), 1):g}"


def _diagonal(positions: Positions) -> jax.Array | bool:
    if positions.diagonal is None or positions.key_positions is None:
        return False
    is_there = _pairs(operator.eq, positions.diagonal, positions.key_positions)
    if positions.query_ids is not None and positions.key_ids is not None:
        is_there &= _pairs(operator.eq, positions.query_ids, positions.key_ids)
    return is_there & ~jnp.asarray(_padding(positions))


def _padding(positions: Positions) -> jax.Array | bool:
    if positions.query_ids is None or positions.key_ids is None:
        return False
    return _pairs(operator.or_, positions.query_ids == 0, positions.key_ids == 0)


def _pairs(relation: Callable[[Any, Any], Any], queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[1, 1, T, S] of [1, T] and [1, S]."""
    return relation(queries[:, None, :, None], keys[:, None, None, :])


@dataclass(frozen=True)
class Figure:
    """One file of panels, in rows."""

    name: str
    rows: tuple[tuple[Panel, ...], ...]

    def text(self) -> str:
        """All panels in characters. The file holds it too, so that it can be checked."""
        panels = (panel for row in self.rows for panel in row)
        return "\n\n".join(f"{panel.title}\n{panel.picture.text()}" for panel in panels)


_CAUSAL: dict[str, Any] = {"is_causal": True}
_BOTTOM_RIGHT: dict[str, Any] = {"causal_alignment": "bottom_right"}
_ALIGNMENTS: dict[str, dict[str, Any]] = {"top_left": {}, "bottom_right": _BOTTOM_RIGHT}


def _causal() -> Figure:
    sizes = {"T < S": (5, 8), "T = S": (6, 6), "T > S": (8, 5)}
    rows = (
        tuple(Panel(f"{name}, {which}", *size, _CAUSAL | how) for which, size in sizes.items())
        for name, how in _ALIGNMENTS.items()
    )
    return Figure("causal", tuple(rows))


def _windows() -> Figure:
    windows: dict[str, dict[str, Any]] = {
        "(2, 0)": {"local_window_size": (2, 0)},
        "(0, 2)": {"local_window_size": (0, 2)},
        "(2, 1)": {"local_window_size": (2, 1)},
        "(None, 1)": {"local_window_size": (None, 1)},
        "2, causal": {"local_window_size": 2, "is_causal": True},
    }
    rows = (
        tuple(Panel(f"{which}, {name}", 5, 8, window | how) for which, window in windows.items())
        for name, how in _ALIGNMENTS.items()
    )
    return Figure("windows", tuple(rows))


def _lengths() -> Figure:
    keys = {"key_value_seq_lengths": np.array([6], np.int32)}
    both = {"query_seq_lengths": np.array([4], np.int32)} | keys
    row = (
        Panel("6 keys", 5, 8, keys),
        Panel("4 queries, 6 keys", 5, 8, both),
        Panel("… causal, top_left", 5, 8, both | _CAUSAL),
        Panel("… causal, bottom_right", 5, 8, both | _CAUSAL | _BOTTOM_RIGHT),
        Panel("… window 1, bottom_right", 5, 8, both | {"local_window_size": 1} | _BOTTOM_RIGHT),
    )
    return Figure("lengths", (row,))


def _segments() -> Figure:
    def panel(title: str, queries: str, keys: str, **arguments: Any) -> Panel:
        sides = {"query_segment_ids": queries, "key_value_segment_ids": keys}
        ids = {side: np.array([[int(x) for x in text]]) for side, text in sides.items()}
        return Panel(title, len(queries), len(keys), ids | arguments)

    own, queries, keys = "11122220", "11222", "1112222"
    return Figure(
        "segments",
        (
            (
                panel("self attention", own, own),
                panel("causal", own, own, **_CAUSAL),
                panel("window (1, 1)", own, own, local_window_size=1),
                panel("ids in any order", "11022013", "11022013"),
            ),
            (
                panel("cross attention", queries, keys),
                panel("causal, top_left", queries, keys, **_CAUSAL),
                panel("causal, bottom_right", queries, keys, **_CAUSAL, **_BOTTOM_RIGHT),
                panel("(1, 0), bottom_right", queries, keys, local_window_size=(1, 0),
                      **_BOTTOM_RIGHT),
            ),
        ),
    )  # fmt: skip


def _mask() -> Figure:
    pairs = np.random.default_rng(3).random((5, 8)) < 0.6
    pairs[2] = False  # a row that attends nothing
    keys = np.arange(8)[None] % 3 != 1
    row = (
        Panel("mask [T, S]", 5, 8, {"mask": pairs}),
        Panel("mask [1, S]", 5, 8, {"mask": keys}),
        Panel("mask [T, S], causal", 5, 8, {"mask": pairs} | _CAUSAL),
    )
    return Figure("mask", (row,))


def _alibi() -> Figure:
    slopes = {"alibi_slopes": np.ones(1, np.float32)}
    row = (
        Panel("top_left", 5, 8, slopes),
        Panel("bottom_right", 5, 8, slopes | _BOTTOM_RIGHT),
        Panel("causal, bottom_right", 5, 8, slopes | _CAUSAL | _BOTTOM_RIGHT),
    )
    return Figure("alibi", (row,))


def _bias() -> Figure:
    shapes: dict[str, tuple[int, ...]] = {
        "[N, T, S]": (2, 3, 3), "[T, S]": (3, 3), "[1, S]": (1, 3), "[T, 1]": (3, 1),
        "[N, 1, 1]": (2, 1, 1),
    }  # fmt: skip
    numbered = {name: np.arange(np.prod(x), dtype=np.float32) for name, x in shapes.items()}
    rows = (
        tuple(
            Panel(f"{name} head {head}", 3, 3, {"bias": numbered[name].reshape(shape)}, 2, head)
            for name, shape in shapes.items()
        )
        for head in (0, 1)
    )
    return Figure("bias", tuple(rows))


FIGURES = (_causal(), _windows(), _lengths(), _segments(), _mask(), _alibi(), _bias())
