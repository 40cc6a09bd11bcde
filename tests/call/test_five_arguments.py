"""Five arguments on their way from the public call to the custom call, as in docs/design.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import call_steps, cudnn, dot_product_attention, paged, paged_attention
from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.normal_form import Call
from attn_dispatch.call.operands import Operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn.call import CudnnCall
from tests.support.backend import needs_cudnn
from tests.support.cudnn_in_numpy import names_of
from tests.support.lowered import attributes_in, calls_in, lowered_for_cuda, printed_attributes

QUERY = jax.ShapeDtypeStruct((2, 4, 16, 64), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((2, 2, 16, 64), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((4,), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16)
PAGES = jax.ShapeDtypeStruct((9, 8, 2, 64), jnp.bfloat16)
TABLE = jax.ShapeDtypeStruct((2, 6), jnp.int16)
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


@dataclass
class Stops:
    """What every function on the way of one lowered call returned, or was given."""

    given: list[Arguments] = field(default_factory=list[Arguments])
    steps: list[Arguments] = field(default_factory=list[Arguments])
    calls: list[Call] = field(default_factory=list[Call])
    specs: list[AttentionSpec] = field(default_factory=list[AttentionSpec])
    kernel_calls: list[CudnnCall] = field(default_factory=list[CudnnCall])
    operands: dict[str, str] = field(default_factory=dict[str, str])
    """The types of the custom call's operands in the lowered text, by name."""
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    """The custom call's attributes in the lowered text."""

    def one_of_each(self) -> tuple[Arguments, Call, AttentionSpec, CudnnCall]:
        """The value at each stop that a call passes exactly once."""
        (given,), (call,), (spec,), (kernel,) = (
            self.given,
            self.calls,
            self.specs,
            self.kernel_calls,
        )
        return given, call, spec, kernel


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
    """Filled while a call is traced and lowered."""
    found = Stops()

    def record(module: ModuleType, name: str, results: list[object]) -> None:
        function = cast("Callable[..., object]", getattr(module, name))

        def recorded(*arguments: object) -> object:
            results.append(result := function(*arguments))
            return result

        monkeypatch.setattr(module, name, recorded)

    record(call_steps, "arguments_of", cast("list[object]", found.given))
    for module, name in (
        (paged, "separate_pages"), (paged, "with_cut_table"),
        (call_steps, "rows_first"), (call_steps, "with_number_as_scale"),
    ):  # fmt: skip
        record(module, name, cast("list[object]", found.steps))
    record(call_steps, "normalise", cast("list[object]", found.calls))
    operands_of = cudnn_arrays.forward_operands

    def forward_operands(
        spec: AttentionSpec, call: CudnnCall, operands: dict[str, jax.Array]
    ) -> list[jax.Array]:
        found.specs.append(spec)
        found.kernel_calls.append(call)
        return operands_of(spec, call, operands)

    monkeypatch.setattr(cudnn_arrays, "forward_operands", forward_operands)
    return found


def lower(stops: Stops, function: Callable[..., jax.Array], *arrays: jax.ShapeDtypeStruct) -> None:
    """Lower the call for an H100, and read its custom call from the text."""
    with attn_dispatch.target("sm90"):
        text = lowered_for_cuda(jax.jit(function), *arrays)
    kernel = stops.one_of_each()[-1]
    line, types, _ = calls_in(text)[cudnn.FORWARD_TARGET]
    stops.operands = dict(zip(names_of(kernel), types, strict=True))
    stops.attributes = attributes_in(line)
    assert stops.attributes == printed_attributes(kernel.attributes)


@needs_cudnn
def test_query_scale_causality_and_window_reach_the_custom_call(stops: Stops):
    lower(
        stops,
        lambda q, k, v: dot_product_attention(
            q, k, v, scale=0.5, is_causal=True, local_window_size=(3, None), qkv_layout="BNTH",
            implementation="cudnn",
        ),
        QUERY, KEY, KEY,
    )  # fmt: skip
    given, call, spec, kernel = stops.one_of_each()
    assert jnp.shape(given.query) == (2, 4, 16, 64) and given.qkv_layout == "BNTH"
    assert (given.scale, given.is_causal, given.local_window_size) == (0.5, True, (3, None))

    assert all(
        jnp.shape(step.query) == (2, 16, 4, 64) and step.heads_first_q for step in stops.steps
    )
    assert all(step.scale == 0.5 for step in stops.steps)

    meaning = call.options.meaning
    assert call.options.operands[0] == "query" and call.operands[0].shape == (2, 16, 4, 64)
    assert (meaning.scale, meaning.is_causal, meaning.window) == (0.5, True, (3, None))

    assert spec.operands[0] == Operand("query", (2, 16, 4, 64), "bfloat16")
    assert spec.meaning == meaning and spec.band == (3, 0)

    assert (kernel.batch, kernel.num_heads, kernel.seq_len_q, kernel.head_dim) == (2, 4, 16, 64)
    assert (kernel.scale, kernel.window_left, kernel.window_right) == (0.5, 3, 0)

    # cuDNN reads heads first in place: the operand has the axes of the caller's array.
    assert stops.operands["query"] == "2x4x16x64xbf16"
    of_the_call = {
        "scale": "5.000000e-01 : f32",
        "window_left": "3 : i64",
        "window_right": "0 : i64",
    }
    assert of_the_call.items() <= stops.attributes.items()


@needs_cudnn
def test_array_scale_is_multiplied_into_the_query(stops: Stops):
    lower(
        stops,
        lambda q, k, v, scale: dot_product_attention(
            q, k, v, scale=scale, qkv_layout="BNTH", implementation="cudnn"
        ),
        QUERY, KEY, KEY, HEADS,
    )  # fmt: skip
    given, _, spec, kernel = stops.one_of_each()
    assert jnp.shape(given.scale) == (4,)
    before, after = stops.steps
    assert before.scale is given.scale and after.scale is None
    assert after.query is not before.query and jnp.shape(after.query) == (2, 16, 4, 64)
    assert spec.meaning.scale == kernel.scale == 1 / 8
    assert stops.attributes["scale"] == "1.250000e-01 : f32"


@needs_cudnn
def test_page_table_reaches_the_custom_call(stops: Stops):
    lower(
        stops,
        lambda q, keys, values, table, lengths: paged_attention(
            q, keys, values, table, lengths, max_seqlen_kv=30, implementation="cudnn"
        ),
        TOKENS, PAGES, PAGES, TABLE, LENGTHS,
    )  # fmt: skip
    given, call, spec, kernel = stops.one_of_each()
    assert jnp.shape(given.page_table) == (2, 6) and given.max_seqlen_kv == 30
    separated, cut, *_ = stops.steps
    assert separated.page_table is given.page_table
    assert jnp.shape(cut.page_table) == (2, 4) and cut.max_seqlen_kv is None

    operands = dict(zip(call.options.operands, call.operands, strict=True))
    assert operands["page_table"].shape == (2, 4) and operands["page_table"].dtype == np.int32

    assert spec.shape("page_table") == (2, 4) and (spec.page_size, spec.seq_len_kv) == (8, 32)
    assert (kernel.page_size, kernel.num_pages, kernel.seq_len_kv) == (8, 9, 32)

    assert stops.operands["page_table"] == "2x4xi32"
    assert {"page_size": "8 : i64", "num_pages": "9 : i64"}.items() <= stops.attributes.items()
