"""The limit on a call's scratch memory, and the parts in which a call stays within it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.in_parts import in_parts_of, length_of, most_heads
from attn_dispatch.core.rewrites.rewrite import Axis, Rewrite
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.memory import memory_bytes
from attn_dispatch.environment import OFF

Scratch = Callable[[AttentionSpec], int | None]
"""The scratch memory of a call in bytes; None for a call that the kernel does not run."""

MIN_LIMIT_DIVISOR, MAX_LIMIT_DIVISOR = 64, 16
"""The default limit is between 1/64 and 1/16 of the device's memory."""

_USUAL_FACTOR = 1.25
_LITTLE_MORE_FACTOR = 1.25
_TRIES = 8
_MAX_SIZES_TRIED = 4096


@dataclass(frozen=True)
class Limit:
    bytes: int
    why: str
    """Where the limit comes from, for `explain`."""
    is_strict: bool
    """Whether a call is refused that takes more even in the smallest parts."""


def is_strict() -> bool:
    """Whether the caller has set a limit, so that calls are refused that take more."""
    return isinstance(settings.current().scratch_limit, int | float)


def limit_of(spec: AttentionSpec, device: Device, xla_bytes: Callable[[], int]) -> Limit | None:
    """The limit on the scratch memory of a call; None if there is none.

    Args:
      xla_bytes: returns the scratch memory that XLA takes for the same call.
    """
    given = settings.current().scratch_limit
    if given == OFF:
        return None
    if isinstance(given, int):
        return Limit(given, "scratch_limit", is_strict=True)
    memory = memory_bytes(device)
    if isinstance(given, float):
        return Limit(
            int(given * memory), f"{100 * given:.3g}% of the device's memory", is_strict=True
        )
    bounds = {
        f"1/{MAX_LIMIT_DIVISOR} of the device's memory": memory // MAX_LIMIT_DIVISOR,
        f"{_USUAL_FACTOR:g} times what kernels without scores in memory take": int(
            _USUAL_FACTOR * usual_bytes(spec)
        ),
    }
    least = memory // MIN_LIMIT_DIVISOR
    # Planning XLA takes time. If another bound is below `least` already, `least` holds in any case.
    if min(bounds.values()) > least:
        bounds["what XLA takes"] = xla_bytes()
    why, limit = min(bounds.items(), key=lambda x: x[1])
    if limit < least:
        why, limit = f"1/{MIN_LIMIT_DIVISOR} of the device's memory", least
    return Limit(limit, why, is_strict=False)


def usual_bytes(spec: AttentionSpec) -> int:
    """The scratch memory of fused kernels, which grows with the arrays, in bytes.

    Forward: two numbers for each row. Backward: those, a float32 gradient of query, and gradients
    of key and value for each query head.
    """
    rows = spec.batch * spec.seq_len_q * spec.num_heads
    if not spec.is_backward:
        return 8 * rows
    keys = spec.batch * spec.seq_len_kv * spec.num_heads
    grouped = spec.num_heads != spec.num_kv_heads
    of_keys = 2 * keys * (spec.head_dim + spec.head_dim_v) if grouped else 0
    return 4 * rows * (spec.head_dim + 2) + of_keys


def parts_within(
    spec: AttentionSpec, scratch_of: Scratch, limit: int, *, is_strict: bool = False
) -> tuple[Rewrite, ...]:
    """The largest parts in which a call that a kernel runs stays within the limit.

    () if the whole call does. If no parts do: under a strict limit, which then refuses the call,
    the smallest; else the largest that take at most 1.25 times as much as the smallest.
    """
    steps, taken = _divided(spec, scratch_of, limit)
    if steps and taken > limit and not is_strict:
        steps, _ = _divided(spec, scratch_of, int(_LITTLE_MORE_FACTOR * taken))
    return steps


