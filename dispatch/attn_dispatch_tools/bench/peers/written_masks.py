"""The masks of cells as a user of this package writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import mods
from attn_dispatch.programs.functions import MaskMod
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.masks import Mask


@dataclass(frozen=True)
class WrittenMask:
    """The arguments of a call that express a mask."""

    options: dict[str, Any]
    """Static arguments."""
    named_arrays: dict[str, jax.Array] = field(default_factory=dict)
    mod: Callable[..., MaskMod] | None = None
    """Returns the mask_mod for the arrays that it reads."""
    mod_arrays: tuple[jax.Array, ...] = ()


def written_mask(mask: Mask, arrays: CellArrays) -> WrittenMask:
    """The arguments for a mask, with the arguments that exist for its parts instead of a mod."""
    tokens = arrays.cell.seq_len
    causal = {"is_causal": True}
    if mask.prefix:
        return WrittenMask({}, mod=mods.prefix_lm, mod_arrays=(jnp.array([mask.prefix]),))
    if mask.image and mask.has_ends:
        return WrittenMask({}, mod=_images_by_ends, mod_arrays=arrays.mask_ends)
    if mask.image:
        return WrittenMask({}, mod=_images_by_number, mod_arrays=(arrays.mask_groups,))
    if mask.documents:
        longest = max(mask.document_lengths(tokens))
        options = causal | {"max_segments": mask.documents, "max_segment_len": longest}
        return WrittenMask(options, {"query_segment_ids": arrays.mask_groups[None]})
    if mask.chunk:
        return WrittenMask({}, mod=lambda: mods.chunked_window(mask.chunk))
    if mask.sinks:
        return WrittenMask(causal, mod=lambda: _window_and_sinks(mask.window, mask.sinks))
    if mask.window:
        return WrittenMask(causal | {"local_window_size": (mask.window - 1, 0)})
    return WrittenMask(causal)


def _images_by_ends(first: jax.Array, end: jax.Array) -> MaskMod:
    def mod(b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return (s <= t) | ((s >= first[t]) & (s < end[t]))

    return mod


def _images_by_number(images: jax.Array) -> MaskMod:
    def mod(b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return (s <= t) | ((images[t] == images[s]) & (images[t] > 0))

    return mod


def _window_and_sinks(window: int, sinks: int) -> MaskMod:
    def mod(b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return (t - s < window) | (s < sinks)

    return mod
