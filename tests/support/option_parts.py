"""Options of calls by the names of facts alone, whichever part of `AttentionOptions` has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from attn_dispatch.call.options import AttentionOptions, Meaning
from attn_dispatch.call.spec import AttentionSpec

PARTS = ("meaning", "wanted", "promises")


def with_facts(options: AttentionOptions, **facts: Any) -> AttentionOptions:
    """The options with other facts; those that no part has are of the options themselves."""
    for name in PARTS:
        part = getattr(options, name)
        own = {x.name: facts.pop(x.name) for x in fields(part) if x.name in facts}
        options = replace(options, **{name: replace(part, **own)})
    return replace(options, **facts)


def options_with(operands: Iterable[str], *, scale: float = 1.0, **facts: Any) -> AttentionOptions:
    """The options of a call with these operands."""
    return with_facts(AttentionOptions(tuple(operands), Meaning(scale)), **facts)


def spec_with(spec: AttentionSpec, **facts: Any) -> AttentionSpec:
    """The same call with other facts."""
    return replace(spec, options=with_facts(spec.options, **facts))
