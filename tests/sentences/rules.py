"""Rules by which calls do not run: names, and sentences with the names of facts in braces"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_dispatch import xla
from attn_dispatch.aiter import asm_rules, call_rules
from attn_dispatch.aiter import rules as aiter
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.call import conventions
from attn_dispatch.core import eligibility, sharding_warnings
from attn_dispatch.core.context import strategies, whole_rows
from attn_dispatch.cudnn import rules as cudnn
from attn_dispatch.fa4 import rules as fa4
from attn_dispatch.fa4 import tangent_calls, wide_calls
from attn_dispatch.flash import rules as flash
from attn_dispatch.reason import Rule
from attn_dispatch.semantics import common_rules

V0_1_15 = Release("v0.1.15", (0, 1, 15))


def rules(table: Iterable[Rule[Any]]) -> str:
    """The rules of a table, one a line."""
    lines = []
    for rule in table:
        remedy = rule.remedy if isinstance(rule.remedy, str) else "one that fits the call"
        lines.append(f"{rule.name}: {rule.text}" + f" (remedy: {remedy})" * bool(remedy))
    return "\n".join(lines)


def warnings_of(table: tuple[Rule[Any], ...]) -> str:
    """Rules whose sentence goes on in the remedy."""
    ends = (x.remedy if isinstance(x.remedy, str) else "; {what fits the call}" for x in table)
    return "\n".join(f"{x.name}: {x.text}{end}" for x, end in zip(table, ends, strict=True))


def rules_in(module: Any) -> str:
    """The rules that a module names one by one."""
    return rules(x for x in vars(module).values() if isinstance(x, Rule))


ROWS = """
# any implementation
rules_in(common_rules)
rules_in(eligibility)

# cudnn
rules(cudnn._RULES)
rules(cudnn._VARIANT_RULES)

# flash
rules(flash._RULES)
rules(flash._WRONG_CORNER)

# fa4
rules(fa4.RULES)
rules_in(fa4)
rules_in(tangent_calls)
rules_in(wide_calls)

# aiter
rules(call_rules.CALL_RULES)
rules(aiter.CK_RULES)
rules(aiter.SPLIT_RULES)
rules(asm_rules.rules_of(DEV18))
rules(asm_rules.rules_of(V0_1_15))

# xla
rules(xla._RULES)

# strategies for sequences that several devices share
rules(strategies.HEADS)
rules(strategies.STRATEGIES["gather"])
rules(strategies.STRATEGIES["ring"])
rules(strategies.STRATEGIES["halo"])
rules(whole_rows._RULES)

# warnings: what a call costs on a mesh, and arrays in an order that is not meant
rules(sharding_warnings._RULES)
warnings_of(conventions._RULES)
"""
