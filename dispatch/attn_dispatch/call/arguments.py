"""The arguments of a public call; each step up to the normal form takes and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeGuard

import jax
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import KvLayout, QkvLayout, Window
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
    key_pages: ArrayLike | None = None
    value_pages: ArrayLike | None = None
    page_table: ArrayLike | None = None
    score_mod: ScoreMod | None = None
    score_mod_args: Sequence[object] = ()
    mask_mod: MaskMod | None = None
    mask_mod_args: Sequence[object] = ()
    qkv_layout: QkvLayout | None = None
    kv_layout: KvLayout = "NHD"
    implementation: str | Sequence[str] | None = None
    context_axis: str | Sequence[str] | None = None
    sequence_order: SequenceOrder = "contiguous"
    return_residual: bool = False
    return_lse: bool = False
    return_max_logits: bool = False

    # Found by the steps, not given by a caller; see `Meaning` and `Wanted`.
    same_lengths: bool = False
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


def holds_structs(argument: object) -> bool:
    """Whether the argument contains a `jax.ShapeDtypeStruct` in place of an array."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(argument))


def with_same_lengths(arguments: Arguments) -> Arguments:
    """The arguments with `same_lengths`: whether every sequence has as many keys as queries.

    They do if the lengths, ids or cu_seqlens of both sides are one object or hold equal numbers on
    the host (NumPy arrays, lists, ints), or if segment ids are given for one side alone.

    Two different `jax.Array`s are not compared: the call would wait for the device that computes
    them, and under `jax.jit`, where they have no values, it would become another program. Structs
    have no values either. A public call decides this first, on the caller's own objects: no step
    compares arrays later, when they are converted or traced.
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
    return replace(a, same_lengths=bool(given) and all(_are_same(x, y) for x, y in given))


def _are_same(x: ArrayLike | None, y: ArrayLike | None) -> bool:
    """Whether x and y are one object, or equal numbers that need not be read from a device."""
    return x is y or (_is_on_host(x) and _is_on_host(y) and np.array_equal(x, y))


def _is_on_host(x: ArrayLike | None) -> TypeGuard[ArrayLike]:
    """Whether x is a NumPy array, a number, or a list of such."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(y, np.ndarray | np.generic | int) for y in leaves)
