"""How a spec is said in cuDNN's terms."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import cudnn_rules, lse_grad
from attn_dispatch.conformance.sizes import BOTTOM_RIGHT, CAUSAL, Packed, case
from attn_dispatch.cudnn_call import Band, CudnnCall, band_of, calls_of, dead_rows
from backend import backward_spec, forward_spec

SPEC_H = Path(__file__).parents[1] / "cuda_backend" / "spec.h"


def spec(**facts: Any) -> Any:
    return forward_spec(case("call", **facts))


def test_attributes_are_those_of_the_library():
    text = SPEC_H.read_text()
    names = re.findall(r"(?:FIRST|FIELD)\(\w+, (\w+)\)", text[text.index("FIRST(bool") :])
    assert names[: len(fields(CudnnCall))] == [field.name for field in fields(CudnnCall)]


def test_variants():
    plain, padded, packed = calls_of(spec())
    assert (plain.has_lengths, plain.is_packed) == (False, False)
    assert (padded.has_lengths, padded.is_packed) == (True, False)
    assert (packed.has_lengths, packed.is_packed) == (True, True)
    assert packed.packed_rows_q == packed.batch * packed.seq_len_q


def test_lengths_go_packed_first():
    packed, padded = calls_of(spec(q_lengths=(1, 0.5), kv_lengths=(0.5, 1)))
    assert packed.is_packed and not padded.is_packed and padded.has_lengths
    assert packed.clears_rows and padded.clears_rows


def test_segments_count_as_sequences():
    ids = Packed((((1, 0.5), (2, 0.25)), ((1, 0.25),)))
    (call,) = calls_of(spec(packed=ids, max_segments=5))
    assert (call.batch, call.packed_rows_q, call.seq_len_q) == (2 * 5, 2 * 256, 256)


def test_one_query_is_never_declared_packed():
    *_, packed = calls_of(spec(t=1))
    assert (packed.seq_len_q, packed.packed_rows_q) == (2, 2)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Band(-1, -1, bottom_right=False, offset=0)),
        (CAUSAL, Band(-1, 0, bottom_right=False, offset=0)),
        ({"window": (3, 2**40)}, Band(3, -1, bottom_right=False, offset=0)),
        (BOTTOM_RIGHT, Band(-1, 0, bottom_right=False, offset=0)),  # as many queries as keys
        ({"t": 128, **BOTTOM_RIGHT}, Band(-1, 0, bottom_right=True, offset=0)),
        ({"t": 128, "bias": "11ts", **BOTTOM_RIGHT}, Band(-1, 128, False, 128)),
        ({"t": 128, "alibi": 1, "alignment": "bottom_right"}, Band(-1, -1, False, 128)),
        ({"t": 128, "dropout": 0.1, "window": (200, 4), "alignment": "bottom_right"},
         Band(72, 132, False, 128)),
        # The window begins right of the first key: nothing from the top left says that.
        ({"t": 128, "dropout": 0.1, "window": (20, 4), "alignment": "bottom_right"}, None),
        ({"bias": "11ts", "q_lengths": (1, 0.5), **BOTTOM_RIGHT}, None),
    ],
)  # fmt: skip
def test_band(facts: dict[str, Any], expected: Band | None):
    assert band_of(spec(**facts)) == expected


def test_dead_rows_are_cut_off():
    trimmed = spec(t=320, s=192, **BOTTOM_RIGHT)
    assert dead_rows(trimmed) == 128
    assert calls_of(trimmed)[0].seq_len_q == 192
    assert dead_rows(spec(t=320, s=192, **CAUSAL)) == 0


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": "float32"}, "needs float16 or bfloat16"),
        ({"sinks": 2}, "sinks: cuDNN has one"),
        ({"alibi": 2}, "alibi_slopes: cuDNN has one"),
        ({"dropout": 0.1, "dropout_keys": 2}, "dropout: cuDNN has one key"),
        ({"packed": Packed((((1, 1.0),),) * 2)}, "pass max_segments"),
        ({"packed": Packed((((1, 1.0),),) * 2), "max_segments": 1, "bias": "11ts"}, "packed"),
        ({"bias": "11ts", "q_lengths": (1, 0.5), **BOTTOM_RIGHT}, "no such bottom-right mask"),
    ],
)
def test_rules(facts: dict[str, Any], reason: str):
    (got,) = cudnn_rules.not_supported_reasons(spec(**facts))
    assert reason in got


def test_rules_of_the_backward_pass():
    slopes = cudnn_rules.not_supported_reasons(backward_spec(case("call", alibi=1)))
    assert slopes == ("the gradient of alibi_slopes",)
    (keys,) = cudnn_rules.not_supported_reasons(backward_spec(case("call", bias="11t1")))
    assert "same for all keys" in keys
    assert cudnn_rules.not_supported_reasons(backward_spec(case("call", sinks=2))) == ()


def test_backward_needs_no_sinks():
    assert calls_of(spec(sinks=1))[0].has_sinks
    assert not calls_of(backward_spec(case("call", sinks=1)))[0].has_sinks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_parts_of_the_gradient_of_lse(dtype: str, size: float):
    rng = np.random.default_rng(0)
    grad = (size * rng.standard_normal((2, 3, 5))).astype(np.float32)
    out = jnp.zeros((2, 5, 3, 4), dtype)
    outs, grads = jax.jit(lse_grad.with_lse_grad)(out, out, jnp.zeros_like(grad), grad)
    assert outs.shape == (2, 5, 3, 4 + lse_grad.COLUMNS)
    columns = (np.asarray(x[..., 4:], np.float64) for x in (outs, grads))
    delta = np.prod(list(columns), axis=0).sum(axis=-1)
    # To float32's accuracy, and where that is less than float16's smallest normal part, to that.
    np.testing.assert_allclose(-delta.swapaxes(1, 2), grad, rtol=2**-22, atol=2.0**-28)


def test_no_gradient_of_lse_where_nothing_is_attended():
    lse = jnp.full((1, 1, 2), -jnp.inf)
    out = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    _, grads = lse_grad.with_lse_grad(out, out, lse, jnp.full_like(lse, jnp.nan))
    assert not np.asarray(grads[..., 8:], np.float32).any()
