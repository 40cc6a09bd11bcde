"""Options of calls by the names of facts, whichever part of `AttentionOptions` holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from attn_dispatch.call.options import AttentionOptions, Meaning
from attn_dispatch.call.spec import AttentionSpec

PARTS = ("meaning", "wanted", "promises")


def with_facts(options: AttentionOptions, **facts: Any) -> AttentionOptions:
    """The options with these facts changed, each in the part that has it."""
    for name in PARTS:
        part = getattr(options, name)
        changes = {x.name: facts.pop(x.name) for x in fields(part) if x.name in facts}
        options = replace(options, **{name: replace(part, **changes)})
    return replace(options, **facts)


def options_with(operands: Iterable[str], *, scale: float = 1.0, **facts: Any) -> AttentionOptions:
    """The options of a call with these operands and facts."""
    return with_facts(AttentionOptions(tuple(operands), Meaning(scale)), **facts)


def spec_with(spec: AttentionSpec, **facts: Any) -> AttentionSpec:
    """The spec with these facts changed."""
    return replace(spec, options=with_facts(spec.options, **facts))
