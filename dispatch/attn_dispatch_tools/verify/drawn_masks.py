"""mask_mods and dense masks of drawn cases, computed by JAX and by NumPy.

A mask_mod is one formula of the positions, of a number w and of arrays that it reads. The arrays
are drawn so that they mean something: ends of ranges, numbers of images, or an entry for each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace
from attn_dispatch_tools.verify.drawn_mods import MASKS, Places, Value

Shape: TypeAlias = "tuple[int, ...]"
Draw: TypeAlias = "Callable[[np.random.RandomState, Shape, int], np.ndarray]"
"""Draws an array of a shape for a mask with so many keys."""


class Read(Protocol):
    """Reads an array, by its number, at indices of pairs."""

    def __call__(self, number: int, *indices: Value) -> Value: ...


@dataclass(frozen=True)
class _Array:
    axes: str
    """The indices by which it is read: letters of b, n, t, s, and l for t or s."""
    draw: Draw
    dtype: type = np.int32


@dataclass(frozen=True)
class MaskFormula:
    """Which pairs attend, by how arrays are read, by b, n, t and s, and by a number w."""

    sees: Callable[[Read, Value, Value, Value, Value, int], Value]
    arrays: tuple[_Array, ...] = ()


def _any_key(rng: np.random.RandomState, shape: Shape, keys: int) -> np.ndarray:
    return rng.randint(1, keys + 1, shape)


def _ends(rng: np.random.RandomState, shape: Shape, keys: int) -> np.ndarray:
    """Ends of ranges: mostly inside the keys, some outside, many of them in runs of queries."""
    ends = rng.randint(-2, keys + 3, shape)
    kept = ends[..., np.arange(shape[-1]) // 16 * 16]
    return np.where(rng.random_sample((*shape[:-1], 1)) < 0.5, kept, ends)


def _groups(rng: np.random.RandomState, shape: Shape, keys: int) -> np.ndarray:
    """Numbers of images in runs, with 0 for the text between them."""
    is_new = rng.random_sample(shape) < 8 / shape[-1]
    number = is_new.cumsum(axis=-1)
    return np.where(number % 2 == 1, number, 0)


def _half(rng: np.random.RandomState, shape: Shape, keys: int) -> np.ndarray:
    return rng.random_sample(shape) < 0.5


def _blocks(rng: np.random.RandomState, shape: Shape, keys: int) -> np.ndarray:
    """Blocks of 64 x 64 pairs that are seen in full, in part or not at all."""
    blocks = (*shape[:-2], *(-(-x // 64) for x in shape[-2:]))
    chance = rng.choice([0.0, 0.0, 0.5, 1.0, 1.0], blocks)
    chance = chance.repeat(64, axis=-2).repeat(64, axis=-1)[..., : shape[-2], : shape[-1]]
    return rng.random_sample(shape) < chance


def _two_ranges(read: Read, s: Value, *at: Value) -> Value:
    first = (s >= read(0, *at)) & (s < read(1, *at))
    return first | ((s >= read(2, *at)) & (s < read(3, *at)))


def _of_old(formula: Callable[[Value, Value, Value, Value, int], Value]) -> MaskFormula:
    """One of `MASKS`, which read one array by b."""
    return MaskFormula(
        lambda read, b, n, t, s, w: formula(n, t, s, read(0, b), w), (_Array("b", _any_key),)
    )


RANGES: dict[str, MaskFormula] = {
    "s <= t or s < x[b]": _of_old(MASKS["s <= t or s < x[b]"]),
    "a[t] <= s < e[t]": MaskFormula(
        lambda read, b, n, t, s, w: (s >= read(0, t)) & (s < read(1, t)), (_Array("t", _ends),) * 2
    ),
    "two ranges by t": MaskFormula(
        lambda read, b, n, t, s, w: _two_ranges(read, s, t), (_Array("t", _ends),) * 4
    ),
    "two ranges by b and t": MaskFormula(
        lambda read, b, n, t, s, w: _two_ranges(read, s, b, t), (_Array("bt", _ends),) * 4
    ),
    "t - s < w or s < w / 2": MaskFormula(
        lambda read, b, n, t, s, w: (s <= t) & ((t - s < w) | (s < w // 2))
    ),
    "s <= t or a[t] <= s < e[t]": MaskFormula(
        lambda read, b, n, t, s, w: (s <= t) | ((s >= read(0, t)) & (s < read(1, t))),
        (_Array("t", _ends),) * 2,
    ),
    "t - t % w <= s <= t": MaskFormula(lambda read, b, n, t, s, w: (s <= t) & (s >= t - t % w)),
    "not w <= s < 2 w": MaskFormula(lambda read, b, n, t, s, w: (s < w) | (s >= 2 * w)),
}
"""Masks of at most two ranges of keys for each query, whatever the arrays hold."""

OTHERS: dict[str, MaskFormula] = {
    "s <= t or same image": MaskFormula(
        lambda read, b, n, t, s, w: (s <= t) | ((read(0, t) == read(0, s)) & (read(0, t) > 0)),
        (_Array("l", _groups),),
    ),
    "same image": MaskFormula(
        lambda read, b, n, t, s, w: read(0, t) == read(0, s), (_Array("l", _groups),)
    ),
    "same chunk of w": MaskFormula(lambda read, b, n, t, s, w: (s <= t) & (t // w == s // w)),
    "two ranges by n and t": MaskFormula(
        lambda read, b, n, t, s, w: _two_ranges(read, s, n, t), (_Array("nt", _ends),) * 4
    ),
    "t - s < w + 8 n": MaskFormula(lambda read, b, n, t, s, w: (s <= t) & (t - s < w + 8 * n)),
    "bits[t, s]": MaskFormula(
        lambda read, b, n, t, s, w: read(0, t, s), (_Array("ts", _half, np.bool_),)
    ),
    "blocks[t, s]": MaskFormula(
        lambda read, b, n, t, s, w: read(0, t, s), (_Array("ts", _blocks, np.bool_),)
    ),
    "blocks[n, t, s]": MaskFormula(
        lambda read, b, n, t, s, w: read(0, n, t, s), (_Array("nts", _blocks, np.bool_),)
    ),
    "s == t or (t - s) % w == 0": _of_old(MASKS["s == t or (t - s) % w == 0"]),
}
"""Masks with more ranges, or with ranges that differ by head, or that only arrays tell."""

FORMULAS = {name: _of_old(formula) for name, formula in MASKS.items()} | RANGES | OTHERS

DENSE: dict[str, Draw] = {"half": _half, "blocks": _blocks}
"""Kinds of dense masks, drawn for a shape whose last two axes are t and s, or 1."""


@dataclass(frozen=True)
class DrawnMaskMod(ModProgram):
    """A mask_mod's program, its formula and its number w."""

    formula: str = field(compare=False, default="")
    w: int = field(compare=False, default=0)

    def may_attend(self, places: Places, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The pairs that this mask allows."""

        def read(number: int, *indices: Value) -> Value:
            array = arrays[number]
            copy = places.copy if array.shape[0] > 1 else np.zeros_like(places.copy)
            return cast("Value", array[(copy, *indices)])

        b, n, t, s = (cast("Value", x) for x in (places.b, places.n, places.t, places.s))
        return np.asarray(FORMULAS[self.formula].sees(read, b, n, t, s, self.w))


def array_shapes(formula: str, lengths: Mapping[str, int]) -> tuple[tuple[Shape, type], ...]:
    """The shape and dtype of each array that a formula reads, by the length of each index."""
    arrays = FORMULAS[formula].arrays
    longest = {"l": max(lengths["t"], lengths["s"])}
    of_index = {**lengths, **longest}
    return tuple((tuple(of_index[x] for x in array.axes), array.dtype) for array in arrays)


def count_of(mask_mod: tuple[str, int] | None) -> int:
    """The number of arrays that a mask_mod reads."""
    return 0 if mask_mod is None else len(FORMULAS[mask_mod[0]].arrays)


def drawn_array(
    formula: str, number: int, rng: np.random.RandomState, shape: Shape, keys: int
) -> np.ndarray:
    """An array of a formula, with the axis of its copies first."""
    return FORMULAS[formula].arrays[number].draw(rng, shape, keys)


def dense_mask(kind: str, rng: np.random.RandomState, shape: Shape) -> np.ndarray:
    """A dense mask; without a kind its pairs attend with a chance of 0.7 each."""
    return DENSE[kind](rng, shape, shape[-1]) if kind else rng.random_sample(shape) < 0.7


@lru_cache(maxsize=1024)
def mask_mod(formula: str, w: int, shapes: tuple[tuple[Shape, type], ...]) -> DrawnMaskMod:
    """The program of this formula, whose arrays have these shapes and dtypes."""

    def function(b: Value, n: Value, t: Value, s: Value, *arrays: jax.Array) -> Value:
        def read(number: int, *indices: Value) -> Value:
            return arrays[number][indices]

        return jnp.asarray(FORMULAS[formula].sees(read, b, n, t, s, w))

    arrays = [np.zeros(shape, dtype) for shape, dtype in shapes]
    made = trace("mask_mod", function, arrays, "float32").program
    return DrawnMaskMod(made.text, made.arrays, made.jaxpr, made.body, formula, w)
