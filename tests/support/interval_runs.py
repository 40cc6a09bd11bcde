"""FlashAttention-4's compiled kernels under any mask, with their results judged by formulas.

A mask is rows [1|B, T, 4] (interval_masks.py), or dense, bool [1|B, 1|N, T, S], which kernels take
as bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.fa4 import interval_calls
from attn_dispatch.fa4.interval_calls import Change
from tests.support import bits
from tests.support import interval_attention as attention
from tests.support import interval_masks as intervals
from tests.support.interval_attention import Check, Inputs, Results, ScoreMod

Operands = tuple[Any, intervals.Lists, intervals.Lists]
"""A mask as kernels read it, and the lists of the forward and of the backward pass."""


def seen_by(mask: np.ndarray, keys: int) -> np.ndarray:
    """The pairs that the mask lets through, bool [1|B, 1|N, T, S]."""
    return mask if mask.dtype == bool else intervals.dense(mask, keys)[:, None]


def mask_operands(mask: np.ndarray, inputs: Inputs, variant: str = "") -> Operands:
    """What the kernels that run these inputs read of a mask."""
    seen = seen_by(mask, inputs.key.shape[1])
    which = (inputs.query, inputs.value, "sm90", variant)
    forward = interval_calls.forward_set(*which).forward_tiles
    backward = interval_calls.backward_set(*which).backward_tiles
    data = bits.packed(mask) if mask.dtype == bool else mask
    return data, _lists(seen, forward, by_keys=False), _lists(seen, backward, by_keys=True)


def _lists(seen: np.ndarray, tile: tuple[int, int], *, by_keys: bool) -> intervals.Lists:
    made = intervals.lists(seen.reshape(-1, *seen.shape[2:]), *tile, by_keys=by_keys)
    a, b, c, d = (x.reshape(*seen.shape[:2], *x.shape[2:]) for x in made)
    return a, b, c, d


def results(
    inputs: Inputs,
    operands: Operands,
    scale: float,
    variant: str = "",
    arrays: tuple[jax.Array, ...] = (),
) -> Results:
    """What the kernels compute, or those of a variant, which read `arrays`."""
    data, forward_lists, backward_lists = jax.tree.map(jnp.asarray, operands)
    q, k, v, change = inputs.query, inputs.key, inputs.value, Change(variant, arrays)
    out, lse = interval_calls.forward(
        q, k, v, data, forward_lists, scale, change=change, sinks=inputs.sinks
    )
    *gradients, products = interval_calls.backward(
        q, k, v, out, lse, inputs.out_grad, inputs.lse_grad, data, backward_lists, scale,
        change=change,
    )  # fmt: skip
    if inputs.sinks is not None:
        gradients.append(attention.sinks_grad(inputs.sinks, lse, -products))
    return out, lse, *gradients


def checks(
    inputs: Inputs,
    mask: np.ndarray,
    got: Results,
    scale: float,
    mod: ScoreMod | None = None,
    mod_in_16_bits: ScoreMod | None = None,
) -> list[Check]:
    """A check of every result. `mod_in_16_bits` is the mod as kernels compute it, if they do it
    less exactly."""
    seen = jnp.asarray(seen_by(mask, inputs.key.shape[1]))
    plain = attention.computed(inputs, seen, scale, is_exact=False, mod=mod_in_16_bits or mod)
    exact = attention.computed(inputs, seen, scale, is_exact=True, mod=mod)
    rounded = attention.lost_by_rounding(inputs, got[0], exact[0])
    gradients = attention.computed(rounded, seen, scale, is_exact=True, mod=mod)[2:]
    return attention.checks(got, (*exact[:2], *gradients), plain)
