"""From the arguments a person writes to one checked, normal form of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.conventions import warn_of_conventions
from attn_dispatch.call.dense_masks import warn_of_dense_mask
from attn_dispatch.call.masks_as_windows import with_window
from attn_dispatch.call.options import (
    AttentionOptions,
    CausalAlignment,
    Meaning,
    Wanted,
    mod_operands,
)
from attn_dispatch.call.paged_arguments import first_of_both
from attn_dispatch.call.shapes import PAGED, CallShape, check_paged, check_qkv, swapped
from attn_dispatch.call.static_arguments import (
    Side,
    Window,
    check_bool,
    check_choice,
    check_dropout,
    check_implementation,
    check_positive_int,
    check_scale,
    check_soft_cap,
    check_window,
)
from attn_dispatch.call.values import Limits, as_int32, check_pages, check_values
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace


@dataclass(frozen=True)
class Call:
    """The options and, in the order of options.operands, the arrays of one attention call."""

    options: AttentionOptions
    operands: tuple[jax.Array, ...]
    """Each with as many leading dims as query was given with; see leading.py."""


ARRAY_ARGUMENTS = (
    "query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths",
    "query_segment_ids", "key_value_segment_ids", "cu_seqlens_q", "cu_seqlens_kv",
    "alibi_slopes", "sinks", "dropout_key", "key_pages", "value_pages", "page_table",
)  # fmt: skip
"""The arguments of the public calls that are arrays."""

_BOTH_SIDES = (
    ("query_seq_lengths", "key_value_seq_lengths"),
    ("query_segment_ids", "key_value_segment_ids"),
    ("cu_seqlens_q", "cu_seqlens_kv"),
)
"""Those of queries, each with that of keys."""


def normalise(
    *,
    scale: float | None,
    is_causal: bool,
    causal_alignment: str,
    local_window_size: Window,
    logits_soft_cap: float | None,
    dropout_rate: float,
    deterministic_backward: bool,
    score_mod: Callable[..., Any] | None = None,
    score_mod_args: Sequence[Any] = (),
    mask_mod: Callable[..., Any] | None = None,
    mask_mod_args: Sequence[Any] = (),
    implementation: str | Sequence[str] | None,
    return_residual: bool,
    return_lse: bool,
    return_max_logits: bool,
    known_implementations: tuple[str, ...],
    max_segments: int | None = None,
    max_segment_len: int | None = None,
    max_seq_lens: tuple[int, int] | None = None,
    needs_keep: bool = False,
    heads_first_q: bool = False,
    heads_first_kv: bool = False,
    value_page: int = 0,
    **arrays: Any,
) -> Call:
    """Check a call and bring it to normal form; spec.py has the shapes.

    Args: those of the public calls, those of ARRAY_ARGUMENTS in `arrays`; max_seq_lens and what
      comes after it as in `AttentionOptions`, the arrays brought to its order (layouts.py);
      known_implementations: what there is to choose from.

    Raises:
      ValueError: with expected and got, for whatever does not fit together.
    """
    given = {n: jnp.asarray(arrays[n]) for n in ARRAY_ARGUMENTS if arrays.get(n) is not None}
    needed = PAGED if "page_table" in given else ("query", "key", "value")
    for name in needed:
        if name not in given:
            raise ValueError(f"{name}: expected an array, got None")
    checked = [given[name] for name in needed]
    if "page_table" in given:
        shape = check_paged(*checked)
    else:
        shape = check_qkv(*checked, heads_first=heads_first_q)
    _complete_segment_ids(given, shape)
    if max_segments is not None:
        max_segments = _check_max_segments(max_segments, "query_segment_ids" in given)
    if max_segment_len is not None:
        max_seq_lens = _check_max_segment_len(max_segment_len, max_segments)
    left, right = check_window(local_window_size)
    window, sides = _static_window(left, right)

    operands = {name: given[name] for name in needed}
    for name, x in given.items():
        if name in ("bias", "mask"):
            operands[name] = _score_shaped(name, x, shape)
        elif name.endswith("_seq_lengths"):
            operands[name] = _lengths(name, x, shape)
        elif name.endswith("_segment_ids"):
            operands[name] = _segment_ids(name, x, shape)
        elif name.startswith("cu_seqlens"):
            operands[name] = _cu_seqlens(name, x, given["cu_seqlens_q"].shape)
        elif name.endswith("_pages"):
            operands[name] = shape.shared(x)
        elif name == "page_table":
            operands[name] = as_int32(x)
            if value_page:
                operands[name] = first_of_both(operands[name], given["key_pages"].shape[0])
        elif name in ("alibi_slopes", "sinks"):
            operands[name] = _per_head(name, x, shape)
    if sides is not None:
        operands["window"] = shape.shared(sides)
    lengths = shape.seq_len_q, shape.seq_len_kv
    limits = Limits(lengths, max_segments, max_seq_lens)
    check_values(arrays | {"local_window_size": sides}, limits)
    if "page_table" in given:
        pages, page_size = given["key_pages"].shape[:2]
        least_left = window[0] if sides is None else 0
        check_pages(arrays, pages // (1 + value_page), page_size, shape.seq_len_q, least_left)
    dropout_rate = check_dropout(dropout_rate, "dropout_key" in given)
    dropout_impl = None
    if "dropout_key" in given and dropout_rate > 0:
        words, dropout_impl = _key_data(given["dropout_key"])
        operands["dropout_key"] = shape.shared(words)

    functions = {"score_mod": (score_mod, score_mod_args), "mask_mod": (mask_mod, mask_mod_args)}
    programs = _add_mods(operands, functions, shape, given["query"].dtype)

    options = AttentionOptions(
        operands=tuple(operands),
        meaning=Meaning(
            scale=check_scale(scale, shape.head_dim, given["query"].dtype),
            is_causal=check_bool("is_causal", is_causal),
            causal_alignment=check_choice(
                "causal_alignment", causal_alignment, get_args(CausalAlignment)
            ),
            window=window,
            logits_soft_cap=check_soft_cap(logits_soft_cap, given["query"].dtype),
            max_segments=max_segments,
            max_seq_lens=max_seq_lens,
            same_lengths=_are_same_lengths(given, arrays, shape),
            dropout_rate=dropout_rate,
            dropout_impl=dropout_impl,
            deterministic_backward=check_bool("deterministic_backward", deterministic_backward),
            score_mod=programs.get("score_mod"),
            mask_mod=programs.get("mask_mod"),
            heads_first_q=heads_first_q,
            heads_first_kv=heads_first_kv,
            value_page=value_page,
            implementation=check_implementation(implementation, known_implementations),
        ),
        wanted=Wanted(
            needs_lse=check_bool("return_residual", return_residual)
            | check_bool("return_lse", return_lse)
            | check_bool("return_max_logits", return_max_logits),
            needs_max=bool(return_max_logits),
            needs_keep=needs_keep,
        ),
    )
    options, operands = with_window(options, operands)
    warn_of_conventions(
        given,
        shape,
        longest=max_seq_lens if max_seq_lens and "cu_seqlens_kv" in given else lengths,
        is_causal=options.meaning.is_causal,
        has_window=left is not None or right is not None,
        is_top_left=options.meaning.causal_alignment == "top_left",
        has_soft_cap=options.meaning.logits_soft_cap is not None,
    )
    warn_of_dense_mask(arrays, shape, options)
    return Call(options, tuple(operands.values()))


def _score_shaped(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """bias or mask as [..., 1|N, 1|T, 1|S]; lower ranks extend to the left, as in numpy."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"mask: expected dtype bool (True = attend), got {x.dtype.name}; of 0 and 1 pass "
            "mask != 0, and what is added to scores as bias"
        )
    if name == "bias" and not floating:
        raise ValueError(f"bias: expected a floating dtype, got {x.dtype.name}")
    full = (*shape.leading, shape.num_heads, shape.seq_len_q, shape.seq_len_kv)
    rank = max(len(full), 4)
    full = (1,) * (rank - len(full)) + full
    if x.ndim > rank or any(
        got not in (1, expected) for got, expected in zip(x.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [batch, heads, queries, keys] "
            f"{list(full)}, got {list(x.shape)}"
            + (_of_batch_and_keys(name, x, full) or swapped(shape, x.shape))
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    return x if shape.leading else x[0]


def _of_batch_and_keys(name: str, x: jax.Array, full: tuple[int, ...]) -> str:
    if x.shape == (full[-4], *full[-2:]):
        return f"; of [batch, queries, keys] pass {name}[:, None]"
    if x.shape != (full[-4], full[-1]):
        return ""
    return f"; of [batch, keys] pass {name}[:, None, None, :]"


def _lengths(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[...] int32."""
    _check_integer(name, x)
    allowed = [shape.leading] if shape.leading else [(), (1,)]
    if x.shape not in allowed:
        raise ValueError(
            f"{name}: expected the batch dims {list(allowed[-1])}, got {list(x.shape)}"
        )
    return as_int32(x.reshape(shape.leading))


def _complete_segment_ids(given: dict[str, jax.Array], shape: CallShape) -> None:
    """In self attention one array of segment ids serves both sides."""
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


def _are_same_lengths(
    given: Mapping[str, jax.Array], arrays: Mapping[str, Any], shape: CallShape
) -> bool:
    """Whether one array each was given for the lengths, ids and cu_seqlens of both sides."""
    pairs = [(x, y) for x, y in _BOTH_SIDES if x in given or y in given]
    if not pairs or shape.seq_len_q != shape.seq_len_kv:
        return False
    return all(
        x in given and y in given and (given[x] is given[y] or arrays.get(x) is arrays.get(y))
        for x, y in pairs
    )


def _check_max_segments(value: Any, has_ids: bool) -> int:
    number = check_positive_int("max_segments", value)
    if not has_ids:
        raise ValueError(
            "max_segments: expected query_segment_ids or key_value_segment_ids with "
            f"max_segments={number}, got neither"
        )
    return number


def _check_max_segment_len(value: Any, max_segments: int | None) -> tuple[int, int]:
    """As AttentionOptions.max_seq_lens: of queries and of keys."""
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
    """The window as it is static; else an open one, and both sides as int32 [2]."""
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


def _segment_ids(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[..., T] or [..., S] int32."""
    _check_integer(name, x)
    length = shape.seq_len_q if name.startswith("query") else shape.seq_len_kv
    if x.shape != (*shape.leading, length):
        raise ValueError(f"{name}: expected shape {[*shape.leading, length]}, got {list(x.shape)}")
    ids, most = as_int32(x), jnp.iinfo(jnp.int32).max
    # One that int32 does not hold is wrong, not the largest that it does.
    return jnp.where(x > most, -1, ids) if jnp.iinfo(x.dtype).max > most else ids


def _cu_seqlens(name: str, x: jax.Array, expected: tuple[int, ...]) -> jax.Array:
    """[M + 1] int32."""
    _check_integer(name, x)
    if x.ndim != 1 or x.shape[0] < 2:
        raise ValueError(
            f"{name}: expected shape [sequences + 1] for one sequence or more, got {list(x.shape)}"
        )
    if x.shape != expected:
        raise ValueError(
            f"{name}: expected cu_seqlens_q's shape {list(expected)}, got {list(x.shape)}"
        )
    return as_int32(x)


def _check_integer(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name}: expected an integer dtype, got {x.dtype.name}")


def _per_head(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[..., N]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating dtype, got {x.dtype.name}")
    shapes = dict.fromkeys([(shape.num_heads,), (*shape.leading, shape.num_heads)])
    if x.shape not in shapes:
        expected = " or ".join(str(list(x)) for x in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {list(x.shape)}")
    return x if x.ndim > 1 else shape.shared(x)


def _add_mods(
    operands: dict[str, jax.Array],
    functions: dict[str, tuple[Callable[..., Any] | None, Sequence[Any]]],
    shape: CallShape,
    dtype: jnp.dtype,
) -> dict[str, ModProgram]:
    """The programs of the mods by name; what they read becomes operands."""
    programs = {}
    for name, (function, arguments) in functions.items():
        if function is None:
            if len(arguments):
                raise ValueError(f"{name}_args: expected none without {name}, got {arguments!r}")
            continue
        # NumPy's, because JAX's promotion may be strict.
        mod = trace(name, function, arguments, np.promote_types(dtype, np.float32).name)
        programs[name] = mod.program
        names = mod_operands(name, len(mod.arrays))
        operands |= zip(names, map(shape.shared, mod.arrays), strict=True)
    if programs:
        operands["mods_start"] = shape.shared(jnp.zeros(2, jnp.int32))
    return programs


def _key_data(key: jax.Array) -> tuple[jax.Array, str]:
    """Key data [words] uint32, and the name of the PRNG it belongs to."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        impl, data = str(jax.random.key_impl(key)), jax.random.key_data(key)
    elif key.dtype == jnp.uint32 and key.ndim == 1:
        try:  # a raw key counts as one of JAX's default PRNG, as it does in jax.random
            impl, data = str(jax.random.key_impl(key)), key
        except TypeError as error:
            raise ValueError(
                "dropout_key: expected the words of a key of JAX's default PRNG, got "
                f"{key.shape[0]} words"
            ) from error
    else:
        raise ValueError(
            f"dropout_key: expected a single JAX PRNG key, got {key.dtype.name}{list(key.shape)}"
        )
    if data.ndim != 1:
        raise ValueError(f"dropout_key: expected a single key, got keys of shape {key.shape}")
    return data, impl
