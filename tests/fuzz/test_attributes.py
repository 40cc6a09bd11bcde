"""Attributes of custom calls as they are before any is drawn wrong, which are accepted."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from attn_dispatch import aiter
from attn_dispatch.cudnn import arrays, rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices import native_libraries
from attn_dispatch_tools.verify import draws
from tests.fuzz import aiter_calls
from tests.fuzz import hostile_attributes as hostile
from tests.support.backend import backward_spec, forward_spec, needs_cudnn
from tests.support.plan_cases import CASES


def test_a_16_bit_accumulator_needs_a_head_dim_that_fits_its_rows():
    """A row has 128 columns, or 192 for head dim 192."""
    shapes = (2, 64, 4), (2, 4, 64)
    attributes = {
        "arch": "gfx950", "generation": "dev18", "max_seq_len_q": 64, "max_seq_len_kv": 64,
        "has_gaps": False,
        "scale": 0.125, "logits_soft_cap": 0.0, "dropout_rate": 0.0, "mask": "none",
        "window_left": -1, "window_right": -1, "bias": "none", "use_asm": True,
        "bf16_rounding": 0, "needs_lse": False, "accumulator": "atomic_16",
        "deterministic": False, "has_dbias": False, "is_paged": False, "heads_first_kv": False,
        "value_page": 0, "num_splits": 1,
    }  # fmt: skip
    half, full = np.dtype(np.float16), np.dtype(np.float32)
    for dim in range(8, 257, 8):
        rows, per_row = ((*shapes[0], dim), half), (shapes[1], full)
        dq_acc = ((*shapes[1], 192 if dim == 192 else 128), half)
        call = aiter_calls.Drawn(
            aiter.BACKWARD_TARGET, attributes, (*[rows] * 4, per_row, rows),
            (*[rows] * 3, per_row, dq_acc),
        )  # fmt: skip
        sentence, struct = aiter_calls._prepared(call)
        if dim > 128 and dim != 192:
            expected = "head dim of q: expected at most 128, or 192, with accumulator atomic_16"
            assert sentence == f"{expected}, got {dim}"
        else:
            assert not sentence
            aiter_calls._check_inside(call, struct)


@needs_cudnn
def test_the_sets_before_their_change_are_accepted():
    """A change to a wrong set would prove nothing."""
    native = native_libraries.load(native_libraries.CUDA)
    for name in ("FORWARD", "BACKWARD", "LENGTHS", "PACKED", "PACKED_BACKWARD", "PAGED", "BIASED"):
        assert native.buffers(getattr(hostile, name)), name
    assert native.buffers(hostile.MODDED) and native.buffers(hostile.MODDED_BACKWARD)


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


@needs_cudnn
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
