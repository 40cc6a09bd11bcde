"""What is known about a call if nothing here can plan it.

cuDNN decides itself which calls it runs. Where its planner is missing, a device that is not here is
not known to run a call, nor known not to, unless the call breaks a rule of this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.nearest import reasons_to_read
from attn_dispatch.core.rewrites import Terms, rewritten
from attn_dispatch.devices.implementation import is_about_planner
from attn_dispatch.reason import Reason


def is_unknown(reasons: Iterable[Reason]) -> bool:
    """Whether the call that these reasons are against may run once the planner is here."""
    return any(map(is_about_planner, reasons))


def certain_reasons(
    spec: AttentionSpec, reasons: tuple[Reason, ...], terms: Terms | None
) -> tuple[Reason, ...]:
    """The reasons that hold whatever a missing planner would say, or else that it is missing.

    A planner is asked only about calls that break no rule. So the search for rewrites takes the
    same steps without it, up to the first call that it would be asked about.

    Args:
      spec: the call.
      reasons: those against the call as it is.
      terms: the terms of the search; None if the call may not be rewritten.
    """

    def against(spec: AttentionSpec) -> tuple[Reason, ...]:
        return _certain(() if terms is None else terms.reasons_against(spec))

    certain = _certain(reasons)
    if certain and terms is not None:
        chain = rewritten(spec, replace(terms, reasons_against=against))
        certain = reasons_to_read(chain, certain, against) if chain.reasons else ()
    return certain or tuple(filter(is_about_planner, reasons))


def _certain(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    return tuple(reason for reason in reasons if not is_about_planner(reason))
