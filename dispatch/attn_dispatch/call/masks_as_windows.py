"""Replacing or narrowing a mask_mod by the window that it lies in, so that kernels skip keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.programs.key_ranges import key_range

Array = TypeVar("Array")


def with_window(
    options: AttentionOptions, operands: Mapping[str, Array]
) -> tuple[AttentionOptions, dict[str, Array]]:
    """The same call with the narrowest window that holds all pairs its mask_mod lets attend.

    If the mask_mod is exactly that window, it is dropped. A mask_mod counts from the top left, so a
    call whose own window counts from the bottom right is left unchanged.
    """
    program, operands = options.meaning.mask_mod, dict(operands)
    if program is None or "window" in operands:
        return options, operands
    has_band = (
        options.meaning.is_causal
        or options.meaning.window != (None, None)
        or "alibi_slopes" in operands
    )
    if options.meaning.causal_alignment != "top_left" and has_band:
        return options, operands
    found = key_range(program)
    if found.band == (None, None):
        return options, operands
    left, right = (
        min((x for x in sides if x is not None), default=None)
        for sides in zip(options.meaning.window, found.band, strict=True)
    )
    meaning = replace(options.meaning, window=(left, right), causal_alignment="top_left")
    if found.is_band:
        without = mod_operands("mask_mod", len(program.arrays))
        without += () if options.meaning.score_mod is not None else ("mods_start",)
        operands = {name: x for name, x in operands.items() if name not in without}
        meaning = replace(meaning, mask_mod=None)
    return replace(options, operands=tuple(operands), meaning=meaning), operands
