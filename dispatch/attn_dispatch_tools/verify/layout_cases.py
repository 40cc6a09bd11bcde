"""Cases whose arrays are in other orders in memory, made from cases of all other tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attn_dispatch_tools.verify.case import Case

_ORDERS = ("q kv", "q", "kv")
_EVERY_UNPAGED = 9
"""The first case of each table is taken, and every ninth after it."""
_EVERY_PAGED = 11


def reordered(tables: Iterable[tuple[Case, ...]]) -> tuple[Case, ...]:
    """Some cases of each table; orders take turns, and every other paged case has one pool."""
    found = []
    for table in tables:
        unpaged = [x for x in table if not x.page][::_EVERY_UNPAGED]
        paged = [x for x in table if x.page][::_EVERY_PAGED]
        for number, case in enumerate((*unpaged, *paged)):
            order = _ORDERS[number % len(_ORDERS)]
            name = f"layouts/{case.name.replace('/', '_')}_{order.replace(' ', '_')}"
            is_one_pool = case.page > 0 and case.h == case.v and number % 2 == 0
            found.append(replace(case, name=name, heads_first=order, one_pool=is_one_pool))
    return tuple(found)
