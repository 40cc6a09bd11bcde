"""Small damage to real inputs: changed bytes, or changed parts of a JSON value."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "µ", "\ud800", "\x1b[2J", "a\nb", "0", "x" * 1000,
    [], {}, [[]], [0], {"": 0}, [None] * 50,
)  # fmt: skip
"""Values that replace an expected one."""


def damaged(random: Random, content: bytes) -> bytes:
    """The content with one to three changes: flipped, removed, repeated or foreign bytes."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(len(changed) + 1)
        end = min(len(changed), at + random.choice((1, 1, 2, 10, 100, len(changed))))
        kind = random.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del changed[at:end]
        elif kind == 2:
            changed[at:at] = changed[at:end]
        elif kind == 3:
            changed[at:at] = random.randbytes(random.choice((1, 4, 64)))
        elif kind == 4:
            changed[at:at] = random.choice((b"[", b"{", b"]", b"}", b'"', b",", b"\0", b"\xff"))
        else:
            changed[at:at] = b"[" * random.choice((10, 1000, 100_000))
    return bytes(changed)


def altered(random: Random, value: Any) -> Any:  # noqa: C901  a branch for each change
    """A copy of a JSON value in which one or two parts are changed or removed."""
    changed = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2))):
        places = _places(changed)
        if not places:
            return random.choice(VALUES)
        holder, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[random.choice(("", "x", "format", "µ"))] = holder.pop(key)
        elif kind == 1:
            holder.insert(key, holder[key])
        elif kind == 2:
            other, name = random.choice(places)
            if not (isinstance(other, list) and name >= len(other)) and _has(other, name):
                holder[key] = copy.deepcopy(other[name])
        elif kind == 3 and isinstance(holder[key], int | float):
            with suppress(OverflowError):  # an integer that no float holds
                holder[key] = random.choice((-1, 2, 0.1, 1000)) * holder[key]
        elif kind == 4:
            holder[key] = [holder[key]]
        elif kind == 5 and isinstance(holder[key], str) and holder[key]:
            at = random.randrange(len(holder[key]))
            holder[key] = holder[key][:at] + random.choice("[],0x9 \0") + holder[key][at + 1 :]
        else:
            # A copy, since the next change may alter it.
            holder[key] = copy.deepcopy(random.choice(VALUES))
    return changed


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else True


def _places(value: Any) -> list[tuple[Any, Any]]:
    """The (list or dict, index or key) of every part of a value."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        holder = level.pop()
        if isinstance(holder, list | dict):
            keys = range(len(holder)) if isinstance(holder, list) else list(holder)
            found += [(holder, key) for key in keys]
            level += [holder[key] for key in keys]
    return found


def json_text(random: Random, value: Any) -> bytes:
    """The value as JSON, altered or damaged four times in five."""
    kind = random.randrange(5)
    if kind in (1, 2, 3):
        value = altered(random, value)
    content = json.dumps(value, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")
    return damaged(random, content) if kind == 4 else content
