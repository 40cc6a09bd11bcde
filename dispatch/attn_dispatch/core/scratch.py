"""How much scratch memory a call may take, and in which parts it takes no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.in_parts import in_parts_of, length_of, most_heads
from attn_dispatch.core.rewrites.rewrite import Axis, Rewrite
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.memory import memory_bytes

Scratch = Callable[[AttentionSpec], int | None]
"""The scratch memory of a call in bytes; None of a call that a kernel does not run."""

LEAST, MOST = 64, 16
"""The default limit is at least the one and at most the other of these parts of a device's memory.
"""

_USUAL = 1.25
_LITTLE_MORE = 1.25
_TRIES = 8
_MOST_LOOKED_AT = 4096


@dataclass(frozen=True)
class Limit:
    bytes: int
    why: str
    """What it comes from, for `explain`."""
    is_strict: bool
    """Whether a call that takes more in the smallest parts does not run."""


def limit_of(spec: AttentionSpec, device: Device, xla_bytes: Callable[[], int]) -> Limit | None:
    """The limit on the scratch memory of a call; None: there is none.

    Args:
      xla_bytes: what XLA takes for the same call.
    """
    given = settings.current().scratch_limit
    if given == settings.OFF:
        return None
    if isinstance(given, int):
        return Limit(given, "scratch_limit", is_strict=True)
    memory = memory_bytes(device)
    if isinstance(given, float):
        return Limit(
            int(given * memory), f"{100 * given:.3g}% of the device's memory", is_strict=True
        )
    bounds = {
        f"1/{MOST} of the device's memory": memory // MOST,
        f"{_USUAL:g} times what kernels without scores in memory take": int(
            _USUAL * usual_bytes(spec)
        ),
    }
    least = memory // LEAST
    # Of an ordinary call XLA need not be asked: the others are below the least already.
    if min(bounds.values()) > least:
        bounds["what XLA takes"] = xla_bytes()
    why, limit = min(bounds.items(), key=lambda x: x[1])
    if limit < least:
        why, limit = f"1/{LEAST} of the device's memory", least
    return Limit(limit, why, is_strict=False)


def usual_bytes(spec: AttentionSpec) -> int:
    """Scratch of fused kernels that grows as the arrays do: backward a float32 gradient of query,
    gradients of key and value for each query head, and two numbers for each row."""
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
    """The largest parts in which a call that a kernel runs takes no more than the limit.

    () where it takes no more as it is. If the smallest take more, those that take little more than
    they do; under a strict limit, which refuses the call then, the smallest.
    """
    steps, taken = _divided(spec, scratch_of, limit)
    if steps and taken > limit and not is_strict:
        steps, _ = _divided(spec, scratch_of, int(_LITTLE_MORE * taken))
    return steps


def _divided(
    spec: AttentionSpec, scratch_of: Scratch, limit: int
) -> tuple[tuple[Rewrite, ...], int]:
    """Parts within the limit, or the smallest that help, and the scratch of the call in them."""
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
    """What is divided first.

    Parts of the batch are slices that follow one another in memory. But if batch rows share the
    gradient of a bias that heads do not, each part of the batch would add up all of it: at batch
    64, 2,048 tokens and 32 heads of 64, 16 parts of the batch took 1.20 of the time of the whole,
    and 16 parts of the heads 1.04 (H200, cuDNN 9.19, both passes).
    """
    if "bias" in spec.wanted.gradients:
        batch, heads, rows, _ = spec.shape("bias")
        if batch < spec.batch and heads > 1 and rows > 1:
            return "heads", "batch"
    return "batch", "heads"


def _largest(
    spec: AttentionSpec, axis: Axis, scratch_of: Scratch, limit: int, whole: int
) -> tuple[Rewrite, int] | None:
    """The largest parts along an axis within the limit, with their scratch, else the smallest."""
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
    """The size of the smallest parts of which no two share a gradient that not all of them share.

    Smaller ones may take more: they keep all of that gradient, in float32.
    """
    if axis == "heads":
        return spec.num_heads // spec.num_kv_heads
    entries = (x.shape[0] for x in spec.operands if x.shape[0] > 1)
    return max((spec.batch // x for x in entries), default=1)


def _runs(spec: AttentionSpec, step: Rewrite, scratch_of: Scratch) -> int | None:
    """The scratch of a call in these parts, if a kernel runs all of them."""
    if step.applied(spec) is None:
        return None
    rest = step.beside(spec)
    if rest is not None and scratch_of(rest) is None:
        return None
    return parts_bytes(spec, (step,), scratch_of)


def _below(spec: AttentionSpec, axis: Axis, most: int) -> int:
    """The size of a part, at most so many and at least 1: one that divides the axis if it is large
    enough, else, of a batch, parts as equal as they can be."""
    whole = length_of(spec, axis)
    most = min(max(most, 1), whole)
    if axis == "heads":
        return most_heads(spec, most)
    least = max(most // 2, most - _MOST_LOOKED_AT, 1)
    divisor = next((x for x in range(most, least - 1, -1) if whole % x == 0), None)
    return divisor or -(-whole // -(-whole // most))
