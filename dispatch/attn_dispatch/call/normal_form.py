"""Checking the arguments of a call, and bringing them to its one normal form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch import settings
from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.array_arguments import cu_seqlens, key_data, operand
from attn_dispatch.call.context_arguments import spread_of
from attn_dispatch.call.conventions import CheckedCall, warn_of_conventions
from attn_dispatch.call.dense_masks import warn_of_dense_mask
from attn_dispatch.call.masks_as_windows import with_window
from attn_dispatch.call.mod_facts import check_mod, sizes_for_mods
from attn_dispatch.call.offsets import Counted, diagonal_of
from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.options import AttentionOptions, Meaning, Wanted
from attn_dispatch.call.paged_arguments import first_of_both
from attn_dispatch.call.shapes import PAGED, CallShape, check_paged, check_qkv
from attn_dispatch.call.static_arguments import (
    Side,
    check_bool,
    check_dropout,
    check_implementation,
    check_positive_int,
    check_scale,
    check_soft_cap,
    window_sides,
)
from attn_dispatch.call.values import Limits, as_int32, check_pages, check_values
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace

_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "cu_seqlens_q")
"""The arrays with which sequences are not whole batch rows; segment ids are given for both sides.
"""

_MOST_SEGMENTS = 2**27
"""Programs have an array with six numbers of each possible id."""


@dataclass(frozen=True)
class Call:
    """The options of one attention call, and its arrays in the order of options.operands."""

    options: AttentionOptions
    operands: tuple[jax.Array, ...]
    """Each array has as many leading dims as the caller's query; see leading.py."""


