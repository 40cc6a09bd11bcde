"""The class of a wrong implementation, and the `Call` that its mistake receives.

A wrong implementation has the interface of every implementation: forward(spec, device, operands)
and backward(spec, device, operands). Its mistake is a function from a `Call` to results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from attn_dispatch import xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.devices.device import Device
from attn_dispatch_tools.verify.case import Case
from tests.support.option_parts import with_facts

Array = jax.Array
Results = dict[str, Array]
Needs = Callable[[Case], Any]


@dataclass(frozen=True)
class Call:
    """One attention call as an implementation receives it, and its right results."""

    spec: AttentionSpec
    device: Device
    operands: Mapping[str, Array]

    @property
    def is_backward(self) -> bool:
        return self.spec.is_backward

    def right(self, changed: Mapping[str, Array | None] | None = None, **options: Any) -> Results:
        """The right results, by name, for the call with these operands and options changed.

        Operands that are changed to None are left out.
        """
        operands = {**self.operands, **(changed or {})}
        operands = {name: x for name, x in operands.items() if x is not None}
        facts = with_facts(self.spec.options, operands=tuple(operands), **options)
        spec = AttentionSpec.of(list(operands.values()), facts)
        compute = xla.backward if spec.is_backward else xla.forward
        return dict(zip(spec.result_names, compute(spec, self.device, operands), strict=True))

    def __getitem__(self, name: str) -> Array:
        return self.operands[name]

    def __contains__(self, name: str) -> bool:
        return name in self.operands

    @property
    def options(self) -> Any:
        return self.spec.options


@dataclass
class Wrong:
    """A wrong implementation, which `select` treats like every other while it is `installed`."""

    name: str
    """"group/mistake"; also the implementation's name."""
    description: str
    """The mistake in one sentence."""
    needs: Needs
    """Tells in which cases the mistake can show; other cases are not worth compiling."""
    mistake: Callable[[Call], Results]
    directions: tuple[str, ...]
    calls: int = field(default=0)
    """The number of calls in which the mistake was made."""

    PLATFORM = None

    @property
    def NAME(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        return getattr(xla, name)  # it differs from XLA in its results alone

    def forward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        return self._compute("forward", Call(spec, device, operands))

    def backward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        return self._compute("backward", Call(spec, device, operands))

    def applies_to(self, case: Case) -> bool:
        """True if the mistake can show in this case."""
        if self.directions == ("backward",) and case.inference:
            return False
        if case.page and not self.name.startswith("serving/"):
            return False  # other mistakes read `key` and `value`, which paged calls do not have
        return bool(self.needs(case))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Add it to the implementations, for as long as the context lasts.

        Every call that asks for it has its name in the options, and no other implementation has
        that name: JAX never takes a result that it cached for another call.
        """
        others = select.IMPLEMENTATIONS
        select.IMPLEMENTATIONS = (*others, self)
        try:
            yield
        finally:
            select.IMPLEMENTATIONS = others

    def _compute(self, direction: str, call: Call) -> tuple[Array, ...]:
        spec = call.spec
        if direction not in self.directions or spec.is_empty:
            results = call.right()
        else:
            self.calls += 1
            results = self.mistake(call)
        found = zip(spec.result_names, spec.results, strict=True)
        return tuple(results[name].reshape(x.shape).astype(x.dtype) for name, x in found)


REGISTERED: dict[str, Wrong] = {}
"""Every wrong implementation in the modules imported so far, by name."""

_BOTH = ("forward", "backward")

Mistake = Callable[[Call], Results]


def wrong(needs: Needs, *directions: str) -> Callable[[Mistake], Mistake]:
    """Register a function as a wrong implementation, described by its docstring.

    The module is its group. Without `directions` the mistake is made in both; a direction that is
    not among them is computed by the right implementation.
    """

    def register(mistake: Mistake) -> Mistake:
        group = mistake.__module__.rpartition(".")[2]
        name = f"{group}/{mistake.__name__}"
        assert name not in REGISTERED and mistake.__doc__
        REGISTERED[name] = Wrong(name, mistake.__doc__, needs, mistake, directions or _BOTH)
        return mistake

    return register
