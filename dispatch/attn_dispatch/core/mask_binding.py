"""When the arrays of a call's mask are bound beside its operands (mask_arrays.py)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device
from attn_dispatch.semantics import mask_data
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.typed_jax import array_type, is_tracer

_DIFFERENTIATED = ("query", "key", "value")


def tiles_to_bind(options: AttentionOptions, operands: Sequence[jax.Array]) -> PlanTiles | None:
    """The tiles in which arrays of the mask are bound; None if they are not.

    They are bound in a traced program, if they are intervals, where the device that calls are
    lowered for has kernels that take them. Bits are large, and those of heads would have to be
    split along these. Explicit mesh axes are part of types, and arrays of masks have none.
    """
    if not any(map(is_tracer, operands)) or options.meaning.context is not None:
        return None
    if any(AxisType.Explicit in array_type(x).sharding.mesh.axis_types for x in operands):
        return None
    device = default_device()
    if device.platform != "cuda":
        return None
    spec = LeadingCall.of(operands, options).spec
    if spec.symbols or mask_data.not_supported_reasons(spec) or not has_intervals(spec):
        return None
    directions = spec.in_training(_DIFFERENTIATED)
    forward, backward = (select.mask_tiles(x, device) for x in directions)
    if forward is None and backward is None:
        return None
    # Lists that nothing reads are not computed.
    either = forward or backward
    assert either is not None
    return PlanTiles(forward or either, backward or either)
