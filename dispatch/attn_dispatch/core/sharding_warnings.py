"""Warnings, once each, about calls of which devices compute more than their share."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import call_warnings
from attn_dispatch.core.mesh_axes import name_of
from attn_dispatch.warning import AttentionShardingWarning, warn_once


def warn_unsplit(spec: AttentionSpec, axes: tuple[tuple[str, int], ...]) -> None:
    """Warn that these mesh axes, each with its number of devices, do not split the call."""
    if axes:
        devices: dict[str, int] = {}
        for axis, size in axes:
            devices[name_of(axis)] = devices.get(name_of(axis), 1) * size
        named = ", ".join(f"{name!r} ({size} devices)" for name, size in devices.items())
        warn_once(
            f"attention is split along batch and heads alone: query is sharded along {named}, and "
            f"neither its {spec.num_heads} heads nor its batch of {spec.batch} divide further. The "
            "arrays are gathered, and devices along that axis compute the same\n"
            f"  call: {spec}",
            AttentionShardingWarning,
            call_warnings.line_of(spec.options),
        )


def warn_left_to_xla(spec: AttentionSpec, *, is_export: bool) -> None:
    """Warn that XLA alone splits a call, which is exported or lowered for devices elsewhere."""
    how = (
        "is exported from a program sharded along Auto mesh axes: how to split the call cannot be "
        "put into the export."
        if is_export
        else "is lowered for more devices than this process has, along Auto mesh axes: how to "
        "split the call cannot be put into the program."
    )
    warn_once(
        f"attention {how} XLA splits it in its own way, and gathers the operands of GPU kernels; "
        "with Explicit axes, or inside a shard_map, each device keeps its share\n"
        f"  call: {spec}",
        AttentionShardingWarning,
        call_warnings.line_of(spec.options),
    )
