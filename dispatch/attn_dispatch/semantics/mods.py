"""score_mod and mask_mod, computed for all pairs of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from attn_dispatch.call.operands import mod_operands
from attn_dispatch.programs.inlining import is_narrow, with_wide_reads
from attn_dispatch.programs.known_forms import depends_on_distance_alone
from attn_dispatch.programs.nodes import XlaArray
from attn_dispatch.programs.program import ModProgram, reads_by_key
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.typed_jax import evaluated

_MAX_COPIED_ELEMENTS = 2**24
"""The most elements that the copies of an array, one per key, may have together."""


def arrays_of(
    mod: str, program: ModProgram, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The arrays that a mod reads, each [C, ...]."""
    return tuple(operands[name] for name in mod_operands(mod, len(program.arrays)))


def may_attend(
    program: ModProgram, indices: PairIndices, arrays: Sequence[jax.Array], axes: str = "bnts"
) -> jax.Array:
    """The mask of a mask_mod, bool [1|B, 1|N, 1|T, 1|S]; length 1 along axes not in `axes`."""
    return _values_of_pairs(program.jaxpr, _pairs(indices, axes), indices, arrays)


def added(
    program: ModProgram,
    indices: PairIndices,
    arrays: Sequence[jax.Array],
    axes: str,
    *,
    is_learned: bool = False,
    is_packed: bool = False,
) -> jax.Array:
    """The bias that a score_mod adds, its result for a score of 0: float32 [1|B, 1|N, 1|T, 1|S].

    Args:
      is_learned: whether gradients of the arrays will be wanted.
      is_packed: whether positions restart inside a row.
    """
    nothing = jnp.zeros((1, 1, 1, 1), program.jaxpr.in_avals[0].dtype)
    has_copies = is_learned and reads_by_key(program)
    by_distance = not is_packed and {"t", "s"} <= {*axes} and depends_on_distance_alone(program)
    pairs = _distances(indices, axes) if by_distance else _pairs(indices, axes)
    found = _values_of_pairs(
        program.jaxpr, (nothing, *pairs), indices, arrays, has_copies=has_copies
    )
    found = found.astype(jnp.float32)
    if by_distance:
        return _along_diagonals(found, indices.t.shape[1], indices.s.shape[1])
    return found


def modified(
    program: ModProgram,
    score: jax.Array,
    indices: PairIndices,
    arrays: Sequence[jax.Array],
    may_attend: jax.Array | None = None,
    *,
    is_learned: bool = False,
) -> jax.Array:
    """Scores after a score_mod, in the same shape and dtype.

    Args:
      score: [B, N, T, S].
      is_learned: whether gradients of the arrays will be wanted.
      may_attend: if given, masked pairs are computed for a key that the query may attend to.
        Otherwise they may be NaN, and in a gradient 0 · NaN is NaN.
    """
    pairs = _pairs(indices)
    if may_attend is not None:
        *others, keys = pairs
        first = jnp.argmax(may_attend, axis=-1, keepdims=True)
        keys = jnp.broadcast_to(keys, (*first.shape[:-1], keys.shape[-1]))
        pairs = (*others, jnp.where(may_attend, keys, jnp.take_along_axis(keys, first, axis=-1)))
        score = jnp.where(may_attend, score, 0)
    has_copies = is_learned and reads_by_key(program)
    result = _values_of_pairs(
        program.jaxpr, (score, *pairs), indices, arrays, has_copies=has_copies
    )
    return jnp.broadcast_to(result.astype(score.dtype), score.shape)


def _pairs(indices: PairIndices, axes: str = "bnts") -> tuple[jax.Array, ...]:
    """b, n, t and s, each [1|B, 1|N, 1|T, 1|S]; 0 for those not in `axes`."""
    found = {
        "b": indices.b[:, None, :, None],
        "n": indices.n[:, :, None, None],
        "t": indices.t[:, None, :, None],
        "s": indices.s[:, None, None, :],
    }
    return tuple(
        x if name in axes else jnp.zeros((1, 1, 1, 1), x.dtype) for name, x in found.items()
    )


