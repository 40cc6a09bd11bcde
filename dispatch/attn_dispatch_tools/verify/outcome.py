"""The outcome of one case."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["passed", "refused", "failed", "crashed"]


@dataclass(frozen=True)
class Outcome:
    """Whether an implementation computes one case correctly, and what was measured."""

    case: str
    family: str
    status: Status = "passed"
    failures: tuple[str, ...] = ()
    """One sentence for each error."""
    reasons: tuple[str, ...] = ()
    """If refused: why the implementation cannot run the forward call."""
    backward: str = ""
    """The implementation that computed the gradients; empty if there are none."""
    refused_gradients: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The reasons against each refused gradient. If only all together are refused: {"a/b/c": …}."""
    rules: tuple[str, ...] = ()
    """The rule of each of `reasons`; empty in old results."""
    gradient_rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The rules of `refused_gradients`, by the same keys."""
    engines: dict[str, str] = field(default_factory=dict)
    """By direction, the engine of `implementation.plan`."""
    rewrites: tuple[str, ...] = ()
    """The rewrites by which its calls reached the kernel (core/rewrites)."""
    errors: dict[str, float] = field(default_factory=dict)
    """By result, the largest error against the float64 reference."""
    allowances: dict[str, float] = field(default_factory=dict)
    """By result, the largest error that is allowed."""
    seconds: float = 0.0
    call: dict[str, Any] = field(default_factory=dict)
    """The case as JSON, if it is not in the table."""

    @property
    def used(self) -> float:
        """The largest ratio of an error to its allowance; above 1 is wrong."""
        return max((x / self.allowances[name] for name, x in self.errors.items()), default=0.0)

    def failed(self, *failures: str) -> Outcome:
        """The outcome with these failures added; unchanged if there are none."""
        if not failures:
            return self
        return replace(self, status="failed", failures=(*self.failures, *failures))

    def to_json(self) -> dict[str, Any]:
        """The fields that are not empty."""
        facts = asdict(self)
        # JSON has no infinity, which is the error where there is a NaN.
        facts["errors"] = {x: y if math.isfinite(y) else str(y) for x, y in self.errors.items()}
        return {name: x for name, x in facts.items() if x or name in ("case", "family", "status")}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> Outcome:
        """The outcome with these fields, as JSON has them."""
        facts = dict(facts)
        for name in ("failures", "reasons", "rules", "rewrites"):
            facts[name] = tuple(facts.get(name, ()))
        facts["errors"] = {x: float(y) for x, y in facts.get("errors", {}).items()}
        for name in ("refused_gradients", "gradient_rules"):
            facts[name] = {names: tuple(x) for names, x in facts.get(name, {}).items()}
        return Outcome(**facts)
