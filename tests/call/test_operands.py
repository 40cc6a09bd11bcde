"""The table of operands: a new operand is one entry, and code that goes by axes treats it right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attn_dispatch.call import operands
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.operands import (
    TABLE,
    Entry,
    Operand,
    Section,
    axes_along,
    axis_of,
    changed_along,
    fitted,
    listed,
    mod_operands,
    resized,
    with_axis,
    with_role,
)
from attn_dispatch.call.options import AttentionOptions, Meaning
from attn_dispatch.core.rewrites.rewrite import changed
from attn_dispatch.core.rewrites.wide_heads import HEADS_OF_256
from attn_dispatch.core.shards import Shards, layout
from attn_dispatch.core.splitting import split
from attn_dispatch.inspection import spec_of

NAME = "temperature"
"""An operand of no call, [1|B, T, N]: the temperature of each query's softmax."""

QKV = {"query": (6, 4, 8, 16), "key": (6, 5, 2, 16), "value": (6, 5, 2, 16)}


@pytest.fixture(autouse=True)
def _made_up_operand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(operands.TABLE, NAME, Entry(NAME, "1b t n", ""))


def temperature(batch: int = 6) -> jnp.ndarray:
    return jnp.arange(batch * 4 * 8, dtype=jnp.float32).reshape(batch, 4, 8)


def call_with(shape: tuple[int, ...]) -> LeadingCall:
    """A call with the made-up operand of this shape."""
    arrays = tuple(Operand(x, y, "float32") for x, y in (QKV | {NAME: shape}).items())
    options = AttentionOptions((*QKV, NAME), Meaning(scale=1.0))
    return LeadingCall(options, arrays)


def sharded(shape: tuple[int, ...], query: P) -> tuple[P, tuple[str, ...]]:
    """The partition spec of the made-up operand, and the axes over which its gradient is summed."""
    call = call_with(shape)
    shards: Shards = split(call, {"x": 2, "y": 2}, query, query)
    return shards.spec_of(layout(call, NAME)), shards.summed(call, NAME)


def test_new_operand_is_found_by_its_axes():
    assert NAME in with_axis("t") and NAME not in with_axis("s")
    assert axes_along("t", apart_from="s")[NAME] == -2
    assert NAME not in axes_along("t", apart_from="n")
    assert (axis_of(NAME, "b"), axis_of(NAME, "t"), axis_of(NAME, "s")) == (-3, -2, None)


def test_section_of_new_operand_is_cut_and_pasted():
    x = temperature()
    rows = Section({"t": (1, 3), "s": (0, 2)})
    assert resized(NAME, x.shape, rows.sizes) == (6, 2, 8)
    part = rows.cut(NAME, x)
    np.testing.assert_array_equal(part, x[:, 1:3])
    whole = rows.pasted(NAME, part, x.shape, value=-1.0)
    np.testing.assert_array_equal(whole, x.at[:, :1].set(-1).at[:, 3:].set(-1))
    np.testing.assert_array_equal(rows.cut("sinks", x[:, 0]), x[:, 0])


def test_shared_axis_is_not_cut():
    rows = Section({"b": (2, 4)})
    assert rows.cut(NAME, temperature()).shape[0] == 2
    assert rows.cut(NAME, temperature(1)).shape[0] == 1


def test_new_operand_is_cut_and_padded_to_sizes():
    x = temperature()
    found = fitted(NAME, x, {"t": 6, "n": 7, "s": 3})
    np.testing.assert_array_equal(found, jnp.pad(x[:, :, :7], [(0, 0), (0, 2), (0, 0)]))
    assert fitted(NAME, temperature(1), {"b": 6}).shape[0] == 1


def test_new_operand_is_changed_along_its_axes():
    x = temperature()
    np.testing.assert_array_equal(changed_along("n", NAME, x, reversed_rows), x[:, :, ::-1])
    assert changed_along("s", NAME, x, reversed_rows) is x


def test_new_operand_is_resized_and_made_in_a_changed_call():
    spec = call_with((6, 4, 8)).spec
    assert changed(spec, sizes={"t": 9, "n": 4, "k": 1}).shape(NAME) == (6, 9, 4)
    shared = call_with((1, 4, 8)).spec
    assert changed(shared, sizes={"b": 3}).shape(NAME) == (1, 4, 8)
    assert spec.made(NAME, {"b": 3}).shape == (3, 4, 8)


def reversed_rows(x: jax.Array) -> jax.Array:
    return x[:, ::-1]


def test_call_on_pages_with_wider_heads_has_wider_pages():
    """Rewrites that name axes alone reach operands that no list of query, key and value has."""
    pages = jnp.zeros((3, 4, 2, 8), jnp.bfloat16)
    spec = spec_of(
        query=jnp.zeros((2, 1, 2, 8), jnp.bfloat16), key_pages=pages, value_pages=pages,
        page_table=jnp.zeros((2, 2), jnp.int32), key_value_seq_lengths=jnp.ones(2, jnp.int32),
    )  # fmt: skip
    wide = HEADS_OF_256.inner(spec)
    assert wide.shape("query")[-1] == wide.shape("key_pages")[-1] == 256
    assert wide.shape("value_pages") == spec.shape("value_pages")


@pytest.mark.parametrize(
    "shape, query, expected",
    [
        ((6, 4, 8), P("x", None, "y"), (P("x", None, "y"), ())),
        ((1, 4, 8), P("x", None, "y"), (P(None, None, "y"), ("x",))),
        ((6, 4, 1), P("x", None, "y"), (P("x", None, None), ("y",))),
    ],
)
def test_new_operand_is_sharded(
    shape: tuple[int, ...], query: P, expected: tuple[P, tuple[str, ...]]
):
    assert sharded(shape, query) == expected


def test_every_operand_of_a_call_has_an_entry_with_its_axes_and_dtype():
    x = jnp.zeros((2, 4, 2, 8), jnp.bfloat16)
    spec = spec_of(
        query=x, key=x, value=x, bias=jnp.zeros((1, 2, 4, 4)), mask=jnp.ones((2, 1, 4, 4), bool),
        query_segment_ids=jnp.ones((2, 4), jnp.int32), sinks=jnp.zeros(2),
        alibi_slopes=jnp.zeros(2), score_mod=lambda x, b, n, t, s, a: x + a[b], is_causal=True,
        score_mod_args=(jnp.zeros(2),),
    )  # fmt: skip
    _, backward = spec.in_training(spec.options.differentiable, has_lse_grad=True)
    fixed = {"call": "bfloat16", "lse": "float32"}
    for x in backward.operands:
        known = listed(x.name)
        if x.name not in mod_operands("score_mod", 1):
            assert len(known.axes) == len(x.shape), x
        assert x.dtype == (fixed.get(known.dtype, known.dtype) or x.dtype), x
    assert backward.options.operands[-4:] == with_role("residual")


def test_table_for_readers_shows_every_operand():
    """The table for readers at the top of the module has all of those that code asks about."""
    text = operands.__doc__ or ""
    for name in TABLE.keys() - {NAME}:
        assert name in text, name
