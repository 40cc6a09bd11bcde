"""The warning or error if no vendor's kernel runs a call on a GPU.

`attn_dispatch.fallback` decides between a warning, an error and silence. select.py has decided
before that XLA computes the call. call_warnings.py keeps which warnings were given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import call_warnings
from attn_dispatch.core.call_warnings import Refusals
from attn_dispatch.devices.device import Device
from attn_dispatch.warning import AttentionFallbackWarning, warn_once

__all__ = ["Fallback", "Refusals", "message", "warn_or_raise"]


@dataclass(frozen=True)
class Fallback:
    """A call that the implementation `to` computes, because no kernel does."""

    spec: AttentionSpec
    device: Device
    to: str
    refused: Refusals
    """The reasons of the implementations that were asked before."""
    is_certain: bool
    """False if the program decides when it runs."""
    how: str
    """What is unusual about the way `to` computes the call, as the end of the headline; else
    empty."""

    @property
    def headline(self) -> str:
        what = "attention"
        if self.spec.is_backward:
            what = "attention's backward pass"
        if self.spec.wanted.derivative is not None:
            what = f"attention's {self.spec.wanted.derivative}"
        headline = f"{what} falls back to {self.to}"
        if not self.is_certain:
            headline = f"{what} may fall back to {self.to}, which is decided when it runs"
        return f"{headline}, {self.how}" if self.how else headline

    @property
    def remedy(self) -> str:
        remedy = f'implementation="{self.to}" asks for it without a warning'
        is_derivative = self.spec.is_backward or self.spec.wanted.derivative is not None
        return (
            f"{remedy}; {self.to} then computes the call itself, too" if is_derivative else remedy
        )


def warn_or_raise(fallback: Fallback, backward_refusals: Callable[[], Refusals]) -> None:
    """Warn, raise or do nothing, as the policy says. A warning is given once for the same reasons.

    A sketch does nothing: its fallbacks are in the list that the user gets.

    Args:
      fallback: the call.
      backward_refusals: returns the reasons against the backward pass that follows; empty if a
        kernel runs it. The warning mentions them, too.

    Raises:
      NotImplementedError: if the policy is "error".
    """
    spec, device, refused = fallback.spec, fallback.device, fallback.refused
    now = settings.current()
    policy = "silent" if now.is_sketch else now.fallback
    if policy == "silent" or (policy == "warn" and call_warnings.were_given(spec, device, refused)):
        return
    text = message(fallback.headline, spec, device, refused)
    backward = backward_refusals()
    if any(backward.values()):
        text += "\n  and so does its backward pass"
        text += _reasons_text({x: y for x, y in backward.items() if y}, known=refused)
    if policy == "error":
        raise NotImplementedError(text)
    call_warnings.mark_given(spec, device, refused, backward)
    line = call_warnings.line_of(spec.options)
    warn_once(f"{text}\n  {fallback.remedy}", AttentionFallbackWarning, line)


def message(headline: str, spec: AttentionSpec, device: Device, refused: Refusals) -> str:
    """A headline, the call, the device, and every reason."""
    return f"{headline}\n  call: {spec}\n  device: {device}" + _reasons_text(refused)


def _reasons_text(refused: Refusals, known: Refusals | None = None) -> str:
    """A line for each reason that is not in `known`."""
    lines: list[str] = []
    for name, reasons in refused.items():
        given = (known or {}).get(name, ())
        lines.append(f"\n  {name}:")
        lines += [f"\n    - {reason.with_remedy}" for reason in reasons if reason not in given]
        if given and not set(reasons) - set(given):
            lines.append(" for the same reasons")
    return "".join(lines)
