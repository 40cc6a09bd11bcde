"""Why an implementation does not run a call, as data: tables of rules, and the reasons they give.

Code compares reasons by rule and, where that is not enough, by the facts that decided. The sentence
and the remedy are for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

Facts = tuple[tuple[str, object], ...]
_Call = TypeVar("_Call")


@dataclass(frozen=True)
class Reason:
    """A reason not to run one call. Two reasons are equal if their rules and facts are."""

    rule: str
    """The rule's name, stable from version to version: "dtype", "aiter/page_size"."""
    facts: Facts = ()
    """Names and values, hashable, of what decided in this call."""
    text: str = field(default="", compare=False)
    """A sentence for people."""
    remedy: str = field(default="", compare=False)
    """What the caller can do about this very call; "" if nothing is known."""

    def __str__(self) -> str:
        return self.text

    @property
    def with_remedy(self) -> str:
        """The sentence, with the remedy if there is one."""
        return f"{self.text} (remedy: {self.remedy})" if self.remedy else self.text

    def where(self, note: str, **facts: object) -> Reason:
        """The same reason for another form of the caller's call, which the note names."""
        text = f"{self.text} ({note})"
        return replace(self, facts=(*self.facts, *facts.items()), text=text)


def reason_from_sentence(source: str, sentence: str) -> Reason:
    """A reason that a library or package gives only as a sentence.

    The rule is the sentence without its numbers, so that another number is not another rule.
    """
    words = re.sub(r"\d+", "#", sentence)
    return Reason(f"{source}: {words}", (("sentence", sentence),), sentence)


def rules_of(reasons: Iterable[Reason]) -> frozenset[str]:
    """The rules of these reasons."""
    return frozenset(reason.rule for reason in reasons)


def sentences(reasons: Iterable[Reason], separator: str = "; ") -> str:
    """The reasons in one line."""
    return separator.join(map(str, reasons))


@dataclass(frozen=True)
class Rule(Generic[_Call]):
    """A row of a table: calls for which `applies` is true do not run."""

    name: str
    applies: Callable[[_Call], bool]
    text: str
    """The sentence, with names of facts in braces."""
    remedy: str | Callable[[_Call], str] = ""
    """One remedy for all calls that break the rule, or a function of the call."""
    facts: Callable[[_Call], Mapping[str, object]] = lambda call: {}
    """The facts that decide, by name."""

    def reason(self, call: _Call) -> Reason:
        """The reason for a call that breaks the rule."""
        facts = self.facts(call)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(call)
        return Reason(self.name, tuple(facts.items()), self.text.format(**facts), remedy)


def broken(rules: Iterable[Rule[_Call]], call: _Call) -> tuple[Reason, ...]:
    """The reasons of those rules that the call breaks."""
    return tuple(rule.reason(call) for rule in rules if rule.applies(call))
