"""The mask_mods and score_mods of drawn calls, by names that a JSON file can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import mods
from attn_dispatch.programs.functions import MaskMod, ScoreMod


def prefix(length: int) -> MaskMod:
    """Causal, and the first keys are seen from everywhere."""
    return lambda b, n, t, s: (s <= t) | (s < length)


def window_and_first(window: int, first: int) -> MaskMod:
    """Causal; the last keys of a window, and the first keys of all."""
    return lambda b, n, t, s: (s <= t) & ((t - s < window) | (s < first))


def documents_and_first(length: int, first: int) -> MaskMod:
    """Causal; the keys of the query's document, all of one length, and the first keys of all."""
    return lambda b, n, t, s: (s <= t) & ((t // length == s // length) | (s < first))


def images(length: int) -> MaskMod:
    """Causal, and every second run of so many tokens is an image, which sees all of itself."""

    def mod(b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return (s <= t) | ((t // length == s // length) & (t // length % 2 == 1))

    return mod


def relative_bias(slope: float) -> ScoreMod:
    """A score that falls with the distance, by another function than ALiBi's."""
    return lambda score, b, n, t, s: score - slope * jnp.sqrt(jnp.abs(t - s).astype(score.dtype))


MASK_MODS: dict[str, Callable[..., MaskMod]] = {
    "prefix": prefix,
    "window_and_first": window_and_first,
    "documents_and_first": documents_and_first,
    "images": images,
    "chunks": mods.chunked_window,
    "dilated": mods.dilated_window,
}
SCORE_MODS: dict[str, Callable[..., ScoreMod]] = {"relative_bias": relative_bias}


def functions_of(mods: dict[str, list[Any]]) -> dict[str, Any]:
    """The arguments mask_mod and score_mod for entries such as {"mask_mod": ["prefix", 512]}."""
    known = {"mask_mod": MASK_MODS, "score_mod": SCORE_MODS}
    return {name: known[name][mod](*numbers) for name, (mod, *numbers) in mods.items()}
