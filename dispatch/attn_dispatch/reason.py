"""Why an implementation does not run a call, as data: rules in tables, and what they say of a call.

Code compares reasons by rule, and by the facts that decided where a rule is not enough. The
sentence and the remedy are for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

Facts = tuple[tuple[str, Any], ...]
_Call = TypeVar("_Call")


@dataclass(frozen=True)
class Reason:
    """What speaks against one call. Two are equal if their rule and their facts are."""

    rule: str
    """Its name, which stays from version to version: "dtype", "aiter/page_size"."""
    facts: Facts = ()
    """Names and values, hashable, of what decided in this call."""
    text: str = field(default="", compare=False)
    """A sentence for people."""
    remedy: str = field(default="", compare=False)
    """What the caller can do about it in this very call; "" if that is not known."""

    def __str__(self) -> str:
        return self.text

    @property
    def with_remedy(self) -> str:
        """The sentence, and what can be done about it where that is known."""
        return f"{self.text} (remedy: {self.remedy})" if self.remedy else self.text

    def where(self, note: str, **facts: Any) -> Reason:
        """The same reason of another call than the one that was made, which the note names."""
        text = f"{self.text} ({note})"
        return replace(self, facts=(*self.facts, *facts.items()), text=text)


def reason_from_sentence(source: str, sentence: str) -> Reason:
    """A reason of which there is only a sentence, from a library or package.

    Its rule is the sentence without its numbers, so that another number is not another rule.
    """
    words = "".join("#" if x.isdigit() else x for x in sentence)
    while "##" in words:
        words = words.replace("##", "#")
    return Reason(f"{source}: {words}", (("sentence", sentence),), sentence)


def rules_of(reasons: Iterable[Reason]) -> frozenset[str]:
    """The rules that a call breaks."""
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
    """With the names of facts in braces."""
    remedy: str | Callable[[_Call], str] = ""
    """The same for all calls that break the rule, or what is true for this one."""
    facts: Callable[[_Call], Mapping[str, Any]] = lambda call: {}
    """What decided, by name."""

    def reason(self, call: _Call) -> Reason:
        """What the rule says of a call that breaks it."""
        facts = self.facts(call)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(call)
        return Reason(self.name, tuple(facts.items()), self.text.format(**facts), remedy)


def broken(rules: Iterable[Rule[_Call]], call: _Call) -> tuple[Reason, ...]:
    """What each of the rules says that the call breaks."""
    return tuple(rule.reason(call) for rule in rules if rule.applies(call))
