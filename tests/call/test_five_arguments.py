"""Five arguments on their way from the public call to the kernel, as in docs/design.md."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.layouts import rows_first, separate_pages
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.normal_form import Call, normalise
from attn_dispatch.call.operands import Operand
from attn_dispatch.call.paged_arguments import with_cut_table
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.call import CudnnCall, variants_of
from attn_dispatch.semantics.array_scale import with_number_as_scale

QUERY = jnp.ones((2, 4, 16, 64), jnp.bfloat16)
KEY = jnp.ones((2, 2, 16, 64), jnp.bfloat16)
DENSE = Arguments(
    query=QUERY, key=KEY, value=KEY, scale=0.5, is_causal=True, local_window_size=(3, None),
    qkv_layout="BNTH",
)  # fmt: skip
PAGES = jnp.ones((9, 8, 2, 64), jnp.bfloat16)
PAGED = Arguments(
    query=jnp.swapaxes(QUERY, 1, 2)[:, :1], key_pages=PAGES, value_pages=PAGES, is_causal=True,
    page_table=np.zeros((2, 6), np.int64), key_value_seq_lengths=np.array([5, 20]),
    max_seqlen_kv=30, causal_alignment="bottom_right",
)  # fmt: skip


def spec_of(call: Call) -> AttentionSpec:
    return LeadingCall.of(call.operands, call.options).spec


def kernel_call(spec: AttentionSpec) -> CudnnCall:
    first = next(iter(variants_of(spec)))
    assert isinstance(first, CudnnCall)
    return first


def test_query_scale_causality_and_window_reach_the_kernel():
    arguments = with_number_as_scale(rows_first(DENSE))
    assert isinstance(arguments, Arguments) and arguments.heads_first_q
    assert jnp.shape(arguments.query) == (2, 16, 4, 64)
    call = normalise(arguments, ("xla",))
    meaning = call.options.meaning
    assert call.options.operands[0] == "query" and call.operands[0].shape == (2, 16, 4, 64)
    assert (meaning.scale, meaning.is_causal, meaning.window) == (0.5, True, (3, None))
    spec = spec_of(call)
    assert spec.operands[0] == Operand("query", (2, 16, 4, 64), "bfloat16")
    assert spec.meaning is meaning and spec.band == (3, 0)
    kernel = kernel_call(spec)
    assert (kernel.batch, kernel.num_heads, kernel.seq_len_q, kernel.head_dim) == (2, 4, 16, 64)
    assert (kernel.scale, kernel.window_left, kernel.window_right) == (0.5, 3, 0)


def test_array_scale_is_multiplied_into_the_query():
    scale = jnp.full(4, 0.5)
    arguments = with_number_as_scale(rows_first(replace(DENSE, scale=scale)))
    assert arguments.scale is None
    np.testing.assert_array_equal(arguments.query, jnp.full((2, 16, 4, 64), 4.0, jnp.bfloat16))
    spec = spec_of(normalise(arguments, ("xla",)))
    assert spec.meaning.scale == kernel_call(spec).scale == 1 / 8


def test_page_table_reaches_the_kernel():
    arguments = with_cut_table(separate_pages(PAGED))
    assert jnp.shape(arguments.page_table) == (2, 4) and arguments.max_seqlen_kv is None
    call = normalise(arguments, ("xla",))
    operands = dict(zip(call.options.operands, call.operands, strict=True))
    assert operands["page_table"].dtype == jnp.int32
    spec = spec_of(call)
    assert spec.shape("page_table") == (2, 4) and (spec.page_size, spec.seq_len_kv) == (8, 32)
    kernel = kernel_call(spec)
    assert (kernel.page_size, kernel.num_pages, kernel.seq_len_kv) == (8, 9, 32)
