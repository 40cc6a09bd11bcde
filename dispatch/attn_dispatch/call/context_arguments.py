"""The arguments of a call in a shard_map that say how its sequences are spread over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import jax

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.context import Context, SequenceOrder
from attn_dispatch.choices import check_choice, did_you_mean

_ORDERS_ELSEWHERE = {"loadbalanced": "zigzag", "dualchunkswap": "zigzag"}
"""By what other libraries say, the name of an order here."""


def spread_of(arguments: Arguments) -> Context | None:
    """How the call's sequences are spread; None if each device has whole sequences.

    Raises:
      ValueError: context_axis is not a manual axis of a surrounding shard_map, or there is another
        order, or rows in zigzag order are odd, or there are documents without ids.
    """
    a = arguments
    order: SequenceOrder = check_choice(
        "sequence_order", a.sequence_order, get_args(SequenceOrder), _ORDERS_ELSEWHERE
    )
    if a.context_axis is None:
        if order != "contiguous":
            raise ValueError(
                f"sequence_order: expected context_axis with {order!r}, got None; under jax.jit "
                "alone, sequences stay in order: leave sequence_order out"
            )
        return None
    given = a.context_axis
    if not isinstance(given, str | Sequence):
        raise ValueError(f"context_axis: expected names of mesh axes, got {given!r}")
    axes = (given,) if isinstance(given, str) else tuple(given)
    devices = _devices(axes)
    for name, x in (("query", a.query), ("key", a.key)):
        length = x.shape[-3] if isinstance(x, jax.Array) else 0
        if order == "zigzag" and length % 2:
            raise ValueError(
                f"{name}: expected an even length on each device for zigzag order, got {length}"
            )
    if order == "documents" and a.query_segment_ids is None:
        raise ValueError("sequence_order: expected query_segment_ids with 'documents', got None")
    return Context(axes, devices, order)


def _devices(axes: Sequence[str]) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(getattr(mesh, "manual_axes", ()))
    if not manual:
        raise ValueError(
            f"context_axis: expected a call inside jax.shard_map, got {tuple(axes)} outside one; "
            "either make the call in a jax.shard_map over this axis, or leave context_axis out and "
            "shard query, key and value along the sequence"
        )
    unknown = [axis for axis in axes if axis not in manual]
    if unknown or not axes or len({*axes}) != len(axes):
        hint = did_you_mean(unknown[0], manual) if unknown else ""
        raise ValueError(
            "context_axis: expected different axes of the surrounding jax.shard_map, which are "
            f"{manual}, got {tuple(axes)}{hint}"
        )
    # JAX numbers the devices of a permute in the order of the mesh.
    in_order = tuple(x for x in mesh.axis_names if x in axes)
    if in_order != tuple(axes):
        raise ValueError(
            f"context_axis: expected axes in the order of the mesh, {in_order}, got {tuple(axes)}"
        )
    return jax.lax.axis_size(tuple(axes))
