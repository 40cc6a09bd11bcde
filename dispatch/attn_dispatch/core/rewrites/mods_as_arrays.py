"""A score_mod or mask_mod that a kernel does not support, replaced by a bias or a mask.

A mask_mod becomes a mask. What a score_mod adds to scores becomes a bias. The bias's gradient gives
the gradients of the arrays that the score_mod reads, for example T5's table of relative positions.
Like all arrays over pairs, the mask or bias has a limited size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import is_mod_operand, mod_operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    MODS,
    Calls,
    NamedArrays,
    Rewrite,
    Shape,
    changed,
    common_shape,
    for_,
)
from attn_dispatch.programs.known_forms import KnownForm, known_form
from attn_dispatch.programs.program import ModProgram, axes_of
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.semantics.sums import sum_like
from attn_dispatch.typed_jax import vjp


def _mask_shape(spec: AttentionSpec) -> Shape:
    program = spec.meaning.mask_mod
    assert program is not None
    shape = _shape(spec, program)
    return common_shape(shape, spec.shape("mask")) if spec.has("mask") else shape


def _with_mask(spec: AttentionSpec) -> AttentionSpec:
    arrays = {"mask": (_mask_shape(spec), "bool")}
    meaning = replace(spec.meaning, mask_mod=None)
    return changed(spec, without=operands_of(spec, "mask_mod"), arrays=arrays, meaning=meaning)


def _compute_with_mask(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    program = spec.meaning.mask_mod
    assert program is not None
    indices = Positions.of(spec, operands).indices
    assert indices is not None
    read = mods.arrays_of("mask_mod", program, operands)
    mask = mods.may_attend(program, indices, read, axes_of(program))
    if spec.has("mask"):
        mask = mask & operands["mask"]
    mask = jnp.broadcast_to(mask, inner.shape("mask"))
    return calls.kernel(for_(inner, operands | {"mask": mask}))


MASK_MOD_AS_MASK = Rewrite(
    "mask_mod: as a mask",
    _with_mask,
    _compute_with_mask,
    asked_of=MODS,
    adds=("mask",),
    when=lambda spec: spec.meaning.mask_mod is not None,
    pairs=lambda spec: (_mask_shape(spec),),
)


def _is_sum(spec: AttentionSpec) -> bool:
    """Whether score_mod adds something to the score, or to the score after a soft cap."""
    found = score_mod_form(spec)
    if found is None or not found.adds:
        return False
    if found.soft_cap is not None and spec.meaning.logits_soft_cap is not None:
        return False
    # XLA may sum the gradients of the arrays that are read in any order.
    return not (
        spec.meaning.deterministic_backward and any(map(is_mod_operand, spec.wanted.gradients))
    )


def _bias_shape(spec: AttentionSpec) -> Shape:
    program = spec.meaning.score_mod
    assert program is not None
    shape = _shape(spec, program)
    return common_shape(shape, spec.shape("bias")) if spec.has("bias") else shape


def _with_bias(spec: AttentionSpec) -> AttentionSpec:
    found = score_mod_form(spec)
    assert found is not None
    wanted = ("bias" if is_mod_operand(x) else x for x in spec.wanted.gradients)
    return changed(
        spec,
        without=operands_of(spec, "score_mod"),
        arrays={"bias": (_bias_shape(spec), _bias_dtype(spec, found))},
        meaning=replace(
            spec.meaning,
            score_mod=None,
            logits_soft_cap=found.soft_cap or spec.meaning.logits_soft_cap,
        ),
        wanted=replace(spec.wanted, gradients=tuple(dict.fromkeys(wanted))),
    )


def _remedies(spec: AttentionSpec) -> Mapping[str, str]:
    """What a caller can do about the dtype of the bias; see `_bias_dtype`."""
    program = spec.meaning.score_mod
    if program is None or not program.arrays or spec.has("bias"):
        return {}
    return {"bias_dtype": f"read arrays of {spec.dtype} alone in score_mod"}


def _compute_with_bias(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    program = spec.meaning.score_mod
    assert program is not None
    indices = Positions.of(spec, operands).indices
    assert indices is not None
    names = mod_operands("score_mod", len(program.arrays))
    moving = {x: operands[x] for x in names if x in spec.wanted.gradients}

    def added(moving: NamedArrays) -> jax.Array:
        read = mods.arrays_of("score_mod", program, operands | moving)
        found = mods.added(
            program,
            indices,
            read,
            axes_of(program),
            is_learned=bool(moving),
            is_packed=spec.is_packed,
        )
        return jnp.broadcast_to(found, _shape(spec, program))

    sum_, pull = vjp(added, moving)
    bias = sum_ + operands["bias"].astype(sum_.dtype) if spec.has("bias") else sum_
    bias = bias.astype(inner.dtype_of("bias"))
    results = dict(calls.kernel(for_(inner, operands | {"bias": bias})))
    if "bias" not in results:
        return results
    grad = results.pop("bias").astype(jnp.float32)
    if "bias" in spec.wanted.gradients:
        own = sum_like(grad, spec.shape("bias"))
        results["bias"] = own.astype(spec.dtype_of("bias"))
    if moving:
        results |= pull(sum_like(grad, sum_.shape))[0]
    return results


SUM_AS_BIAS = Rewrite(
    "score_mod: what it adds, as a bias",
    _with_bias,
    _compute_with_bias,
    asked_of=MODS,
    adds=("bias",),
    when=_is_sum,
    pairs=lambda spec: (_bias_shape(spec),),
    remedies=_remedies,
)


def _bias_dtype(spec: AttentionSpec, found: KnownForm) -> str:
    """float32; or the call's 16-bit dtype if all that is added is read in that dtype."""
    is_narrow = found.dtype == spec.dtype and not spec.has("bias")
    return spec.dtype if is_narrow else "float32"


def _shape(spec: AttentionSpec, program: ModProgram) -> tuple[int, int, int, int]:
    """The shape of what a mod computes, with 1 for each axis along which that is the same."""
    axes = axes_of(program)
    has_rows = "b" in axes or (spec.is_packed and not {"t", "s"}.isdisjoint(axes))
    return (
        spec.batch if has_rows or spec.shape("mods_start")[0] > 1 else 1,
        spec.num_heads if "n" in axes else 1,
        spec.seq_len_q if "t" in axes else 1,
        spec.seq_len_kv if "s" in axes else 1,
    )


def score_mod_form(spec: AttentionSpec) -> KnownForm | None:
    """The form of the call's score_mod if that is a sum, a soft cap or both; else None."""
    program = spec.meaning.score_mod
    return None if program is None else known_form(program)


def operands_of(spec: AttentionSpec, mod: str) -> tuple[str, ...]:
    """The operands of the call that only this mod needs."""
    names = tuple(x.name for x in spec.operands if is_mod_operand(x.name) and mod in x.name)
    return names if len(spec.meaning.mods) > 1 else (*names, "mods_start")