def normalise(arguments: Arguments, known_implementations: tuple[str, ...]) -> Call:
    """Check a call and bring it to normal form; operands.py has the shapes.

    Args:
      arguments: arguments with arrays in the order of operands.py (layouts.py) and a number as
        scale (array_scale.py).
      known_implementations: the names that `implementation` may have.

    Raises:
      ValueError: if an argument is wrong, or does not fit the others; the message has what was
        expected and what was given.
    """
    a = arguments
    arrays = a.arrays
    given = {name: _array(name, x) for name, x in arrays.items()}
    shape = _check_shape(given, a)
    context = spread_of(a)
    whole = shape.times(1 if context is None else context.devices)
    _complete_segment_ids(given, shape)
    max_segments, max_seq_lens = _check_longest(a, has_ids="query_segment_ids" in given)
    left, right = window_sides(a.local_window_size)
    window, sides = _static_window(left, right)

    counted = Counted(
        has_distances=sides is not None or "alibi_slopes" in given,
        has_lengths=any(name in given for name in _LENGTHS),
    )
    is_causal = check_bool("is_causal", a.is_causal)
    diagonal = diagonal_of(a.causal_alignment, whole, counted, is_causal=is_causal, window=window)

    operands = _operands(given, a, shape, whole.seq_len_kv)
    if sides is not None:
        operands["window"] = shape.shared(sides)
    if diagonal.operand is not None:
        operands["causal_offset"] = diagonal.operand
    lengths = whole.seq_len_q, whole.seq_len_kv
    limits = Limits(lengths, max_segments, max_seq_lens)
    check_values(arrays if sides is None else {**arrays, "local_window_size": sides}, limits)
    if "page_table" in given:
        pages, page_size = given["key_pages"].shape[:2]
        least_left = window[0] if sides is None else 0
        check_pages(arrays, pages // (1 + a.value_page), page_size, shape.seq_len_q, least_left)
    dropout_rate = check_dropout(a.dropout_rate, "dropout_key" in given)
    dropout_impl = None
    if "dropout_key" in given and dropout_rate > 0:
        words, dropout_impl = key_data(given["dropout_key"])
        operands["dropout_key"] = shape.shared(words)

    sizes = sizes_for_mods(whole, given)
    for mod in (a.score_mod, a.mask_mod):
        check_mod(mod, sizes)
    programs = _add_mods(operands, a, shape, given["query"].dtype)

    options = AttentionOptions(
        operands=tuple(operands),
        meaning=Meaning(
            scale=check_scale(a.scale, shape.head_dim, given["query"].dtype),
            is_causal=diagonal.is_causal,
            causal_alignment=diagonal.causal_alignment,
            causal_offset=diagonal.causal_offset,
            window=diagonal.window,
            logits_soft_cap=check_soft_cap(a.logits_soft_cap, given["query"].dtype),
            max_segments=max_segments,
            max_seq_lens=max_seq_lens,
            same_lengths=a.same_lengths and shape.seq_len_q == shape.seq_len_kv,
            dropout_rate=dropout_rate,
            dropout_impl=dropout_impl,
            deterministic_backward=check_bool("deterministic_backward", a.deterministic_backward),
            finite_padding=_has_finite_padding(a) and counted.has_lengths,
            score_mod=programs.get("score_mod"),
            mask_mod=programs.get("mask_mod"),
            heads_first_q=a.heads_first_q,
            heads_first_kv=a.heads_first_kv,
            context=context,
            value_page=a.value_page,
            implementation=check_implementation(a.implementation, known_implementations),
        ),
        wanted=Wanted(
            needs_lse=check_bool("return_residual", a.return_residual)
            | check_bool("return_lse", a.return_lse)
            | check_bool("return_max_logits", a.return_max_logits),
            needs_max=bool(a.return_max_logits),
            needs_keep=a.needs_keep,
        ),
    )
    options, operands = with_window(options, operands)
    longest = max_seq_lens if max_seq_lens and "cu_seqlens_kv" in given else lengths
    warn_of_conventions(CheckedCall(a, given, shape, (left, right), longest))
    warn_of_dense_mask(arguments, shape, options)
    return Call(options, tuple(operands.values()))


def _array(name: str, x: ArrayLike) -> jax.Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise ValueError(f"{name}: expected an array, got {x!r:.60}") from error


def _has_finite_padding(a: Arguments) -> bool:
    """Whether kernels may read padding rows as they are, if the call has any."""
    promised = settings.current().finite_padding
    if a.finite_padding is not None:
        promised = check_bool("finite_padding", a.finite_padding)
    # Keys past a length in pages are not the caller's to promise: a page may be anyone's.
    return (promised or a.has_no_padding) and a.page_table is None


def _needed(given: Mapping[str, jax.Array]) -> tuple[str, ...]:
    """The names of the arrays that the call must have."""
    return PAGED if "page_table" in given else ("query", "key", "value")


def _check_shape(given: Mapping[str, jax.Array], a: Arguments) -> CallShape:
    for name in _needed(given):
        if name not in given:
            raise ValueError(f"{name}: expected an array, got None")
    checked = [given[name] for name in _needed(given)]
    if "page_table" in given:
        return check_paged(*checked)
    return check_qkv(*checked, heads_first=a.heads_first_q)


def _operands(
    given: Mapping[str, jax.Array], a: Arguments, shape: CallShape, columns: int
) -> dict[str, jax.Array]:
    """The operands but for the window, the dropout key and what mods read.

    `columns`: those of a bias or mask, for the keys of all devices.
    """
    scores = replace(shape, seq_len_kv=columns)
    operands = {name: given[name] for name in _needed(given)}
    for name, x in given.items():
        if name in ("cu_seqlens_q", "cu_seqlens_kv"):
            operands[name] = cu_seqlens(name, x, given["cu_seqlens_q"].shape)
        elif name == "page_table":
            operands[name] = as_int32(x)
            if a.value_page:
                operands[name] = first_of_both(operands[name], given["key_pages"].shape[0])
        elif name != "dropout_key":
            operands[name] = operand(name, x, scores if name in ("bias", "mask") else shape)
    return operands


def _complete_segment_ids(given: dict[str, jax.Array], shape: CallShape) -> None:
    """In self attention, use one array of segment ids for both sides."""
    sides = ("query_segment_ids", "key_value_segment_ids")
    present = [name for name in sides if name in given]
    if len(present) != 1:
        return
    if shape.seq_len_q != shape.seq_len_kv:
        raise ValueError(
            f"segment ids: expected both {sides[0]} and {sides[1]} where query and key differ in "
            f"length ({shape.seq_len_q} and {shape.seq_len_kv}), got only {present[0]}"
        )
    ids = given.pop(present[0])
    given.update(dict.fromkeys(sides, ids))


def _check_longest(a: Arguments, *, has_ids: bool) -> tuple[int | None, tuple[int, int] | None]:
    """The largest segment id, and the longest sequence of queries and of keys."""
    max_segments = None
    if a.max_segments is not None:
        max_segments = _check_max_segments(a.max_segments, has_ids)
    if a.max_segment_len is not None:
        return max_segments, _check_max_segment_len(a.max_segment_len, max_segments)
    if a.max_seqlen_q is None or a.max_seqlen_kv is None:
        return max_segments, None
    return max_segments, (a.max_seqlen_q, a.max_seqlen_kv)


def _check_max_segments(value: int, has_ids: bool) -> int:
    number = check_positive_int("max_segments", value)
    if not has_ids:
        raise ValueError(
            "max_segments: expected query_segment_ids or key_value_segment_ids with "
            f"max_segments={number}, got neither"
        )
    if number > _MOST_SEGMENTS:
        raise ValueError(f"max_segments: expected at most {_MOST_SEGMENTS:,}, got {number:,}")
    return number


def _check_max_segment_len(value: int, max_segments: int | None) -> tuple[int, int]:
    """The longest sequence of queries and of keys, as in `Meaning.max_seq_lens`."""
    longest = check_positive_int("max_segment_len", value)
    if max_segments is None:
        raise ValueError(
            f"max_segment_len: expected max_segments as well with max_segment_len={longest}, got "
            "None"
        )
    return longest, longest


def _static_window(
    left: Side, right: Side
) -> tuple[tuple[int | None, int | None], jax.Array | None]:
    """The static window and None; if a side is traced, an open window and the sides, int32 [2]."""
    if not isinstance(left, jax.Array) and not isinstance(right, jax.Array):
        return (left, right), None
    most = jnp.iinfo(jnp.int32).max
    sides = [
        as_int32(side)
        if isinstance(side, jax.Array)
        else jnp.int32(most if side is None else min(side, most))
        for side in (left, right)
    ]
    return (None, None), jnp.stack(sides)


def _add_mods(
    operands: dict[str, jax.Array], a: Arguments, shape: CallShape, dtype: np.dtype
) -> dict[str, ModProgram]:
    """The programs of the mods, by name; adds the arrays that they read to the operands."""
    functions = (
        ("score_mod", a.score_mod, a.score_mod_args),
        ("mask_mod", a.mask_mod, a.mask_mod_args),
    )
    programs: dict[str, ModProgram] = {}
    for name, function, arguments in functions:
        if function is None:
            if len(arguments):
                raise ValueError(f"{name}_args: expected none without {name}, got {arguments!r}")
            continue
        # NumPy promotes here because JAX's promotion may be strict.
        mod = trace(name, function, arguments, np.promote_types(dtype, np.float32).name)
        programs[name] = mod.program
        names = mod_operands(name, len(mod.arrays))
        operands |= zip(names, map(shape.shared, mod.arrays), strict=True)
    if programs:
        operands["mods_start"] = shape.shared(jnp.zeros(2, jnp.int32))
    return programs
