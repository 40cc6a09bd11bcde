"""What came of one case."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["passed", "refused", "failed", "crashed"]


@dataclass(frozen=True)
class Outcome:
    """Whether an implementation does one case right, and everything measured on the way."""

    case: str
    family: str
    status: Status = "passed"
    failures: tuple[str, ...] = ()
    """A sentence for everything that is wrong."""
    reasons: tuple[str, ...] = ()
    """Refused: why the implementation cannot run the forward call."""
    backward: str = ""
    """The implementation that computed the gradients; empty where there are none."""
    refused_gradients: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Why it does not compute these gradients itself."""
    rules: dict[str, str] = field(default_factory=dict)
    """The rule of each of those sentences, of which cases differ in numbers (`Reason`)."""
    engines: dict[str, str] = field(default_factory=dict)
    """By direction, what `implementation.plan` says will run."""
    rewrites: tuple[str, ...] = ()
    """What was done to its calls before the kernel ran them (core/rewrites)."""
    errors: dict[str, float] = field(default_factory=dict)
    """By result, the largest error against the float64 reference."""
    allowances: dict[str, float] = field(default_factory=dict)
    """By result, the largest error it may have."""
    seconds: float = 0.0
    call: dict[str, Any] = field(default_factory=dict)
    """The case as JSON, of one that is not in the table."""

    @property
    def used(self) -> float:
        """The largest share of its allowance that an error takes; above 1 is wrong."""
        return max((x / self.allowances[name] for name, x in self.errors.items()), default=0.0)

    def failed(self, *failures: str) -> Outcome:
        """The same with these failures as well; with none it stays what it is."""
        if not failures:
            return self
        return replace(self, status="failed", failures=(*self.failures, *failures))

    def to_json(self) -> dict[str, Any]:
        """The fields that say something."""
        facts = asdict(self)
        # JSON knows no infinity: that is the error where a NaN is.
        facts["errors"] = {x: y if math.isfinite(y) else str(y) for x, y in self.errors.items()}
        return {name: x for name, x in facts.items() if x or name in ("case", "family", "status")}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> Outcome:
        """The outcome with these fields, as JSON has them."""
        facts = dict(facts)
        for name in ("failures", "reasons", "rewrites"):
            facts[name] = tuple(facts.get(name, ()))
        facts["errors"] = {x: float(y) for x, y in facts.get("errors", {}).items()}
        refused = facts.get("refused_gradients", {})
        facts["refused_gradients"] = {name: tuple(x) for name, x in refused.items()}
        return Outcome(**facts)
