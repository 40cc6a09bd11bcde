"""The strides in cuDNN's plans are those of the custom calls' arrays.

An exported plan contains its graph with the dims and strides of each tensor. They must equal an
array's strides in NumPy, in cuDNN's order of axes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.call import CudnnCall, variants_of
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from tests.support.backend import needs_cudnn
from tests.support.cudnn_in_numpy import names_of

pytestmark = needs_cudnn

PLAIN = Case("plain", t=192, s=384, n=4, k=2, h=64, v=64, dtype="bfloat16")
WIDE = replace(PLAIN, name="wide", h=128, v=64)
LENGTHS = replace(PLAIN, name="lengths", kv_lengths=(100, 384))
PAGED = replace(PLAIN, name="paged", t=1, page=64, kv_lengths=(100, 384), inference=True)
LAYOUTS = ("", "q kv", "q", "kv")
_QUERIES = ("query", "out", "out_grad", "dq")
_CHECKED = ("query", "key", "value", "out", "out_grad", "dq", "dk", "dv")

CASES = [
    (replace(case, heads_first=order, one_pool=one_pool), direction)
    for case in (PLAIN, WIDE, LENGTHS, PAGED)
    for order in LAYOUTS
    for one_pool in ((False, True) if case.page else (False,))
    for direction in (("forward",) if case.page else ("forward", "backward"))
]


def planned_tensors(call: CudnnCall) -> dict[int, tuple[list[int], list[int]]]:
    """Dims and strides of each tensor of the plan, by uid."""
    library = cudnn_library.find()
    properties, backend = library.device_properties(parse("sm90")), library.backend
    assert backend is not None
    backend.plan(call.attributes, properties)
    blob = bytes.fromhex(backend.export_plan(call.attributes, properties).rpartition(" ")[2])
    text = blob[blob.index(b'{"cudnnVersion"') :].decode(errors="replace")
    graph = json.JSONDecoder().raw_decode(text)[0]["operationGraph"]
    named = [x for x in graph["tensors"] if x["name"].isdigit()]
    return {int(x["name"]): (x["dim"], x["stride"]) for x in named}


def expected(call: CudnnCall, name: str, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Dims [B, heads, length, dim] and strides of an array of queries or of keys."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    is_query = name in _QUERIES
    length = call.seq_len_q if is_query else call.seq_len_kv
    heads = call.num_heads if is_query else call.num_kv_heads
    batch = call.batch
    if call.page_size and not is_query:
        batch, length = shape[0], call.page_size
    if len(shape) == 3:  # packed: [rows, heads, dim]
        row, head = strides[:2]
    else:
        is_heads_first = call.head_rows_q if is_query else call.head_rows_kv
        head, row = strides[1:3] if is_heads_first else (strides[2], strides[1])
    # In a packed array sequences begin at their offsets, so the batch stride has no effect.
    return [batch, heads, length, shape[-1]], [length * heads * shape[-1], head, row, 1]


def axes(tensor: tuple[list[int], list[int]]) -> list[tuple[int, int]]:
    """Dim and stride of each axis, sorted."""
    return sorted(zip(*tensor, strict=True))


def spec_for(case: Case, direction: str) -> tuple[AttentionSpec, dict[str, Any]]:
    options = case.forward_options(needs_lse=not case.inference)
    arrays = {name: jnp.asarray(x) for name, x in case.operands().items()}
    if direction == "backward":
        options = case.backward_options()
        cotangents = {name: jnp.asarray(x) for name, x in case.cotangents().items()}
        residuals = {
            "out": cotangents["out_grad"],
            "lse": jnp.zeros((case.b, case.n, case.t), jnp.float32),
        }
        arrays |= cotangents | residuals
    if case.page:
        options, arrays = paged_options(case, options), in_pages(case, arrays)
    return spec_of(options, arrays), arrays


@pytest.mark.parametrize(
    ("case", "direction"),
    CASES,
    ids=[f"{x.name} {x.heads_first or 'rows'}{' one pool' * x.one_pool} {y}" for x, y in CASES],
)
def test_strides_of_the_plan_are_those_of_the_arrays(case: Case, direction: str):
    spec, arrays = spec_for(case, direction)
    call = variants_of(spec)[0]
    operands_of = cudnn_arrays.backward_operands if call.backward else cudnn_arrays.forward_operands
    shapes = cudnn_arrays.backward_shapes if call.backward else cudnn_arrays.forward_shapes
    operands = jax.eval_shape(lambda x: operands_of(spec, call, x), arrays)
    names = names_of(call)
    assert len(names) == len(operands)
    by_name = {name: x.shape for name, x in zip(names, operands, strict=True)}
    flags = sum(name.startswith("flags") for name in names)
    uids = {name: number + 1 - flags for number, name in enumerate(names)}
    for number, name in enumerate(shapes(call)):
        uids[name] = len(names) - flags + number + 1
        by_name[name] = shapes(call)[name].shape
    tensors, checked = planned_tensors(call), 0
    for name in _CHECKED:
        if name in uids:
            # A backward pass swaps the last two axes of key and value.
            wanted = expected(call, name, by_name[name])
            assert axes(tensors[uids[name]]) == axes(wanted), name
            checked += 1
    assert checked == (8 if call.backward else 4)
    if call.page_size:
        tables = [uids[x] for x in ("page_table", "value_table") if x in uids]
        assert len(tables) == 1 + case.one_pool and all(x in tensors for x in tables)
