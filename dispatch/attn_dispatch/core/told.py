"""Which fallbacks have been told of, and where calls were made: for one warning at that line.

JAX lowers a call, which is when it is known to fall back, long after it was traced, and its forward
and backward pass apart.
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

_MOST = 4096

_told: dict[object, None] = {}
_lock = Lock()


def has_been(spec: AttentionSpec, device: Device, refused: Refusals) -> bool:
    """Whether these reasons against the call, in its direction, have been told."""
    return all(key in _told for key in _keys(spec, device, refused, of_backward=spec.is_backward))


def remember(spec: AttentionSpec, device: Device, refused: Refusals, of_backward: Refusals) -> None:
    """The call's reasons are being told, and with them those of its backward pass."""
    keys = _keys(spec, device, refused, of_backward=spec.is_backward)
    keys += _keys(spec, device, of_backward, of_backward=True)
    with _lock:
        _told.update(dict.fromkeys(keys))
        for key in list(_told)[:-_MOST]:
            del _told[key]


def forget() -> None:
    """Everything is told again."""
    _told.clear()
    _lines.clear()


def _keys(
    spec: AttentionSpec, device: Device, refused: Refusals, *, of_backward: bool
) -> list[object]:
    call = _forward_of(spec)
    return [
        (call, device, of_backward, name, reason)
        for name, reasons in refused.items()
        for reason in reasons
    ]


def _forward_of(spec: AttentionSpec) -> AttentionSpec:
    """The forward call that a call is or belongs to, whatever it returns."""
    options = _forward_options(spec.options)
    return AttentionSpec(options, spec.operands[: len(options.operands)])


@lru_cache(maxsize=_MOST)
def _forward_options(options: AttentionOptions) -> AttentionOptions:
    return options.forward


_lines: dict[AttentionOptions, Line] = {}


def called_here(options: AttentionOptions) -> None:
    """A call is being made at this line of the program; it is lowered later, from elsewhere."""
    if line := caller():
        with _lock:
            if len(_lines) >= _MOST:
                _lines.clear()
            _lines[_forward_options(options)] = line


def line_of(options: AttentionOptions) -> Line | None:
    """Where the latest call with these options was made, or the one they are the backward of."""
    return _lines.get(_forward_options(options))
