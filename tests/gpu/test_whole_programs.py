"""The lists of `explain_program` equal the optimized HLO of training steps compiled for this GPU.

Custom calls are compared with their attributes, their workspaces and the numbers of rounds of the
loops around them. The programs in plain JAX need nothing more; the others need flax and optax,
equinox, or keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from attn_dispatch import cudnn, explain_program
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.reports.environment import cuda_devices
from tests.support.model_programs import PROGRAMS
from tests.support.optimized_hlo import compiled, listed
from tests.support.present import present
from tests.support.program_lists import of_arrays


@pytest.fixture(autouse=True)
def on_cudnn(monkeypatch: pytest.MonkeyPatch):
    if reason := cudnn.unusable_reason(default_device()):
        pytest.skip(reason)
    monkeypatch.setattr(select, "is_installed", lambda extra: False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_list_equals_the_optimized_hlo(name: str, record: Callable[..., None]):
    maker, mesh = PROGRAMS[name], []
    for package in maker.packages:
        pytest.importorskip(package)
    if maker.is_on_mesh:
        devices = cuda_devices()[:2]
        auto = (AxisType.Auto,)
        mesh = [jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)]
    program = maker.make(*mesh)
    found = explain_program(program.step, *program.args)
    function, arrays = of_arrays(program.step, program.args)
    text: Any = present(jax.jit(function).lower(arrays).compile().as_text())
    expected = compiled(text)
    assert listed(found) == expected and found.fallbacks == () and found.others == ()
    runs = [
        sum(times for kernel, times in expected.items() if kernel.target == target)
        for target in (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)
    ]
    assert runs == [program.forward, program.backward]
    record(name=name, forward=runs[0], backward=runs[1], kernels=len(expected))
