"""The sets of a library, as the library itself names them to later builds.

They are text in the file, so that a library for any machine can be read on any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from attn_dispatch.text import counted
from attn_dispatch_tools.build_fa4.sets import SETS, KernelSet, Variant

_MARK = b"attn-dispatch build-fa4, sets: "
_MOST_NAMES = 4
"""The most names in a message."""


def source(sets: Iterable[KernelSet]) -> str:
    """The text as a variable in C."""
    listed = [(_plain(x), x.variant and asdict(x.variant)) for x in sets]
    # A text in JSON is one in C, as the inner JSON has no character beyond ASCII.
    text = json.dumps(_MARK.decode() + json.dumps(listed))
    return f"__attribute__((used)) static const char contents[] = {text};\n"


def read(library: Path) -> list[KernelSet] | None:
    """The sets that a library was built with, as this version of the tool makes them.

    Returns:
      None if the file does not say, or names sets that this version does not know. Without a file
      the list is empty.
    """
    if not library.is_file():
        return []
    _, mark, rest = library.read_bytes().partition(_MARK)
    try:
        listed = json.loads(rest.partition(b"\0")[0]) if mark else None
        return None if listed is None else [_set(*x) for x in listed]
    except (KeyError, TypeError, ValueError):
        return None  # another version's, or a file that was cut off


def _set(name: str, variant: dict[str, object] | None) -> KernelSet:
    return replace(SETS[name], variant=None if variant is None else Variant.from_json(variant))


def added(before: Sequence[KernelSet], sets: Sequence[KernelSet]) -> list[KernelSet]:
    """The sets before, and those that are not among them."""
    there = {x.name for x in before}
    return [*before, *(x for x in sets if x.name not in there)]


def title(sets: Sequence[KernelSet]) -> str:
    """The number of sets, in words."""
    with_mod = sum(x.variant is not None for x in sets)
    mods = f", {with_mod} of them with a score_mod" if with_mod else ""
    return counted(len(sets), "set") + mods


def replaced(before: Sequence[KernelSet] | None, after: Sequence[KernelSet]) -> str:
    """What is lost with the library before; "" if nothing is."""
    if before is None:
        return "It replaced a library whose sets cannot be read"
    lost = _lost(before, after)
    if not lost:
        return ""
    more = len(lost) - _MOST_NAMES
    names = ", ".join(lost[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return (
        f"It replaced a library of {title(before)}; no longer there: {names}. With --add they stay"
    )


def _lost(before: Iterable[KernelSet], after: Iterable[KernelSet]) -> list[str]:
    """The names of mods that are gone altogether, and of other sets that are."""
    there = {x.name for x in after}
    variants = {_digest(x) for x in after}
    gone = [x for x in before if x.name not in there]
    mods = dict.fromkeys(x.variant.name for x in gone if x.variant and _digest(x) not in variants)
    sets = (
        f"{_plain(x)} with {x.variant.name}" if x.variant else x.name
        for x in gone
        if not x.variant or _digest(x) in variants
    )
    return [*mods, *sets]


def _plain(kernels: KernelSet) -> str:
    """The set's name without its mod."""
    return replace(kernels, variant=None).name


def _digest(kernels: KernelSet) -> str:
    return "" if kernels.variant is None else kernels.variant.digest
