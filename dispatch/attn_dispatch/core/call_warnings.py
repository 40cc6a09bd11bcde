"""Which fallback warnings were given, and at which line of the program each call was made.

A fallback becomes known when JAX lowers the call, long after the line that made it, and separately
for the forward and the backward pass. With these records the user gets one warning, at that line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from threading import Lock

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.reason import Reason
from attn_dispatch.warning import Line, caller

Refusals = Mapping[str, tuple[Reason, ...]]
"""Reasons by implementation."""

_MAX_ENTRIES = 4096

_given: dict[object, None] = {}
_lock = Lock()


def were_given(spec: AttentionSpec, device: Device, refused: Refusals) -> bool:
    """Whether a warning has given all these reasons against the call, in its direction."""
    return all(key in _given for key in _keys(spec, device, refused, of_backward=spec.is_backward))


def mark_given(
    spec: AttentionSpec, device: Device, refused: Refusals, of_backward: Refusals
) -> None:
    """Record that a warning gives the call's reasons, and those of its backward pass."""
    keys = _keys(spec, device, refused, of_backward=spec.is_backward)
    keys += _keys(spec, device, of_backward, of_backward=True)
    with _lock:
        _given.update(dict.fromkeys(keys))
        for key in list(_given)[:-_MAX_ENTRIES]:
            del _given[key]


def forget() -> None:
    """Give every warning again."""
    _given.clear()
    _lines.clear()


def _keys(
    spec: AttentionSpec, device: Device, refused: Refusals, *, of_backward: bool
) -> list[object]:
    call = forward_of(spec)
    return [
        (call, device, of_backward, name, reason)
        for name, reasons in refused.items()
        for reason in reasons
    ]


def forward_of(spec: AttentionSpec) -> AttentionSpec:
    """The forward call that a call is or belongs to, whatever it returns."""
    options = _forward_options(spec.options)
    return AttentionSpec(options, spec.operands[: len(options.operands)])


@lru_cache(maxsize=_MAX_ENTRIES)
def _forward_options(options: AttentionOptions) -> AttentionOptions:
    return options.forward


_lines: dict[AttentionOptions, Line] = {}


def note_line(options: AttentionOptions) -> None:
    """Record the line of the program that makes this call, before it is lowered from elsewhere."""
    if line := caller():
        with _lock:
            if len(_lines) >= _MAX_ENTRIES:
                _lines.clear()
            _lines[_forward_options(options)] = line


def line_of(options: AttentionOptions) -> Line | None:
    """The line that made the latest call with these options, or with their forward options."""
    return _lines.get(_forward_options(options))
