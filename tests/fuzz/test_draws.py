"""Drawn inputs, most of them wrong: each is refused with a sentence, or gives what it should.

A target is a module of this folder, whose docstring says what it draws and what must hold. To add
one, write the module and its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from attn_dispatch_tools import cli
from tests.fuzz import aiter_calls, hostile_attributes
from tests.fuzz.child import DRAWS, outcomes
from tests.support import aiter_emulated
from tests.support.backend import needs_cudnn, needs_no_driver

_ON_CPU = {"JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True)
class Target:
    """How one module is run, and which outcomes show that its draws reach what they should."""

    draws: int
    """The number of draws in CI."""
    least: Mapping[str, int]
    """Outcomes, and how often each must come at least."""
    kinds: int = 0
    """The least number of different outcomes or, where inputs are refused by name, of refusals."""
    only: tuple[str, ...] = ()
    """All outcomes that may come; empty if others may, too."""
    seconds: float = 2.0
    """The time limit of a draw. Where cuDNN plans, a busy machine takes long."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], Any] = lambda: None
    """Run first, in this process: what takes longer than the time of a draw."""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    is_list: bool = False
    """Whether seeds are places in a list, which has no more of them in a longer run."""


TARGETS = {
    "aiter_calls": Target(
        250, {"ran": 25, "prepared, too large to run": 1}, kinds=15,
        prepare=aiter_calls.write_real_calls,
    ),
    "aiter_folders": Target(200, {"used as it is": 10}, kinds=5),
    "aiter_modules": Target(
        40, {"ran as it is": 6, "ran": 2}, kinds=6, seconds=60.0, environment=_ON_CPU,
        prepare=aiter_emulated.library,
    ),
    "call_notation": Target(
        400, dict.fromkeys(("explained", "explained as it is", "calls"), 11)
        | {"packed": 1, "ValueError": 1}, seconds=10.0,
    ),
    "command_lines": Target(
        250, {f"{x}: done": 1 for x in ("explain", "mask", "info", "completion", "verify")},
        seconds=60.0,
    ),
    "cudnn_attributes": Target(
        240, {"taken": 41, "planned": 1}, kinds=13, seconds=60.0, marks=(needs_cudnn,)
    ),
    "hostile_attributes": Target(
        len(hostile_attributes.HOSTILE), {"wrong call": 66}, only=("wrong call",), is_list=True,
        marks=(needs_cudnn,),
    ),
    # With a driver the library would plan for the device. Without one, it checks the attributes
    # at compilation, and no device runs the modules.
    "modules": Target(
        120, {"taken": 11}, kinds=13, seconds=60.0, environment=_ON_CPU,
        marks=(needs_cudnn, needs_no_driver),
    ),
    "plan_files": Target(
        300, {"read": 21, "built anew": 21}, only=("read", "built anew"), seconds=10.0
    ),
    "plan_lines": Target(
        200, dict.fromkeys((
            "the plan", "a damaged plan", "the plan of another call",
            "expected a plan as a line of JSON and digits", "the plan, from JSON written otherwise",
        ), 1), seconds=20.0, marks=(needs_cudnn,),
    ),
    "target_files": Target(
        300, dict.fromkeys(("refused", "as it is, taken", "altered, taken"), 21), seconds=20.0
    ),
    "winner_files": Target(
        300, dict.fromkeys(("found, kept", "not found, kept", "not found, not kept"), 11),
        only=("found, kept", "not found, kept", "not found, not kept", "found, not kept"),
        seconds=10.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(x, marks=y.marks) for x, y in TARGETS.items()])
def test_drawn_inputs_are_refused_or_give_what_they_should(name: str):
    target = TARGETS[name]
    target.prepare()
    draws = target.draws if target.is_list else DRAWS or target.draws
    found = outcomes(
        f"tests.fuzz.{name}", range(draws), seconds=target.seconds, environment=target.environment
    )
    report = dict(found.most_common())
    assert all(found[x] >= least for x, least in target.least.items()), report
    refusals = [x for x in found if x.startswith("refused: ")] or found
    assert len(refusals) >= target.kinds, report
    assert not target.only or found.keys() <= {*target.only}, report
    if name == "command_lines":
        for command in cli.names():
            assert found[f"{command}: usage"] + found[f"{command}: an error"] > 0, report
