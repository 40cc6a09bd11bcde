"""The reasons to show for a call that does not run: those against its nearest form.

Rewrites remove reasons, and may bring others, against a call that the user never made. Such a
reason is listed with those that were removed, and a note names the rewrites. If a rewrite would
help but its array over pairs of queries and keys is too large, a note has the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import REWRITES, Chain, Reasons
from attn_dispatch.core.rewrites.rewrite import MAX_PAIR_ENTRIES, Shape, is_affordable
from attn_dispatch.reason import Reason, rules_of


def reasons_to_read(
    chain: Chain, reasons: tuple[Reason, ...], reasons_against: Reasons
) -> tuple[Reason, ...]:
    """The reasons against the nearest form of a call.

    Args:
      chain: the rewrites of the call, which end with reasons.
      reasons: the reasons against the call as it is.
      reasons_against: returns why the implementation does not run a call.
    """
    number, left = chain.nearest
    if not left:
        # Some form of the call had no reasons, but dropout requires further rewrites: take the
        # reasons after those.
        number, left = len(chain.steps), chain.reasons
    taken = chain.steps[:number]
    spec = chain.after(number)
    known: dict[str, str] = {}
    for rewrite, outer in taken:
        known |= rewrite.remedies(outer)
    too_large = dict(_too_large(spec, left, reasons_against))
    is_new = any(reason not in reasons for reason in left)
    found = [x for x in reasons if is_new and x.rule not in rules_of(left)]
    for reason in left:
        if reason not in reasons:
            names = ", then ".join(dict.fromkeys(rewrite.name for rewrite, _ in taken))
            reason = replace(reason, remedy=known.get(reason.rule, ""))
            reason = reason.where(f"of the call as rewritten: {names}", ("rewritten", names))
        if reason.rule in too_large:
            reason = _with_size(reason, too_large[reason.rule])
        found.append(reason)
    return tuple(found)


def _too_large(
    spec: AttentionSpec, left: tuple[Reason, ...], reasons_against: Reasons
) -> Iterator[tuple[str, Shape]]:
    """The rules that a rewrite would remove if its array over pairs were smaller, each with the
    shape of that array."""
    for rewrite in reversed(REWRITES):
        if (shape := rewrite.too_large(spec)) is not None:
            gone = rules_of(left) - rules_of(reasons_against(rewrite.inner(spec)))
            yield from ((rule, shape) for rule in gone)


def _with_size(reason: Reason, shape: Shape) -> Reason:
    entries = math.prod(shape)
    note = (
        f"as an array over pairs it would be {list(shape)}, {entries:,} entries; the limit is "
        f"{MAX_PAIR_ENTRIES:,}"
    )
    in_parts = shape[0] > 1 and is_affordable((1, *shape[1:]))
    remedy = "make calls for a part of the batch each" if in_parts else ""
    reason = replace(reason, remedy=reason.remedy or remedy)
    return reason.where(note, ("entries", entries), ("limit", MAX_PAIR_ENTRIES))
