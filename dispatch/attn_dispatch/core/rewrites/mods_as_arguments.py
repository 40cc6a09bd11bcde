"""A score_mod replaced by the argument that means the same, for kernels that take no score_mod."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.mods_as_arrays import operands_of, score_mod_form
from attn_dispatch.core.rewrites.rewrite import MODS, Calls, NamedArrays, Rewrite, changed, for_
from attn_dispatch.programs.known_forms import AlibiSlopes
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.typed_jax import vjp


def _is_cap(spec: AttentionSpec) -> bool:
    found = score_mod_form(spec)
    if found is None or found.soft_cap is None or found.adds:
        return False
    is_learned = any(map(is_mod_operand, spec.wanted.gradients))
    return spec.meaning.logits_soft_cap is None and not is_learned


def _capped(spec: AttentionSpec) -> AttentionSpec:
    found = score_mod_form(spec)
    assert found is not None
    without = operands_of(spec, "score_mod")
    meaning = replace(spec.meaning, score_mod=None, logits_soft_cap=found.soft_cap)
    return changed(spec, without=without, meaning=meaning)


def _compute_capped(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    return calls.kernel(for_(inner, operands))


SCORE_MOD_AS_CAP = Rewrite(
    "score_mod: as logits_soft_cap", _capped, _compute_capped, asked_of=MODS, when=_is_cap
)


def _is_alibi(spec: AttentionSpec) -> bool:
    found = _slopes(spec)
    # A mod counts positions from the top left.
    if found is None or spec.meaning.causal_alignment != "top_left":
        return False
    right = spec.band[1]
    if spec.has("alibi_slopes") or (found.is_one_sided and (right is None or right > 0)):
        return False
    # In packed sequences b is the number of the sequence.
    return not ("b" in found.values.axes and spec.has("cu_seqlens_q"))


def _with_slopes(spec: AttentionSpec) -> AttentionSpec:
    found = _slopes(spec)
    assert found is not None
    has_rows = "b" in found.values.axes or spec.shape("mods_start")[0] > 1
    shape = spec.batch if has_rows else 1, spec.num_heads
    wanted = ("alibi_slopes" if is_mod_operand(x) else x for x in spec.wanted.gradients)
    return changed(
        spec,
        without=operands_of(spec, "score_mod"),
        arrays={"alibi_slopes": (shape, "float32")},
        meaning=replace(spec.meaning, score_mod=None),
        wanted=replace(spec.wanted, gradients=tuple(dict.fromkeys(wanted))),
    )


def _compute_with_slopes(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    found, program = _slopes(spec), spec.meaning.score_mod
    assert found is not None and program is not None
    indices = Positions.of(spec, operands).indices
    assert indices is not None
    moving = {x: y for x, y in operands.items() if x in spec.wanted.gradients}
    moving = {x: y for x, y in moving.items() if is_mod_operand(x)}
    shape = inner.shape("alibi_slopes")

    def slopes(moving: NamedArrays) -> jax.Array:
        read = mods.arrays_of("score_mod", program, operands | moving)
        of_heads = found.sign * mods.xla_array(found.values, indices, read)[:, :, 0, 0]
        return jnp.broadcast_to(of_heads, shape).astype(jnp.float32)

    made, pull = vjp(slopes, moving)
    results = dict(calls.kernel(for_(inner, operands | {"alibi_slopes": made})))
    if "alibi_slopes" in results:
        results |= pull(results.pop("alibi_slopes"))[0]
    return results


def _slopes(spec: AttentionSpec) -> AlibiSlopes | None:
    found = score_mod_form(spec)
    return None if found is None or found.soft_cap is not None else found.slopes


SCORE_MOD_AS_SLOPES = Rewrite(
    "score_mod: as alibi_slopes",
    _with_slopes,
    _compute_with_slopes,
    asked_of=MODS,
    adds=("alibi_slopes",),
    when=_is_alibi,
)
