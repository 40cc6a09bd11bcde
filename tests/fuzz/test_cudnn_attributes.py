"""Drawn attributes of cuDNN's custom calls are refused by name, or give the right sizes."""

from __future__ import annotations

import math

import jax
import pytest

from attn_dispatch.cudnn import arrays, rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices import native_libraries
from attn_dispatch_tools.verify import draws
from tests.fuzz.child import DRAWS, outcomes
from tests.support.backend import backward_spec, forward_spec, needs_cudnn
from tests.support.plan_cases import CASES

pytestmark = needs_cudnn

_PLAN_SECONDS = 60.0
"""The time limit of one of cuDNN's plans, on a busy machine."""


def test_drawn_attributes_are_refused_or_give_the_right_sizes():
    found = outcomes("tests.fuzz.cudnn_attributes", range(DRAWS or 240), seconds=_PLAN_SECONDS)
    assert found["taken"] > 40 and found["planned"] > 0
    assert len([x for x in found if x.startswith("refused: ")]) > 12, found
    print(dict(found.most_common()))


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sizes_of_buffers_are_those_of_the_arrays(direction: str):
    native = native_libraries.load(native_libraries.CUDA)
    specs = {label: case.spec(direction) for label, case in CASES.items()}
    # Drawn calls also have lengths that are multiples of no tile.
    drawn = {x.name: x for x in draws.examples(80, 7) if direction == "forward" or not x.inference}
    specs |= {
        name: forward_spec(x) if direction == "forward" else backward_spec(x)
        for name, x in drawn.items()
    }
    seen = 0
    for label, spec in specs.items():
        if rules.not_supported_reasons(spec):
            continue
        call = variants_of(spec)[seen % len(variants_of(spec))]
        operands, results = native.buffers(vars(call))
        avals = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.operands}
        pass_operands = (
            arrays.backward_operands if direction == "backward" else arrays.forward_operands
        )
        passed = jax.eval_shape(
            lambda xs, pass_operands=pass_operands, s=spec, c=call: pass_operands(s, c, xs), avals
        )
        shapes = arrays.backward_shapes if direction == "backward" else arrays.forward_shapes
        assert [size for _, size in operands] == [_bytes(x) for x in passed], label
        assert dict(results) == {name: _bytes(x) for name, x in shapes(call).items()}, label
        seen += 1
    assert seen > 60
