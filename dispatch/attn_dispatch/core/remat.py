"""`jax.checkpoint` in its new form (`jax_remat3`): what a policy saves of a call.

The new form looks at a program before it is differentiated. For each primitive it asks a rule for
the results, and for a way to have them again in the backward pass. If the policy saves the name
"context", attn_fwd runs once and returns its lse too, and attn_saved stands for it in the backward
pass: its results are those that were saved, and its derivative is that of attn_fwd. Otherwise
attn_fwd runs again, as JAX does it with primitives that have no rule; but arrays of the mask are
not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from attn_dispatch.call.options import AttentionOptions, both_options
from attn_dispatch.core import jax_compat
from attn_dispatch.core.batching import batch_known
from attn_dispatch.core.derivatives import SAVED_NAME, Tangents, along_tangents, moving_operands
from attn_dispatch.core.formulas import Arrays
from attn_dispatch.core.jax_compat import Context, MlirValues, ad, batching, mlir
from attn_dispatch.core.made_once import made_once_p
from attn_dispatch.core.mask_arrays import backward_arrays
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.typed_jax import bind

X = TypeVar("X")

Saved = tuple[Sequence[jax.Array], Sequence[jax.Array]]
"""What follows the operands of the backward call (mask_arrays.py), and the results; no results if
the policy does not save them."""


def make_saveable(forward: Primitive) -> None:
    """Give attn_fwd its rule, and the arrays of masks theirs."""
    jax_compat.set_remat_rule(forward, partial(_split, forward))
    jax_compat.set_remat_rule(made_once_p, _split_made_once)


def _split(
    primitive: Primitive,
    policy: jax_compat.RematPolicy | None,
    *arrays: jax.Array,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> jax_compat.Split:
    params = {"options": options, "tiles": tiles}
    # The name stands for out and lse. Some policies save by primitive: everything_saveable.
    saving = jax_compat.saving_by(policy, jax_compat.name_p, arrays[:1], {"name": SAVED_NAME})
    saving = saving or jax_compat.saving_by(policy, primitive, arrays, params)
    if "page_table" in options.operands or (saving is None and tiles is None):
        compute = partial(bind, primitive, **params)
        return compute(*arrays), (), partial(_recomputed, compute)
    # Which operands have tangents is not known yet.
    moving, needs_lse = options.differentiable, options.wanted.needs_lse
    forward, _ = both_options(options, moving, has_lse_grad=needs_lse)
    compute = partial(bind, primitive, options=forward, tiles=tiles)
    known, count = compute(*arrays), len(options.operands)
    further: Sequence[jax.Array] = ()
    if tiles is not None:
        further = backward_arrays(options, arrays[:count], arrays[count:], tiles)

    def again(saved: Saved, *arrays: jax.Array) -> list[jax.Array]:
        further, known = saved
        if saving is None:
            known = compute(*map(jax.lax.stop_gradient, arrays))
        else:
            known = [*map(saving.back, known)]
        operands = arrays[:count]
        return bind(attn_saved_p, *operands, *further, *known, count=len(known), **params)

    kept = () if saving is None else [*map(saving.away, known)]
    return _without_lse(options, known), (further, kept), again


def _split_made_once(
    policy: jax_compat.RematPolicy | None, *arrays: jax.Array, maker: object
) -> jax_compat.Split:
    """They are saved whatever the policy, as made_once.py has it for the other form."""
    del policy
    made = bind(made_once_p, *arrays, maker=maker)
    return made, made, _as_saved


def _recomputed(
    compute: Callable[..., list[jax.Array]], saved: object, *arrays: jax.Array
) -> list[jax.Array]:
    del saved
    return compute(*arrays)


def _as_saved(saved: list[jax.Array], *arrays: jax.Array) -> list[jax.Array]:
    del arrays
    return saved


def _without_lse(options: AttentionOptions, known: Sequence[X]) -> list[X]:
    """The results of a call, from those of the same call that also returns lse."""
    return [x for i, x in enumerate(known) if i != 1 or options.wanted.needs_lse]


def _types(
    *avals: ShapedArray, options: AttentionOptions, count: int, tiles: PlanTiles | None = None
) -> list[ShapedArray]:
    del tiles
    return _without_lse(options, avals[-count:])


def _jvp(
    arrays: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
    count: int,
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, Tangents]:
    """The saved results, whose tangents are those of a call of these operands."""
    number = len(options.operands)
    operands, further, known = arrays[:number], arrays[number:-count], arrays[-count:]
    along = moving_operands(options, tangents[:number])
    if options.meaning.dropout_rate:
        # The forward pass was chosen for the gradients of all; another choice drops other pairs.
        by_name = dict(zip(options.operands, tangents, strict=False))
        along = {x: _instantiated(by_name[x]) for x in options.differentiable}
    return along_tangents(options, operands, further, known, along, tiles)


def _instantiated(tangent: object) -> jax.Array:
    return cast("Callable[[object], jax.Array]", ad.instantiate_zeros)(tangent)


def _batch(
    arrays: Arrays,
    dims: Sequence[int | None],
    *,
    options: AttentionOptions,
    count: int,
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, list[int]]:
    bound = partial(bind, attn_saved_p, options=options, count=count, tiles=tiles)
    return batch_known(bound, arrays, dims, options, count)


def _lower(
    ctx: Context,
    *arrays: object,
    options: AttentionOptions,
    count: int,
    tiles: PlanTiles | None = None,
) -> MlirValues:
    del ctx, tiles
    return _without_lse(options, arrays[-count:])


def _make_primitive() -> Primitive:
    """The primitive attn_saved, from the operands of attn_fwd, what follows those of attn_bwd
    (mask_arrays.py), and the `count` results of the call that returns lse."""
    primitive = Primitive("attn_saved")
    primitive.multiple_results = True
    jax_compat.run_eagerly(primitive)
    primitive.def_abstract_eval(_types)
    ad.primitive_jvps[primitive] = _jvp
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, _lower)
    return primitive


attn_saved_p = _make_primitive()
