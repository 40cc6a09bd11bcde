"""Cases of arrays in other orders of memory: calls of every kind of the other tables, reordered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attn_dispatch_tools.verify.case import Case

_ORDERS = ("q kv", "q", "kv")
_OF_A_KIND = 9
"""Of each table the first case and every ninth after it."""
_OF_PAGES = 11


def reordered(tables: Iterable[tuple[Case, ...]]) -> tuple[Case, ...]:
    """Some cases of each table, in each order in turn; every other one of pages in one pool."""
    found = []
    for table in tables:
        apart = [x for x in table if not x.page][::_OF_A_KIND]
        paged = [x for x in table if x.page][::_OF_PAGES]
        for number, case in enumerate((*apart, *paged)):
            order = _ORDERS[number % len(_ORDERS)]
            name = f"layouts/{case.name.replace('/', '_')}_{order.replace(' ', '_')}"
            is_one_pool = case.page > 0 and case.h == case.v and number % 2 == 0
            found.append(replace(case, name=name, heads_first=order, one_pool=is_one_pool))
    return tuple(found)
