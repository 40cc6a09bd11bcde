"""The part of a call that its mask depends on: the same in both directions and in every layer."""

from __future__ import annotations

from attn_dispatch.call.operands import Operand, mod_operands
from attn_dispatch.call.options import AttentionOptions, Meaning, Promises
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import ID_OPERANDS

_SHAPES = ("query", "key", "value")
"""The operands of which the mask depends on lengths and heads alone."""


def mask_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the mask alone. Calls whose masks are made alike have equal ones."""
    kept = (*_SHAPES, *mask_operands(spec))
    operands = tuple(_without_dims(x) for x in spec.operands if x.name in kept)
    given = spec.meaning
    meaning = Meaning(
        scale=1.0,
        is_causal=given.is_causal,
        causal_alignment=given.causal_alignment,
        causal_offset=given.causal_offset,
        window=given.window,
        max_segments=given.max_segments,
        max_seq_lens=given.max_seq_lens,
        same_lengths=given.same_lengths,
        mask_mod=given.mask_mod,
    )
    promises = Promises(is_checked=spec.promises.is_checked)
    names = tuple(x.name for x in operands)
    return AttentionSpec(AttentionOptions(names, meaning, promises=promises), operands)


def mask_operands(spec: AttentionSpec) -> tuple[str, ...]:
    """The operands that the mask of a call depends on, but for shapes."""
    program = spec.meaning.mask_mod
    read = () if program is None else mod_operands("mask_mod", len(program.arrays))
    names = (
        *ID_OPERANDS,
        "causal_offset",
        "mask",
        *read,
        *(() if program is None else ("mods_start",)),
    )
    return tuple(x.name for x in spec.operands if x.name in names)


def _without_dims(x: Operand) -> Operand:
    """An operand with a head dim of 1, of no dtype of the caller's."""
    if x.name not in _SHAPES:
        return x
    return Operand(x.name, (*x.shape[:3], 1), "float32")