def _divided(
    spec: AttentionSpec, scratch_of: Scratch, limit: int
) -> tuple[tuple[Rewrite, ...], int]:
    """Parts within the limit, or the smallest that help, and the scratch memory in those parts."""
    found: list[Rewrite] = []
    inner, taken = spec, scratch_of(spec) or 0
    for axis in _axes(spec):
        if taken <= limit:
            break
        held = (parts_bytes(spec, tuple(found), scratch_of) or 0) - (scratch_of(inner) or 0)
        best = _largest(inner, axis, scratch_of, limit - held, taken - held)
        if best is not None:
            found.append(best[0])
            inner, taken = best[0].applied(inner) or inner, best[1] + held
    return tuple(found), taken


def parts_bytes(spec: AttentionSpec, steps: tuple[Rewrite, ...], scratch_of: Scratch) -> int | None:
    """The scratch memory of a call in these parts."""
    if not steps:
        return scratch_of(spec)
    first, *others = steps
    inner = first.applied(spec)
    of_part = None if inner is None else parts_bytes(inner, tuple(others), scratch_of)
    return None if of_part is None else first.own_bytes(spec) + of_part


def _axes(spec: AttentionSpec) -> tuple[Axis, Axis]:
    """The axes in the order in which they are divided.

    Parts of the batch are contiguous slices. But if batch rows share the gradient of a bias that
    heads do not, each part of the batch would add up all of it: at batch 64, 2,048 tokens and 32
    heads of 64, 16 parts of the batch took 1.20 of the time of the whole, and 16 parts of the heads
    1.04 (H200, cuDNN 9.19, both passes).
    """
    if "bias" in spec.wanted.gradients:
        batch, heads, rows, _ = spec.shape("bias")
        if batch < spec.batch and heads > 1 and rows > 1:
            return "heads", "batch"
    return "batch", "heads"


def _largest(
    spec: AttentionSpec, axis: Axis, scratch_of: Scratch, limit: int, whole: int
) -> tuple[Rewrite, int] | None:
    """The largest parts along an axis within the limit, else the smallest; with their scratch."""
    size, taken, unshared = length_of(spec, axis), whole, _unshared(spec, axis)
    best: tuple[Rewrite, int] | None = None
    for _ in range(_TRIES):
        smaller = min(size - 1, int(size * limit / max(taken, 1)))
        if smaller < unshared < size:
            smaller = unshared
        size = _below(spec, axis, smaller)
        if size < 1:
            break
        step = in_parts_of(axis, size)
        found = _runs(spec, step, scratch_of)
        if found is not None and found < (best[1] if best else whole):
            best = step, found
            if found <= limit:
                break
        if found is not None:
            taken = found
        if size == 1:
            break
    return best


def _unshared(spec: AttentionSpec, axis: Axis) -> int:
    """The size of the smallest parts that share a gradient with all other parts or with none.

    Smaller parts may take more memory: each keeps the whole shared gradient, in float32.
    """
    if axis == "heads":
        return spec.num_heads // spec.num_kv_heads
    entries = (x.shape[0] for x in spec.operands if x.shape[0] > 1)
    return max((spec.batch // x for x in entries), default=1)


def _runs(spec: AttentionSpec, step: Rewrite, scratch_of: Scratch) -> int | None:
    """The scratch memory of a call in these parts; None unless a kernel runs all of them."""
    if step.applied(spec) is None:
        return None
    rest = step.beside(spec)
    if rest is not None and scratch_of(rest) is None:
        return None
    return parts_bytes(spec, (step,), scratch_of)


def _below(spec: AttentionSpec, axis: Axis, most: int) -> int:
    """The size of a part, from 1 to `most`. It divides the axis if such a size is large enough;
    otherwise the parts of a batch are as equal as possible."""
    whole = length_of(spec, axis)
    most = min(max(most, 1), whole)
    if axis == "heads":
        return most_heads(spec, most)
    least = max(most // 2, most - _MAX_SIZES_TRIED, 1)
    divisor = next((x for x in range(most, least - 1, -1) if whole % x == 0), None)
    return divisor or -(-whole // -(-whole // most))
