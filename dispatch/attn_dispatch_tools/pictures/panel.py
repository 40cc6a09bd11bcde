"""The mask of a call and what is added to its scores, for each pair, as text or for a drawing.

Both come from the functions that the library itself uses: normal form, positions and masks.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.arguments import ARRAY_ARGUMENTS, Arguments
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.normal_form import normalise
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.mods import arrays_of, modified
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.warning import AttentionConventionWarning


@dataclass(frozen=True)
class Panel:
    """A call with T queries and S keys, and the head of it that is shown."""

    title: str
    seq_len_q: int
    seq_len_kv: int
    arguments: dict[str, Any] = field(default_factory=dict)
    num_heads: int = 1
    head: int = 0

    def call(self) -> dict[str, Any]:
        """Arguments of `dot_product_attention`, which returns probabilities [1, T, N, S] for them.

        Unless query and key are given, query · key is 0, so that the probabilities only depend on
        the mask, the bias, ALiBi and mods.
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
        """What the panel shows, as arrays."""
        arguments = self.call()
        # Arrays are traced, so that invalid segment ids are not errors, and can be shown.
        arrays = {name: x for name, x in arguments.items() if name in ARRAY_ARGUMENTS}
        return Picture(**jax.jit(lambda arrays: self._parts(arguments | arrays))(arrays))

    def _parts(self, arguments: dict[str, Any]) -> dict[str, jax.Array | None]:
        bound = inspect.signature(dot_product_attention).bind(**arguments)
        bound.apply_defaults()
        with warnings.catch_warnings():  # a picture shows what the call means
            warnings.simplefilter("ignore", AttentionConventionWarning)
            call = normalise(Arguments(**bound.arguments), ("xla",))
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
        program = spec.meaning.score_mod
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
    """bool [T, S]; True = the key is on the query's diagonal, if positions matter to the call."""
    padding: jax.Array
    """bool [T, S]; True = the query or the key is padding."""
    numbers: jax.Array | None
    """[T, S]; the result of score_mod, the bias or ALiBi's distances; None without any of them."""

    def text(self) -> str:
        """A line for each query, with a "." for each key that it does not attend to."""
        shown = "x" if self.numbers is None else np.vectorize(shortened)(self.numbers)
        return "\n".join("".join(row) for row in np.where(self.mask, shown, "."))


def shortened(number: SupportsFloat) -> str:
    """A number as pictures show it, with at most one decimal."""
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
    """The relation [1, 1, T, S] of each query [1, T] and each key [1, S]."""
    return relation(queries[:, None, :, None], keys[:, None, None, :])


@dataclass(frozen=True)
class Figure:
    """Rows of panels that one file shows."""

    name: str
    rows: tuple[tuple[Panel, ...], ...]

    def text(self) -> str:
        """All panels as text. The file holds this text, too, so that tests can check it."""
        panels = (panel for row in self.rows for panel in row)
        return "\n\n".join(f"{panel.title}\n{panel.picture.text()}" for panel in panels)