def _distances(indices: PairIndices, axes: str) -> tuple[jax.Array, ...]:
    """Like `_pairs`, but with one pair for each distance s - t along the last axis: 0 … S - 1, then
    an unused place, then -(T - 1) … -1."""
    queries, keys = indices.t.shape[1], indices.s.shape[1]
    b, n, _, _ = _pairs(indices, axes)
    place = jnp.arange(queries + keys, dtype=jnp.int32)[None, None, None, :]
    is_later = place < keys
    return b, n, jnp.where(is_later, 0, queries + keys - place), jnp.where(is_later, place, 0)


def _along_diagonals(x: jax.Array, queries: int, keys: int) -> jax.Array:
    """Values by distance, [·, ·, 1, T + S] as in `_distances`, spread over all pairs [·, ·, T, S].

    Each row is the previous one shifted by one. Repeating the T + S values and cutting the result
    into rows of T + S - 1 shifts them so. Nothing is looked up, so the gradient is a plain sum; the
    gradient of a lookup would add all pairs of a distance to one number. T5's table, with two heads
    and 8,192 tokens, trains 1.7 times as fast (H200).
    """
    b, n, _, length = x.shape
    rows = jnp.broadcast_to(x, (b, n, queries, length)).reshape(b, n, queries * length)
    rows = rows[:, :, : queries * (length - 1)].reshape(b, n, queries, length - 1)
    return rows[..., :keys]


def xla_array(array: XlaArray, indices: PairIndices, arrays: Sequence[jax.Array]) -> jax.Array:
    """The values of an array that a kernel reads, [1|B, 1|N, 1|T, 1|S]."""
    return _values_of_pairs(array.body, _pairs(indices, array.axes), indices, arrays)


def _values_of_pairs(
    body: ClosedJaxpr,
    pairs: tuple[jax.Array, ...],
    indices: PairIndices,
    arrays: Sequence[jax.Array],
    *,
    has_copies: bool = False,
) -> jax.Array:
    """A program's values for these pairs, [1|B, 1|N, 1|T, 1|S].

    With `has_copies`, each key reads a separate copy of the small arrays. A GPU adds what many
    pairs contribute to the gradient of one entry one after the other: training with T5's table of
    32 entries, 8,192 tokens and two heads took 193 ms, and takes 3 ms with copies (H200).
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in pairs))
    is_shared = [x.shape[0] == 1 for x in arrays]
    rows = [
        x[0] if shared else jnp.take(x, indices.copies, axis=0)
        for x, shared in zip(arrays, is_shared, strict=True)
    ]
    if not all(is_shared):
        shape = (indices.copies.shape[0], *shape[1:])
    if has_copies:
        rows = [x.astype(jnp.float32) if is_narrow(x.dtype) else x for x in rows]
    keys = max(x.shape[3] for x in pairs)
    # A batch may be a symbol, in an exported module.
    entries = [prod(x.shape[1:]) for x in arrays]
    is_copied = [has_copies and keys > 1 and keys * x <= _MAX_COPIED_ELEMENTS for x in entries]
    for i, shared in enumerate(is_shared):
        if is_copied[i]:
            axis = 0 if shared else 1
            x = jnp.expand_dims(rows[i], axis)
            rows[i] = jnp.broadcast_to(x, (*x.shape[:axis], keys, *x.shape[axis + 1 :]))

    def of_one(*inputs: jax.Array) -> jax.Array:
        return evaluated(body, *inputs)[0]

    function: Callable[..., jax.Array] = with_wide_reads(body) if has_copies else of_one
    mapped = []
    # Each vmap maps the first of the remaining axes, so the last axis is wrapped first.
    for axis in reversed(range(4)):
        axes = [None if x.shape[axis] == 1 else 0 for x in pairs]
        axes += [
            0 if (axis == 0 and not shared) or (axis == 3 and copied) else None
            for shared, copied in zip(is_shared, is_copied, strict=True)
        ]
        if any(x is not None for x in axes):
            function = jax.vmap(function, tuple(axes))
            mapped.append(axis)
    inputs = [x.reshape(tuple(n for n in x.shape if n != 1)) for x in pairs]
    result = jnp.asarray(function(*inputs, *rows))  # a program may return a Python number
    return result.reshape(tuple(n if i in mapped else 1 for i, n in enumerate(shape)))
