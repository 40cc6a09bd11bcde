"""The arguments of a public call; each step up to the normal form takes and returns them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeGuard

import jax
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import Implementations, KvLayout, QkvLayout, Window
from attn_dispatch.programs.functions import MaskMod, ScoreMod

ARRAY_ARGUMENTS = (
    "query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths",
    "query_segment_ids", "key_value_segment_ids", "cu_seqlens_q", "cu_seqlens_kv",
    "alibi_slopes", "sinks", "dropout_key", "key_pages", "value_pages", "page_table",
)  # fmt: skip
"""The arguments of the public calls that are arrays."""

_READ_BY_MODS = ("score_mod_args", "mask_mod_args")


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """All arguments of a public call, as given or as a step has changed them.

    Arguments that a public call does not have keep these defaults. The docstrings of
    `dot_product_attention`, `ragged_dot_product_attention` and `paged_attention` describe them.
    """

    query: ArrayLike | None = None
    key: ArrayLike | None = None
    value: ArrayLike | None = None
    bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    scale: ArrayLike | None = None
    is_causal: bool = False
    causal_alignment: CausalAlignment | ArrayLike | None = None
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: Window = None
    logits_soft_cap: float | None = None
    alibi_slopes: ArrayLike | None = None
    sinks: ArrayLike | None = None
    dropout_rate: float = 0.0
    dropout_key: ArrayLike | None = None
    deterministic_backward: bool = False
    query_segment_ids: ArrayLike | None = None
    key_value_segment_ids: ArrayLike | None = None
    max_segments: int | None = None
    max_segment_len: int | None = None
    cu_seqlens_q: ArrayLike | None = None
    cu_seqlens_kv: ArrayLike | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    finite_padding: bool | None = None
    key_pages: ArrayLike | None = None
    value_pages: ArrayLike | None = None
    page_table: ArrayLike | None = None
    score_mod: ScoreMod | None = None
    score_mod_args: Sequence[object] = ()
    mask_mod: MaskMod | None = None
    mask_mod_args: Sequence[object] = ()
    qkv_layout: QkvLayout | None = None
    kv_layout: KvLayout = "NHD"
    implementation: Implementations = None
    context_axis: str | Sequence[str] | None = None
    sequence_order: SequenceOrder = "contiguous"
    return_residual: bool = False
    return_lse: bool = False
    return_max_logits: bool = False

    # Found by the steps, not given by a caller; see `Meaning` and `Wanted`.
    same_lengths: bool = False
    has_no_padding: bool = False
    heads_first_q: bool = False
    heads_first_kv: bool = False
    value_page: int = 0
    needs_keep: bool = False

    @property
    def arrays(self) -> dict[str, ArrayLike]:
        """The arrays that were given, by name, in the order of `ARRAY_ARGUMENTS`."""
        found = {name: getattr(self, name) for name in ARRAY_ARGUMENTS}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def traceable(self) -> dict[str, object]:
        """The arguments that `jax.eval_shape` can trace, by name: arrays, mods' arrays, structs."""
        read = {name: getattr(self, name) for name in _READ_BY_MODS}
        given = {x.name: getattr(self, x.name) for x in fields(self)}
        structs = {name: x for name, x in given.items() if holds_structs(x)}
        return {**self.arrays, **read, **structs}


def arguments_of(call: inspect.BoundArguments) -> Arguments:
    """The arguments of a public call, with its own defaults and with what is known of lengths."""
    call.apply_defaults()
    return _with_known_lengths(Arguments(**call.arguments))


def holds_structs(argument: object) -> bool:
    """Whether the argument contains a `jax.ShapeDtypeStruct` in place of an array."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(argument))


def _with_known_lengths(arguments: Arguments) -> Arguments:
    """The arguments with what lengths, ids and cu_seqlens show without being computed.

    `same_lengths`: every sequence has as many keys as queries. They do if the lengths, ids or
    cu_seqlens of both sides are one object or hold equal numbers on the host (NumPy arrays, lists,
    ints), or if segment ids are given for one side alone.

    `has_no_padding`: every row belongs to a sequence, by numbers on the host.

    A `jax.Array` is not read: the call would wait for the device that computes it, and under
    `jax.jit`, where it has no values, it would become another program. Structs have no values
    either. A public call decides this first, on the caller's own objects: no step reads arrays
    later, when they are converted or traced.
    """
    a = arguments
    query_ids = a.key_value_segment_ids if a.query_segment_ids is None else a.query_segment_ids
    key_ids = query_ids if a.key_value_segment_ids is None else a.key_value_segment_ids
    pairs = (
        (a.query_seq_lengths, a.key_value_seq_lengths),
        (query_ids, key_ids),
        (a.cu_seqlens_q, a.cu_seqlens_kv),
    )
    given = [pair for pair in pairs if any(x is not None for x in pair)]
    return replace(
        a,
        same_lengths=bool(given) and all(_are_same(x, y) for x, y in given),
        has_no_padding=bool(given) and _has_no_padding(a),
    )


def _has_no_padding(a: Arguments) -> bool:
    """Whether the lengths, ids and cu_seqlens that are given leave no row out."""
    sides = (
        (a.query, a.query_seq_lengths, a.query_segment_ids, a.cu_seqlens_q),
        (a.key, a.key_value_seq_lengths, a.key_value_segment_ids, a.cu_seqlens_kv),
    )
    return all(
        (lengths is None or _all_are(lengths, _number_of_rows(x, a.qkv_layout)))
        and (ids is None or (_is_on_host(ids) and bool(np.all(np.asarray(ids) > 0))))
        and (ends is None or _all_are(_last_of(ends), _number_of_rows(x, a.qkv_layout)))
        for x, lengths, ids, ends in sides
    )


def _number_of_rows(x: ArrayLike | None, layout: QkvLayout | None) -> int | None:
    """T or S of query or key; None where x has no such axis."""
    shape = np.shape(() if x is None else x)
    axis = -2 if layout == "BNTH" else -3
    return shape[axis] if len(shape) >= -axis else None


def _last_of(cu_seqlens: ArrayLike) -> ArrayLike | None:
    """The last of numbers on the host; None if there are none."""
    numbers = np.asarray(cu_seqlens) if _is_on_host(cu_seqlens) else np.empty(0)
    return numbers[-1:] if numbers.ndim == 1 and numbers.size else None


def _all_are(x: ArrayLike | None, number: int | None) -> bool:
    """Whether x is on the host, and each of its numbers is `number`."""
    return _is_on_host(x) and bool(np.all(np.asarray(x) == number))


def _are_same(x: ArrayLike | None, y: ArrayLike | None) -> bool:
    """Whether x and y are one object, or equal numbers that need not be read from a device."""
    return x is y or (_is_on_host(x) and _is_on_host(y) and np.array_equal(x, y))


def _is_on_host(x: ArrayLike | None) -> TypeGuard[ArrayLike]:
    """Whether x is a NumPy array, a number, or a list of such."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(y, np.ndarray | np.generic | int) for y in leaves)
