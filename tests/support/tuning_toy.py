"""A stand-in implementation with engines, for tests of tuning: XLA, with set times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import xla
from attn_dispatch.call.features import FEATURES
from attn_dispatch.core import select
from attn_dispatch.core.tuning import timing
from attn_dispatch.devices.from_packages import GROUP, FromPackage
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.inspection import spec_of

Q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 48, 4, 16)), jnp.float32)
SPEC = spec_of(query=Q, key=Q, value=Q, is_causal=True)

TIMES = {
    "toy": 100e-6,
    "toy 1": 90e-6,
    "toy 2": 80e-6,
    "toy 2 2": 70e-6,
    "toy wrong": 1e-6,
    "toy raises": 1e-6,
    "toy absent": 1e-6,
    "xla": 95e-6,
}

OTHER_ENGINES = {
    "": ("1", "2", "wrong", "raises", "absent"),
    "2": ("2 2", "1", "wrong"),
    "2 2": ("2",),
}
"""The other engines that the stand-in proposes, by engine."""


class Toy(ModuleType):
    """XLA's results under engine names: one gives wrong numbers, one fails, one does not exist."""

    NAME, PLATFORM, FEATURES = "toy", "cpu", FEATURES
    KEEPS_NAN_APART = True

    def __init__(self):
        super().__init__("toy_of_tests")
        self.ran: list[str] = []

    def not_supported_reasons(self, spec, device):
        return ("no such engine",) if spec.options.engine == "absent" else ()

    def plan(self, spec, device):
        return Plan(spec.options.engine or "default engine", 0)

    def other_engines(self, spec, device):
        return OTHER_ENGINES.get(spec.options.engine, ())

    def forward(self, spec, device, operands):
        return self._run(spec, xla.forward(spec, device, operands))

    def backward(self, spec, device, operands):
        return self._run(spec, xla.backward(spec, device, operands))

    def _run(self, spec, results):
        self.ran.append(spec.options.engine)
        if spec.options.engine == "raises":
            raise RuntimeError("out of luck\nand more")
        if spec.options.engine == "wrong":
            return tuple(x.at[0, 7].multiply(1.01) for x in results)
        return results


def installed_toy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Toy]:
    """The body of a fixture: the stand-in beside XLA, a clock that reads TIMES, a winners file."""
    module = Toy()
    monkeypatch.setitem(sys.modules, "toy_of_tests", module)
    extra = FromPackage.of(EntryPoint("toy", "toy_of_tests", GROUP))
    monkeypatch.setattr(select, "installed", lambda: (extra,))
    monkeypatch.setattr(timing, "seconds_per_call", lambda run, arrays, calls: TIMES[name_of(run)])
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(folder / "kept" / "winners.json"))
    jax.clear_caches()
    yield module
    jax.clear_caches()


def name_of(run) -> str:
    choice = run.__wrapped__.func.__self__
    return f"{choice.NAME} {choice.chain.spec.options.engine}".strip()
