"""Mods that combine other mods.

All ready-made mods are classes rather than closures, so that they can be copied and pickled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.mod_facts import ModFacts
from attn_dispatch.mods.checks import Numbers, RowNumber
from attn_dispatch.programs.functions import MaskMod, ScoreMod

_Operation = Callable[[jax.Array, jax.Array], jax.Array]


def all_of(*masks: MaskMod) -> MaskMod:
    """Attend where all of the masks do. A mask is any function (b, n, t, s) -> bool of scalars.

    For example, causal within chunks and within documents:
    `all_of(chunked_window(1024), document_mask(documents))`.
    """
    return _joined("all_of", _and, masks)


def any_of(*masks: MaskMod) -> MaskMod:
    """Attend where at least one of the masks does."""
    return _joined("any_of", _or, masks)


def not_(mask: MaskMod) -> MaskMod:
    """Attend where the mask does not."""
    _check_masks("not_", [mask])
    return Negated(mask)


@dataclass(frozen=True, eq=False)
class Negated:
    """Attend where the mask does not."""

    mask: MaskMod

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return jnp.logical_not(self.mask(b, n, t, s))

    @property
    def facts(self) -> ModFacts:
        return replace(ModFacts.of(self.mask), sees_ahead=None)


def with_query_offset(mod: ScoreMod | MaskMod, offset: Numbers) -> ScoreMod | MaskMod:
    """The mod with t + offset in place of t, for queries that begin at position `offset`.

    Use it for queries behind a cache; without it, the first query is at position 0.

    Args:
      mod: (score, b, n, t, s) -> score or (b, n, t, s) -> bool, without further arguments.
      offset: an int, or an integer array [] or [B], which may be traced; in positions.
    """
    _check_mods("with_query_offset", [mod])
    return WithQueryOffset(mod, RowNumber("offset", offset))


@dataclass(frozen=True, eq=False)
class WithQueryOffset:
    """A mod for queries that begin at a position other than 0."""

    mod: ScoreMod | MaskMod
    start: RowNumber

    def __call__(self, *inputs: jax.Array) -> ArrayLike:
        *score, b, n, t, s = inputs
        return self.mod(*score, b, n, t + self.start.of(b), s)

    @property
    def facts(self) -> ModFacts:
        facts = ModFacts.of(self.mod).from_offset()
        return replace(facts, sizes=(*facts.sizes, *self.start.sizes))


def _and(x: jax.Array, y: jax.Array) -> jax.Array:
    return x & y


def _or(x: jax.Array, y: jax.Array) -> jax.Array:
    return x | y


def _joined(name: str, operation: _Operation, masks: Sequence[MaskMod]) -> MaskMod:
    _check_masks(name, masks)
    return Joined(operation, tuple(masks))


@dataclass(frozen=True, eq=False)
class Joined:
    """Masks joined by a binary operation."""

    operation: _Operation
    masks: tuple[MaskMod, ...]

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        results = (jnp.asarray(mask(b, n, t, s)) for mask in self.masks)
        return functools.reduce(self.operation, results)

    @property
    def facts(self) -> ModFacts:
        return ModFacts.of(*self.masks)


def _check_mods(name: str, mods: Sequence[ScoreMod | MaskMod]) -> None:
    if not mods:
        raise ValueError(f"{name}: expected one mask or more, got none")
    for mod in mods:
        if not callable(mod):
            raise ValueError(f"{name}: expected functions, got {mod!r}")


def _check_masks(name: str, masks: Sequence[MaskMod]) -> None:
    _check_mods(name, masks)
    for mask in masks:
        try:
            inspect.signature(mask).bind("b", "n", "t", "s")
        except TypeError as error:
            got = ", ".join(inspect.signature(mask).parameters)
            raise ValueError(
                f"{name}: expected masks, functions of (b, n, t, s), got one of ({got})"
            ) from error
        except ValueError:  # some functions written in C have no signature
            continue
